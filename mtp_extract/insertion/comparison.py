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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtp_extract.bundle import Opened
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.errors import PairError, escape, few
from mtp_extract.insertion.base import find_base
from mtp_extract.insertion.base_checkpoint import read_base
from mtp_extract.insertion.encoding import least_lost
from mtp_extract.insertion.fit import check_base
from mtp_extract.insertion.loss import MOST_LOST
from mtp_extract.insertion.slots import Match, Slot, are_alike, match_roles, over_rows, relative_error, squares
from mtp_extract.litertlm.storage import Floats
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.progress import SILENT, Reporter, counter

EQUAL = "equal"
HALF_STEP = "within half a step"
DIFFERENT = "different"
NOT_FOUND = "not found"
NEAREST = "nearest code"
"""Nothing nearer could be stored: numbers lie beyond the last code of their row, or few codes lose much of them."""
VERDICTS = (EQUAL, HALF_STEP, NEAREST, DIFFERENT, NOT_FOUND)

# Rounding of float32 along the way, in steps: the largest code is 127.
_HALF = 0.5 + 1e-4
# Half a step of floats, as a share of the number; what is stored in F32 was not rounded.
_FLOAT_STEPS = {TensorType.FLOAT16: 2.0**-11, TensorType.BFLOAT16: 2.0**-8}
# Sums of squares that differ by less are equal.
_AS_GOOD = 1.001
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


def compare_base(opened: Opened, directory: Path, reporter: Reporter = SILENT) -> BaseComparison:
    """Hold the base in ``opened`` against the checkpoint in ``directory``.

    Raises:
        MtpExtractError: one of the two cannot be read, or they are not of one geometry.
    """
    checkpoint, base = read_base(directory), find_base(opened)
    check_base(checkpoint, base)
    verdicts = compare_slots([*match_roles(base.places, checkpoint.weights)], reporter)
    nowhere = "the bundle has no place for this tensor"
    verdicts += [RoleVerdict(name, name, (), NOT_FOUND, why=nowhere) for name in checkpoint.unknown]
    return BaseComparison(opened.source.name, directory, base.walk.layers, tuple(verdicts), checkpoint.others)


def compare_slots(matches: Sequence[Match], reporter: Reporter = SILENT) -> list[RoleVerdict]:
    """How far what the bundle holds of each role is from its weight."""
    slots = [slot for match in matches for slot in match.slots]
    tick = counter(reporter, "comparing", sum(math.prod(slot.new.shape) for slot in slots))
    differ = set[Slot]()
    wrong = set[Slot]()

    def look(slot: Slot, first: int, last: int) -> _Look:
        wanted, stored = slot.new.floats(first, last), slot.held.floats(first, last)
        tick(wanted.size)
        # After rows that differ no others are compared to the bit, nor after a wrong code all others with theirs.
        if slot not in differ and not are_alike(stored, wanted, slot.dtype):
            differ.add(slot)
        size = squares(wanted)
        if not math.isfinite(size):
            wrong.add(slot)
            return _Look(1, 1, math.inf, math.inf, 1.0)
        apart = wanted - stored
        difference = least = squares(apart)
        if _has_codes(slot):
            grid = _Grid.of(slot, first, last)
            outside, steps = grid.distances(wanted, apart)
            if outside and slot not in wrong and grid.has_wrong_code(wanted, stored):
                wrong.add(slot)
            if difference > MOST_LOST**2 * size and slot not in wrong:
                least = least_lost(slot, wanted, apart, first, last)
        else:
            outside, steps = _outside_of_floats(slot, wanted, apart), -1.0
            if outside:
                wrong.add(slot)
        return _Look(outside, steps, difference, least, size)

    looks = over_rows(slots, look, _ELEMENTS)
    of_roles = ([look for slot in match.slots for look in looks[slot]] for match in matches)
    totals = [_Look.total(of_role) if of_role else None for of_role in of_roles]
    return [_verdict(match, total, differ, wrong) for match, total in zip(matches, totals, strict=True)]


class _Look(NamedTuple):
    """At some rows: how many numbers lie further from what is stored than half a step and what rounding to their type
    explains; the most in steps, −1 for floats; and sums of squares.
    """

    outside: int
    steps: float
    difference: float
    least: float  # that the difference could be, were the weight put in
    size: float

    @classmethod
    def total(cls, looks: Sequence[_Look]) -> _Look:
        """At all of the rows that ``looks`` are of."""
        outside, steps, *sums = zip(*looks, strict=True)
        return cls(sum(outside), max(steps), *map(math.fsum, sums))

    @property
    def error(self) -> float:
        """Root mean square of the difference, as a share of the checkpoint's."""
        return relative_error([self.difference], [self.size])


def _has_codes(slot: Slot) -> bool:
    """Whether it is stored as codes, one for each number."""
    return slot.constant is not None and slot.constant.source.packing is not None and not slot.constant.folded


def _outside_of_floats(slot: Slot, wanted: Floats, apart: Floats) -> int:
    """How many numbers are further ``apart`` from a constant in floats than rounding to its type explains."""
    half = 0.0 if slot.constant is None else _FLOAT_STEPS.get(slot.constant.source.storage.type, 0.0)
    return int(np.count_nonzero(~(np.abs(apart) <= half * np.abs(wanted))))


@dataclass(frozen=True)
class _Grid:
    """The codes of some rows, in numbers of the weight; all ``[groups]``."""

    step: Floats
    lowest: Floats  # what the codes at the ends stand for
    highest: Floats
    columns: int
    roundoff: float  # of the checkpoint's type, as a share of a number

    @classmethod
    def of(cls, slot: Slot, first: int, last: int) -> _Grid:
        """Of rows ``[first, last)`` of what ``slot`` stores as codes."""
        source, storage = slot.stored.source, slot.stored.source.storage
        groups = slot.part(storage.groups, first, last)
        scale = source.scale.reshape(-1)[groups] / np.float32(slot.stored.factor)
        zero_point = source.zero_point.reshape(-1)[groups]
        ends = [scale * (code - zero_point).astype(np.float32) for code in storage.bounds]
        return cls(np.abs(scale), np.minimum(*ends), np.maximum(*ends), storage.columns, DTYPES[slot.dtype].roundoff)

    def distances(self, wanted: Floats, apart: Floats) -> tuple[int, float]:
        """How many numbers are further ``apart`` from what is stored than half a step and what rounding to the type of
        ``wanted`` explains; and the most in steps."""
        distances = np.abs(self._by_group(apart))
        furthest = distances.max(axis=(0, 2))
        with np.errstate(divide="ignore", over="ignore"):
            steps = np.divide(furthest, self.step, out=np.zeros_like(furthest), where=furthest > 0)
        if not (most := float(steps.max())) > _HALF:
            return 0, most
        return int(np.count_nonzero(distances > self._slack(wanted))), most

    def has_wrong_code(self, wanted: Floats, stored: Floats) -> bool:
        """Whether a number is ``stored`` that is not the nearest of the grid: beyond its ends, that at the end is."""
        nearest = np.clip(self._by_group(wanted), self.lowest[:, None], self.highest[:, None])
        slack = self._slack(nearest)
        return not bool((np.abs(nearest - self._by_group(stored)) <= slack).all())

    def _slack(self, wanted: Floats) -> Floats:
        slack: Floats = np.abs(self._by_group(wanted))
        slack *= np.float32(self.roundoff)
        slack += (self.step * np.float32(_HALF))[:, None]
        return slack

    def _by_group(self, rows: Floats) -> Floats:
        """``[repeats, groups, columns]``."""
        return rows.reshape(-1, self.step.size, self.columns)


def _verdict(match: Match, look: _Look | None, differ: AbstractSet[Slot], wrong: AbstractSet[Slot]) -> RoleVerdict:
    """``look``: at all rows of all constants that hold the role; None where none does.

    Args:
        differ: slots that hold other numbers.
        wrong: slots that hold another code than the nearest.
    """
    types = {place.found.tensor.type_name for place in match.places if place.found.tensor is not None}
    named = partial(RoleVerdict, match.role, match.name, match.shape, stored=tuple(sorted(types)))
    if look is None:
        return named(DIFFERENT if match.places and match.name else NOT_FOUND, why=match.problem)
    if differ.isdisjoint(match.slots):
        verdict, why = EQUAL, None
    elif not wrong.isdisjoint(match.slots):
        verdict, why = DIFFERENT, f"{look.outside} weights differ"
        why += f", by up to {look.steps:.3g} steps" if look.steps >= 0 else ""
    elif look.error > MOST_LOST:
        verdict, why = _judge_loss(match, look)
    elif look.outside:
        verdict, why = NEAREST, f"{look.outside} weights lie beyond the last code of their row"
    else:
        verdict, why = HALF_STEP, None
    return named(
        verdict,
        steps=look.steps if 0 <= look.steps < math.inf else None,
        error=look.error if look.error < math.inf else None,
        why=why,
    )


def _judge_loss(match: Match, look: _Look) -> tuple[str, str]:
    """The verdict, and why, on nearest codes that lose much: of floats that were never trained on the file's grid, if
    its scales are as good as any that an insertion would choose; of another weight, if they are not.
    """
    packings = (slot.stored.source.packing for slot in match.slots)
    bits = {packing.bits for packing in packings if packing is not None}
    loss = f"nearest codes of {' and '.join(map(str, sorted(bits)))} bits: loses {look.error:.0%}"
    if look.difference > _AS_GOOD * look.least:
        return DIFFERENT, f"{loss}, and with other scales {relative_error([look.least], [look.size]):.0%}"
    return NEAREST if look.outside else HALF_STEP, loss
