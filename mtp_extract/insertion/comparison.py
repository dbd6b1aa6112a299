"""Compare the weights of a bundle's base with a checkpoint, role by role, in one pass over the rows.

A role is equal if the stored weight, rounded to the checkpoint's type, is the checkpoint's. Otherwise every number
should lie within half a step of the stored one, so that rounding explains the difference, or beyond the last code, as
where scales were trained. What the graphs compute with the weights is not compared.
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

from mtp_extract.bundle import ModelFile
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.errors import PairError, escape, list_few
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
from mtp_extract.progress import SILENT, Reporter, make_counter

EQUAL = "equal"
HALF_STEP = "within half a step"
DIFFERENT = "different"
NOT_FOUND = "not found"
NEAREST = "nearest code"
"""The nearest codes, yet far off: numbers lie beyond the last code of their row, or few codes lose much of them."""
VERDICTS = (EQUAL, HALF_STEP, NEAREST, DIFFERENT, NOT_FOUND)

# In steps, with the rounding of float32 in between: the largest code is 127.
_HALF_STEP = 0.5 + 1e-4
# Half a step of a float type: relative to the number, and absolute for subnormal ones. F32 was not rounded.
_FLOAT_STEPS = {TensorType.FLOAT16: (2.0**-11, 2.0**-25), TensorType.BFLOAT16: (2.0**-8, 2.0**-134)}
# Sums of squares within this ratio count as equal.
_AS_GOOD = 1.001
_MOST_LOST_OF_GROUP = 0.5
"""A row or block that loses more is ruined, even if it is a small part of a table with many rows."""


@dataclass(frozen=True)
class RoleVerdict:
    """How a role's weights in the bundle compare with the checkpoint's."""

    role: str
    tensor: str | None  # its name in the checkpoint; None if there is none
    shape: tuple[int, ...]
    verdict: str  # one of VERDICTS
    stored: tuple[str, ...] = ()  # element types in the bundle; empty if it is not stored
    steps: float | None = None  # the largest distance in steps of the stored codes; None for floats
    error: float | None = None  # root mean square of the difference, relative to the checkpoint's; None beyond F64
    why: str | None = None  # the reason, if the verdict needs one


@dataclass(frozen=True)
class BaseComparison:
    """The comparison of a bundle's base with a checkpoint."""

    bundle: str
    checkpoint: Path
    layers: int  # of the base
    roles: tuple[RoleVerdict, ...]
    not_compared: Mapping[str, int]  # tensors of other parts than the text model, by part
    notes: tuple[str, ...]  # on settings of the checkpoint that were compared with nothing

    @property
    def counts(self) -> dict[str, int]:
        """The number of roles with each verdict."""
        counts = Counter(role.verdict for role in self.roles)
        return {verdict: counts[verdict] for verdict in VERDICTS if counts[verdict]}

    @property
    def problem(self) -> PairError | None:
        """The error that lists the roles that differ, or None."""
        wrong = [r for r in self.roles if r.verdict in (DIFFERENT, NOT_FOUND)]
        if not wrong:
            return None
        reasons = list_few((f"{r.role}: {r.why or r.verdict}" for r in wrong), separator="; ")
        return PairError(
            f"{self.bundle}: {len(wrong)} of {len(self.roles)} roles are not the weights of "
            f"{escape(self.checkpoint)}: {reasons}."
        )

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON."""
        return asdict(self) | {"checkpoint": str(self.checkpoint), "verdicts": self.counts}


def compare_base(opened: ModelFile, directory: Path, reporter: Reporter = SILENT) -> BaseComparison:
    """Compare the base in ``opened`` with a checkpoint; MtpExtractError if one is unreadable or geometries differ."""
    checkpoint, base = read_base(directory), find_base(opened)
    notes = check_base(checkpoint, base)
    verdicts = compare_slots([*match_roles(base.places, checkpoint.weights)], reporter)
    reason = "the bundle has no place for this tensor"
    verdicts += [RoleVerdict(name, name, (), NOT_FOUND, why=reason) for name in checkpoint.unknown]
    return BaseComparison(
        opened.source.name, directory, base.structure.layers, tuple(verdicts), checkpoint.others, tuple(notes)
    )


def compare_slots(matches: Sequence[RoleMatch], reporter: Reporter = SILENT) -> list[RoleVerdict]:
    """Compare the stored weight of each role with the checkpoint's."""
    slots = [slot for match in matches for slot in match.slots]
    report = make_counter(reporter, "comparing", sum(math.prod(slot.new.shape) for slot in slots))
    differing = set[WeightSlot]()
    wrong = set[WeightSlot]()

    def compare(slot: WeightSlot, first: int, last: int) -> _RowComparison:
        wanted, stored = slot.new.floats(first, last), slot.stored_weight.floats(first, last)
        report(wanted.size)
        # What is known of a slot is not computed for its other rows: that they differ, that a code is wrong.
        if slot not in differing and not are_equal(stored, wanted, slot.dtype):
            differing.add(slot)
        comparison = _compare_rows(slot, first, last, wanted, stored, slot in wrong)
        if comparison.has_wrong_code:
            wrong.add(slot)
        return comparison

    comparisons = map_rows(slots, compare)
    verdicts = []
    for match in matches:
        of_role = [comparison for slot in match.slots for comparison in comparisons[slot]]
        total = _RowComparison.total(of_role) if of_role else None
        verdicts.append(_build_verdict(match, total, differing.isdisjoint(match.slots)))
    return verdicts


class _RowComparison(NamedTuple):
    """Figures of some rows, wanted and stored."""

    outside: int  # numbers that half a step, and rounding to the checkpoint's type, do not explain
    has_wrong_code: bool  # whether a code, in these rows or in earlier ones, is known not to be the nearest
    ruined: int  # groups that lose much, and would lose less with other scales
    steps: float  # largest distance in steps; −1 for floats
    difference: float  # sum of squares of (wanted − stored)
    least: float  # the same sum, had the weight been inserted
    size: float  # sum of squares of the wanted numbers

    @classmethod
    def total(cls, comparisons: Sequence[_RowComparison]) -> _RowComparison:
        outside, has_wrong_code, ruined, steps, *sums = zip(*comparisons, strict=True)
        return cls(sum(outside), any(has_wrong_code), sum(ruined), max(steps), *map(math.fsum, sums))

    @property
    def error(self) -> float:
        """Root mean square of the difference, relative to the checkpoint's."""
        return compute_relative_error(self.difference, self.size)


def _compare_rows(
    slot: WeightSlot, first: int, last: int, wanted: Floats, stored: Floats, has_wrong_code: bool
) -> _RowComparison:
    """Compare rows ``[first, last)`` of ``slot``. ``has_wrong_code``: a code of other rows is known to be wrong."""
    if not math.isfinite(size := sum_squares(wanted)):
        return _RowComparison(1, True, 0, 1, math.inf, math.inf, 1.0)
    differences = wanted - stored
    difference = least = sum_squares(differences)
    if slot.constant is None or slot.storage.packing is None or slot.constant.folded:
        outside = int(np.count_nonzero(~(np.abs(differences) <= _compute_float_slack(slot, wanted))))
        return _RowComparison(outside, has_wrong_code or outside > 0, 0, -1.0, difference, least, size)

    code_range = _CodeRange.of(slot, first, last)
    outside, has_wrong_code, steps = code_range.compare(wanted, stored, differences, has_wrong_code)
    ruined = 0
    if not has_wrong_code:
        lost, sizes = (sum_squares_by_group(slot.storage.group_by_scale(rows)) for rows in (differences, wanted))
        loses_much = lost > _MOST_LOST_OF_GROUP**2 * sizes
        if loses_much.any() or difference > MOST_LOST**2 * size:
            least_by_group = compute_least_loss(slot, wanted, lost, first, last)
            least = float(least_by_group.sum())
            ruined = int(np.count_nonzero(loses_much & (lost > _AS_GOOD * least_by_group)))
    return _RowComparison(outside, has_wrong_code, ruined, steps, difference, least, size)


def _compute_float_slack(slot: WeightSlot, wanted: Floats) -> Floats | float:
    """Return how far rounding to the types of the file and the checkpoint can move floats from ``wanted``."""
    if slot.constant is None or slot.storage.type not in _FLOAT_STEPS:
        return 0.0
    share, least = _FLOAT_STEPS[slot.storage.type]
    slack: Floats = np.abs(wanted) * np.float32(share + DTYPES[slot.dtype].roundoff)
    np.maximum(slack, np.float32(least / abs(slot.stored_constant.factor)), out=slack)
    return slack


@dataclass(frozen=True)
class _CodeRange:
    """The numbers that the codes of some rows can represent, without the folded factor."""

    step: Floats  # [groups]
    lowest: Floats  # [groups], the number of the code at one end
    highest: Floats  # [groups]
    columns: int
    roundoff: float  # of the checkpoint's type, relative to a number

    @classmethod
    def of(cls, slot: WeightSlot, first: int, last: int) -> _CodeRange:
        """The range of the codes of rows ``[first, last)``."""
        source, storage = slot.stored_constant.source, slot.storage
        groups = slot.find_slice(storage.groups, first, last)
        scale = source.scale.reshape(-1)[groups] / np.float32(slot.stored_constant.factor)
        zero_point = source.zero_point.reshape(-1)[groups]
        ends = [scale * (code - zero_point).astype(np.float32) for code in storage.bounds]
        return cls(np.abs(scale), np.minimum(*ends), np.maximum(*ends), storage.columns, DTYPES[slot.dtype].roundoff)

    def compare(
        self, wanted: Floats, stored: Floats, differences: Floats, has_wrong_code: bool
    ) -> tuple[int, bool, float]:
        """Return :class:`_RowComparison`'s ``outside``, ``has_wrong_code`` and ``steps``.

        The nearest code beyond the ends is the last. Codes are not checked if one is known to be wrong.
        """
        distances = np.abs(self._group_values(differences))
        furthest = distances.max(axis=(0, 2))
        with np.errstate(divide="ignore", over="ignore"):
            steps = np.divide(furthest, self.step, out=np.zeros_like(furthest), where=furthest > 0)
        if not (most := float(steps.max())) > _HALF_STEP:
            return 0, has_wrong_code, most

        outside = distances > self._compute_slack(wanted)
        del distances  # each array here is as large as the rows
        if not has_wrong_code:
            nearest = np.clip(self._group_values(wanted), self.lowest[:, None], self.highest[:, None])
            slack = self._compute_slack(nearest)
            has_wrong_code = bool((outside & (np.abs(nearest - self._group_values(stored)) > slack)).any())
        return int(np.count_nonzero(outside)), has_wrong_code, most

    def _compute_slack(self, wanted: Floats) -> Floats:
        slack: Floats = np.abs(self._group_values(wanted))
        slack *= np.float32(self.roundoff)
        slack += (self.step * np.float32(_HALF_STEP))[:, None]
        return slack

    def _group_values(self, rows: Floats) -> Floats:
        return rows.reshape(-1, self.step.size, self.columns)  # [repeats, groups, columns]


def _build_verdict(match: RoleMatch, total: _RowComparison | None, is_equal: bool) -> RoleVerdict:
    """Build the verdict on a role from the ``total`` over all its rows, None if there is nothing to compare."""
    types = {place.found.tensor.type_name for place in match.places if place.found.tensor is not None}
    build = partial(RoleVerdict, match.role, match.name, match.shape, stored=tuple(sorted(types)))
    if total is None:
        return build(DIFFERENT if match.places and match.name else NOT_FOUND, why=match.problem)
    verdict, why = (EQUAL, None) if is_equal else _judge_difference(match, total)
    steps = total.steps if 0 <= total.steps < math.inf else None
    return build(verdict, steps=steps, error=total.error if total.error < math.inf else None, why=why)


def _judge_difference(match: RoleMatch, total: _RowComparison) -> tuple[str, str | None]:
    """Return the verdict on a weight that is not equal to the bit, and the reason."""
    if total.has_wrong_code:
        by_steps = f", by up to {total.steps:.3g} steps" if total.steps >= 0 else ""
        return DIFFERENT, _format_clause(total.outside, "weight differs", "weights differ") + by_steps
    verdict = NEAREST if total.outside else HALF_STEP
    if total.error > MOST_LOST:
        # If the file's scales are as good as those an insertion would choose, the floats were never trained on its
        # grid; if not, it holds another weight.
        bits = sorted({slot.storage.packing.bits for slot in match.slots if slot.storage.packing is not None})
        loss = f"nearest codes of {' and '.join(map(str, bits))} bits: loses {total.error:.0%}"
        if total.difference > _AS_GOOD * total.least:
            return DIFFERENT, f"{loss}, and with other scales {compute_relative_error(total.least, total.size):.0%}"
        return verdict, loss
    if total.ruined:
        lose = _format_clause(total.ruined, "row or block loses", "rows or blocks lose")
        return DIFFERENT, f"{lose} more than {_MOST_LOST_OF_GROUP:.0%}, and less with other scales"
    lie = _format_clause(
        total.outside, "weight lies beyond the last code of its row", "weights lie beyond the last code of their row"
    )
    return verdict, lie if total.outside else None


def _format_clause(count: int, singular: str, plural: str) -> str:
    return f"{count} {singular if count == 1 else plural}"
