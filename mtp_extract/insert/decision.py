"""What becomes of one role: kept, its codes, its floats, or requantized, and the error that it suffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.integers import row_codes, same_codes
from mtp_extract.checkpoint.lazy import ConstantTensor, FilledTensor, LazyTensor, divided, read_floats
from mtp_extract.errors import CheckpointError, NoCodesError, UnsupportedError
from mtp_extract.litertlm.quantized import FLOAT_TYPES, LARGEST_SCALE, Floats, QuantizedTensor
from mtp_extract.litertlm.requantize import Storage, float_bytes, rechunked
from mtp_extract.litertlm.tflite import TensorType

KEPT, CODES, FLOATS, REQUANTIZED = "kept", "codes", "floats", "requantized"
_COMPARED = 1 << 16

_FLOAT_NAMES = {TensorType.FLOAT32: "f32", TensorType.FLOAT16: "f16", TensorType.BFLOAT16: "bf16"}

Integers64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Content:
    """What a constant is to hold: bytes in stored order, and the scales and zero points that they are read with."""

    scale: Floats
    zero_point: Integers64
    produce: Callable[[], Iterator[bytes]]


@dataclass(frozen=True)
class Decision:
    """What becomes of one role.

    Attributes:
        how: :data:`KEPT` (the checkpoint holds what the file holds), :data:`CODES` (its integers are taken as they
            are), :data:`FLOATS` or :data:`REQUANTIZED`.
        before: the type it is stored in now.
        storage: how it is to lie.
        error: root mean square of what the file will hold less what the checkpoint holds, as a share of the latter's.
        content: what is to be written; for what is kept, too, for where it has to move.
    """

    role: str
    how: str
    before: TensorType
    storage: Storage
    error: float
    content: Content


def decide(
    role: str, stored: ConstantTensor, new: LazyTensor, dtype: str, wanted: TensorType | None = None
) -> Decision:
    """What becomes of ``role``, stored as ``stored``, when it is to hold ``new``.

    Args:
        dtype: what the checkpoint's floats were rounded to.
        wanted: the type it is to be stored in; None for the one it has.

    Raises:
        UnsupportedError: values that the type cannot hold.
        CheckpointError: values that are not finite.
    """
    source = stored.source
    here = Storage.of(source)
    target = here if wanted in (None, here.type) else here.as_type(wanted)
    same = holds(stored, new, dtype)
    # What was rounded on its way out is taken from where it is exact.
    exact: LazyTensor = stored if same else new
    if same and target is here:
        return Decision(role, KEPT, here.type, here, 0.0, as_stored(source))
    if target.elements != math.prod(new.shape):
        target, exact = _unfolded(role, target, exact)
    oriented = _Oriented(role, exact, stored.transposed, stored.factor, stored.offset)
    if target.kind == "none" and target.type in FLOAT_TYPES:
        return Decision(role, FLOATS, here.type, target, *_floats(role, oriented, target))
    taken = _codes(oriented, target, dtype)
    if taken is not None:
        return Decision(role, CODES, here.type, target, 0.0, taken)
    return Decision(role, REQUANTIZED, here.type, target, *_requantized(role, oriented, target, source))


def _rounds_to(stored: LazyTensor, new: LazyTensor) -> bool:
    """Whether ``new`` has the codes of ``stored``, and its scales less what was folded into them, in F32 or in FP16:
    what a format that keeps integers makes of it.
    """
    try:
        mine, theirs = row_codes(stored), row_codes(new)
    except NoCodesError:
        return False
    if mine.block % theirs.block:
        return False
    steps = np.repeat(mine.steps, mine.block // theirs.block, axis=1)
    with np.errstate(over="ignore", under="ignore"):
        narrow = steps.astype(np.float16).astype(np.float32)
    return any(np.array_equal(scales, theirs.steps) for scales in (steps, narrow)) and same_codes(mine, theirs)


def holds(stored: LazyTensor, new: LazyTensor, dtype: str) -> bool:
    """Whether ``new`` is ``stored``, bit for bit: exactly, after rounding to ``dtype``, or with scales in FP16."""
    return _same(stored.floats(), new.floats(), dtype) or _rounds_to(stored, new)


def apart(stored: LazyTensor, new: LazyTensor) -> float:
    """Root mean square of ``stored`` less ``new``, as a share of that of ``new``."""
    return _error(stored.floats(), new.floats())


def as_stored(source: QuantizedTensor) -> Content:
    """What ``source`` holds."""

    def produce() -> Iterator[bytes]:
        for at in range(0, source.location.length, _COMPARED):
            yield source.location.read(at, min(_COMPARED, source.location.length - at))

    return Content(source.scale.reshape(-1), source.zero_point.reshape(-1), produce)


def _unfolded(role: str, target: Storage, new: LazyTensor) -> tuple[Storage, LazyTensor]:
    """For a vector of equal numbers that the converter stored as one: still one, or a vector again."""
    values = read_floats(new).reshape(-1)
    if target.type not in FLOAT_TYPES:
        raise UnsupportedError(f"{role}: is stored as one {target.type.name} number, which cannot become a vector.")
    if (values == values[0]).all():
        return target, FilledTensor((1,), float(values[0]))
    return replace(target, shape=(values.size,)), new


@dataclass(frozen=True)
class _Oriented:
    """A weight as the constant has it: less the offset, times the factor, turned where it is stored ``[in, out]``."""

    role: str
    tensor: LazyTensor
    transposed: bool
    factor: float
    offset: float

    def _stored(self, chunks: Iterable[npt.NDArray[Any]]) -> Iterator[npt.NDArray[Any]]:
        if self.transposed:
            whole = np.concatenate([chunk.copy() for chunk in chunks])
            yield np.ascontiguousarray(whole.reshape(self.tensor.shape).T).reshape(-1)
        else:
            yield from chunks

    def weights(self) -> Iterator[Floats]:
        """Its numbers, as they are."""
        return self._stored(self.tensor.floats())

    def floats(self) -> Iterator[Floats]:
        """Its numbers, as they are stored.

        Raises:
            CheckpointError: one is not finite.
        """
        for chunk in self.weights():
            if not np.isfinite(chunk).all():
                raise CheckpointError(f"{self.role}: holds values that are not finite. Train it again.")
            plain = self.factor == 1.0 and not self.offset
            yield chunk if plain else ((chunk.astype(np.float64) - self.offset) * self.factor).astype(np.float32)

    def read(self, stored: Iterable[Floats]) -> Iterator[Floats]:
        """What the graph makes of stored numbers."""
        for chunk in stored:
            values = divided(chunk, self.factor)
            yield values + np.float32(self.offset) if self.offset else values

    def integers(self) -> Iterator[npt.NDArray[Any]]:
        """Its codes."""
        return self._stored(self.tensor.integers())


def _same(stored: Iterable[Floats], new: Iterable[Floats], dtype: str) -> bool:
    rounding = DTYPES.get(dtype)
    for mine, theirs in zip(rechunked(stored, _COMPARED), rechunked(new, _COMPARED), strict=False):
        if mine.size != theirs.size:
            return False
        if _equal(mine, theirs):
            continue
        if rounding is None or not _equal(rounding.widen(rounding.narrow(mine, "a weight").tobytes()), theirs):
            return False
    return True


def _equal(a: Floats, b: Floats) -> bool:
    return bool((a.view(np.uint32) == b.view(np.uint32)).all())


def _floats(role: str, new: _Oriented, target: Storage) -> tuple[float, Content]:
    def produce() -> Iterator[bytes]:
        for chunk in new.floats():
            yield float_bytes(np.ascontiguousarray(chunk), target.type, role)

    # Of floats that are not rounded the error is 0; they are read all the same, since not all can be stored.
    widen = DTYPES[_FLOAT_NAMES[target.type]].widen
    error = _error(new.read(map(widen, produce())), new.weights())
    return error, Content(np.empty(0, np.float32), np.empty(0, np.int64), produce)


def _requantized(role: str, new: _Oriented, target: Storage, source: QuantizedTensor) -> tuple[float, Content]:
    if not target.symmetric and source.tensor.quantization is not None:
        held = source.tensor.quantization.zero_point_count
        if held != target.groups:
            raise UnsupportedError(
                f"{role}: {source.tensor.label} has {target.groups} scales and {held} zero points, so new ones have no "
                "place. Give its codes with the checkpoint."
            )
    scale, zero_point = target.measure(new.floats())
    if scale.size and scale.max() > LARGEST_SCALE:
        raise CheckpointError(f"{role}: holds values too large for integers and scales. Train it again.")

    def codes() -> Iterator[npt.NDArray[Any]]:
        return target.encode(new.floats(), scale, zero_point)

    error = _error(target.decode(codes(), scale, zero_point), new.floats())
    return error, Content(scale, zero_point, lambda: target.stored_codes(codes()))


def _error(held: Iterable[Floats], wanted: Iterable[Floats]) -> float:
    apart, size = 0.0, 0.0
    for mine, theirs in zip(rechunked(held, _COMPARED), rechunked(wanted, _COMPARED), strict=True):
        # Squares of floats overflow and vanish in F32.
        exact = theirs.astype(np.float64)
        difference = mine - exact
        apart += float(np.dot(difference, difference))
        size += float(np.dot(exact, exact))
    if not size:
        return math.inf if apart else 0.0
    return math.sqrt(apart / size)


def _codes(new: _Oriented, target: Storage, dtype: str) -> Content | None:
    """The codes of ``new``, where it has some that say in ``target`` what its floats say; else None."""
    packing, steps = target.packing, new.tensor.steps
    if packing is None or steps is None or new.offset:
        return None
    size = _by_group(steps.size, steps.block, target, new.transposed)
    zero_point = _by_group(steps.zero_point, steps.block, target, new.transposed)
    lowest, highest = int(packing.codes.min()), int(packing.codes.max())
    if size is None or zero_point is None or (target.symmetric and zero_point.any()):
        return None
    if zero_point.min() < lowest or zero_point.max() > highest:
        return None
    if any(chunk.min() < lowest or chunk.max() > highest for chunk in new.integers() if chunk.size):
        return None
    # The same factor is folded in already, where the codes are this file's; another is not.
    factor = 1.0 if steps.factor == new.factor else new.factor / steps.factor
    scale = size if factor == 1.0 else (size.astype(np.float64) * factor).astype(np.float32)
    if target.kind == "blockwise" and not np.array_equal(scale.astype(np.float16).astype(np.float32), scale):
        return None
    # What is to be written says the same as the checkpoint's floats, or the codes are not taken.
    decoded = target.decode(new.integers(), scale, zero_point)
    if not _same(new.read(decoded), new.weights(), dtype):
        return None
    return Content(scale, zero_point, lambda: target.stored_codes(new.integers()))


def _by_group(by_place: npt.NDArray[Any], block: int, target: Storage, transposed: bool) -> npt.NDArray[Any] | None:
    """What is said ``[rows, columns / block]`` of a matrix, said of each group of ``target``; None where it cannot be.

    A group is one only where all of it has one value.
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
