"""What becomes of one role: kept, its codes, its floats, or requantized, and the error that it suffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from mtp_extract.checkpoint.constant import Constant
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.rounding import SCALES, rounded_again
from mtp_extract.checkpoint.stored import stored_of
from mtp_extract.checkpoint.weight import Weight, divided, filled, row_ranges
from mtp_extract.errors import CheckpointError, OutputError, UnsupportedError
from mtp_extract.io.threads import Turns, cores, in_turn
from mtp_extract.litertlm.storage import (
    FLOAT_TYPES,
    LARGEST_SCALE,
    Floats,
    QuantizedTensor,
    Storage,
    float_bytes,
    widened,
)

KEPT, CODES, FLOATS, REQUANTIZED = "kept", "codes", "floats", "requantized"
_CHUNK = 1 << 16

# Summing in chunks of another size changes an error by this much, and so do scales that are alike.
_ERRORS_ALIKE = 1e-6
# Dividing by a folded factor, and multiplying again, changes a scale by less.
_SCALES_ALIKE = 1e-6

Integers64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Content:
    """What a constant holds: bytes in stored order, and the scales and zero points that they are read with."""

    scale: Floats
    """``[groups]``; empty for floats."""
    zero_point: Integers64
    """``[groups]``; empty for floats."""
    produce: Callable[[], Iterator[bytes]]

    @classmethod
    def of(cls, source: QuantizedTensor) -> Content:
        """What ``source`` holds."""

        def produce() -> Iterator[bytes]:
            for at in range(0, source.location.size, _CHUNK):
                yield source.location.read(at, min(_CHUNK, source.location.size - at))

        return cls(source.scale.reshape(-1), source.zero_point.reshape(-1), produce)

    def like(self, other: Content) -> Turns[bool]:
        """Whether both hold the same codes, with scales that differ by rounding at most."""
        same_scale = np.allclose(self.scale, other.scale, rtol=_SCALES_ALIKE, atol=0)
        if not (same_scale and np.array_equal(self.zero_point, other.zero_point)):
            return False
        made = xxh3_128()
        for chunk in self.produce():
            made.update(chunk)
            yield
        return made.hexdigest() == digest(other.produce())


def digest(*parts: Iterable[bytes | memoryview]) -> str:
    """XXH3-128 of all the bytes of ``parts``."""
    found = xxh3_128()
    for part in parts:
        for chunk in part:
            found.update(chunk)
    return found.hexdigest()


@dataclass(frozen=True)
class Decision:
    """What becomes of one role."""

    role: str
    new: Weight = field(repr=False)
    """The weight of the checkpoint that it is to hold."""
    dtype: str
    """What the checkpoint's floats were rounded to, a name in :data:`~mtp_extract.checkpoint.dtypes.DTYPES`."""
    how: str
    """:data:`KEPT` (the checkpoint holds what the file holds), :data:`CODES` (its integers are taken as they are),
    :data:`FLOATS` or :data:`REQUANTIZED`."""
    storage: Storage
    error: float
    """Root mean square of what the file will hold less ``new``, as a share of that of ``new``."""
    content: Content
    """What is to be written; of what is kept too, in case it has to move."""

    @cached_property
    def fingerprint(self) -> str:
        """Equal for decisions that write the same."""
        named = f"{self.storage.type} {self.storage.shape}".encode()
        content = self.content
        return digest([named, content.scale.tobytes(), content.zero_point.tobytes()], content.produce())

    def check_written(self, path: Path, written: Weight) -> Turns[None]:
        """Check that ``written``, read from the new file at ``path``, is as far from the weight as was planned.

        Raises:
            OutputError: it is not.
        """
        if self.how != REQUANTIZED and self.error == 0.0:
            same = yield from holds(written, self.new, self.dtype)
        else:
            tolerance = _ERRORS_ALIKE + (_SCALES_ALIKE if self.how == KEPT else 0.0)
            sums = _Squares()
            for rows in row_ranges(written, self.new):
                sums.add(written.floats(*rows), self.new.floats(*rows))
                yield
            same = abs(sums.error - self.error) <= tolerance
        if not same:
            raise OutputError(f"{path}: {self.role} reads back differently. Nothing was kept.")


def table_of(weight: Weight) -> object:
    """Equal for columns of one matrix, which are to be read together; None for all of one.

    Where there are cores enough, several read the matrix, each for some of its columns.
    """
    stored = stored_of(weight)
    if stored is None or stored.columns is None:
        return None
    table = stored.columns[0] // max(weight.columns, 1)
    return stored.path, stored.tensor.offset, table % max(1, cores() // 2)


def decide(role: str, stored: Constant, new: Weight, dtype: str) -> Turns[Decision]:
    """What becomes of ``role``, stored as ``stored``, when it is to hold ``new``.

    Args:
        dtype: what the checkpoint's floats were rounded to.

    Raises:
        UnsupportedError: values that the type cannot hold.
        CheckpointError: values that are not finite.
    """
    target = stored.source.storage
    decided = partial(Decision, role, new, dtype)
    if (yield from holds(stored.weight, new, dtype)):
        return decided(KEPT, target, 0.0, Content.of(stored.source))
    exact = new
    if target.elements != math.prod(new.shape):
        target, exact = _unfolded(role, target, new)
    weight = _AsStored(role, exact, stored, target)
    if target.type in FLOAT_TYPES:
        return decided(FLOATS, target, *(yield from _floats(weight)))
    taken = yield from _codes(weight, dtype)
    if taken is not None:
        return decided(CODES, target, 0.0, taken)
    return decided(REQUANTIZED, target, *(yield from _requantized(weight)))


def require_ones(role: str, shape: tuple[int, ...], new: Weight, dtype: str) -> None:
    """Check that ``new`` is of ones, as a weight has to be that no constant of the graph holds.

    Raises:
        UnsupportedError: it is not.
    """
    if in_turn([holds(filled(shape), new, dtype)]) != [True]:
        raise UnsupportedError(
            f"{role}: the graph multiplies by nothing here, because the weight was 1 when it was exported and was "
            "folded away; the checkpoint has another. Keep it at 1, or take a bundle whose graph has it."
        )


def holds(stored: Weight, new: Weight, dtype: str) -> Turns[bool]:
    """Whether ``new`` is ``stored``, bit for bit: exactly, after rounding to ``dtype``, or, where both have codes, with
    what was folded into the scales divided out and the scales in F32 or FP16, as formats keep them.
    """
    if (yield from _same(stored, new, dtype)):
        return True
    if new.scheme is None:
        return False
    try:
        coded = [rounded_again(stored, (f"{scales}{SCALES}",)) for scales in ("F32", "FP16")]
    except (CheckpointError, UnsupportedError):
        # It has no codes, or scales that run across the rows: no format keeps such codes.
        return False
    for tensor in coded:
        if (yield from _same(tensor, new, "f32")):
            return True
    return False


def _same(stored: Weight, new: Weight, dtype: str) -> Turns[bool]:
    if (stored.rows, stored.columns) != (new.rows, new.columns):
        return False
    for rows in row_ranges(stored, new):
        yield
        with np.errstate(over="ignore", invalid="ignore"):
            if not _alike(stored.floats(*rows), new.floats(*rows), dtype):
                return False
    return True


def _alike(held: Floats, wanted: Floats, dtype: str) -> bool:
    """Whether ``held``, as it is or rounded to ``dtype``, is ``wanted``, to the bit."""
    held, wanted = held.reshape(-1), wanted.reshape(-1)
    if _equal(held, wanted):
        return True
    rounding = DTYPES[dtype]
    return _equal(rounding.widen(rounding.narrow(held, "a weight").tobytes()), wanted)


def _equal(a: Floats, b: Floats) -> bool:
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())


class _Squares:
    """What an error is made of."""

    def __init__(self) -> None:
        self.difference, self.size = 0.0, 0.0

    def add(self, found: Floats, expected: Floats) -> None:
        # Squares of floats overflow and vanish in F32.
        exact = expected.astype(np.float64).reshape(-1)
        error = found.reshape(-1) - exact
        self.difference += float(np.dot(error, error))
        self.size += float(np.dot(exact, exact))

    @property
    def error(self) -> float:
        """Root mean square of the difference, as a share of that of what was wanted."""
        if not self.size:
            return math.inf if self.difference else 0.0
        return math.sqrt(self.difference / self.size)


def _unfolded(role: str, target: Storage, new: Weight) -> tuple[Storage, Weight]:
    """For a vector of equal numbers that the converter stored as one: still one, or a vector again."""
    values = new.array().reshape(-1)
    if target.type not in FLOAT_TYPES:
        raise UnsupportedError(f"{role}: is stored as one {target.type.name} number, which cannot become a vector.")
    if (values == values[0]).all():
        return target, filled((1,), float(values[0]))
    return replace(target, shape=(values.size,)), new


@dataclass(frozen=True)
class _AsStored:
    """A weight as ``constant`` is to hold it: ``factor · weight``, transposed where it is ``[in, out]``."""

    role: str
    weight: Weight
    constant: Constant
    target: Storage

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Rows of the weight to take together: all, where the stored ones lie, or have their scales, otherwise."""
        apart = self.target.by_rows and self.weight.columns % self.target.columns == 0
        if self.constant.transposed or not (apart or self.target.type in FLOAT_TYPES):
            return iter([(0, self.weight.rows)])
        return row_ranges(self.weight)

    def ordered(self, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Rows of the weight, flat, in stored order."""
        return (np.ascontiguousarray(rows.T) if self.constant.transposed else rows).reshape(-1)

    def floats(self, rows: tuple[int, int]) -> Floats:
        """The numbers that are stored for ``rows`` of the weight, flat, in stored order.

        Raises:
            CheckpointError: one is not finite.
        """
        factor = self.constant.factor
        values = self.ordered(self.weight.floats(*rows))
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.role}: holds values that are not finite. Train it again.")
        if factor == 1.0:
            return values
        with np.errstate(over="ignore"):
            return (values.astype(np.float64) * factor).astype(np.float32)


def _floats(weight: _AsStored) -> Turns[tuple[float, Content]]:
    type_, sums = weight.target.type, _Squares()

    def stored(rows: tuple[int, int]) -> bytes:
        return float_bytes(weight.floats(rows), type_, weight.role)

    # Of floats that are not rounded the error is 0; they are read all the same, since not all can be stored.
    for rows in weight.ranges():
        held = divided(widened(stored(rows), type_), weight.constant.factor)
        sums.add(held, weight.ordered(weight.weight.floats(*rows)))
        yield
    return sums.error, Content(np.empty(0, np.float32), np.empty(0, np.int64), lambda: map(stored, weight.ranges()))


def _requantized(weight: _AsStored) -> Turns[tuple[float, Content]]:
    tensor, target, sums = weight.constant.source.tensor, weight.target, _Squares()
    if not target.symmetric and tensor.quantization is not None:
        held = tensor.quantization.zero_points.count
        if held != target.groups:
            raise UnsupportedError(
                f"{weight.role}: {tensor.label} has {target.groups} scales and {held} zero points, so new ones have no "
                "place. Give its codes with the checkpoint."
            )
    scales, zeros = [np.empty(0, np.float32)], [np.empty(0, np.int64)]
    for rows in weight.ranges():
        values = weight.floats(rows)
        with np.errstate(over="ignore", invalid="ignore"):
            scale, zero_point, codes = target.quantized(values)
            target.scale_codes(codes, scale, zero_point)
            sums.add(codes, values)
        scales.append(scale)
        zeros += [] if target.symmetric else [zero_point]
        yield
    scale = np.concatenate(scales)
    if scale.size and scale.max() > LARGEST_SCALE:
        raise CheckpointError(f"{weight.role}: holds values too large for integers and scales. Train it again.")
    # Tables of a base have a row a token each: zero points that are all 0 are not kept.
    zero_point = np.broadcast_to(np.int64(0), scale.shape) if target.symmetric else np.concatenate(zeros)

    def produce() -> Iterator[bytes]:
        return (target.stored(target.quantized(weight.floats(rows))[2]) for rows in weight.ranges())

    return sums.error, Content(scale, zero_point, produce)


def _codes(weight: _AsStored, dtype: str) -> Turns[Content | None]:
    """The codes of ``weight``, where it has some that say, as they are stored, what its floats say; else None."""
    target, constant, steps = weight.target, weight.constant, weight.weight.steps
    if target.packing is None or steps is None:
        return None
    size = _by_group(steps.size, steps.block, target, constant.transposed)
    zero_point = _by_group(steps.zero_point, steps.block, target, constant.transposed)
    if size is None or zero_point is None or (target.symmetric and zero_point.any()):
        return None
    lowest, highest = target.packing.lowest, target.packing.highest
    if zero_point.min() < lowest or zero_point.max() > highest:
        return None
    # The same factor is folded in already, where the codes are this file's; another is not.
    factor = 1.0 if steps.factor == constant.factor else constant.factor / steps.factor
    scale = size if factor == 1.0 else (size.astype(np.float64) * factor).astype(np.float32)
    if target.kind == "blockwise" and not np.array_equal(scale.astype(np.float16).astype(np.float32), scale):
        return None
    for rows in weight.ranges():
        codes = weight.ordered(weight.weight.codes(*rows))
        if codes.min() < lowest or codes.max() > highest:
            return None
        # What is to be written says the same as the checkpoint's floats, or the codes are not taken.
        held = codes.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            target.scale_codes(held, scale, zero_point, rows[0] * weight.weight.columns)
            if not _alike(divided(held, constant.factor), weight.ordered(weight.weight.floats(*rows)), dtype):
                return None
        yield

    def produce() -> Iterator[bytes]:
        return (target.stored(weight.ordered(weight.weight.codes(*rows))) for rows in weight.ranges())

    return Content(scale, zero_point, produce)


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
