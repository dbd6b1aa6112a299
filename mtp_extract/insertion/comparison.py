"""Does a bundle hold the weights of this base? Role by role, from equal to how far apart.

Weights alone are compared, not what the graphs compute with them: whether what is stored, rounded to the checkpoint's
type, is the weight; and whether every number lies within half a step of what is stored, so that it may have been
rounded to it, or beyond the last code, as where scales were trained. One pass over the rows answers all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtp_extract.bundle import Opened
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.errors import PairError, escape, few
from mtp_extract.insertion.base import check_base, find_base
from mtp_extract.insertion.base_checkpoint import read_base
from mtp_extract.insertion.encoding import compute_least_loss, sum_squares_by_group
from mtp_extract.insertion.plan import MOST_LOST
from mtp_extract.insertion.slots import (
    RoleMatch,
    WeightSlot,
    are_equal,
    compute_relative_error,
    map_rows,
    match_roles,
    sum_squares,
)
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
_HALF_STEP = 0.5 + 1e-4
# Half a step of floats, as a share of the number, and of the least of them; what is stored in F32 was not rounded.
_FLOAT_STEPS = {TensorType.FLOAT16: (2.0**-11, 2.0**-25), TensorType.BFLOAT16: (2.0**-8, 2.0**-134)}
# Sums of squares that differ by less are equal.
_AS_GOOD = 1.001
_MOST_LOST_OF_GROUP = 0.5
"""Of the numbers that share a scale: what loses more is lost, and is little of a table of many rows."""


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
    """Hold the base in ``opened`` against the checkpoint in ``directory``; MtpExtractError where one of the two cannot
    be read, or they are not of one geometry."""
    checkpoint, base = read_base(directory), find_base(opened)
    check_base(checkpoint, base)
    verdicts = compare_slots([*match_roles(base.places, checkpoint.weights)], reporter)
    nowhere = "the bundle has no place for this tensor"
    verdicts += [RoleVerdict(name, name, (), NOT_FOUND, why=nowhere) for name in checkpoint.unknown]
    return BaseComparison(opened.source.name, directory, base.walk.layers, tuple(verdicts), checkpoint.others)


def compare_slots(matches: Sequence[RoleMatch], reporter: Reporter = SILENT) -> list[RoleVerdict]:
    """How far what the bundle holds of each role is from its weight."""
    slots = [slot for match in matches for slot in match.slots]
    tick = counter(reporter, "comparing", sum(math.prod(slot.new.shape) for slot in slots))
    differ = set[WeightSlot]()
    wrong = set[WeightSlot]()

    def look(slot: WeightSlot, first: int, last: int) -> _RowComparison:
        wanted, stored = slot.new.floats(first, last), slot.stored_weight.floats(first, last)
        tick(wanted.size)
        # After rows that differ no others are compared to the bit, nor after a wrong code all others with theirs.
        if slot not in differ and not are_equal(stored, wanted, slot.dtype):
            differ.add(slot)
        result = _compare_rows(slot, first, last, wanted, stored, slot in wrong)
        if result.wrong:
            wrong.add(slot)
        return result

    looks = map_rows(slots, look)
    verdicts = []
    for match in matches:
        of_role = [look for slot in match.slots for look in looks[slot]]
        total = _RowComparison.total(of_role) if of_role else None
        verdicts.append(_build_verdict(match, total, differ.isdisjoint(match.slots)))
    return verdicts


class _RowComparison(NamedTuple):
    """At some rows: how many numbers lie further from what is stored than half a step and what rounding to their type
    explains; whether a code is known that is not the nearest; how many groups of a scale lose much, and less with other
    scales; the most in steps, −1 for floats; and sums of squares."""

    outside: int
    wrong: bool
    ruined: int
    steps: float
    difference: float
    least: float  # that the difference could be, were the weight put in
    size: float

    @classmethod
    def total(cls, looks: Sequence[_RowComparison]) -> _RowComparison:
        """At all of the rows that ``looks`` are of."""
        outside, wrong, ruined, steps, *sums = zip(*looks, strict=True)
        return cls(sum(outside), any(wrong), sum(ruined), max(steps), *map(math.fsum, sums))

    @property
    def error(self) -> float:
        """Root mean square of the difference, as a share of the checkpoint's."""
        return compute_relative_error(self.difference, self.size)


def _compare_rows(
    slot: WeightSlot, first: int, last: int, wanted: Floats, stored: Floats, wrong: bool
) -> _RowComparison:
    """At rows ``[first, last)`` of ``slot``, which are to be ``wanted`` and are ``stored``; of its other rows some are
    known to be ``wrong``, or not."""
    if not math.isfinite(size := sum_squares(wanted)):
        return _RowComparison(1, True, 0, 1, math.inf, math.inf, 1.0)
    apart = wanted - stored
    difference = least = sum_squares(apart)
    if slot.constant is None or slot.storage.packing is None or slot.constant.folded:
        count = int(np.count_nonzero(~(np.abs(apart) <= _compute_float_slack(slot, wanted))))
        return _RowComparison(count, wrong or count > 0, 0, -1.0, difference, least, size)
    count, wrong, steps = _CodeRange.of(slot, first, last).compare(wanted, stored, apart, wrong)
    rows = 0
    if not wrong:
        lost, sizes = (sum_squares_by_group(slot.storage.group_by_scale(numbers)) for numbers in (apart, wanted))
        is_ruined = lost > _MOST_LOST_OF_GROUP**2 * sizes
        if is_ruined.any() or difference > MOST_LOST**2 * size:
            best = compute_least_loss(slot, wanted, lost, first, last)
            least = float(best.sum())
            rows = int(np.count_nonzero(is_ruined & (lost > _AS_GOOD * best)))
    return _RowComparison(count, wrong, rows, steps, difference, least, size)


def _compute_float_slack(slot: WeightSlot, wanted: Floats) -> Floats | float:
    """How far floats may be from ``wanted``: what rounding to the type of the file and of the checkpoint explains."""
    if slot.constant is None or slot.storage.type not in _FLOAT_STEPS:
        return 0.0
    share, least = _FLOAT_STEPS[slot.storage.type]
    slack: Floats = np.abs(wanted) * np.float32(share + DTYPES[slot.dtype].roundoff)
    np.maximum(slack, np.float32(least / abs(slot.stored_constant.factor)), out=slack)
    return slack


@dataclass(frozen=True)
class _CodeRange:
    """The codes of some rows, in numbers of the weight; all ``[groups]``."""

    step: Floats
    lowest: Floats  # what the codes at the ends stand for
    highest: Floats
    columns: int
    roundoff: float  # of the checkpoint's type, as a share of a number

    @classmethod
    def of(cls, slot: WeightSlot, first: int, last: int) -> _CodeRange:
        """Of rows ``[first, last)`` of what ``slot`` stores as codes."""
        source, storage = slot.stored_constant.source, slot.storage
        groups = slot.find_slice(storage.groups, first, last)
        scale = source.scale.reshape(-1)[groups] / np.float32(slot.stored_constant.factor)
        zero_point = source.zero_point.reshape(-1)[groups]
        ends = [scale * (code - zero_point).astype(np.float32) for code in storage.bounds]
        return cls(np.abs(scale), np.minimum(*ends), np.maximum(*ends), storage.columns, DTYPES[slot.dtype].roundoff)

    def compare(self, wanted: Floats, stored: Floats, apart: Floats, wrong: bool) -> tuple[int, bool, float]:
        """How many numbers are further ``apart`` from what is ``stored`` than half a step and what rounding to the type
        of ``wanted`` explains; whether one of these is not stored as the nearest of the grid, which beyond its ends is
        the last, if that is not known (``wrong``) already; and the most in steps."""
        distances = np.abs(self._group_values(apart))
        furthest = distances.max(axis=(0, 2))
        with np.errstate(divide="ignore", over="ignore"):
            steps = np.divide(furthest, self.step, out=np.zeros_like(furthest), where=furthest > 0)
        if not (most := float(steps.max())) > _HALF_STEP:
            return 0, wrong, most
        outside = distances > self._compute_slack(wanted)
        del distances  # each array here is as large as the rows
        if not wrong:
            nearest = np.clip(self._group_values(wanted), self.lowest[:, None], self.highest[:, None])
            slack = self._compute_slack(nearest)
            wrong = bool((outside & (np.abs(nearest - self._group_values(stored)) > slack)).any())
        return int(np.count_nonzero(outside)), wrong, most

    def _compute_slack(self, wanted: Floats) -> Floats:
        slack: Floats = np.abs(self._group_values(wanted))
        slack *= np.float32(self.roundoff)
        slack += (self.step * np.float32(_HALF_STEP))[:, None]
        return slack

    def _group_values(self, rows: Floats) -> Floats:
        """``[repeats, groups, columns]``."""
        return rows.reshape(-1, self.step.size, self.columns)


def _build_verdict(match: RoleMatch, look: _RowComparison | None, equal: bool) -> RoleVerdict:
    """``look``: at all rows of all constants that hold the role; None where none does. ``equal``: to the bit."""
    types = {place.found.tensor.type_name for place in match.places if place.found.tensor is not None}
    named = partial(RoleVerdict, match.role, match.name, match.shape, stored=tuple(sorted(types)))
    if look is None:
        return named(DIFFERENT if match.places and match.name else NOT_FOUND, why=match.problem)
    verdict, why = (EQUAL, None) if equal else _judge_difference(match, look)
    steps = look.steps if 0 <= look.steps < math.inf else None
    return named(verdict, steps=steps, error=look.error if look.error < math.inf else None, why=why)


def _judge_difference(match: RoleMatch, look: _RowComparison) -> tuple[str, str | None]:
    """The verdict on what is not equal to the bit, and why."""
    if look.wrong:
        by_steps = f", by up to {look.steps:.3g} steps" if look.steps >= 0 else ""
        return DIFFERENT, f"{look.outside} weights differ{by_steps}"
    verdict = NEAREST if look.outside else HALF_STEP
    if look.error > MOST_LOST:
        # Floats that were never trained on the file's grid, if its scales are as good as any that an insertion would
        # choose; another weight, if they are not.
        bits = sorted({slot.storage.packing.bits for slot in match.slots if slot.storage.packing is not None})
        loss = f"nearest codes of {' and '.join(map(str, bits))} bits: loses {look.error:.0%}"
        if look.difference > _AS_GOOD * look.least:
            return DIFFERENT, f"{loss}, and with other scales {compute_relative_error(look.least, look.size):.0%}"
        return verdict, loss
    if look.ruined:
        return (
            DIFFERENT,
            f"{look.ruined} rows or blocks lose more than {_MOST_LOST_OF_GROUP:.0%}, and less with other scales",
        )
    return verdict, f"{look.outside} weights lie beyond the last code of their row" if look.outside else None
