"""Does a bundle hold the weights of this base? Role by role, from equal to how far apart.

Weights alone are compared, not what the graphs compute with them: whether what is stored, rounded to the checkpoint's
type, is the weight; and whether every number lies within half a step of what is stored, so that it may have been
rounded to it. One pass over the rows answers both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mtp_extract.bundle import Opened
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.errors import PairError, escape, few
from mtp_extract.insertion.base import find_base
from mtp_extract.insertion.base_checkpoint import read_base
from mtp_extract.insertion.fit import check_base
from mtp_extract.insertion.slots import Match, Slot, are_alike, match_roles, over_rows, relative_error, squares
from mtp_extract.io.source import Progress, counter, nothing_shown
from mtp_extract.litertlm.storage import Floats
from mtp_extract.litertlm.tflite import TensorType

EQUAL, HALF_STEP, DIFFERENT, NOT_FOUND = VERDICTS = ("equal", "within half a step", "different", "not found")

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
    verdicts = judge([*match_roles(base.places, checkpoint.weights)], progress)
    nowhere = "the bundle has no place for this tensor"
    verdicts += [RoleVerdict(name, name, (), NOT_FOUND, why=nowhere) for name in checkpoint.unknown]
    return BaseComparison(opened.source.name, directory, base.walk.layers, tuple(verdicts), checkpoint.others)


def judge(found: Sequence[Match], progress: Progress = nothing_shown) -> list[RoleVerdict]:
    """How far what the bundle holds of each role is from its weight."""
    slots = [slot for match in found for slot in match.slots]
    tick = counter(progress, sum(math.prod(slot.new.shape) for slot in slots))
    differ = set[Slot]()

    def look(slot: Slot, first: int, last: int) -> tuple[int, float, float, float]:
        given, held = slot.new.floats(first, last), slot.held.floats(first, last)
        # After rows that differ no others are compared to the bit.
        if slot not in differ and not are_alike(held, given, slot.dtype):
            differ.add(slot)
        tick(given.size)
        if np.isfinite(given).all():
            apart = given - held
            return *_distance(slot, given, apart, first, last), squares(apart), squares(given)
        return 1, math.inf, math.nan, 1.0

    looks = over_rows(slots, look, _ELEMENTS)
    return [_verdict(match, [one for slot in match.slots for one in looks[slot]], differ) for match in found]


def _distance(slot: Slot, given: Floats, apart: Floats, first: int, last: int) -> tuple[int, float]:
    """How many of ``given``, rows of the weight, are ``apart`` from what is held by more than half a step and what
    rounding to their type explains; and the largest difference in steps, −1 for floats.
    """
    constant, apart = slot.constant, np.abs(apart)
    if constant is None or constant.source.packing is None or constant.folded:
        half = 0.0 if constant is None else _FLOAT_STEPS.get(constant.source.storage.type, 0.0)
        return int(np.count_nonzero(~(apart <= half * np.abs(given)))), -1.0
    storage = constant.source.storage
    scale = constant.source.scale.reshape(-1)[slot.part(storage.groups, first, last)] / np.float32(constant.factor)
    step, rows = np.abs(scale)[:, None], (-1, scale.size, storage.columns)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        distances = apart.reshape(rows) / step
        most = float(distances.max())
        slack = _HALF if most <= _HALF else _HALF + DTYPES[slot.dtype].roundoff * np.abs(given.reshape(rows)) / step
    return int(np.count_nonzero(~(distances <= slack))), most


def _verdict(match: Match, looks: Sequence[tuple[int, float, float, float]], differ: AbstractSet[Slot]) -> RoleVerdict:
    """``looks``: of all rows of all constants that hold the role."""
    places = match.places
    types = tuple(sorted({place.found.tensor.type_name for place in places if place.found.tensor is not None}))
    if match.problem:
        verdict = DIFFERENT if places and match.name else NOT_FOUND
        return RoleVerdict(match.role, match.name, match.shape, verdict, types, why=match.problem)
    outside, steps, difference, size = zip(*looks, strict=True)
    error, most, same = relative_error(difference, size), max(steps), differ.isdisjoint(match.slots)
    verdict, why = EQUAL if same else DIFFERENT if sum(outside) else HALF_STEP, None
    if verdict == DIFFERENT:
        why = f"{sum(outside)} weights differ" + (f", by up to {most:.3g} steps" if most >= 0 else "")
    measured = most if 0 <= most < math.inf else None, error if error < math.inf else None
    return RoleVerdict(match.role, match.name, match.shape, verdict, types, *measured, why)
