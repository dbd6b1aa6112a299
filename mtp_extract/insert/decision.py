"""What becomes of one role: kept, its codes, its floats, or requantized, and the error that it suffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from mtp_extract.checkpoint.constant import Constant
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.rounding import SCALES, rounded_again
from mtp_extract.checkpoint.stored import stored_of
from mtp_extract.checkpoint.weight import Weight, filled
from mtp_extract.errors import CheckpointError, OutputError, UnsupportedError
from mtp_extract.io.threads import Turns, cores, in_turn
from mtp_extract.litertlm.storage import (
    FLOAT_TYPES,
    LARGEST_SCALE,
    Floats,
    Integers,
    QuantizedTensor,
    Storage,
    float_bytes,
    rechunked,
    widened,
)
from mtp_extract.litertlm.tflite import TensorType

KEPT, CODES, FLOATS, REQUANTIZED = "kept", "codes", "floats", "requantized"
_CHUNK = 1 << 16

# Summing in chunks of another size changes an error by this much, and so do scales that are alike.
_ERRORS_ALIKE = 1e-6
# Dividing by a folded factor, and multiplying again, changes a scale by less.
_SCALES_ALIKE = 1e-6

_T = TypeVar("_T")
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
            for at in range(0, source.location.length, _CHUNK):
                yield source.location.read(at, min(_CHUNK, source.location.length - at))

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
    before: TensorType
    """The type it is stored in now."""
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
            error = yield from _Squares().add_all(written.chunks(), self.new.chunks())
            same = abs(error - self.error) <= tolerance
        if not same:
            raise OutputError(f"{path}: {self.role} reads back differently. Nothing was kept.")


def beside(weight: Weight) -> object:
    """Equal for columns of one matrix, which are to be read together; None for all of one.

    Where there are cores enough, several read the matrix, each for some of its columns.
    """
    stored = stored_of(weight)
    if stored is None or stored.columns is None:
        return None
    table = stored.columns[0] // max(weight.columns, 1)
    return stored.path, stored.tensor.offset, table % max(1, cores() // 2)


def decide(role: str, stored: Constant, new: Weight, dtype: str, wanted: TensorType | None = None) -> Turns[Decision]:
    """What becomes of ``role``, stored as ``stored``, when it is to hold ``new``.

    Args:
        dtype: what the checkpoint's floats were rounded to.
        wanted: the type it is to be stored in; None for the one it has.

    Raises:
        UnsupportedError: values that the type cannot hold.
        CheckpointError: values that are not finite.
    """
    source = stored.source
    here = source.storage
    target = here if wanted in (None, here.type) else here.as_type(wanted)
    decided = partial(Decision, role, new, dtype, here.type)
    same = yield from holds(stored.weight, new, dtype)
    # What was rounded on its way out is taken from where it is exact.
    exact = stored.weight if same else new
    if same and target is here:
        return decided(KEPT, here, 0.0, Content.of(source))
    if target.elements != math.prod(new.shape):
        target, exact = _unfolded(role, target, exact)
    weight = _AsStored(role, exact, stored)
    if target.kind == "none" and target.type in FLOAT_TYPES:
        return decided(FLOATS, target, *(yield from _floats(weight, target)))
    taken = yield from _codes(weight, target, dtype)
    if taken is not None:
        return decided(CODES, target, 0.0, taken)
    return decided(REQUANTIZED, target, *(yield from _requantized(weight, target)))


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
    if (yield from _same(stored.chunks(), new.chunks(), dtype)):
        return True
    if new.scheme is None:
        return False
    try:
        coded = [rounded_again(stored, (f"{scales}{SCALES}",)) for scales in ("F32", "FP16")]
    except (CheckpointError, UnsupportedError):
        # It has no codes, or scales that run across the rows: no format keeps such codes.
        return False
    for tensor in coded:
        if (yield from _same(tensor.chunks(), new.chunks(), "f32")):
            return True
    return False


def _quiet(chunks: Iterator[_T]) -> Iterator[_T]:
    """``chunks``, made without warnings of what leaves float32; whoever works in turn is not to set that aside."""
    while True:
        with np.errstate(over="ignore", invalid="ignore"):
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk


def _same(stored: Iterable[Floats], new: Iterable[Floats], dtype: str) -> Turns[bool]:
    rounding = DTYPES[dtype]
    pairs = zip(rechunked(stored, _CHUNK), rechunked(new, _CHUNK), strict=False)
    for held, wanted in _quiet(pairs):
        yield
        if held.size != wanted.size:
            return False
        if _equal(held, wanted):
            continue
        if not _equal(rounding.widen(rounding.narrow(held, "a weight").tobytes()), wanted):
            return False
    return True


def _equal(a: Floats, b: Floats) -> bool:
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())


class _Squares:
    """What an error is made of."""

    def __init__(self) -> None:
        self.difference, self.size = 0.0, 0.0

    def add(self, found: Floats, expected: Floats) -> None:
        # Squares of floats overflow and vanish in F32.
        exact = expected.astype(np.float64)
        error = found - exact
        self.difference += float(np.dot(error, error))
        self.size += float(np.dot(exact, exact))

    def add_all(self, held: Iterable[Floats], wanted: Iterable[Floats]) -> Turns[float]:
        for found, expected in zip(rechunked(held, _CHUNK), rechunked(wanted, _CHUNK), strict=True):
            self.add(found, expected)
            yield
        return self.error

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
    """A weight as ``constant`` holds it: ``factor · (weight − offset)``, transposed where that is ``[in, out]``."""

    role: str
    weight: Weight
    constant: Constant

    def weights(self) -> Iterator[Floats]:
        """The numbers of the weight, flat, in stored order."""
        if self.constant.transposed:
            return iter([np.ascontiguousarray(self.weight.floats().T).reshape(-1)])
        return self.weight.chunks()

    def codes(self) -> Iterator[Integers]:
        """The codes of the weight, flat, in stored order."""
        if self.constant.transposed:
            return iter([np.ascontiguousarray(self.weight.codes().T).reshape(-1)])
        return self.weight.code_chunks()

    def floats(self) -> Iterator[Floats]:
        """The numbers that are stored for them.

        Raises:
            CheckpointError: one is not finite.
        """
        factor, offset = self.constant.factor, self.constant.offset
        for chunk in self.weights():
            if not np.isfinite(chunk).all():
                raise CheckpointError(f"{self.role}: holds values that are not finite. Train it again.")
            plain = factor == 1.0 and not offset
            yield chunk if plain else ((chunk.astype(np.float64) - offset) * factor).astype(np.float32)


def _floats(weight: _AsStored, target: Storage) -> Turns[tuple[float, Content]]:
    def produce() -> Iterator[bytes]:
        for chunk in weight.floats():
            yield float_bytes(np.ascontiguousarray(chunk), target.type, weight.role)

    # Of floats that are not rounded the error is 0; they are read all the same, since not all can be stored.
    stored = (widened(chunk, target.type) for chunk in produce())
    error = yield from _Squares().add_all(map(weight.constant.unfolded, stored), weight.weights())
    return error, Content(np.empty(0, np.float32), np.empty(0, np.int64), produce)


def _requantized(weight: _AsStored, target: Storage) -> Turns[tuple[float, Content]]:
    tensor = weight.constant.source.tensor
    if not target.symmetric and tensor.quantization is not None:
        held = tensor.quantization.zero_point_count
        if held != target.groups:
            raise UnsupportedError(
                f"{weight.role}: {tensor.label} has {target.groups} scales and {held} zero points, so new ones have no "
                "place. Give its codes with the checkpoint."
            )
    sums = _Squares()
    if target.by_rows:
        scale, zero_point = yield from _in_one_pass(weight, target, sums)
    else:
        scale, zero_point = target.measure(weight.floats())
    if scale.size and scale.max() > LARGEST_SCALE:
        raise CheckpointError(f"{weight.role}: holds values too large for integers and scales. Train it again.")

    def codes() -> Iterator[npt.NDArray[Any]]:
        return target.encode(weight.floats(), scale, zero_point)

    if not target.by_rows:
        yield from sums.add_all(target.decode(codes(), scale, zero_point), weight.floats())
    return sums.error, Content(scale, zero_point, lambda: target.stored_codes(codes()))


def _in_one_pass(weight: _AsStored, target: Storage, sums: _Squares) -> Turns[tuple[Floats, Integers64]]:
    """Scales and zero points of rows that have their own, which need not be known before they are encoded."""
    scales, zeros = [np.empty(0, np.float32)], [np.empty(0, np.int64)]
    for chunk in _quiet(rechunked(weight.floats(), target.unit)):
        with np.errstate(over="ignore", invalid="ignore"):
            scale, zero_point, codes = target.quantized(chunk.reshape(-1, target.columns))
            if zero_point.any():
                codes -= zero_point.astype(np.float32)[:, None]
            codes *= scale[:, None]
            sums.add(codes.reshape(-1), chunk)
        scales.append(scale)
        zeros += [] if target.symmetric else [zero_point]
        yield
    # Tables of a base have a row a token each: zero points that are all 0 are not kept.
    scale = np.concatenate(scales)
    return scale, np.broadcast_to(np.int64(0), scale.shape) if target.symmetric else np.concatenate(zeros)


def _codes(weight: _AsStored, target: Storage, dtype: str) -> Turns[Content | None]:
    """The codes of ``weight``, where it has some that say in ``target`` what its floats say; else None."""
    packing, steps, constant = target.packing, weight.weight.steps, weight.constant
    if packing is None or steps is None or constant.offset:
        return None
    size = _by_group(steps.size, steps.block, target, constant.transposed)
    zero_point = _by_group(steps.zero_point, steps.block, target, constant.transposed)
    if size is None or zero_point is None or (target.symmetric and zero_point.any()):
        return None
    if zero_point.min() < packing.lowest or zero_point.max() > packing.highest:
        return None
    if any(chunk.min() < packing.lowest or chunk.max() > packing.highest for chunk in weight.codes() if chunk.size):
        return None
    # The same factor is folded in already, where the codes are this file's; another is not.
    factor = 1.0 if steps.factor == constant.factor else constant.factor / steps.factor
    scale = size if factor == 1.0 else (size.astype(np.float64) * factor).astype(np.float32)
    if target.kind == "blockwise" and not np.array_equal(scale.astype(np.float16).astype(np.float32), scale):
        return None
    # What is to be written says the same as the checkpoint's floats, or the codes are not taken.
    decoded = map(weight.constant.unfolded, target.decode(weight.codes(), scale, zero_point))
    if not (yield from _same(decoded, weight.weights(), dtype)):
        return None
    return Content(scale, zero_point, lambda: target.stored_codes(weight.codes()))


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
