"""How the numbers of a constant are stored, and how numbers become what is stored.

``real = scale · (code − zero_point)``. Codes of less than a byte are packed flat in row-major order, first element in
the low bits, two's complement (unsigned for UINT4); a row need not begin on a byte.

The rule from numbers to codes is ai-edge-quantizer's (0.10.0, min/max), the one that Google's files were made by:
``scale = max|w| / qmax``, codes rounded to the nearest, ties to even; 8-bit symmetric codes leave out the lowest
(−127…127), fewer bits use all; where zero points are stored, ``scale = (max − min) / (2^bits − 1)`` over a range that
holds 0; scales of blocks are rounded to bfloat16 and stored as FP16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.litertlm.tflite import ELEMENT_BITS, TensorType

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.integer]

CHUNK_ELEMENTS = 1 << 18
"""Elements at a time: 1 MiB of float32, which stays in a core's own cache."""

# A scale of zero would make every code one value.
_SMALLEST_BOUND = 1e-9
_SMALLEST_F16 = np.float32(np.finfo(np.float16).smallest_subnormal)
_NARROW_BITS = 8
_LARGEST_INT16 = (1 << 15) - 1


@dataclass(frozen=True)
class Packing:
    """How codes lie in bytes: ``bits`` each, two's complement where ``signed``."""

    bits: int
    signed: bool

    @property
    def per_byte(self) -> int:
        return 8 // self.bits

    @property
    def dtype(self) -> np.dtype[np.int8] | np.dtype[np.uint8]:
        """Type that holds one unpacked code."""
        return np.dtype(np.int8) if self.signed else np.dtype(np.uint8)

    @property
    def lowest(self) -> int:
        return -(1 << self.bits - 1) if self.signed else 0

    @property
    def highest(self) -> int:
        return self.lowest + (1 << self.bits) - 1

    @property
    def codes(self) -> Integers:
        """The codes every byte value stands for, first element first: ``[256, per_byte]``."""
        return _codes_of_bytes(self)


@cache
def _codes_of_bytes(packing: Packing) -> Integers:
    shifts = np.arange(packing.per_byte) * packing.bits
    codes = (np.arange(256)[:, None] >> shifts) & ((1 << packing.bits) - 1)
    if packing.signed:
        codes -= (codes >> (packing.bits - 1)) << packing.bits
    table = codes.astype(packing.dtype)
    table.setflags(write=False)
    return table


CODE_TYPES = MappingProxyType(
    {
        TensorType.INT8: Packing(8, True),
        TensorType.UINT8: Packing(8, False),
        TensorType.INT4: Packing(4, True),
        TensorType.UINT4: Packing(4, False),
        TensorType.INT2: Packing(2, True),
    }
)
"""Element types that hold quantized codes."""

FLOAT_TYPES = frozenset({TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16})
"""Element types that hold real numbers."""

NUMBER_TYPES = FLOAT_TYPES | CODE_TYPES.keys() | {TensorType.INT16}
"""Element types that a weight may have."""


def pack_bytes(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Codes of ``bits`` bits, a byte each, as packed bytes: 8 / ``bits`` neighbours each, the first in the low bits.

    Args:
        codes: contiguous, the last axis a multiple of 8 / ``bits``; what lies above their ``bits`` bits is 0.
    """
    if bits == 8:
        return codes
    # The codes of a byte at once, as one little-endian integer whose bytes they are.
    wide = codes.view("<u2" if bits == 4 else "<u4")
    packed = wide.copy()
    for place in range(1, 8 // bits):
        packed |= wide >> wide.dtype.type((8 - bits) * place)
    result: npt.NDArray[np.uint8] = packed.astype(np.uint8)
    return result


def pack(codes: Integers, packing: Packing) -> npt.NDArray[np.uint8]:
    """Codes, flat, as stored; the last byte is filled up with zeros."""
    codes = np.concatenate([codes, np.zeros(-codes.size % packing.per_byte, codes.dtype)])
    return pack_bytes(codes.view(np.uint8) & np.uint8((1 << packing.bits) - 1), packing.bits)


def narrowed(values: Floats, type_: TensorType) -> npt.NDArray[np.generic]:
    """Finite numbers, flat, rounded to a type of :data:`FLOAT_TYPES`: to the nearest, ties to even; BF16 as uint16.

    Raises:
        OverflowError: a number leaves the range of the type.
    """
    if type_ is TensorType.FLOAT32:
        return values
    result: npt.NDArray[np.generic]
    if type_ is TensorType.BFLOAT16:
        # The sum cannot wrap: the largest finite magnitude, with the sign bit, is 0xFF7FFFFF.
        bits = values.view(np.uint32)
        rounded = bits >> np.uint32(16)
        rounded &= np.uint32(1)
        rounded += np.uint32(0x7FFF)
        rounded += bits
        upper: npt.NDArray[np.uint16] = np.ascontiguousarray(rounded.view(np.uint16)[1::2])
        result, overflows = upper, ((upper & np.uint16(0x7FFF)) == np.uint16(0x7F80)).any()
    else:
        with np.errstate(over="ignore"):
            halves = values.astype(np.float16)
        result, overflows = halves, not np.isfinite(halves).all()
    if overflows:
        raise OverflowError(f"a number leaves the range of {type_.name}")
    return result


def widened(stored: bytes, type_: TensorType) -> Floats:
    """Little-endian numbers of a type of :data:`FLOAT_TYPES`, or INT16, as float32, exactly; flat."""
    if type_ is TensorType.FLOAT32:
        return np.frombuffer(stored, "<f4")
    if type_ is TensorType.BFLOAT16:
        # A bfloat16 is the upper half of a float32.
        return (np.frombuffer(stored, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(stored, "<f2" if type_ is TensorType.FLOAT16 else "<i2").astype(np.float32)


def float_bytes(values: Floats, type_: TensorType, name: str) -> bytes:
    """float32 values, flat, as the floating-point type ``type_``, rounded to the nearest.

    Raises:
        UnsupportedError: a value leaves the type.
    """
    if np.isfinite(values).all():
        with suppress(OverflowError):
            return narrowed(values, type_).tobytes()
    raise UnsupportedError(f"{name}: holds values beyond the range of {type_.name}, which the file stores.")


def gathered(chunks: Iterable[Floats], shape: tuple[int, ...]) -> Floats:
    """Flat chunks, each perhaps a view that the next one overwrites, as one array of ``shape``."""
    result = np.empty(math.prod(shape), np.float32)
    at = 0
    for chunk in chunks:
        result[at : at + chunk.size] = chunk
        at += chunk.size
    return result.reshape(shape)


def rechunked(chunks: Iterable[npt.NDArray[Any]], unit: int) -> Iterator[npt.NDArray[Any]]:
    """The same elements in chunks of a multiple of ``unit`` (the last as it comes), each an array of its own."""
    size = max(1, CHUNK_ELEMENTS // unit) * unit
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


@dataclass(frozen=True)
class Storage:
    """How a constant lies in its file, which is how what replaces it has to lie.

    In stored order it is rows of :attr:`columns` elements that share a scale; row ``r`` has scale ``r % groups``.
    """

    type: TensorType
    shape: tuple[int, ...]
    kind: str
    """"none" (floats; INT16 too), "per_tensor", "per_channel" or "blockwise"."""
    axis: int = 0
    """Of the channels, for per_channel."""
    block_size: int = 0
    """Elements of the last axis that share a scale, for blockwise; else 0."""
    symmetric: bool = True
    """Whether zero points are all 0, and stay so."""

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
    def columns(self) -> int:
        """Neighbours that share a scale; 1 where there is one scale for all."""
        if self.kind == "blockwise":
            return self.block_size
        return math.prod(self.shape[self.axis + 1 :]) if self.kind == "per_channel" else 1

    @property
    def rows(self) -> int:
        """How many such groups of neighbours there are."""
        return self.elements // self.columns if self.columns else 0

    @property
    def unit(self) -> int:
        """Chunks of a multiple of it begin with a scale of their own, and on a byte."""
        if self.groups == 1:
            return 8
        return math.lcm(self.columns * (self.groups if self.rows > self.groups else 1), 8)

    def scale_rows(self, codes: Floats, first: int, scale: Floats, zero_point: Floats | None) -> None:
        """Turn codes into numbers, in place.

        Args:
            codes: whole rows of neighbours, flat, from row ``first`` on.
            scale: ``[groups]``.
            zero_point: ``[groups]``; None where nothing is to be subtracted.
        """
        if self.groups == 1:
            rows, which = codes.reshape(1, -1), slice(0, 1)
        else:
            rows, which = codes.reshape(-1, self.columns), self._groups_of(first, codes.size // self.columns)
        if zero_point is not None:
            rows -= zero_point[which, None]
        rows *= scale[which, None]

    def _groups_of(self, first: int, count: int) -> Any:
        """Index of the scales of rows ``[first, first + count)``."""
        if self.groups == self.rows:
            return slice(first, first + count)
        return np.arange(first, first + count) % self.groups

    def _grouped(self, chunk: npt.NDArray[Any], at: int) -> tuple[npt.NDArray[Any], slice]:
        """A chunk of whole units from element ``at`` on as ``[repeats, groups, neighbours]``, and which groups."""
        if self.groups == 1:
            return chunk.reshape(1, 1, -1), slice(0, 1)
        if self.rows > self.groups:
            return chunk.reshape(-1, self.groups, self.columns), slice(0, self.groups)
        first = at // self.columns
        return chunk.reshape(1, -1, self.columns), slice(first, first + chunk.size // self.columns)

    @property
    def _bounds(self) -> tuple[int, int]:
        """The least and the greatest code that a number becomes."""
        if self.type is TensorType.INT16:
            return -_LARGEST_INT16, _LARGEST_INT16
        assert self.packing is not None
        narrow = self.symmetric and self.packing.bits == _NARROW_BITS
        return self.packing.lowest + narrow, self.packing.highest

    def measure(self, chunks: Iterable[Floats]) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Scales and zero points for the numbers in ``chunks``, each ``[groups]``; in stored order."""
        low, high = np.zeros(self.groups, np.float32), np.zeros(self.groups, np.float32)
        at = 0
        for chunk in rechunked(chunks, self.unit):
            rows, which = self._grouped(chunk, at)
            low[which] = np.minimum(low[which], rows.min(axis=(0, 2)))
            high[which] = np.maximum(high[which], rows.max(axis=(0, 2)))
            at += chunk.size
        return self._scales(low, high)

    def _scales(self, low: Floats, high: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
        zeros = np.zeros(low.size, np.int64)
        bound = np.maximum(np.maximum(-low, high) if self.symmetric else high - low, _SMALLEST_BOUND).astype(np.float32)
        lowest, highest = self._bounds
        scale = bound / np.float32(highest if self.symmetric else highest - lowest)
        zero_point = zeros if self.symmetric else np.rint(np.float32(lowest) - low / scale).astype(np.int64)
        if self.kind == "blockwise":
            brain, half = TensorType.BFLOAT16, TensorType.FLOAT16
            try:
                halves = narrowed(widened(narrowed(scale, brain).tobytes(), brain), half)
            except OverflowError as error:
                raise UnsupportedError("A scale of blocks leaves FP16, in which the file stores them.") from error
            # What underflows FP16 is a block of nothing but zeros.
            scale = np.maximum(halves.astype(np.float32), _SMALLEST_F16)
        return scale, zero_point

    @property
    def by_rows(self) -> bool:
        """Whether each of :attr:`rows` has a scale of its own, so that :meth:`quantized` takes any of them."""
        return self.packing is not None and self.rows == self.groups

    def quantized(self, values: Floats) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
        """Scales, zero points, each ``[rows]``, and codes, ``[rows, columns]`` in float32, of some whole rows.

        The same as :meth:`measure` and :meth:`encode` give in two passes; only where :attr:`by_rows`.
        """
        low, high = np.minimum(values.min(axis=1), np.float32(0)), np.maximum(values.max(axis=1), np.float32(0))
        scale, zero_point = self._scales(low, high)
        shift = zero_point.astype(np.float32) if zero_point.any() else None
        return scale, zero_point, self._codes(values, scale, shift)

    def _codes(self, rows: npt.NDArray[Any], scale: Floats, shift: Floats | None) -> npt.NDArray[Any]:
        """The codes of ``rows`` ``[…, groups, neighbours]``, still as floats."""
        lowest, highest = self._bounds
        codes: npt.NDArray[Any] = rows / scale[:, None]
        if shift is not None:
            codes += shift[:, None]
        np.clip(np.rint(codes, out=codes), lowest, highest, out=codes)
        return codes

    def encode(self, chunks: Iterable[Floats], scale: Floats, zero_point: npt.NDArray[np.int64]) -> Iterator[Integers]:
        """Codes of the numbers in ``chunks``, flat, in stored order; chunks of a multiple of :attr:`unit`."""
        dtype: np.dtype[Any] = self.packing.dtype if self.packing is not None else np.dtype(np.int16)
        shift = zero_point.astype(np.float32) if zero_point.any() else None
        at = 0
        for chunk in rechunked(chunks, self.unit):
            rows, which = self._grouped(chunk, at)
            codes = self._codes(rows, scale[which], None if shift is None else shift[which])
            yield codes.astype(dtype).reshape(-1)
            at += chunk.size

    def decode(
        self, codes: Iterable[npt.NDArray[Any]], scale: Floats, zero_point: npt.NDArray[np.int64]
    ) -> Iterator[Floats]:
        """The numbers that ``codes``, in stored order, stand for."""
        shift = zero_point.astype(np.float32) if zero_point.any() else None
        first = 0
        for chunk in rechunked(codes, self.unit):
            values = chunk.astype(np.float32)
            self.scale_rows(values, first, scale, shift)
            yield values
            first += chunk.size // self.columns

    def stored_codes(self, codes: Iterable[npt.NDArray[Any]]) -> Iterator[bytes]:
        """Codes, in chunks that :meth:`encode` gives or any others, as bytes."""
        for chunk in rechunked(codes, 8):
            yield chunk.astype("<i2").tobytes() if self.packing is None else pack(chunk, self.packing).tobytes()
