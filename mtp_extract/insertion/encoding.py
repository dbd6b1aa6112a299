"""What becomes of each slot of a bundle: kept, the checkpoint's codes, its floats, or requantized; and its error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.rounding import SCALES, rounded_again
from mtp_extract.checkpoint.weight import divided, same_weight
from mtp_extract.errors import CheckpointError, OutputError, UnsupportedError, few
from mtp_extract.insertion.slots import Slot, are_alike, changing, over_rows
from mtp_extract.io.source import Advance
from mtp_extract.litertlm.storage import FLOAT_TYPES, LARGEST_SCALE, Floats, Storage, float_bytes, widened

KEPT, CODES, FLOATS, REQUANTIZED = "kept", "codes", "floats", "requantized"

# Dividing by a folded factor, and multiplying again, changes a scale by less.
_SCALES_ALIKE = 1e-6


class Scales(NamedTuple):
    """Of codes, both ``[groups]``; empty for floats."""

    scale: Floats
    zero_point: npt.NDArray[np.int64]


_NO_SCALES = Scales(np.empty(0, np.float32), np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class Encoding:
    """What becomes of one slot.

    Attributes:
        how: :data:`KEPT` (the checkpoint holds what the file holds), :data:`CODES` (its integers are taken as they
            are), :data:`FLOATS` or :data:`REQUANTIZED`.
        error: root mean square of what the file will hold less the checkpoint's weight, as a share of the weight's.
    """

    slot: Slot
    how: str
    error: float
    scales: Scales

    @property
    def role(self) -> str:
        """The role that it is of."""
        return self.slot.role

    @property
    def storage(self) -> Storage:
        """How it lies in the file, before and after."""
        return self.slot.stored.source.storage

    def data(self, first: int, last: int) -> bytes:
        """The bytes of rows ``[first, last)``.

        Raises:
            UnsupportedError: a number leaves the type.
        """
        slot, storage = self.slot, self.storage
        if self.how == KEPT:
            part = slot.part(storage.length, first, last)
            return slot.stored.source.location.read(part.start, part.stop - part.start)
        if self.how == CODES:
            return storage.stored(slot.new.codes(first, last).reshape(-1))
        values = slot.numbers(first, last)
        if self.how == FLOATS:
            return float_bytes(values, storage.type, slot.role)
        return storage.stored(storage.quantized(values)[2])

    def writes_as(self, other: Encoding) -> bool:
        """Whether the rows of both come to the same bytes."""
        if self is other:
            return True
        same = self.storage == other.storage
        return same and all(self.data(*rows) == other.data(*rows) for rows in self.slot.ranges())


def encode(slots: Sequence[Slot], advance: Advance = lambda _: None) -> dict[str, tuple[Encoding, ...]]:
    """What becomes of each of ``slots``, by role; ``advance`` is told how many elements were read.

    Raises:
        UnsupportedError: values that the type cannot hold, or a weight that was folded away and is no longer 1.
        CheckpointError: values that are not finite.
    """
    apart = changing(slots)
    changed = [slot for slot in slots if slot in apart and not _has_rounded_scales(slot)]
    if folded := next((slot for slot in changed if slot.constant is None), None):
        raise UnsupportedError(
            f"{folded.role}: the graph multiplies by nothing here, because the weight was 1 when it was exported and "
            "was folded away; the checkpoint has another. Keep it at 1, or take a bundle whose graph has it."
        )
    found = {slot: _kept(slot, 0.0) for slot in slots if slot.constant is not None and slot not in changed}
    found |= {slot: coded for slot in changed if (coded := _coded(slot)) is not None}
    left = [slot for slot in changed if slot not in found]
    advance(sum(math.prod(slot.new.shape) for slot in slots if slot not in left))
    differ = set[Slot]()

    def measure(slot: Slot, first: int, last: int) -> _Measured:
        measured = _measure(slot, first, last, slot in differ)
        if not measured.alike:
            differ.add(slot)
        advance((last - first) * slot.new.columns)
        return measured

    for slot, parts in over_rows(left, measure).items():
        encoding = _encoded(slot, parts)
        found[slot] = encoding if slot in differ else _kept(slot, encoding.error)
    return {slot.role: tuple(found[own] for own in slots if own.role == slot.role and own in found) for slot in slots}


def check_written(path: Path, slots: Sequence[Slot]) -> None:
    """Check that ``slots``, read from the new file at ``path``, hold what they were to hold: nothing is left to do.

    Raises:
        OutputError: one does not.
    """
    wrong = [role for role, own in encode(slots).items() if any(encoding.how != KEPT for encoding in own)]
    if wrong:
        raise OutputError(f"{path}: {few(wrong)} reads back differently. Nothing was kept.")


def _kept(slot: Slot, error: float) -> Encoding:
    source = slot.stored.source
    return Encoding(slot, KEPT, error, Scales(source.scale.reshape(-1), source.zero_point.reshape(-1)))


def _has_rounded_scales(slot: Slot) -> bool:
    """Whether the new weight has the codes that the bundle holds, with the folded factor divided out and scales in F32
    or FP16, as formats keep them.
    """
    # Without codes by rows: no format keeps such integers.
    with suppress(CheckpointError, UnsupportedError):
        return slot.new.scheme is not None and any(
            same_weight(rounded_again(slot.held, (f"{kind}{SCALES}",)), slot.new) for kind in ("F32", "FP16")
        )
    return False


def _coded(slot: Slot) -> Encoding | None:
    """The codes of the new weight as they are; None where the file cannot store them, or the floats say otherwise."""
    scales = _scales_of_codes(slot)
    if scales is None or not all(_are_codes(slot, scales, *rows) for rows in slot.ranges()):
        return None
    return Encoding(slot, CODES, 0.0, scales)


def _scales_of_codes(slot: Slot) -> Scales | None:
    """Scales and zero points for the codes of the new weight; None where it has none that the file can store."""
    if slot.constant is None or slot.constant.folded or slot.new.scheme is None:
        return None
    storage, factor, steps = slot.constant.source.storage, slot.constant.factor, slot.new.steps.by_row()
    if storage.packing is None:
        return None
    sizes, zeros = steps.size, steps.zero_point
    if storage.by_rows and steps.block % storage.columns == 0:
        each = steps.block // storage.columns
        sizes, zeros = np.repeat(sizes, each, axis=1), np.repeat(zeros, each, axis=1)
    elif storage.groups == 1 and not np.ptp(sizes) and not np.ptp(zeros):
        sizes, zeros = sizes[:1, :1], zeros[:1, :1]
    else:
        return None
    out_of_range = zeros.min() < storage.packing.lowest or zeros.max() > storage.packing.highest
    if out_of_range or (storage.symmetric and zeros.any()):
        return None
    # The same factor is folded in already, where the codes are this file's; another is not.
    again = 1.0 if steps.factor == factor else factor / steps.factor
    scale = sizes.reshape(-1) if again == 1.0 else (sizes.reshape(-1).astype(np.float64) * again).astype(np.float32)
    if storage.kind == "blockwise" and not np.array_equal(scale.astype(np.float16).astype(np.float32), scale):
        return None
    return Scales(scale, zeros.reshape(-1))


def _are_codes(slot: Slot, scales: Scales, first: int, last: int) -> bool:
    """Whether the codes of rows fit the type and say, with ``scales``, what the checkpoint's floats say."""
    storage, codes = slot.stored.source.storage, slot.new.codes(first, last).reshape(-1)
    assert storage.packing is not None
    if codes.min() < storage.packing.lowest or codes.max() > storage.packing.highest:
        return False
    held = codes.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        storage.scale_codes(held, *scales, first * slot.new.columns)
        return are_alike(divided(held, slot.stored.factor), slot.new.floats(first, last), slot.dtype)


class _Measured(NamedTuple):
    """Of some rows that are to be stored."""

    alike: bool  # whether the file stores them already
    scales: Scales
    error: float
    size: float  # sums of squares of what storing them changes, and of the weights


def _measure(slot: Slot, first: int, last: int, differs: bool) -> _Measured:
    """``differs``: it is known that other rows are not alike, so that these need not be looked at."""
    source, values = slot.stored.source, slot.numbers(first, last)
    storage = source.storage
    if storage.type in FLOAT_TYPES:
        data, part = float_bytes(values, storage.type, slot.role), slot.part(storage.length, first, last)
        alike = not differs and data == source.location.read(part.start, part.stop - part.start)
        made = divided(widened(data, storage.type), slot.stored.factor)
        return _Measured(alike, _NO_SCALES, *_squares(made, slot.new.floats(first, last)))
    groups, part = slot.part(storage.groups, first, last), slot.part(storage.elements, first, last)
    # Zero points that all came to be 0 look like those that stay 0.
    for rule in (storage,) if differs or not storage.symmetric else (replace(storage, symmetric=False), storage):
        with np.errstate(over="ignore", invalid="ignore"):
            scale, zero_point, codes = rule.quantized(values)
            alike = not differs and (
                np.allclose(scale, source.scale.reshape(-1)[groups], rtol=_SCALES_ALIKE, atol=0)
                and np.array_equal(zero_point, source.zero_point.reshape(-1)[groups])
                and np.array_equal(codes, source.codes(part.start, part.stop))
            )
            if alike:
                break
    with np.errstate(over="ignore", invalid="ignore"):
        rule.scale_codes(codes, scale, zero_point)
    return _Measured(alike, Scales(scale, zero_point), *_squares(codes, values))


def _squares(found: Floats, expected: Floats) -> tuple[float, float]:
    # Squares of floats overflow and vanish in F32.
    exact: npt.NDArray[Any] = expected.astype(np.float64).reshape(-1)
    error = found.reshape(-1) - exact
    return float(np.dot(error, error)), float(np.dot(exact, exact))


def _encoded(slot: Slot, parts: Sequence[_Measured]) -> Encoding:
    """As floats, or requantized.

    Raises:
        CheckpointError: numbers too large for any scale.
    """
    error, storage = relative_error((part.error, part.size) for part in parts), slot.stored.source.storage
    if storage.type in FLOAT_TYPES:
        return Encoding(slot, FLOATS, error, _NO_SCALES)
    scale = np.concatenate([part.scales.scale for part in parts])
    if scale.size and scale.max() > LARGEST_SCALE:
        raise CheckpointError(f"{slot.role}: holds values too large for integers and scales. Train it again.")
    # Tables of a base have a row a token each: zero points that are all 0 are not kept.
    zeros = np.broadcast_to(np.int64(0), scale.shape)
    zero_point = zeros if storage.symmetric else np.concatenate([part.scales.zero_point for part in parts])
    return Encoding(slot, REQUANTIZED, error, Scales(scale, zero_point))


def relative_error(squares: Iterable[tuple[float, float]]) -> float:
    """Root mean square of a difference as a share of that of the weight, from sums of squares of both."""
    difference, size = (sum(column) for column in zip(*squares, strict=True))
    return math.sqrt(difference / size) if size else math.inf if difference else 0.0
