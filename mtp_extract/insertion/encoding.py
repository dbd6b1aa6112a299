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
from mtp_extract.insertion.slots import Slot, are_alike, over_rows, relative_error, squares
from mtp_extract.litertlm.storage import FLOAT_TYPES, LARGEST_SCALE, Floats, Storage, float_bytes, widened

KEPT = "kept"
AS_CODES = "codes"
AS_FLOATS = "floats"
REQUANTIZED = "requantized"

# Dividing by a folded factor, and multiplying again, changes a scale by less.
_SCALES_ALIKE = 1e-6
# Losses that differ by less are equal: sums of the same squares, in float32, in another order.
_AS_GOOD = 1 + 1e-4
_NO_SCALE = np.float32(1e-30)
# In steps: what rounding to float32 leaves of a number that is a code's.
_NOISE = 1e-5


_Doubles = npt.NDArray[np.float64]


class Scales(NamedTuple):
    """Of codes, both ``[groups]``; empty for floats."""

    scale: Floats
    zero_point: npt.NDArray[np.int64]

    @property
    def step(self) -> Floats:
        """Between neighbouring codes; next to nothing where the scale is 0, with which no number but 0 is stored."""
        return np.where(self.scale > 0, self.scale, _NO_SCALE)

    def part(self, groups: slice) -> Scales:
        """Those of some groups."""
        return Scales(self.scale[groups], self.zero_point[groups])

    @classmethod
    def joined(cls, parts: Sequence[Scales], symmetric: bool) -> Scales:
        """Those of groups after each other. Zero points that are all 0 take no memory: a base's tables have a row a
        token each."""
        scale = np.concatenate([part.scale for part in parts])
        zeros = np.broadcast_to(np.int64(0), scale.shape)
        return cls(scale, zeros if symmetric else np.concatenate([part.zero_point for part in parts]))

    def is_close(self, other: Scales) -> bool:
        """Whether all are the same, a rounding of scales apart."""
        scales_alike = np.allclose(self.scale, other.scale, rtol=_SCALES_ALIKE, atol=0)
        return scales_alike and np.array_equal(self.zero_point, other.zero_point)

    def equals(self, other: Scales) -> bool:
        """Whether all are the same, to the bit."""
        return np.array_equal(self.scale, other.scale) and np.array_equal(self.zero_point, other.zero_point)


class Sums(NamedTuple):
    """Sums of squares over a slot, as it is stored; zeros where the file holds the weight, or takes its codes."""

    lost: float  # of what the file will hold less the checkpoint's weight
    changed: float  # of the checkpoint's weight less what the file holds
    size: float  # of the checkpoint's weight

    @classmethod
    def total(cls, parts: Iterable[Sums]) -> Sums:
        """The sums over several parts."""
        return cls(*map(math.fsum, zip(_NOTHING, *parts, strict=True)))


_NOTHING = Sums(0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Encoding:
    """What becomes of one slot."""

    slot: Slot
    how: str  # KEPT (the file holds it), AS_CODES (the checkpoint's integers, as they are), AS_FLOATS, REQUANTIZED
    scales: Scales
    sums: Sums = _NOTHING
    written: dict[tuple[int, int], str] = field(default_factory=dict)  # rows that were written → XXH3 of their bytes

    @property
    def error(self) -> float:
        """Root mean square of what the file will hold less the checkpoint's weight, as a share of the weight's."""
        return relative_error(self.sums.lost, self.sums.size)

    @property
    def weight_sums(self) -> Sums:
        """The sums of the weight, without the factor with which it is stored."""
        return Sums(*(number / self.slot.stored.factor**2 for number in self.sums))

    @property
    def storage(self) -> Storage:
        """How it lies in the file, before and after."""
        return self.slot.storage

    def data(self, first: int, last: int) -> bytes:
        """The bytes of rows ``[first, last)``; UnsupportedError where a number leaves the type."""
        slot, storage = self.slot, self.storage
        if self.how == KEPT:
            return slot.stored_bytes(first, last)
        if self.how == AS_CODES:
            return storage.stored(slot.new.codes(first, last).reshape(-1))
        values = slot.numbers(first, last)
        if self.how == AS_FLOATS:
            return float_bytes(values, storage.type, slot.role)
        scales = self.scales.part(slot.part(storage.groups, first, last))
        return storage.stored(storage.coded(values, *scales))

    def write(self, first: int, last: int) -> bytes:
        """The bytes of rows ``[first, last)``, which are being written: what they are is noted."""
        data = self.data(first, last)
        self.written[first, last] = xxh3_128_hexdigest(data)
        return data

    def digest(self, first: int, last: int) -> str:
        """XXH3 of rows ``[first, last)``, as they were written or are to be."""
        return self.written.get((first, last)) or xxh3_128_hexdigest(self.data(first, last))


def encode(slots: Sequence[Slot], advance: Callable[[int], None] = lambda _: None) -> dict[str, tuple[Encoding, ...]]:
    """What becomes of each of ``slots``, by role; ``advance`` is told how many elements were read.

    Raises:
        UnsupportedError: values that the type cannot hold, or a weight that was folded away and is no longer 1.
        CheckpointError: values that are not finite, or too large for any scale.
    """
    changed = _changed(slots)
    encodings = {slot: _without_rounding(slot, slot in changed) for slot in slots}
    to_measure = [slot for slot in slots if slot.constant is not None and encodings[slot] is None]
    advance(sum(math.prod(slot.new.shape) for slot in slots if slot not in to_measure))
    encodings |= _rounded(to_measure, _leaders(slots), advance)

    by_role: dict[str, tuple[Encoding, ...]] = {slot.role: () for slot in slots}
    for slot, encoding in encodings.items():
        if encoding is not None:
            by_role[slot.role] += (encoding,)
    return by_role


def _changed(slots: Sequence[Slot]) -> set[Slot]:
    """Those of ``slots`` that hold something else than their weight."""
    changed = set[Slot]()

    def compare(slot: Slot, first: int, last: int) -> None:
        # After rows that differ no others are read.
        if slot in changed:
            return
        with np.errstate(over="ignore", invalid="ignore"):
            if not are_alike(slot.held.floats(first, last), slot.new.floats(first, last), slot.dtype):
                changed.add(slot)

    over_rows(slots, compare)
    return changed


def _without_rounding(slot: Slot, changed: bool) -> Encoding | None:
    """What becomes of a slot whose weight the file holds, or can take as it is; None of any other, and of one that is
    not stored."""
    if not changed or _has_rounded_scales(slot):
        return None if slot.constant is None else Encoding(slot, KEPT, _present(slot))
    if slot.constant is None:
        raise UnsupportedError(
            f"{slot.role}: the graph multiplies by nothing here, because the weight was 1 when it was exported and "
            "was folded away; the checkpoint has another. Keep it at 1, or take a bundle whose graph has it."
        )
    scales = _scales_of_codes(slot)
    return None if scales is None else Encoding(slot, AS_CODES, scales)


def _rounded(
    slots: Sequence[Slot], leaders: Mapping[Slot, Slot], advance: Callable[[int], None]
) -> dict[Slot, Encoding | None]:
    """What becomes of ``slots`` whose weights are to be rounded; each with scales of its own, or of its leader."""
    differ = set[Slot]()

    def measure(slot: Slot, first: int, last: int) -> _Measured:
        values = slot.numbers(first, last)
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

    encodings: dict[Slot, Encoding | None] = {}
    for slot, rows in over_rows(slots, measure).items():
        sums = Sums.total(measured.sums for measured in rows)
        if slot not in differ:
            encodings[slot] = Encoding(slot, KEPT, _present(slot), sums)
            continue
        scales = Scales.joined([measured.scales for measured in rows], slot.storage.symmetric)
        if scales.scale.max(initial=0) > LARGEST_SCALE:
            raise CheckpointError(
                f"{slot.role}: holds values too large for integers and scales. It was damaged, or the training "
                "diverged: fetch it again, or train it again."
            )
        how = AS_FLOATS if slot.storage.type in FLOAT_TYPES else REQUANTIZED
        encodings[slot] = Encoding(slot, how, scales, sums)
    return encodings


def check_written(path: Path, slots: Iterable[Slot], planned: Mapping[str, Iterable[Encoding]]) -> None:
    """Raise OutputError where one of ``slots``, read from the new file at ``path``, is of other constants than were
    ``planned``, or holds other bytes or scales."""
    # By constant, not by role: roles that hold the same numbers now may be told apart no longer, and need not be.
    encodings = [encoding for of_role in planned.values() for encoding in of_role]
    expected = {key: encoding for encoding in encodings for key in _constants(encoding.slot)}
    written = {slot: _constants(slot) for slot in slots if slot.constant is not None}
    wrong = {slot.role for slot, keys in written.items() if not keys <= expected.keys()}
    wrong |= {expected[key].slot.role for key in expected.keys() - set().union(*written.values())}
    wrong |= _holding_others(
        {slot: {expected[key] for key in keys} for slot, keys in written.items() if slot.role not in wrong}
    )
    if wrong:
        raise OutputError(f"{path}: {few(sorted(wrong))} reads back differently. Nothing was kept.")


def _holding_others(to_hold: Mapping[Slot, Iterable[Encoding]]) -> set[str]:
    """The roles of slots that hold other scales or bytes than they are to hold."""
    wrong = {
        slot.role
        for slot, encodings in to_hold.items()
        if not all(_present(slot).equals(encoding.scales) for encoding in encodings)
    }

    def compare(slot: Slot, first: int, last: int) -> None:
        if slot.role in wrong:
            return
        digest = xxh3_128_hexdigest(slot.stored_bytes(first, last))
        if any(encoding.digest(first, last) != digest for encoding in to_hold[slot]):
            wrong.add(slot.role)

    over_rows([*to_hold], compare)
    return wrong


def _constants(slot: Slot) -> set[tuple[int, tuple[int, int] | None, tuple[int, int] | None]]:
    """The constants that play its role, by section, subgraph and index, and columns."""
    return {(place.model.region.begin, place.found.key, place.columns) for place in slot.places}


def _present(slot: Slot) -> Scales:
    """The scales and zero points that the file has."""
    return Scales(slot.stored.source.scale.reshape(-1), slot.stored.source.zero_point.reshape(-1))


def _leaders(slots: Sequence[Slot]) -> dict[Slot, Slot]:
    """For each slot the one whose scales may stay: the first of its role, so that all signatures get the same."""
    first: dict[object, Slot] = {}
    leaders = {}
    for slot in slots:
        if slot.constant is not None:
            key = slot.role, slot.places[0].columns, slot.storage, slot.stored.factor
            leaders[slot] = first.setdefault(key, slot)
    return leaders


def _has_rounded_scales(slot: Slot) -> bool:
    """Whether the new weight has the codes that the bundle holds, with the folded factor divided out and scales in F32
    or FP16, as formats keep them."""
    # Without codes by rows: no format keeps such integers.
    with suppress(CheckpointError, UnsupportedError):
        return slot.new.scheme is not None and any(
            same_weight(rounded_again(slot.held, (f"{kind}{SCALES}",)), slot.new) for kind in ("F32", "FP16")
        )
    return False


def _scales_of_codes(slot: Slot) -> Scales | None:
    """Scales and zero points for the codes of the new weight as they are; None where it has no codes, the file cannot
    store them, or they would say something else than the checkpoint's floats."""
    storage = slot.storage
    if slot.new.scheme is None or storage.packing is None or slot.stored.folded:
        return None
    scales = _as_stored(slot.new.steps.by_row(), storage, slot.stored.factor)
    if scales is None:
        return None
    lowest, highest = (0, 0) if storage.symmetric else (storage.packing.lowest, storage.packing.highest)
    if scales.zero_point.min() < lowest or scales.zero_point.max() > highest:
        return None
    if storage.kind == "blockwise" and not np.array_equal(scales.scale.astype(np.float16), scales.scale):
        return None
    return scales if all(_are_codes(slot, scales, *rows) for rows in slot.ranges()) else None


def _as_stored(steps: Steps, storage: Storage, factor: float) -> Scales | None:
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
    return Scales(scale, zeros.reshape(-1))


def _are_codes(slot: Slot, scales: Scales, first: int, last: int) -> bool:
    """Whether codes of the new weight, rows ``[first, last)``, fit the file, and with ``scales`` say its floats."""
    packing = slot.storage.packing
    codes = slot.new.codes(first, last).reshape(-1)
    if packing is None or codes.min() < packing.lowest or codes.max() > packing.highest:
        return False
    floats = codes.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        slot.storage.scale_codes(floats, *scales, first * slot.new.columns)
        return are_alike(unfold_factor(floats, slot.stored.factor), slot.new.floats(first, last), slot.dtype)


class _Measured(NamedTuple):
    """What rows of a slot become."""

    is_stored: bool  # whether the file stores them already
    scales: Scales
    sums: Sums


def _measure_floats(slot: Slot, values: Floats, first: int, last: int) -> _Measured:
    """Of a constant in floats that is to hold ``values`` in rows ``[first, last)``."""
    type_ = slot.storage.type
    before = slot.stored_bytes(first, last)
    after = float_bytes(values, type_, slot.role)

    lost, changed = (squares(widened(stored, type_) - values) for stored in (after, before))
    return _Measured(after == before, _present(slot), Sums(lost, changed, squares(values)))


def _measure_codes(slot: Slot, leader: Slot, values: Floats, first: int, last: int, differs: bool) -> _Measured:
    """Of a constant in codes that is to hold ``values`` in rows ``[first, last)``, with the scales of ``leader`` or the
    rule's. Where it is known that it ``differs`` in other rows, these are not held against its codes."""
    storage = slot.storage
    elements = slot.part(storage.elements, first, last)
    codes = slot.stored.source.codes(elements.start, elements.stop)
    present, may_stay = (_present(each).part(slot.part(storage.groups, first, last)) for each in (slot, leader))

    steps = _in_steps(storage, values, present)
    lost = _squares_by_group(present, _rounding_of(storage, steps))
    steps -= storage.by_scale(codes.astype(np.float32))
    changed = float(_squares_by_group(present, steps).sum())
    if leader is not slot:
        lost = _lost_by(storage, values, may_stay)
    chosen, lost = _least_lossy(storage, values, may_stay, lost)

    is_stored = not differs and chosen.is_close(present) and np.array_equal(storage.coded(values, *chosen), codes)
    return _Measured(is_stored, chosen, Sums(float(lost.sum()), changed, squares(values)))


def _least_lossy(storage: Storage, values: Floats, present: Scales, lost: _Doubles) -> tuple[Scales, _Doubles]:
    """Scales of ``values``, of each group the ``present`` ones, which lose ``lost``, or the rule's where these lose
    less; and what they lose, as sums of squares."""
    rule = Scales(*storage.scales_for(values))
    # It reaches the largest number of each group: without zero points no number lies beyond the last code.
    lost_by_rule = _lost_by(storage, values, rule, within=storage.symmetric)

    # The rule's own scale, a rounding apart: its codes are those that the rule makes of the same numbers.
    is_rule = np.isclose(rule.scale, present.scale, rtol=_SCALES_ALIKE, atol=0)
    is_rule &= rule.zero_point == present.zero_point
    noise = values.size / lost.size * np.square(_NOISE * present.step.astype(np.float64))
    stays = (lost <= _AS_GOOD * lost_by_rule + noise) & ~is_rule

    scale = np.where(stays, present.scale, rule.scale)
    zero_point = np.where(stays, present.zero_point, rule.zero_point)
    return Scales(scale, zero_point), np.where(stays, lost, lost_by_rule)


def least_lost(slot: Slot, weight: Floats, lost: _Doubles, first: int, last: int) -> _Doubles:
    """Of each group the sum of the squares of what rows ``[first, last)`` would lose of ``weight``, which are ``lost``
    in what is stored: less, if the rule's scales are better than the file's."""
    storage, factor = slot.storage, slot.stored.factor
    present = _present(slot).part(slot.part(storage.groups, first, last))
    stored = weight if factor == 1.0 else weight * np.float32(factor)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        _, least = _least_lossy(storage, stored, present, factor**2 * lost)
    return least / factor**2


def _lost_by(storage: Storage, values: Floats, scales: Scales, within: bool = False) -> _Doubles:
    """Of each group the sum of the squares of what the nearest codes by ``scales`` lose."""
    return _squares_by_group(scales, _rounding_of(storage, _in_steps(storage, values, scales), within))


def _in_steps(storage: Storage, values: Floats, scales: Scales) -> Floats:
    """``values``, ``[repeats, groups, columns]``, in steps of their scales: of a number on the grid its code."""
    by_group: Floats = storage.by_scale(values)
    steps = by_group / scales.step[:, None]
    if not storage.symmetric:
        steps += scales.zero_point[:, None].astype(np.float32)
    return steps


def _rounding_of(storage: Storage, steps: Floats, within: bool = False) -> Floats:
    """How far the nearest codes are from ``steps``, which may be known to lie ``within`` the ends of the codes."""
    apart = np.rint(steps)
    if not within:
        np.clip(apart, *storage.bounds, out=apart)
    apart -= steps
    return apart


def _squares_by_group(scales: Scales, steps: Floats) -> _Doubles:
    """Of each group the sum of the squares of distances in ``steps``, as those of numbers."""
    return sum_squares(steps) * np.square(scales.step.astype(np.float64))


def sum_squares(by_scale: Floats) -> _Doubles:
    """Of each group of ``by_scale``, ``[repeats, groups, columns]``, the sum of the squares of its numbers."""
    sums = np.einsum("rgc,rgc->g", by_scale, by_scale)
    if not np.isfinite(sums).all():
        sums = np.einsum("rgc,rgc->g", by_scale, by_scale, dtype=np.float64)
    return np.asarray(sums, np.float64)
