"""Does a bundle hold the weights of this base? Role by role, from equal to how far apart.

Weights alone are compared, not what the graphs compute with them: whether what is stored, rounded to the checkpoint's
type, is the weight; and whether every number lies within half a step of what is stored, so that it may have been
rounded to it, or beyond the last code, as where scales were trained. One pass over the rows answers all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtp_extract.bundle import Opened
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.errors import PairError, escape, few
from mtp_extract.insertion.base import find_base
from mtp_extract.insertion.base_checkpoint import read_base
from mtp_extract.insertion.fit import check_base
from mtp_extract.insertion.loss import MOST_LOST
from mtp_extract.insertion.slots import Match, Slot, are_alike, match_roles, over_rows, relative_error, squares
from mtp_extract.io.source import Progress, counter, nothing_shown
from mtp_extract.litertlm.storage import Floats
from mtp_extract.litertlm.tflite import TensorType

EQUAL = "equal"
HALF_STEP = "within half a step"
DIFFERENT = "different"
NOT_FOUND = "not found"
NEAREST = "nearest code"
"""Some numbers lie beyond the last code of their row, which is what is stored; little of the weight is lost by it."""
VERDICTS = (EQUAL, HALF_STEP, NEAREST, DIFFERENT, NOT_FOUND)

# Rounding of float32 along the way, in steps: the largest code is 127.
_HALF = 0.5 + 1e-4
# Half a step of floats, as a share of the number; what is stored in F32 was not rounded.
_FLOAT_STEPS = {TensorType.FLOAT16: 2.0**-11, TensorType.BFLOAT16: 2.0**-8}
# What is looked at together: it stays in a core's own cache.
_ELEMENTS = 1 << 17


@dataclass(frozen=True)
class RoleVerdict:
    """How a role's weights in the bundle compare with the checkpoint's."""

    role: str
    tensor: str | None  # its name in the checkpoint; None where the checkpoint has none
    shape: tuple[int, ...]
    verdict: str  # one of VERDICTS
    stored: tuple[str, ...] = ()  # the types in which the bundle stores it; empty where nothing does
    steps: float | None = None  # the largest distance in steps of the stored codes; None for floats
    error: float | None = None  # root mean square of the difference, as a share of the checkpoint's; None beyond F64
    why: str | None = None  # of a verdict that needs a reason


@dataclass(frozen=True)
class BaseComparison:
    """A bundle's base beside a checkpoint."""

    bundle: str
    checkpoint: Path
    layers: int  # of the base
    roles: tuple[RoleVerdict, ...]
    not_compared: Mapping[str, int]  # tensors of other parts than the text model, by part

    @property
    def counts(self) -> dict[str, int]:
        """How many roles have each verdict."""
        counted = Counter(role.verdict for role in self.roles)
        return {verdict: counted[verdict] for verdict in VERDICTS if counted[verdict]}

    @property
    def problem(self) -> PairError | None:
        """The error that says which roles differ; None when none does."""
        wrong = [r for r in self.roles if r.verdict in (DIFFERENT, NOT_FOUND)]
        if not wrong:
            return None
        listed = few((f"{r.role}: {r.why or r.verdict}" for r in wrong), separator="; ")
        what = f"{len(wrong)} of {len(self.roles)} roles are not the weights of {escape(self.checkpoint)}"
        return PairError(f"{self.bundle}: {what}: {listed}.")

    def as_json(self) -> dict[str, Any]:
        """The whole of it, as JSON has it."""
        return asdict(self) | {"checkpoint": str(self.checkpoint), "verdicts": self.counts}


def compare_base(opened: Opened, directory: Path, progress: Progress = nothing_shown) -> BaseComparison:
    """Hold the base in ``opened`` against the checkpoint in ``directory``.

    Raises:
        MtpExtractError: one of the two cannot be read, or they are not of one geometry.
    """
    checkpoint, base = read_base(directory), find_base(opened)
    check_base(checkpoint, base)
    verdicts = compare_slots([*match_roles(base.places, checkpoint.weights)], progress)
    nowhere = "the bundle has no place for this tensor"
    verdicts += [RoleVerdict(name, name, (), NOT_FOUND, why=nowhere) for name in checkpoint.unknown]
    return BaseComparison(opened.source.name, directory, base.walk.layers, tuple(verdicts), checkpoint.others)


def compare_slots(found: Sequence[Match], progress: Progress = nothing_shown) -> list[RoleVerdict]:
    """How far what the bundle holds of each role is from its weight."""
    slots = [slot for match in found for slot in match.slots]
    tick = counter(progress, sum(math.prod(slot.new.shape) for slot in slots))
    differ = set[Slot]()

    def look(slot: Slot, first: int, last: int) -> _Look:
        wanted, stored = slot.new.floats(first, last), slot.held.floats(first, last)
        # After rows that differ no others are compared to the bit.
        if slot not in differ and not are_alike(stored, wanted, slot.dtype):
            differ.add(slot)
        tick(wanted.size)
        if np.isfinite(wanted).all():
            apart = wanted - stored
            return _Look(*_distance(slot, wanted, apart, first, last), squares(apart), squares(wanted))
        return _Look(1, 1, math.inf, math.nan, 1.0)

    looks = over_rows(slots, look, _ELEMENTS)
    return [
        _verdict(match, [look_at_slot for slot in match.slots for look_at_slot in looks[slot]], differ)
        for match in found
    ]


class _Look(NamedTuple):
    """At some rows: how many numbers lie further from what is stored than half a step and what rounding to their type
    explains, and how many even where the row's codes end; the most in steps, −1 for floats; and sums of squares.
    """

    outside: int
    wrong: int
    steps: float
    difference: float
    size: float


def _distance(slot: Slot, wanted: Floats, apart: Floats, first: int, last: int) -> tuple[int, int, float]:
    """The first figures of :class:`_Look` of ``wanted``, rows of the weight, ``apart`` from what is stored."""
    constant, apart = slot.constant, np.abs(apart)
    if constant is None or constant.source.packing is None or constant.folded:
        half = 0.0 if constant is None else _FLOAT_STEPS.get(constant.source.storage.type, 0.0)
        outside = int(np.count_nonzero(~(apart <= half * np.abs(wanted))))
        return outside, outside, -1.0
    storage = constant.source.storage
    scale = constant.source.scale.reshape(-1)[slot.part(storage.groups, first, last)] / np.float32(constant.factor)
    step, rows = np.abs(scale)[:, None], (-1, scale.size, storage.columns)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        distances = apart.reshape(rows) / step
        most = float(distances.max())
        slack = _HALF if most <= _HALF else _HALF + DTYPES[slot.dtype].roundoff * np.abs(wanted.reshape(rows)) / step
        outside = ~(distances <= slack)
        if not outside.any():
            return 0, 0, most
        past = _past_the_last_code(slot, wanted.reshape(rows), step, first, last)
        wrong = outside & ~((past > 0) & (np.abs(distances - past) <= slack))
    return int(np.count_nonzero(outside)), int(np.count_nonzero(wrong)), most


def _past_the_last_code(slot: Slot, rows: Floats, step: Floats, first: int, last: int) -> Floats:
    """How many steps each of ``rows`` lies beyond the lowest or the highest code; negative between them."""
    source = slot.stored.source
    lowest, highest = source.storage.bounds
    zeros = source.zero_point.reshape(-1)[slot.part(source.storage.groups, first, last)][:, None].astype(np.float32)
    codes = rows / np.where(step > 0, step, np.float32(np.inf)) * np.float32(math.copysign(1.0, slot.stored.factor))
    beyond: Floats = np.maximum(lowest - zeros - codes, codes - (highest - zeros))
    return beyond


def _verdict(match: Match, looks: Sequence[_Look], differ: AbstractSet[Slot]) -> RoleVerdict:
    """``looks``: of all rows of all constants that hold the role."""
    places = match.places
    types = tuple(sorted({place.found.tensor.type_name for place in places if place.found.tensor is not None}))
    if match.problem:
        verdict = DIFFERENT if places and match.name else NOT_FOUND
        return RoleVerdict(match.role, match.name, match.shape, verdict, types, why=match.problem)
    outside, wrong = sum(look.outside for look in looks), sum(look.wrong for look in looks)
    error = relative_error([look.difference for look in looks], [look.size for look in looks])
    most = max(look.steps for look in looks)
    verdict, why = HALF_STEP, None
    if differ.isdisjoint(match.slots):
        verdict = EQUAL
    elif outside and (wrong or not error <= MOST_LOST):
        verdict, why = DIFFERENT, f"{outside} weights differ" + (f", by up to {most:.3g} steps" if most >= 0 else "")
    elif outside:
        verdict, why = NEAREST, f"{outside} weights lie beyond the last code of their row"
    measured = most if 0 <= most < math.inf else None, error if error < math.inf else None
    return RoleVerdict(match.role, match.name, match.shape, verdict, types, *measured, why)
