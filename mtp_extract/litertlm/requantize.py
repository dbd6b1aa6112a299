"""From numbers to stored bytes: the way back from :mod:`mtp_extract.litertlm.quantized`.

The rule is ai-edge-quantizer's (0.10.0, min/max), the one that Google's files were made by: ``scale = max|w| / qmax``,
codes rounded to the nearest, ties to even; 8-bit symmetric codes leave out the lowest (−127…127), fewer bits use all;
where zero points are stored, ``scale = (max − min) / (2^bits − 1)`` over a range that holds 0; scales of blocks are
rounded to bfloat16 and stored as FP16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.litertlm.quantized import CODE_TYPES, FLOAT_TYPES, Floats, Integers, Packing, QuantizedTensor
from mtp_extract.litertlm.tflite import ELEMENT_BITS, TensorType

# A scale of zero would make every code one value.
_SMALLEST_BOUND = 1e-9
_SMALLEST_F16 = np.float32(np.finfo(np.float16).smallest_subnormal)
_CHUNK = 1 << 18
_NARROW_BITS = 8
_WIDE = (1 << 15) - 1


def rechunked(chunks: Iterable[npt.NDArray[Any]], unit: int) -> Iterator[npt.NDArray[Any]]:
    """The same elements in chunks of a multiple of ``unit`` (the last as it comes), each an array of its own."""
    size = max(1, _CHUNK // unit) * unit
    held: list[npt.NDArray[Any]] = []
    count = 0
    for chunk in chunks:
        rest = chunk
        while rest.size:
            taken, rest = rest[: size - count], rest[size - count :]
            # Sources hand out views that the next chunk overwrites.
            held.append(taken.copy())
            count += taken.size
            if count == size:
                yield held[0] if len(held) == 1 else np.concatenate(held)
                held, count = [], 0
    if held:
        yield np.concatenate(held)


def pack(codes: Integers, packing: Packing) -> npt.NDArray[np.uint8]:
    """Codes as stored, first in the low bits; the last byte is filled up with zeros."""
    if packing.per_byte == 1:
        return np.ascontiguousarray(codes).view(np.uint8)
    codes = np.concatenate([codes, np.zeros(-codes.size % packing.per_byte, codes.dtype)])
    lanes = (codes.view(np.uint8) & np.uint8((1 << packing.bits) - 1)).reshape(-1, packing.per_byte)
    packed: npt.NDArray[np.uint8] = lanes[:, 0].copy()
    for lane in range(1, packing.per_byte):
        packed |= lanes[:, lane] << np.uint8(lane * packing.bits)
    return packed


def float_bytes(values: Floats, type_: TensorType, name: str) -> bytes:
    """float32 values as the floating-point type ``type_``, rounded to the nearest.

    Raises:
        UnsupportedError: a value leaves the type.
    """
    with np.errstate(over="ignore"):
        if type_ is TensorType.FLOAT32:
            result = values.astype("<f4")
        elif type_ is TensorType.FLOAT16:
            result = values.astype("<f2")
        else:
            bits = values.view(np.uint32)
            result = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
                "<u2"
            )
            if ((result & np.uint16(0x7FFF)) == np.uint16(0x7F80)).any():
                result = np.full(1, np.inf, "<f4")
    if result.dtype.kind == "f" and not np.isfinite(result).all():
        raise UnsupportedError(f"{name}: holds values beyond the range of {type_.name}, which the file stores.")
    return result.tobytes()


@dataclass(frozen=True)
class Storage:
    """How a constant lies in its file, which is how what replaces it has to lie.

    Attributes:
        shape: as stored.
        kind, axis, block_size: as :class:`QuantizedTensor` has them; kind is "none" for floats.
        symmetric: whether zero points are all 0, and stay so.
    """

    type: TensorType
    shape: tuple[int, ...]
    kind: str
    axis: int = 0
    block_size: int = 0
    symmetric: bool = True

    @classmethod
    def of(cls, stored: QuantizedTensor) -> Storage:
        """How ``stored`` lies."""
        type_ = TensorType(stored.tensor.type_id)
        kind = stored.kind
        return cls(type_, stored.tensor.shape, kind, stored.axis, stored.block_size, stored.symmetric)

    def as_type(self, type_: TensorType) -> Storage:
        """The same constant in ``type_``: floats, or symmetric codes with a scale for each row of a matrix."""
        kind = "none" if type_ in FLOAT_TYPES else "per_channel"
        return replace(self, type=type_, kind=kind, axis=0, block_size=0, symmetric=True)

    @property
    def packing(self) -> Packing | None:
        """How codes are packed; None for floats."""
        return CODE_TYPES.get(self.type)

    @property
    def elements(self) -> int:
        """How many numbers there are."""
        return math.prod(self.shape)

    @property
    def length(self) -> int:
        """Bytes of data."""
        return (self.elements * ELEMENT_BITS[self.type] + 7) // 8

    @property
    def groups(self) -> int:
        """How many scales there are."""
        if self.kind == "blockwise":
            return self.elements // self.block_size
        return self.shape[self.axis] if self.kind == "per_channel" else 1

    @property
    def _inner(self) -> int:
        """Neighbours that share a scale."""
        if self.kind == "blockwise":
            return self.block_size
        return math.prod(self.shape[self.axis + 1 :]) if self.kind == "per_channel" else self.elements

    @property
    def _repeats(self) -> bool:
        """Whether the scales come round again: channels along an axis that is not the first."""
        return self.groups * self._inner != self.elements

    @property
    def unit(self) -> int:
        """Chunks of a multiple of it begin with a scale of their own, and on a byte."""
        if self.groups == 1:
            return 8
        own = self._inner * (self.groups if self._repeats else 1)
        return math.lcm(own, 8)

    def _rows(self, chunk: npt.NDArray[Any], first: int) -> tuple[npt.NDArray[Any], slice]:
        """``chunk``, which begins at element ``first``, as ``[repeats, groups, neighbours]``, and which groups."""
        if self.groups == 1:
            return chunk.reshape(1, 1, -1), slice(0, 1)
        if self._repeats:
            return chunk.reshape(-1, self.groups, self._inner), slice(0, self.groups)
        rows = chunk.reshape(1, -1, self._inner)
        return rows, slice(first // self._inner, first // self._inner + rows.shape[1])

    def measure(self, chunks: Iterable[Floats]) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Scales and zero points for the numbers in ``chunks``, each ``[groups]``; in stored order."""
        low, high = np.zeros(self.groups, np.float32), np.zeros(self.groups, np.float32)
        at = 0
        for chunk in rechunked(chunks, self.unit):
            rows, which = self._rows(chunk, at)
            low[which] = np.minimum(low[which], rows.min(axis=(0, 2)))
            high[which] = np.maximum(high[which], rows.max(axis=(0, 2)))
            at += chunk.size
        return self._scales(low, high)

    def _scales(self, low: Floats, high: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
        if self.type is TensorType.INT16:
            return np.maximum(np.maximum(-low, high), _SMALLEST_BOUND).astype(np.float32) / np.float32(_WIDE), _zeros(1)
        assert self.packing is not None
        lowest, highest = int(self.packing.codes.min()), int(self.packing.codes.max())
        if self.symmetric:
            bound = np.maximum(np.maximum(-low, high), _SMALLEST_BOUND).astype(np.float32)
            scale, zero_point = bound / np.float32(highest), _zeros(self.groups)
        else:
            bound = np.maximum(high - low, _SMALLEST_BOUND).astype(np.float32)
            scale = bound / np.float32(highest - lowest)
            zero_point = np.rint(np.float32(lowest) - low / scale).astype(np.int64)
        if self.kind == "blockwise":
            # What underflows FP16 is a block of nothing but zeros.
            scale = np.maximum(_through_bfloat16(scale), _SMALLEST_F16)
            if not np.isfinite(scale).all():
                raise UnsupportedError("A scale of blocks leaves FP16, in which the file stores them.")
        return scale, zero_point

    def encode(self, chunks: Iterable[Floats], scale: Floats, zero_point: npt.NDArray[np.int64]) -> Iterator[Integers]:
        """Codes of the numbers in ``chunks``, flat, in stored order; chunks of a multiple of :attr:`unit`."""
        if self.type is TensorType.INT16:
            lowest, highest = -_WIDE, _WIDE
            dtype: np.dtype[Any] = np.dtype(np.int16)
        else:
            assert self.packing is not None
            lowest, highest = int(self.packing.codes.min()), int(self.packing.codes.max())
            lowest += self.symmetric and self.packing.bits == _NARROW_BITS
            dtype = self.packing.dtype
        shift = zero_point.astype(np.float32) if zero_point.any() else None
        at = 0
        for chunk in rechunked(chunks, self.unit):
            rows, which = self._rows(chunk, at)
            codes = rows / scale[which][:, None]
            if shift is not None:
                codes += shift[which][:, None]
            np.clip(np.rint(codes, out=codes), lowest, highest, out=codes)
            yield codes.astype(dtype).reshape(-1)
            at += chunk.size

    def decode(
        self, codes: Iterable[npt.NDArray[Any]], scale: Floats, zero_point: npt.NDArray[np.int64]
    ) -> Iterator[Floats]:
        """The numbers that ``codes``, in stored order, stand for."""
        shift = zero_point.astype(np.float32) if zero_point.any() else None
        at = 0
        for chunk in rechunked(codes, self.unit):
            values = chunk.astype(np.float32)
            rows, which = self._rows(values, at)
            if shift is not None:
                rows -= shift[which][:, None]
            rows *= scale[which][:, None]
            yield values
            at += chunk.size

    def stored_codes(self, codes: Iterable[npt.NDArray[Any]]) -> Iterator[bytes]:
        """Codes, in chunks that :meth:`encode` gives or any others, as bytes."""
        for chunk in rechunked(codes, 8):
            yield chunk.astype("<i2").tobytes() if self.packing is None else pack(chunk, self.packing).tobytes()


def _zeros(count: int) -> npt.NDArray[np.int64]:
    return np.zeros(count, np.int64)


def _through_bfloat16(values: Floats) -> Floats:
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    with np.errstate(over="ignore"):
        narrow: Floats = rounded.view(np.float32).astype(np.float16).astype(np.float32)
    return narrow
