"""Decide how each slot of a bundle stores its new weight: kept, the checkpoint's codes, floats, or requantized.

Quantization-aware training does not derive scales from the largest number of a row: with such a scale, a weight that
two bits hold exactly would lose four fifths. So a row keeps the scale of the file, unless the scale of the rule
(:mod:`mtp_extract.litertlm.storage`) loses less.
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

from mtp_extract.checkpoint.rounding import SCALES, repeat_roundings
from mtp_extract.checkpoint.weight import Steps, is_same_weight, unfold_factor
from mtp_extract.errors import CheckpointError, OutputError, UnsupportedError, list_few
from mtp_extract.insertion.slots import WeightSlot, are_equal, compute_relative_error, map_rows, sum_squares
from mtp_extract.litertlm.storage import FLOAT_TYPES, LARGEST_SCALE, Floats, Storage, encode_floats, widen_floats

KEPT = "kept"
AS_CODES = "codes"
AS_FLOATS = "floats"
REQUANTIZED = "requantized"

# Dividing a scale by a folded factor and multiplying it again changes it by less.
_SCALE_TOLERANCE = 1e-6
# Summing the same squares in another order, in float32, changes a loss by less.
_AS_GOOD = 1 + 1e-4
_NO_SCALE = np.float32(1e-30)
# Distance, in steps, of a number on the grid from its code, after rounding to float32.
_NOISE = 1e-5

_Doubles = npt.NDArray[np.float64]


class GroupScales(NamedTuple):
    """Scales and zero points of codes, both ``[groups]``; empty for floats."""

    scale: Floats
    zero_point: npt.NDArray[np.int64]

    @property
    def step(self) -> Floats:
        """Distance of neighbouring codes, F32 ``[groups]``; tiny where the scale is 0, to divide by."""
        return np.where(self.scale > 0, self.scale, _NO_SCALE)

    def select(self, groups: slice) -> GroupScales:
        return GroupScales(self.scale[groups], self.zero_point[groups])

    @classmethod
    def concatenate(cls, parts: Sequence[GroupScales], symmetric: bool) -> GroupScales:
        """Join the scales of consecutive rows. ``symmetric`` zero points, all 0, take no memory: an embedding has a row
        for each token."""
        scale = np.concatenate([part.scale for part in parts])
        zeros = np.broadcast_to(np.int64(0), scale.shape)
        return cls(scale, zeros if symmetric else np.concatenate([part.zero_point for part in parts]))

    def is_close(self, other: GroupScales) -> bool:
        """Whether zero points are equal, and scales equal up to rounding."""
        scales_alike = np.allclose(self.scale, other.scale, rtol=_SCALE_TOLERANCE, atol=0)
        return scales_alike and np.array_equal(self.zero_point, other.zero_point)

    def is_equal(self, other: GroupScales) -> bool:
        return np.array_equal(self.scale, other.scale) and np.array_equal(self.zero_point, other.zero_point)


class SquareSums(NamedTuple):
    """Sums of squares over the stored numbers of a slot; 0 if the file holds the weight already, or takes its codes."""

    lost: float  # of (number in the new file − number of the checkpoint)
    changed: float  # of (number of the checkpoint − number in the old file)
    size: float  # of the numbers of the checkpoint

    @classmethod
    def total(cls, parts: Iterable[SquareSums]) -> SquareSums:
        return cls(*map(math.fsum, zip(_NO_SUMS, *parts, strict=True)))


_NO_SUMS = SquareSums(0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Encoding:
    """How the new weight of a slot is stored."""

    slot: WeightSlot
    how: str  # KEPT (the file holds it), AS_CODES (the checkpoint's codes, unchanged), AS_FLOATS or REQUANTIZED
    scales: GroupScales
    sums: SquareSums = _NO_SUMS
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # rows already written → XXH3 of their bytes

    @property
    def error(self) -> float:
        """Root mean square of (new file − checkpoint), relative to that of the checkpoint's weight."""
        return compute_relative_error(self.sums.lost, self.sums.size)

    @property
    def weight_sums(self) -> SquareSums:
        """The sums without the factor that the converter folded into the stored numbers."""
        return SquareSums(*(number / self.slot.stored_constant.factor**2 for number in self.sums))

    @property
    def storage(self) -> Storage:
        """Element type, shape and grouping in the file, which an insertion does not change."""
        return self.slot.storage

    def encode_rows(self, first: int, last: int) -> bytes:
        """Return the bytes of rows ``[first, last)``; raise UnsupportedError if a number leaves the element type."""
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
        """Return the bytes of rows ``[first, last)`` for writing, and remember their digest."""
        data = self.encode_rows(first, last)
        self.digests[first, last] = xxh3_128_hexdigest(data)
        return data

    def compute_digest(self, first: int, last: int) -> str:
        """Return XXH3 of the bytes of rows ``[first, last)``, encoded again only if they were not written yet."""
        return self.digests.get((first, last)) or xxh3_128_hexdigest(self.encode_rows(first, last))


def encode_slots(
    slots: Sequence[WeightSlot], advance: Callable[[int], None] = lambda _: None
) -> dict[str, tuple[Encoding, ...]]:
    """Choose the encodings of ``slots``, by role: none for a weight of ones that is not stored.

    Args:
        advance: called with the number of elements just read.

    Raises:
        UnsupportedError: the element type cannot hold a value, or a weight of ones that the converter folded away is no
            longer 1.
        CheckpointError: a value is not finite, or too large for any scale.
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
    changed = set[WeightSlot]()

    def compare(slot: WeightSlot, first: int, last: int) -> None:
        if slot in changed:  # one difference is enough: the other rows need not be read
            return
        with np.errstate(over="ignore", invalid="ignore"):
            if not are_equal(slot.stored_weight.floats(first, last), slot.new.floats(first, last), slot.dtype):
                changed.add(slot)

    map_rows(slots, compare)
    return changed


def _encode_exactly(slot: WeightSlot, changed: bool) -> Encoding | None:
    """Return the encoding if the file holds the weight or can take its codes; None if it must be rounded, or is not
    stored."""
    if not changed or _has_equal_codes(slot):
        return None if slot.constant is None else Encoding(slot, KEPT, _list_stored_scales(slot))
    if slot.constant is None:
        raise UnsupportedError(
            f"{slot.role}: the graph multiplies by nothing here, because the weight was 1 at export and was folded "
            "away; the checkpoint's is not 1. Keep it at 1, or take a bundle whose graph has it."
        )
    scales = _find_scales_of_codes(slot)
    return None if scales is None else Encoding(slot, AS_CODES, scales)


def _encode_with_rounding(
    slots: Sequence[WeightSlot], leaders: Mapping[WeightSlot, WeightSlot], advance: Callable[[int], None]
) -> dict[WeightSlot, Encoding | None]:
    differ = set[WeightSlot]()

    def measure(slot: WeightSlot, first: int, last: int) -> _RowMeasurement:
        values = slot.compute_stored_values(first, last)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            if slot.storage.type in FLOAT_TYPES:
                measured = _measure_floats(slot, values, first, last)
            else:
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
    """Raise OutputError if ``slots``, read from the new file at ``path``, have other constants, bytes or scales than
    ``planned``."""
    # By constant, not by role: in the new file, roles with equal numbers can no longer be told apart.
    encodings = [encoding for of_role in planned.values() for encoding in of_role]
    expected = {key: encoding for encoding in encodings for key in _list_constants(encoding.slot)}
    written = {slot: _list_constants(slot) for slot in slots if slot.constant is not None}
    wrong = {slot.role for slot, keys in written.items() if not keys <= expected.keys()}
    wrong |= {expected[key].slot.role for key in expected.keys() - set().union(*written.values())}
    wrong |= _find_wrong_contents(
        {slot: {expected[key] for key in keys} for slot, keys in written.items() if slot.role not in wrong}
    )
    if wrong:
        raise OutputError(f"{path}: {list_few(sorted(wrong))} reads back differently. Nothing was kept.")


def _find_wrong_contents(expected: Mapping[WeightSlot, Iterable[Encoding]]) -> set[str]:
    wrong = {
        slot.role
        for slot, encodings in expected.items()
        if not all(_list_stored_scales(slot).is_equal(encoding.scales) for encoding in encodings)
    }

    def compare(slot: WeightSlot, first: int, last: int) -> None:
        if slot.role in wrong:
            return
        digest = xxh3_128_hexdigest(slot.read_stored_bytes(first, last))
        if any(encoding.compute_digest(first, last) != digest for encoding in expected[slot]):
            wrong.add(slot.role)

    map_rows([*expected], compare)
    return wrong


def _list_constants(slot: WeightSlot) -> set[tuple[int, tuple[int, int] | None, tuple[int, int] | None]]:
    """Identify the constants of ``slot``: (start of the section, (subgraph, index), columns)."""
    return {(place.model.region.begin, place.found.key, place.columns) for place in slot.places}


def _list_stored_scales(slot: WeightSlot) -> GroupScales:
    return GroupScales(
        slot.stored_constant.source.scale.reshape(-1), slot.stored_constant.source.zero_point.reshape(-1)
    )


def _find_leaders(slots: Sequence[WeightSlot]) -> dict[WeightSlot, WeightSlot]:
    """Map each slot to the first of its role, whose scales it may keep: all signatures get the same scales."""
    first_slots: dict[object, WeightSlot] = {}
    leaders = {}
    for slot in slots:
        if slot.constant is not None:
            key = slot.role, slot.places[0].columns, slot.storage, slot.stored_constant.factor
            leaders[slot] = first_slots.setdefault(key, slot)
    return leaders


def _has_equal_codes(slot: WeightSlot) -> bool:
    """Whether the new weight has the codes of the bundle, and scales that differ only as checkpoint formats round them:
    the folded factor divided out, in F32 or FP16."""
    # A constant without codes by rows raises: no format keeps such integers.
    with suppress(CheckpointError, UnsupportedError):
        return slot.new.scheme is not None and any(
            is_same_weight(repeat_roundings(slot.stored_weight, (f"{kind}{SCALES}",)), slot.new)
            for kind in ("F32", "FP16")
        )
    return False


def _find_scales_of_codes(slot: WeightSlot) -> GroupScales | None:
    """Return the scales with which the file can take the codes of the new weight unchanged; None if the weight has no
    codes, the file cannot store them, or they would not give the checkpoint's floats."""
    storage = slot.storage
    if slot.new.scheme is None or storage.packing is None or slot.stored_constant.folded:
        return None
    scales = _arrange_scales(slot.new.steps.merge_equal_blocks(), storage, slot.stored_constant.factor)
    if scales is None:
        return None
    lowest, highest = (0, 0) if storage.symmetric else (storage.packing.lowest, storage.packing.highest)
    if scales.zero_point.min() < lowest or scales.zero_point.max() > highest:
        return None
    if storage.kind == "blockwise" and not np.array_equal(scales.scale.astype(np.float16), scales.scale):
        return None
    return scales if all(_can_take_codes(slot, scales, *rows) for rows in slot.list_row_ranges()) else None


def _arrange_scales(steps: Steps, storage: Storage, factor: float) -> GroupScales | None:
    """Convert ``steps`` to one scale for each group of ``storage``, times ``factor``; None if it has fewer scales."""
    sizes, zeros = steps.size, steps.zero_point
    if storage.by_rows and steps.block % storage.columns == 0:
        repeats = steps.block // storage.columns
        sizes, zeros = np.repeat(sizes, repeats, axis=1), np.repeat(zeros, repeats, axis=1)
    elif storage.groups == 1 and not np.ptp(sizes) and not np.ptp(zeros):
        sizes, zeros = sizes[:1, :1], zeros[:1, :1]
    else:
        return None
    scale = sizes.reshape(-1)
    # An equal factor is folded in already: the codes come from this file.
    if steps.factor != factor:
        scale = (scale.astype(np.float64) * (factor / steps.factor)).astype(np.float32)
    return GroupScales(scale, zeros.reshape(-1))


def _can_take_codes(slot: WeightSlot, scales: GroupScales, first: int, last: int) -> bool:
    """Whether the codes of rows ``[first, last)`` fit the element type and, with ``scales``, give the new floats."""
    packing = slot.storage.packing
    codes = slot.new.codes(first, last).reshape(-1)
    if packing is None or codes.min() < packing.lowest or codes.max() > packing.highest:
        return False
    floats = codes.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        slot.storage.dequantize_inplace(floats, *scales, first * slot.new.columns)
        return are_equal(unfold_factor(floats, slot.stored_constant.factor), slot.new.floats(first, last), slot.dtype)


class _RowMeasurement(NamedTuple):
    is_stored: bool  # whether the file holds them already
    scales: GroupScales
    sums: SquareSums


def _measure_floats(slot: WeightSlot, values: Floats, first: int, last: int) -> _RowMeasurement:
    """Round ``values`` of rows ``[first, last)`` to the float type of the file, and sum the squares."""
    type_ = slot.storage.type
    before = slot.read_stored_bytes(first, last)
    after = encode_floats(values, type_, slot.role)

    lost, changed = (sum_squares(widen_floats(stored, type_) - values) for stored in (after, before))
    return _RowMeasurement(after == before, _list_stored_scales(slot), SquareSums(lost, changed, sum_squares(values)))


def _measure_codes(
    slot: WeightSlot, leader: WeightSlot, values: Floats, first: int, last: int, differs: bool
) -> _RowMeasurement:
    """Choose the leader's or the rule's scales for ``values`` of rows ``[first, last)``. The codes in the file are not
    compared if the slot ``differs`` in other rows."""
    storage = slot.storage
    elements = slot.find_slice(storage.elements, first, last)
    codes = slot.stored_constant.source.codes(elements.start, elements.stop)
    groups = slot.find_slice(storage.groups, first, last)
    old_scales = _list_stored_scales(slot).select(groups)

    steps = _compute_steps(storage, values, old_scales)
    lost = _sum_squared_steps(old_scales, _compute_rounding(storage, steps))
    steps -= storage.group_by_scale(codes.astype(np.float32))
    changed = float(_sum_squared_steps(old_scales, steps).sum())

    candidates = old_scales
    if leader is not slot:
        candidates = _list_stored_scales(leader).select(groups)
        lost = _compute_loss(storage, values, candidates)
    chosen, lost = _choose_scales(storage, values, candidates, lost)

    keeps_scales = not differs and chosen.is_close(old_scales)
    is_stored = keeps_scales and np.array_equal(storage.quantize_by(values, *chosen), codes)
    return _RowMeasurement(is_stored, chosen, SquareSums(float(lost.sum()), changed, sum_squares(values)))


def _choose_scales(storage: Storage, values: Floats, old: GroupScales, lost: _Doubles) -> tuple[GroupScales, _Doubles]:
    """Choose for each group the ``old`` scale or the rule's, whichever loses less. ``lost`` are the sums of squares
    with the old scales; returned are those with the chosen ones, F64 ``[groups]``."""
    rule = GroupScales(*storage.compute_scales(values))
    # The rule's scale covers the largest number of a group: without zero points no number lies beyond the last code.
    lost_by_rule = _compute_loss(storage, values, rule, within_codes=storage.symmetric)

    # Where the old scale is the rule's up to rounding, take the rule's: it gives the codes that the quantizer gave.
    is_rule = np.isclose(rule.scale, old.scale, rtol=_SCALE_TOLERANCE, atol=0)
    is_rule &= rule.zero_point == old.zero_point
    noise = values.size / lost.size * np.square(_NOISE * old.step.astype(np.float64))
    stays = (lost <= _AS_GOOD * lost_by_rule + noise) & ~is_rule

    scale = np.where(stays, old.scale, rule.scale)
    zero_point = np.where(stays, old.zero_point, rule.zero_point)
    return GroupScales(scale, zero_point), np.where(stays, lost, lost_by_rule)


def compute_least_loss(slot: WeightSlot, weight: Floats, lost: _Doubles, first: int, last: int) -> _Doubles:
    """Return the sums of squares that ``weight``, rows ``[first, last)``, loses with the better of the file's and the
    rule's scales; ``lost``: with the codes and scales in the file. Both F64 ``[groups]``."""
    storage, factor = slot.storage, slot.stored_constant.factor
    old_scales = _list_stored_scales(slot).select(slot.find_slice(storage.groups, first, last))
    stored = weight if factor == 1.0 else weight * np.float32(factor)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _, least = _choose_scales(storage, stored, old_scales, factor**2 * lost)
    return least / factor**2


def _compute_loss(storage: Storage, values: Floats, scales: GroupScales, within_codes: bool = False) -> _Doubles:
    """Return the sum of squares that the nearest codes with ``scales`` lose, F64 ``[groups]``."""
    steps = _compute_steps(storage, values, scales)
    return _sum_squared_steps(scales, _compute_rounding(storage, steps, within_codes))


def _compute_steps(storage: Storage, values: Floats, scales: GroupScales) -> Floats:
    """Return the codes of ``values`` before rounding and clipping, F32 ``[repeats, groups, columns]``."""
    by_group: Floats = storage.group_by_scale(values)
    steps = by_group / scales.step[:, None]
    if not storage.symmetric:
        steps += scales.zero_point[:, None].astype(np.float32)
    return steps


def _compute_rounding(storage: Storage, steps: Floats, within_codes: bool = False) -> Floats:
    """Return nearest code − ``steps``; nothing needs clipping if all are known to lie ``within_codes``."""
    rounding = np.rint(steps)
    if not within_codes:
        np.clip(rounding, *storage.bounds, out=rounding)
    rounding -= steps
    return rounding


def _sum_squared_steps(scales: GroupScales, steps: Floats) -> _Doubles:
    """Sum the squares of distances in ``steps`` by group, in units of the numbers: F64 ``[groups]``."""
    return sum_squares_by_group(steps) * np.square(scales.step.astype(np.float64))


def sum_squares_by_group(by_scale: Floats) -> _Doubles:
    """Sum squares over each group: ``[repeats, groups, columns]`` → F64 ``[groups]``."""
    sums = np.einsum("rgc,rgc->g", by_scale, by_scale)
    if not np.isfinite(sums).all():
        sums = np.einsum("rgc,rgc->g", by_scale, by_scale, dtype=np.float64)
    return np.asarray(sums, np.float64)
