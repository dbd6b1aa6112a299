"""Storage of a constant's numbers: bytes → codes → numbers, and back.

``real = scale · (code − zero_point)``. Codes of less than a byte are packed flat in row-major order, first element in
the low bits, two's complement (unsigned for UINT4); a row need not begin on a byte.

Numbers become codes by the rule of ai-edge-quantizer (0.10.0, min/max), which made Google's files:
``scale = max|w| / qmax``, codes rounded to the nearest, ties to even; symmetric codes of whole bytes leave out the
lowest (−127…127), those of fewer bits do not; with zero points, ``scale = (max − min) / (2^bits − 1)`` over a range
that includes 0; scales of blocks are rounded to bfloat16 and stored as FP16.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.litertlm.tflite import ELEMENT_BITS, TensorType

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.integer]

CHUNK_ELEMENTS = 1 << 18
"""Elements that are processed at a time: 1 MiB of float32, which stays in the cache of a core."""

LARGEST_SCALE = float(np.finfo(np.float32).max) / (1 << 18)
"""With a larger scale, (code − zero point) · scale could leave float32."""

# Keeps scales above 0: nothing can be divided by 0.
_SMALLEST_BOUND = 1e-9
_SMALLEST_F16 = np.float32(np.finfo(np.float16).smallest_subnormal)

# Bits → shifts and masks that spread the codes of a byte over the bytes of a little-endian integer.
_SPREAD = MappingProxyType({4: ((4, 0x0F0F),), 2: ((12, 0x000F000F), (6, 0x03030303))})


@dataclass(frozen=True)
class Packing:
    """Packing of codes in bytes: ``bits`` each, two's complement if ``signed``."""

    bits: int
    signed: bool

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]:
        """The type of an unpacked code, little-endian."""
        return np.dtype(f"<{'i' if self.signed else 'u'}{-(-self.bits // 8)}")

    @property
    def lowest(self) -> int:
        return -(1 << self.bits - 1) if self.signed else 0

    @property
    def highest(self) -> int:
        return self.lowest + (1 << self.bits) - 1

    def unpack(self, stored: bytes) -> Integers:
        """Unpack all codes in ``stored``, flat, of :attr:`dtype`."""
        codes = unpack_bytes(np.frombuffer(stored, np.uint8), self.bits)
        if self.signed and self.bits < 8:
            codes ^= np.uint8(-self.lowest)
            codes -= np.uint8(-self.lowest)
        return codes.view(self.dtype)


CODE_TYPES = MappingProxyType(
    {
        TensorType.INT16: Packing(16, True),
        TensorType.INT8: Packing(8, True),
        TensorType.UINT8: Packing(8, False),
        TensorType.INT4: Packing(4, True),
        TensorType.UINT4: Packing(4, False),
        TensorType.INT2: Packing(2, True),
    }
)
"""Element types that hold quantized codes; INT16 for vectors of fully quantized models."""

FLOAT_TYPES = frozenset({TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16})
"""Element types that hold real numbers."""

NUMBER_TYPES = FLOAT_TYPES | CODE_TYPES.keys()
"""Element types that a weight may have."""


def pack_bytes(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Pack codes of a byte each into ``bits`` bits, the first in the low bits.

    Args:
        codes: contiguous, the last axis a multiple of 8 / ``bits``; bits above the lowest ``bits`` are 0.
    """
    if bits == 8:
        return codes
    # All codes of a packed byte at once: the bytes of one little-endian integer.
    wide = codes.view("<u2" if bits == 4 else "<u4")
    packed = wide.copy()
    for place in range(1, 8 // bits):
        packed |= wide >> wide.dtype.type((8 - bits) * place)
    result: npt.NDArray[np.uint8] = packed.astype(np.uint8)
    return result


def unpack_bytes(stored: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Undo :func:`pack_bytes`; the last axis of ``stored`` is contiguous. Codes of whole bytes stay the same array."""
    if bits >= 8:
        return stored
    wide = stored.astype("<u2" if bits == 4 else "<u4")
    for shift, mask in _SPREAD[bits]:
        wide |= wide << wide.dtype.type(shift)
        wide &= wide.dtype.type(mask)
    codes: npt.NDArray[np.uint8] = wide.view(np.uint8)
    return codes


def round_floats(values: Floats, type_: TensorType) -> npt.NDArray[np.generic]:
    """Round finite numbers, flat, to a type of :data:`FLOAT_TYPES`, ties to even; BF16 is returned as uint16.

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


def widen_floats(stored: bytes | memoryview, type_: TensorType) -> Floats:
    """Convert little-endian numbers of a type of :data:`FLOAT_TYPES` exactly to float32, flat."""
    if type_ is TensorType.FLOAT32:
        return np.frombuffer(stored, "<f4")
    if type_ is TensorType.BFLOAT16:
        # A bfloat16 is the upper half of a float32.
        bits = np.frombuffer(stored, "<u2").astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return np.frombuffer(stored, "<f2").astype(np.float32)


def encode_floats(values: Floats, type_: TensorType, name: str) -> bytes:
    """Encode ``values``, flat, as ``type_``, rounded to the nearest; UnsupportedError if one leaves its range."""
    if np.isfinite(values).all():
        with suppress(OverflowError):
            return round_floats(values, type_).tobytes()
    raise UnsupportedError(f"{name}: holds values beyond the range of {type_.name}, which the file stores.")


@dataclass(frozen=True)
class Storage:
    """Element type, shape and grouping by scale of a constant in its file.

    In stored order it is ``[repeats, groups, columns]``: rows of ``columns`` neighbours that share one of ``groups``
    scales; row ``r`` has scale ``r % groups``.
    """

    type: TensorType
    shape: tuple[int, ...]
    kind: str  # "none" (floats), "per_tensor", "per_channel" or "blockwise"
    axis: int = 0  # of the channels, for per_channel
    block_size: int = 0  # elements of the last axis that share a scale, for blockwise; else 0
    symmetric: bool = True  # whether zero points are all 0, and stay so

    @property
    def packing(self) -> Packing | None:
        """The packing of codes; None for floats."""
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
        """Number of scales."""
        if self.kind == "blockwise":
            return self.elements // self.block_size
        return self.shape[self.axis] if self.kind == "per_channel" else 1

    @property
    def columns(self) -> int:
        """Number of neighbours that share a scale; 1 if there is one scale for all."""
        if self.kind == "blockwise":
            return self.block_size
        return math.prod(self.shape[self.axis + 1 :]) if self.kind == "per_channel" else 1

    @property
    def rows(self) -> int:
        """Number of rows of :attr:`columns` neighbours."""
        return self.elements // self.columns if self.columns else 0

    @property
    def by_rows(self) -> bool:
        """Whether each of :attr:`rows` has its own scale, so that some rows can be processed alone."""
        return self.packing is not None and self.rows == self.groups

    def quantized(self, values: Floats) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
        """Return scales and zero points, each ``[groups]``, and codes, float32 in the shape of ``values``.

        Args:
            values: the whole constant, or some rows if it is :attr:`by_rows`.

        Raises:
            UnsupportedError: a scale of blocks leaves FP16.
        """
        scale, zero_point = self.compute_scales(values)
        return scale, zero_point, self.quantize_by(values, scale, zero_point)

    def quantize_by(self, values: Floats, scale: Floats, zero_point: npt.NDArray[np.int64]) -> Floats:
        """Return the codes of ``values`` with given scales and zero points, as :meth:`quantized` does."""
        # With a scale of 0, every code stands for 0.
        codes: npt.NDArray[Any] = self.group_by_scale(values) / np.where(scale > 0, scale, np.float32(1))[:, None]
        if not self.symmetric:
            codes += zero_point[:, None].astype(np.float32)
        np.clip(np.rint(codes, out=codes), *self.bounds, out=codes)
        return codes.reshape(values.shape)

    def group_by_scale(self, values: Floats) -> npt.NDArray[Any]:
        """Reshape ``values`` to ``[repeats, groups, columns]``."""
        return values.reshape((1, -1, self.columns) if self.by_rows else (-1, self.groups, self.columns))

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest code that the quantizer uses."""
        assert self.packing is not None
        is_narrow = self.symmetric and self.packing.signed and self.packing.bits >= 8
        return self.packing.lowest + is_narrow, self.packing.highest

    def dequantize_inplace(
        self, codes: Floats, scale: Floats, zero_point: npt.NDArray[np.int64], begin: int = 0
    ) -> None:
        """Convert ``codes`` of the elements from ``begin`` on, flat, to numbers in place."""
        groups_of_rows: slice | Integers = slice(0, 1)
        columns = codes.size
        if self.groups > 1:
            # A range may begin or end within a row if the constant has more axes than its weight.
            columns = self.columns if not (begin % self.columns or codes.size % self.columns) else 1
            first, last = begin // columns, (begin + codes.size) // columns
            groups_of_rows = slice(first, last)
            if columns < self.columns or not self.by_rows:
                groups_of_rows = np.arange(first, last) * columns // self.columns % self.groups
        rows = codes.reshape(-1, max(columns, 1))
        if not self.symmetric:
            rows -= zero_point[groups_of_rows, None].astype(np.float32)
        rows *= scale[groups_of_rows, None]

    def pack_codes(self, codes: npt.NDArray[Any]) -> bytes:
        """Pack codes of any type, flat, into bytes; the last byte is padded with zeros."""
        assert self.packing is not None
        bits = self.packing.bits
        codes = codes.astype(self.packing.dtype, copy=False)
        if bits >= 8:
            return codes.tobytes()
        if missing := -codes.size % (8 // bits):
            codes = np.concatenate([codes, np.zeros(missing, codes.dtype)])
        return pack_bytes(codes.view(np.uint8) & np.uint8((1 << bits) - 1), bits).tobytes()

    def compute_scales(self, values: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Return scales and zero points of ``values``, as :meth:`quantized` does."""
        rows = self.group_by_scale(values)
        lowest, highest = self.bounds
        low = np.minimum(rows.min(axis=(0, 2)), np.float32(0))
        high = np.maximum(rows.max(axis=(0, 2)), np.float32(0))
        if self.symmetric:
            scale = np.maximum(np.maximum(-low, high), _SMALLEST_BOUND).astype(np.float32) / np.float32(highest)
            zero_point = np.zeros(low.size)
        else:
            bound = np.maximum(high - low, _SMALLEST_BOUND).astype(np.float32)
            scale = bound / np.float32(highest - lowest)
            zero_point = np.rint(np.float32(lowest) - low / scale)
        return _round_block_scales(scale) if self.kind == "blockwise" else scale, zero_point.astype(np.int64)


def _round_block_scales(scale: Floats) -> Floats:
    """Round scales of blocks as files store them: BF16 numbers in FP16."""
    try:
        brains = widen_floats(round_floats(scale, TensorType.BFLOAT16).tobytes(), TensorType.BFLOAT16)
        halves = round_floats(brains, TensorType.FLOAT16)
    except OverflowError as error:
        raise UnsupportedError("A scale of blocks leaves FP16, in which the file stores them.") from error
    # Only the scale of a block of zeros underflows FP16.
    stored: Floats = np.maximum(halves.astype(np.float32), _SMALLEST_F16)
    return stored
