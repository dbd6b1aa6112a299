"""What becomes of each slot of a bundle: kept, the checkpoint's codes, its floats, or requantized; and its error.

Scales of quantization-aware training are no maxima: by the largest number of each row, a weight that two bits hold
exactly would be stored with four fifths of it lost. So a row is requantized with the scale that the file has, or with
the rule's where that loses less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128_hexdigest

from mtp_extract.checkpoint.rounding import SCALES, rounded_again
from mtp_extract.checkpoint.weight import Steps, same_weight, unfold_factor
from mtp_extract.errors import CheckpointError, OutputError, UnsupportedError, few
from mtp_extract.insertion.slots import WeightSlot, are_equal, compute_relative_error, map_rows, sum_squares
from mtp_extract.litertlm.storage import FLOAT_TYPES, LARGEST_SCALE, Floats, Storage, encode_floats, widened

KEPT = "kept"
AS_CODES = "codes"
AS_FLOATS = "floats"
REQUANTIZED = "requantized"

# Dividing by a folded factor, and multiplying again, changes a scale by less.
_SCALE_TOLERANCE = 1e-6
# Losses that differ by less are equal: sums of the same squares, in float32, in another order.
_AS_GOOD = 1 + 1e-4
_NO_SCALE = np.float32(1e-30)
# In steps: what rounding to float32 leaves of a number that is a code's.
_NOISE = 1e-5


_Doubles = npt.NDArray[np.float64]


class GroupScales(NamedTuple):
    """Of codes, both ``[groups]``; empty for floats."""

    scale: Floats
    zero_point: npt.NDArray[np.int64]

    @property
    def step(self) -> Floats:
        """Between neighbouring codes; next to nothing where the scale is 0, with which no number but 0 is stored."""
        return np.where(self.scale > 0, self.scale, _NO_SCALE)

    def select(self, groups: slice) -> GroupScales:
        """Those of some groups."""
        return GroupScales(self.scale[groups], self.zero_point[groups])

    @classmethod
    def concatenate(cls, parts: Sequence[GroupScales], symmetric: bool) -> GroupScales:
        """Those of groups after each other. Zero points that are all 0 take no memory: a base's tables have a row a
        token each."""
        scale = np.concatenate([part.scale for part in parts])
        zeros = np.broadcast_to(np.int64(0), scale.shape)
        return cls(scale, zeros if symmetric else np.concatenate([part.zero_point for part in parts]))

    def is_close(self, other: GroupScales) -> bool:
        """Whether all are the same, a rounding of scales apart."""
        scales_alike = np.allclose(self.scale, other.scale, rtol=_SCALE_TOLERANCE, atol=0)
        return scales_alike and np.array_equal(self.zero_point, other.zero_point)

    def is_equal(self, other: GroupScales) -> bool:
        """Whether all are the same, to the bit."""
        return np.array_equal(self.scale, other.scale) and np.array_equal(self.zero_point, other.zero_point)


class SquareSums(NamedTuple):
    """Sums of squares over a slot, as it is stored; zeros where the file holds the weight, or takes its codes."""

    lost: float  # of what the file will hold less the checkpoint's weight
    changed: float  # of the checkpoint's weight less what the file holds
    size: float  # of the checkpoint's weight

    @classmethod
    def total(cls, parts: Iterable[SquareSums]) -> SquareSums:
        """The sums over several parts."""
        return cls(*map(math.fsum, zip(_NO_SUMS, *parts, strict=True)))


_NO_SUMS = SquareSums(0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Encoding:
    """What becomes of one slot."""

    slot: WeightSlot
    how: str  # KEPT (the file holds it), AS_CODES (the checkpoint's integers, as they are), AS_FLOATS, REQUANTIZED
    scales: GroupScales
    sums: SquareSums = _NO_SUMS
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # rows that were written → XXH3 of their bytes

    @property
    def error(self) -> float:
        """Root mean square of what the file will hold less the checkpoint's weight, as a share of the weight's."""
        return compute_relative_error(self.sums.lost, self.sums.size)

    @property
    def weight_sums(self) -> SquareSums:
        """The sums of the weight, without the factor with which it is stored."""
        return SquareSums(*(number / self.slot.stored_constant.factor**2 for number in self.sums))

    @property
    def storage(self) -> Storage:
        """How it lies in the file, before and after."""
        return self.slot.storage

    def encode_rows(self, first: int, last: int) -> bytes:
        """The bytes of rows ``[first, last)``; UnsupportedError where a number leaves the type."""
        slot, storage = self.slot, self.storage
        if self.how == KEPT:
            return slot.read_stored_bytes(first, last)
        if self.how == AS_CODES:
            return storage.pack_codes(slot.new.codes(first, last).reshape(-1))
        values = slot.compute_stored_values(first, last)
        if self.how == AS_FLOATS:
            return encode_floats(values, storage.type, slot.role)
        scales = self.scales.select(slot.find_slice(storage.groups, first, last))
        return storage.pack_codes(storage.quantize_by(values, *scales))

    def encode_and_record(self, first: int, last: int) -> bytes:
        """The bytes of rows ``[first, last)``, which are being written: what they are is noted."""
        data = self.encode_rows(first, last)
        self.digests[first, last] = xxh3_128_hexdigest(data)
        return data

    def compute_digest(self, first: int, last: int) -> str:
        """XXH3 of rows ``[first, last)``, as they were written or are to be."""
        return self.digests.get((first, last)) or xxh3_128_hexdigest(self.encode_rows(first, last))


def encode_slots(
    slots: Sequence[WeightSlot], advance: Callable[[int], None] = lambda _: None
) -> dict[str, tuple[Encoding, ...]]:
    """What becomes of each of ``slots``, by role; ``advance`` is told how many elements were read.

    Raises:
        UnsupportedError: values that the type cannot hold, or a weight that was folded away and is no longer 1.
        CheckpointError: values that are not finite, or too large for any scale.
    """
    changed = _find_changed_slots(slots)
    encodings = {slot: _encode_exactly(slot, slot in changed) for slot in slots}
    to_measure = [slot for slot in slots if slot.constant is not None and encodings[slot] is None]
    advance(sum(math.prod(slot.new.shape) for slot in slots if slot not in to_measure))
    encodings |= _encode_with_rounding(to_measure, _find_leaders(slots), advance)

    by_role: dict[str, tuple[Encoding, ...]] = {slot.role: () for slot in slots}
    for slot, encoding in encodings.items():
        if encoding is not None:
            by_role[slot.role] += (encoding,)
    return by_role


def _find_changed_slots(slots: Sequence[WeightSlot]) -> set[WeightSlot]:
    """Those of ``slots`` that hold something else than their weight."""
    changed = set[WeightSlot]()

    def compare(slot: WeightSlot, first: int, last: int) -> None:
        # After rows that differ no others are read.
        if slot in changed:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            if not are_equal(slot.stored_weight.floats(first, last), slot.new.floats(first, last), slot.dtype):
                changed.add(slot)

    map_rows(slots, compare)
    return changed


def _encode_exactly(slot: WeightSlot, changed: bool) -> Encoding | None:
    """What becomes of a slot whose weight the file holds, or can take as it is; None of any other, and of one that is
    not stored."""
    if not changed or _differs_by_scale_rounding(slot):
        return None if slot.constant is None else Encoding(slot, KEPT, _list_stored_scales(slot))
    if slot.constant is None:
        raise UnsupportedError(
            f"{slot.role}: the graph multiplies by nothing here, because the weight was 1 when it was exported and "
            "was folded away; the checkpoint has another. Keep it at 1, or take a bundle whose graph has it."
        )
    scales = _find_scales_of_codes(slot)
    return None if scales is None else Encoding(slot, AS_CODES, scales)


def _encode_with_rounding(
    slots: Sequence[WeightSlot], leaders: Mapping[WeightSlot, WeightSlot], advance: Callable[[int], None]
) -> dict[WeightSlot, Encoding | None]:
    """What becomes of ``slots`` whose weights are to be rounded; each with scales of its own, or of its leader."""
    differ = set[WeightSlot]()

    def measure(slot: WeightSlot, first: int, last: int) -> _RowMeasurement:
        values = slot.compute_stored_values(first, last)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if slot.storage.type in FLOAT_TYPES:
                measured = _measure_floats(slot, values, first, last)
            else:
                # After rows that differ no others are held against the file's codes.
                measured = _measure_codes(slot, leaders[slot], values, first, last, slot in differ)
        if not measured.is_stored:
            differ.add(slot)
        advance((last - first) * slot.new.columns)
        return measured

    encodings: dict[WeightSlot, Encoding | None] = {}
    for slot, rows in map_rows(slots, measure).items():
        sums = SquareSums.total(measured.sums for measured in rows)
        if slot not in differ:
            encodings[slot] = Encoding(slot, KEPT, _list_stored_scales(slot), sums)
            continue
        scales = GroupScales.concatenate([measured.scales for measured in rows], slot.storage.symmetric)
        if scales.scale.max(initial=0) > LARGEST_SCALE:
            raise CheckpointError(
                f"{slot.role}: holds values too large for integers and scales. It was damaged, or the training "
                "diverged: fetch it again, or train it again."
            )
        how = AS_FLOATS if slot.storage.type in FLOAT_TYPES else REQUANTIZED
        encodings[slot] = Encoding(slot, how, scales, sums)
    return encodings


def check_written(path: Path, slots: Iterable[WeightSlot], planned: Mapping[str, Iterable[Encoding]]) -> None:
    """Raise OutputError where one of ``slots``, read from the new file at ``path``, is of other constants than were
    ``planned``, or holds other bytes or scales."""
    # By constant, not by role: roles that hold the same numbers now may be told apart no longer, and need not be.
    encodings = [encoding for of_role in planned.values() for encoding in of_role]
    expected = {key: encoding for encoding in encodings for key in _list_constants(encoding.slot)}
    written = {slot: _list_constants(slot) for slot in slots if slot.constant is not None}
    wrong = {slot.role for slot, keys in written.items() if not keys <= expected.keys()}
    wrong |= {expected[key].slot.role for key in expected.keys() - set().union(*written.values())}
    wrong |= _find_wrong_contents(
        {slot: {expected[key] for key in keys} for slot, keys in written.items() if slot.role not in wrong}
    )
    if wrong:
        raise OutputError(f"{path}: {few(sorted(wrong))} reads back differently. Nothing was kept.")


def _find_wrong_contents(to_hold: Mapping[WeightSlot, Iterable[Encoding]]) -> set[str]:
    """The roles of slots that hold other scales or bytes than they are to hold."""
    wrong = {
        slot.role
        for slot, encodings in to_hold.items()
        if not all(_list_stored_scales(slot).is_equal(encoding.scales) for encoding in encodings)
    }

    def compare(slot: WeightSlot, first: int, last: int) -> None:
        if slot.role in wrong:
            return
        digest = xxh3_128_hexdigest(slot.read_stored_bytes(first, last))
        if any(encoding.compute_digest(first, last) != digest for encoding in to_hold[slot]):
            wrong.add(slot.role)

    map_rows([*to_hold], compare)
    return wrong


def _list_constants(slot: WeightSlot) -> set[tuple[int, tuple[int, int] | None, tuple[int, int] | None]]:
    """The constants that play its role, by section, subgraph and index, and columns."""
    return {(place.model.region.begin, place.found.key, place.columns) for place in slot.places}


def _list_stored_scales(slot: WeightSlot) -> GroupScales:
    """The scales and zero points that the file has."""
    return GroupScales(
        slot.stored_constant.source.scale.reshape(-1), slot.stored_constant.source.zero_point.reshape(-1)
    )


def _find_leaders(slots: Sequence[WeightSlot]) -> dict[WeightSlot, WeightSlot]:
    """For each slot the one whose scales may stay: the first of its role, so that all signatures get the same."""
    first: dict[object, WeightSlot] = {}
    leaders = {}
    for slot in slots:
        if slot.constant is not None:
            key = slot.role, slot.places[0].columns, slot.storage, slot.stored_constant.factor
            leaders[slot] = first.setdefault(key, slot)
    return leaders


def _differs_by_scale_rounding(slot: WeightSlot) -> bool:
    """Whether the new weight has the codes that the bundle holds, with the folded factor divided out and scales in F32
    or FP16, as formats keep them."""
    # Without codes by rows: no format keeps such integers.
    with suppress(CheckpointError, UnsupportedError):
        return slot.new.scheme is not None and any(
            same_weight(rounded_again(slot.stored_weight, (f"{kind}{SCALES}",)), slot.new) for kind in ("F32", "FP16")
        )
    return False


def _find_scales_of_codes(slot: WeightSlot) -> GroupScales | None:
    """Scales and zero points for the codes of the new weight as they are; None where it has no codes, the file cannot
    store them, or they would say something else than the checkpoint's floats."""
    storage = slot.storage
    if slot.new.scheme is None or storage.packing is None or slot.stored_constant.folded:
        return None
    scales = _arrange_scales(slot.new.steps.by_row(), storage, slot.stored_constant.factor)
    if scales is None:
        return None
    lowest, highest = (0, 0) if storage.symmetric else (storage.packing.lowest, storage.packing.highest)
    if scales.zero_point.min() < lowest or scales.zero_point.max() > highest:
        return None
    if storage.kind == "blockwise" and not np.array_equal(scales.scale.astype(np.float16), scales.scale):
        return None
    return scales if all(_can_take_codes(slot, scales, *rows) for rows in slot.list_row_ranges()) else None


def _arrange_scales(steps: Steps, storage: Storage, factor: float) -> GroupScales | None:
    """``steps``, in the order of ``storage`` and with its ``factor``; None where it has fewer scales."""
    sizes, zeros = steps.size, steps.zero_point
    if storage.by_rows and steps.block % storage.columns == 0:
        each = steps.block // storage.columns
        sizes, zeros = np.repeat(sizes, each, axis=1), np.repeat(zeros, each, axis=1)
    elif storage.groups == 1 and not np.ptp(sizes) and not np.ptp(zeros):
        sizes, zeros = sizes[:1, :1], zeros[:1, :1]
    else:
        return None
    scale = sizes.reshape(-1)
    # The same factor is folded in already, where the codes are this file's; another is not.
    if steps.factor != factor:
        scale = (scale.astype(np.float64) * (factor / steps.factor)).astype(np.float32)
    return GroupScales(scale, zeros.reshape(-1))


def _can_take_codes(slot: WeightSlot, scales: GroupScales, first: int, last: int) -> bool:
    """Whether codes of the new weight, rows ``[first, last)``, fit the file, and with ``scales`` say its floats."""
    packing = slot.storage.packing
    codes = slot.new.codes(first, last).reshape(-1)
    if packing is None or codes.min() < packing.lowest or codes.max() > packing.highest:
        return False
    floats = codes.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        slot.storage.dequantize_inplace(floats, *scales, first * slot.new.columns)
        return are_equal(unfold_factor(floats, slot.stored_constant.factor), slot.new.floats(first, last), slot.dtype)


class _RowMeasurement(NamedTuple):
    """What rows of a slot become."""

    is_stored: bool  # whether the file stores them already
    scales: GroupScales
    sums: SquareSums


def _measure_floats(slot: WeightSlot, values: Floats, first: int, last: int) -> _RowMeasurement:
    """Of a constant in floats that is to hold ``values`` in rows ``[first, last)``."""
    type_ = slot.storage.type
    before = slot.read_stored_bytes(first, last)
    after = encode_floats(values, type_, slot.role)

    lost, changed = (sum_squares(widened(stored, type_) - values) for stored in (after, before))
    return _RowMeasurement(after == before, _list_stored_scales(slot), SquareSums(lost, changed, sum_squares(values)))


def _measure_codes(
    slot: WeightSlot, leader: WeightSlot, values: Floats, first: int, last: int, differs: bool
) -> _RowMeasurement:
    """Of a constant in codes that is to hold ``values`` in rows ``[first, last)``, with the scales of ``leader`` or the
    rule's. Where it is known that it ``differs`` in other rows, these are not held against its codes."""
    storage = slot.storage
    elements = slot.find_slice(storage.elements, first, last)
    codes = slot.stored_constant.source.codes(elements.start, elements.stop)
    present, may_stay = (
        _list_stored_scales(each).select(slot.find_slice(storage.groups, first, last)) for each in (slot, leader)
    )

    steps = _compute_steps(storage, values, present)
    lost = _sum_squared_steps(present, _compute_rounding(storage, steps))
    steps -= storage.group_by_scale(codes.astype(np.float32))
    changed = float(_sum_squared_steps(present, steps).sum())
    if leader is not slot:
        lost = _compute_loss(storage, values, may_stay)
    chosen, lost = _choose_scales(storage, values, may_stay, lost)

    is_stored = not differs and chosen.is_close(present) and np.array_equal(storage.quantize_by(values, *chosen), codes)
    return _RowMeasurement(is_stored, chosen, SquareSums(float(lost.sum()), changed, sum_squares(values)))


def _choose_scales(
    storage: Storage, values: Floats, present: GroupScales, lost: _Doubles
) -> tuple[GroupScales, _Doubles]:
    """Scales of ``values``, of each group the ``present`` ones, which lose ``lost``, or the rule's where these lose
    less; and what they lose, as sums of squares."""
    rule = GroupScales(*storage.compute_scales(values))
    # It reaches the largest number of each group: without zero points no number lies beyond the last code.
    lost_by_rule = _compute_loss(storage, values, rule, within=storage.symmetric)

    # The rule's own scale, a rounding apart: its codes are those that the rule makes of the same numbers.
    is_rule = np.isclose(rule.scale, present.scale, rtol=_SCALE_TOLERANCE, atol=0)
    is_rule &= rule.zero_point == present.zero_point
    noise = values.size / lost.size * np.square(_NOISE * present.step.astype(np.float64))
    stays = (lost <= _AS_GOOD * lost_by_rule + noise) & ~is_rule

    scale = np.where(stays, present.scale, rule.scale)
    zero_point = np.where(stays, present.zero_point, rule.zero_point)
    return GroupScales(scale, zero_point), np.where(stays, lost, lost_by_rule)


def compute_least_loss(slot: WeightSlot, weight: Floats, lost: _Doubles, first: int, last: int) -> _Doubles:
    """Of each group the sum of the squares of what rows ``[first, last)`` would lose of ``weight``, which are ``lost``
    in what is stored: less, if the rule's scales are better than the file's."""
    storage, factor = slot.storage, slot.stored_constant.factor
    present = _list_stored_scales(slot).select(slot.find_slice(storage.groups, first, last))
    stored = weight if factor == 1.0 else weight * np.float32(factor)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _, least = _choose_scales(storage, stored, present, factor**2 * lost)
    return least / factor**2


def _compute_loss(storage: Storage, values: Floats, scales: GroupScales, within: bool = False) -> _Doubles:
    """Of each group the sum of the squares of what the nearest codes by ``scales`` lose."""
    return _sum_squared_steps(scales, _compute_rounding(storage, _compute_steps(storage, values, scales), within))


def _compute_steps(storage: Storage, values: Floats, scales: GroupScales) -> Floats:
    """``values``, ``[repeats, groups, columns]``, in steps of their scales: of a number on the grid its code."""
    by_group: Floats = storage.group_by_scale(values)
    steps = by_group / scales.step[:, None]
    if not storage.symmetric:
        steps += scales.zero_point[:, None].astype(np.float32)
    return steps


def _compute_rounding(storage: Storage, steps: Floats, within: bool = False) -> Floats:
    """How far the nearest codes are from ``steps``, which may be known to lie ``within`` the ends of the codes."""
    apart = np.rint(steps)
    if not within:
        np.clip(apart, *storage.bounds, out=apart)
    apart -= steps
    return apart


def _sum_squared_steps(scales: GroupScales, steps: Floats) -> _Doubles:
    """Of each group the sum of the squares of distances in ``steps``, as those of numbers."""
    return sum_squares_by_group(steps) * np.square(scales.step.astype(np.float64))


def sum_squares_by_group(by_scale: Floats) -> _Doubles:
    """Of each group of ``by_scale``, ``[repeats, groups, columns]``, the sum of the squares of its numbers."""
    sums = np.einsum("rgc,rgc->g", by_scale, by_scale)
    if not np.isfinite(sums).all():
        sums = np.einsum("rgc,rgc->g", by_scale, by_scale, dtype=np.float64)
    return np.asarray(sums, np.float64)
