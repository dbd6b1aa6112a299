"""What becomes of each slot of a bundle: kept, the checkpoint's codes, its floats, or requantized; and its error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from mtp_extract.checkpoint.weight import divided
from mtp_extract.errors import CheckpointError, OutputError, few
from mtp_extract.insertion.slots import Slot, are_alike, over_rows, passing, unchanged
from mtp_extract.io.source import Advance
from mtp_extract.litertlm.storage import (
    CHUNK_ELEMENTS,
    FLOAT_TYPES,
    LARGEST_SCALE,
    Floats,
    Storage,
    float_bytes,
    widened,
)

KEPT, CODES, FLOATS, REQUANTIZED = "kept", "codes", "floats", "requantized"

# Summing numbers that were divided by a factor changes an error by this much, and so do scales that are alike.
_ERRORS_ALIKE = 1e-6
# Dividing by a folded factor, and multiplying again, changes a scale by less.
_SCALES_ALIKE = 1e-6

Integers64 = npt.NDArray[np.int64]
Scales = tuple[Floats, Integers64]
"""Scales, float32, and zero points, int64, each ``[groups]``; both empty for floats."""
_NO_SCALES: Scales = np.empty(0, np.float32), np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Encoding:
    """What becomes of one slot."""

    slot: Slot = field(repr=False)
    how: str
    """:data:`KEPT` (the checkpoint holds what the file holds), :data:`CODES` (its integers are taken as they are),
    :data:`FLOATS` or :data:`REQUANTIZED`."""
    storage: Storage
    error: float
    """Root mean square of what the file will hold less the checkpoint's weight, as a share of that of the weight."""
    scales: Scales = field(repr=False)

    @property
    def role(self) -> str:
        """The role that it is of."""
        return self.slot.role

    def data(self, first: int, last: int) -> bytes:
        """The bytes of rows ``[first, last)``; of what is kept too, in case it has to move.

        Raises:
            UnsupportedError: a number leaves the type.
        """
        slot, storage = self.slot, self.storage
        if self.how == KEPT:
            part = slot.part(storage.length, first, last)
            return slot.constant.source.location.read(part.start, part.stop - part.start)
        if self.how == CODES:
            return storage.stored(slot.ordered(slot.new.codes(first, last)))
        values = slot.numbers(first, last)
        if self.how == FLOATS:
            return float_bytes(values, storage.type, slot.role)
        return storage.stored(storage.quantized(values)[2])

    @cached_property
    def digest(self) -> str:
        """XXH3-128 of all that it writes: equal for encodings that write the same."""
        made = xxh3_128(f"{self.storage.type} {self.storage.shape}".encode())
        for array in self.scales:
            made.update(array.tobytes())
        for rows in self.slot.ranges(CHUNK_ELEMENTS):
            made.update(self.data(*rows))
        return made.hexdigest()


def encode(slots: Sequence[Slot], advance: Advance = lambda _: None) -> list[Encoding]:
    """What becomes of each of ``slots``, which have constants; ``advance`` is told how many elements were read.

    Raises:
        UnsupportedError: values that the type cannot hold.
        CheckpointError: values that are not finite.
    """
    found: dict[Slot, Encoding] = {}
    for slot in unchanged(slots):
        found[slot] = _kept(slot, 0.0)
        advance(math.prod(slot.new.shape))
    scales = {slot: own for slot in slots if slot not in found and (own := _scales_of_codes(slot)) is not None}

    def has_codes(slot: Slot, first: int, last: int) -> bool:
        return _are_codes(slot, scales[slot], first, last)

    for slot in passing(scales, has_codes):
        found[slot] = Encoding(slot, CODES, slot.target[0], 0.0, scales[slot])
        advance(math.prod(slot.new.shape))
    left = [slot for slot in slots if slot not in found]
    alike = set(passing(left, _encodes_alike))

    def measure(slot: Slot, first: int, last: int) -> _Measured:
        advance((last - first) * slot.new.columns)
        return _measure(slot, first, last)

    for slot, parts in zip(left, over_rows(left, measure), strict=True):
        encoding = _encoded(slot, parts)
        found[slot] = _kept(slot, encoding.error) if slot in alike else encoding
    return [found[slot] for slot in slots]


def _kept(slot: Slot, error: float) -> Encoding:
    source = slot.constant.source
    return Encoding(slot, KEPT, source.storage, error, (source.scale.reshape(-1), source.zero_point.reshape(-1)))


def _scales_of_codes(slot: Slot) -> Scales | None:
    """Scales and zero points for the codes of the new weight; None where it has none that can be stored."""
    steps = slot.new.steps
    if slot.constant.source.packing is None or steps is None:
        return None
    target, factor = slot.target[0], slot.constant.factor
    size = _by_group(steps.size, steps.block, target, slot.constant.transposed)
    zero_point = _by_group(steps.zero_point, steps.block, target, slot.constant.transposed)
    if size is None or zero_point is None or (target.symmetric and zero_point.any()):
        return None
    assert target.packing is not None
    if zero_point.min() < target.packing.lowest or zero_point.max() > target.packing.highest:
        return None
    # The same factor is folded in already, where the codes are this file's; another is not.
    again = 1.0 if steps.factor == factor else factor / steps.factor
    scale = size if again == 1.0 else (size.astype(np.float64) * again).astype(np.float32)
    if target.kind == "blockwise" and not np.array_equal(scale.astype(np.float16).astype(np.float32), scale):
        return None
    return scale, zero_point


def _by_group(by_place: npt.NDArray[Any], block: int, target: Storage, transposed: bool) -> npt.NDArray[Any] | None:
    """``by_place``, one value for each block of a row, ``[rows, columns / block]``, as one value for each group of
    ``target``; None where a group has several.
    """
    if target.kind == "blockwise":
        if transposed or block % target.block_size:
            return None
        return np.repeat(by_place, block // target.block_size, axis=1).reshape(-1)
    axes = [axis for axis, size in enumerate(target.shape) if size != 1]
    along_rows = target.kind == "per_channel" and axes[:1] == [target.axis]
    over: tuple[int, ...] = (0, 1)
    if target.kind == "per_channel":
        # Rows of the weight are columns of what is stored turned.
        over = (1,) if along_rows != transposed else (0,)
    if np.ptp(by_place, axis=over).any():
        return None
    least: npt.NDArray[Any] = by_place.min(axis=over).reshape(-1)
    return np.repeat(least, block) if over == (0,) and block > 1 else least


def _are_codes(slot: Slot, scales: Scales, first: int, last: int) -> bool:
    """Whether the codes of rows fit the type and say, with ``scales``, what the checkpoint's floats say."""
    storage, codes = slot.target[0], slot.ordered(slot.new.codes(first, last))
    assert storage.packing is not None
    if codes.min() < storage.packing.lowest or codes.max() > storage.packing.highest:
        return False
    held = codes.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        storage.scale_codes(held, *scales, first * slot.new.columns)
        floats = slot.ordered(slot.new.floats(first, last))
        return are_alike(divided(held, slot.constant.factor), floats, slot.dtype)


def _encodes_alike(slot: Slot, first: int, last: int) -> bool:
    """Whether rows, rounded or quantized as the bundle stores them, are what it stores."""
    storage, source = slot.target[0], slot.constant.source
    if storage != source.storage:
        return False
    values = slot.numbers(first, last)
    if storage.type in FLOAT_TYPES:
        part = slot.part(storage.length, first, last)
        return float_bytes(values, storage.type, slot.role) == source.location.read(part.start, part.stop - part.start)
    with np.errstate(over="ignore", invalid="ignore"):
        scale, zero_point, codes = storage.quantized(values)
    groups, part = slot.part(storage.groups, first, last), slot.part(storage.elements, first, last)
    return (
        np.allclose(scale, source.scale.reshape(-1)[groups], rtol=_SCALES_ALIKE, atol=0)
        and np.array_equal(zero_point, source.zero_point.reshape(-1)[groups])
        and np.array_equal(codes, source.codes(part.start, part.stop))
    )


_Measured = tuple[Floats, Integers64, float, float]
"""Scales and zero points of some rows, and the sums of squares of their error and of the weights."""


def _measure(slot: Slot, first: int, last: int) -> _Measured:
    storage, values = slot.target[0], slot.numbers(first, last)
    if storage.type in FLOAT_TYPES:
        # Of floats that are not rounded the error is 0; they are read all the same, since not all can be stored.
        stored = divided(widened(float_bytes(values, storage.type, slot.role), storage.type), slot.constant.factor)
        return (*_NO_SCALES, *_squares(stored, slot.ordered(slot.target[1].floats(first, last))))
    with np.errstate(over="ignore", invalid="ignore"):
        scale, zero_point, codes = storage.quantized(values)
        storage.scale_codes(codes, scale, zero_point)
        return scale, zero_point, *_squares(codes, values)


def _squares(found: Floats, expected: Floats) -> tuple[float, float]:
    # Squares of floats overflow and vanish in F32.
    exact = expected.astype(np.float64).reshape(-1)
    error = found.reshape(-1) - exact
    return float(np.dot(error, error)), float(np.dot(exact, exact))


def _share(squares: Iterable[tuple[float, float]]) -> float:
    """Root mean square of a difference, as a share of that of what was wanted."""
    difference, size = (sum(column) for column in zip(*squares, strict=True))
    if not size:
        return math.inf if difference else 0.0
    return math.sqrt(difference / size)


def _encoded(slot: Slot, parts: Sequence[_Measured]) -> Encoding:
    """As floats, or requantized.

    Raises:
        CheckpointError: numbers too large for any scale.
    """
    storage, error = slot.target[0], _share(part[2:] for part in parts)
    if storage.type in FLOAT_TYPES:
        return Encoding(slot, FLOATS, storage, error, _NO_SCALES)
    scale = np.concatenate([part[0] for part in parts])
    if scale.size and scale.max() > LARGEST_SCALE:
        raise CheckpointError(f"{slot.role}: holds values too large for integers and scales. Train it again.")
    # Tables of a base have a row a token each: zero points that are all 0 are not kept.
    zeros = np.broadcast_to(np.int64(0), scale.shape)
    zero_point = zeros if storage.symmetric else np.concatenate([part[1] for part in parts])
    return Encoding(slot, REQUANTIZED, storage, error, (scale, zero_point))


def check_written(path: Path, planned: Iterable[Encoding], slots: Iterable[Slot]) -> None:
    """Check that ``slots``, read from the new file at ``path``, hold what was ``planned``: what is exact to the bit,
    anything else with the error that was planned.

    Raises:
        OutputError: one does not.
    """
    expected = {(e.role, place.signature, place.columns): e for e in planned for place in e.slot.places}
    found = {slot: [expected[slot.role, place.signature, place.columns] for place in slot.places] for slot in slots}
    exact = [slot for slot, own in found.items() if all(e.how != REQUANTIZED and not e.error for e in own)]
    wrong = {slot.role for slot in set(exact) - set(unchanged(exact))}
    rounded = [slot for slot in found if slot not in set(exact)]

    def squares(slot: Slot, first: int, last: int) -> tuple[float, float]:
        return _squares(slot.held.floats(first, last), slot.new.floats(first, last))

    for slot, parts in zip(rounded, over_rows(rounded, squares), strict=True):
        # Those that are kept have scales that are alike. What is no number is not alike.
        if any(not abs(_share(parts) - e.error) <= (1 + (e.how == KEPT)) * _ERRORS_ALIKE for e in found[slot]):
            wrong.add(slot.role)
    if wrong:
        raise OutputError(f"{path}: {few(sorted(wrong))} reads back differently. Nothing was kept.")
