"""What becomes of each slot of a bundle: kept, the checkpoint's codes, its floats, or requantized; and its error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.rounding import SCALES, rounded_again
from mtp_extract.checkpoint.weight import divided, same_weight
from mtp_extract.errors import CheckpointError, OutputError, UnsupportedError, few
from mtp_extract.insertion.slots import Slot, are_alike, over_rows, relative_error, squares
from mtp_extract.io.source import Advance
from mtp_extract.litertlm.storage import FLOAT_TYPES, LARGEST_SCALE, Floats, Storage, float_bytes, widened

KEPT, CODES, FLOATS, REQUANTIZED = "kept", "codes", "floats", "requantized"

# Dividing by a folded factor, and multiplying again, changes a scale by less.
_SCALES_ALIKE = 1e-6


class Scales(NamedTuple):
    """Of codes, both ``[groups]``; empty for floats."""

    scale: Floats
    zero_point: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Encoding:
    """What becomes of one slot."""

    slot: Slot
    how: str  # KEPT (the file holds it), CODES (the checkpoint's integers are taken as they are), FLOATS, REQUANTIZED
    error: float  # root mean square of what the file will hold less the checkpoint's weight, as a share of the weight's
    scales: Scales

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


def encode(slots: Sequence[Slot], advance: Advance = lambda _: None) -> dict[str, tuple[Encoding, ...]]:
    """What becomes of each of ``slots``, by role; ``advance`` is told how many elements were read.

    Raises:
        UnsupportedError: values that the type cannot hold, or a weight that was folded away and is no longer 1.
        CheckpointError: values that are not finite, or too large for any scale.
    """
    changed, differ, left, found = set[Slot](), set[Slot](), list[Slot](), dict[Slot, Encoding]()

    def compare(slot: Slot, first: int, last: int) -> None:
        # After rows that differ no others are read.
        with np.errstate(over="ignore", invalid="ignore"):
            if slot not in changed and not are_alike(
                slot.held.floats(first, last), slot.new.floats(first, last), slot.dtype
            ):
                changed.add(slot)

    def measure(slot: Slot, first: int, last: int) -> _Measured:
        measured = _measure(slot, first, last, slot in differ)
        if not measured[0]:
            differ.add(slot)
        advance((last - first) * slot.new.columns)
        return measured

    over_rows(slots, compare)
    for slot in slots:
        if slot not in changed or _has_rounded_scales(slot):
            if slot.constant is not None:
                found[slot] = _kept(slot, 0.0)
        elif slot.constant is None:
            raise UnsupportedError(
                f"{slot.role}: the graph multiplies by nothing here, because the weight was 1 when it was exported and "
                "was folded away; the checkpoint has another. Keep it at 1, or take a bundle whose graph has it."
            )
        elif (scales := _scales_of_codes(slot)) is not None:
            found[slot] = Encoding(slot, CODES, 0.0, scales)
        else:
            left.append(slot)
    advance(sum(math.prod(slot.new.shape) for slot in slots if slot not in left))
    for slot, rows in over_rows(left, measure).items():
        _, scales_of_rows, zeros_of_rows, difference, size = zip(*rows, strict=True)
        error, storage = relative_error(difference, size), slot.stored.source.storage
        scale = np.concatenate(scales_of_rows)
        # Tables of a base have a row a token each: zero points that are all 0 are not kept.
        zeros = np.broadcast_to(np.int64(0), scale.shape)
        new = Scales(scale, zeros if storage.symmetric else np.concatenate(zeros_of_rows))
        if slot not in differ:
            found[slot] = _kept(slot, error)
        elif storage.type in FLOAT_TYPES:
            found[slot] = Encoding(slot, FLOATS, error, new)
        elif scale.max() > LARGEST_SCALE:
            raise CheckpointError(f"{slot.role}: holds values too large for integers and scales. Train it again.")
        else:
            found[slot] = Encoding(slot, REQUANTIZED, error, new)
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


def _scales_of_codes(slot: Slot) -> Scales | None:
    """Scales and zero points for the codes of the new weight as they are; None where it has no codes, the file cannot
    store them, or they would say something else than the checkpoint's floats.
    """
    storage, packing, factor = slot.stored.source.storage, slot.stored.source.packing, slot.stored.factor
    if slot.stored.folded or slot.new.scheme is None or packing is None:
        return None
    steps = slot.new.steps.by_row()
    sizes, zeros = steps.size, steps.zero_point
    if storage.by_rows and steps.block % storage.columns == 0:
        each = steps.block // storage.columns
        sizes, zeros = np.repeat(sizes, each, axis=1), np.repeat(zeros, each, axis=1)
    elif storage.groups == 1 and not np.ptp(sizes) and not np.ptp(zeros):
        sizes, zeros = sizes[:1, :1], zeros[:1, :1]
    else:
        return None
    # The same factor is folded in already, where the codes are this file's; another is not.
    again = 1.0 if steps.factor == factor else factor / steps.factor
    scale = sizes.reshape(-1) if again == 1.0 else (sizes.reshape(-1).astype(np.float64) * again).astype(np.float32)
    fits = packing.lowest <= zeros.min() and zeros.max() <= packing.highest and not (storage.symmetric and zeros.any())
    if not fits or (storage.kind == "blockwise" and not np.array_equal(scale.astype(np.float16), scale)):
        return None

    def are_codes(first: int, last: int) -> bool:
        codes = slot.new.codes(first, last).reshape(-1)
        if codes.min() < packing.lowest or codes.max() > packing.highest:
            return False
        held = codes.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            storage.scale_codes(held, scale, zeros.reshape(-1), first * slot.new.columns)
            return are_alike(divided(held, factor), slot.new.floats(first, last), slot.dtype)

    return Scales(scale, zeros.reshape(-1)) if all(are_codes(*rows) for rows in slot.ranges()) else None


_Measured = tuple[bool, Floats, npt.NDArray[np.int64], float, float]
"""Whether the file stores some rows already; their scales and zero points; sums of squares of what storing them
changes, and of the rows."""


def _measure(slot: Slot, first: int, last: int, differs: bool) -> _Measured:
    """``differs``: it is known that other rows are not alike, so that these need not be looked at."""
    source, values = slot.stored.source, slot.numbers(first, last)
    storage, scale, zero_point = source.storage, source.scale, source.zero_point
    with np.errstate(over="ignore", invalid="ignore"):
        if storage.type in FLOAT_TYPES:
            data, part = float_bytes(values, storage.type, slot.role), slot.part(storage.length, first, last)
            alike = not differs and data == source.location.read(part.start, part.stop - part.start)
            made = widened(data, storage.type)
            return alike, scale, zero_point, squares(made - values), squares(values)
        groups, part = slot.part(storage.groups, first, last), slot.part(storage.elements, first, last)
        scale, zero_point, made = storage.quantized(values)
        alike = not differs and (
            np.allclose(scale, source.scale.reshape(-1)[groups], rtol=_SCALES_ALIKE, atol=0)
            and np.array_equal(zero_point, source.zero_point.reshape(-1)[groups])
            and np.array_equal(made, source.codes(part.start, part.stop))
        )
        storage.scale_codes(made, scale, zero_point)
        return alike, scale, zero_point, squares(made - values), squares(values)
