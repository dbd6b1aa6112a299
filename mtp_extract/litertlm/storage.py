"""How the numbers of a constant are stored: bytes → codes → numbers, and back.

``real = scale · (code − zero_point)``. The element type decides, never the presence of metadata: an F32 tensor is taken
as it is, whatever scales it carries (dequantizing the norms of published drafters zeroes them). Codes of less than a
byte are packed flat in row-major order, first element in the low bits, two's complement (unsigned for UINT4); a row
need not begin on a byte. Any range of elements that begins on one can be read alone, 1 MiB of float32 at a time, so
that what is worked on stays in a core's own cache.

The rule from numbers to codes is ai-edge-quantizer's (0.10.0, min/max), the one that Google's files were made by:
``scale = max|w| / qmax``, codes rounded to the nearest, ties to even; symmetric codes of whole bytes leave out
the lowest (−127…127), fewer bits use all; where zero points are stored, ``scale = (max − min) / (2^bits − 1)`` over a
range that holds 0; scales of blocks are rounded to bfloat16 and stored as FP16.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, UnsupportedError, several
from mtp_extract.io.source import Region
from mtp_extract.litertlm.tflite import (
    ELEMENT_BITS,
    Blockwise,
    Quantization,
    Tensor,
    TensorType,
    TfliteModel,
)

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.integer]

CHUNK_ELEMENTS = 1 << 18
"""Elements at a time: 1 MiB of float32, which stays in a core's own cache."""

LARGEST_SCALE = float(np.finfo(np.float32).max) / (1 << 18)
"""No code, less its zero point, times this leaves float32."""

# A scale of zero would make every code one value.
_SMALLEST_BOUND = 1e-9
_SMALLEST_F16 = np.float32(np.finfo(np.float16).smallest_subnormal)

# Spreads the codes of a byte over a little-endian integer that has a byte for each: shifts, and what to keep.
_SPREAD = MappingProxyType({4: ((4, 0x0F0F),), 2: ((12, 0x000F000F), (6, 0x03030303))})


@dataclass(frozen=True)
class Packing:
    """How codes lie in bytes: ``bits`` each, two's complement where ``signed``."""

    bits: int
    signed: bool

    @property
    def dtype(self) -> np.dtype[np.integer[Any]]:
        """Type that holds one unpacked code, little-endian."""
        return np.dtype(f"<{'i' if self.signed else 'u'}{-(-self.bits // 8)}")

    @property
    def lowest(self) -> int:
        return -(1 << self.bits - 1) if self.signed else 0

    @property
    def highest(self) -> int:
        return self.lowest + (1 << self.bits) - 1

    def unpack(self, stored: bytes) -> Integers:
        """All codes that ``stored`` holds, flat, of :attr:`dtype`."""
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
"""Element types that hold quantized codes. INT16 is that of vectors where every operator is quantized."""

FLOAT_TYPES = frozenset({TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16})
"""Element types that hold real numbers."""

NUMBER_TYPES = FLOAT_TYPES | CODE_TYPES.keys()
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


def unpack_bytes(stored: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """What :func:`pack_bytes` packed, from bytes whose last axis is contiguous; of whole bytes ``stored`` itself."""
    if bits >= 8:
        return stored
    wide = stored.astype("<u2" if bits == 4 else "<u4")
    for shift, mask in _SPREAD[bits]:
        wide |= wide << wide.dtype.type(shift)
        wide &= wide.dtype.type(mask)
    codes: npt.NDArray[np.uint8] = wide.view(np.uint8)
    return codes


def pack_codes(codes: Integers, packing: Packing) -> npt.NDArray[np.uint8]:
    """Codes, flat, as stored; the last byte is filled up with zeros."""
    if packing.bits >= 8:
        return codes.astype(packing.dtype, copy=False).view(np.uint8)
    if missing := -codes.size % (8 // packing.bits):
        codes = np.concatenate([codes, np.zeros(missing, codes.dtype)])
    return pack_bytes(codes.view(np.uint8) & np.uint8((1 << packing.bits) - 1), packing.bits)


def round_floats(values: Floats, type_: TensorType) -> npt.NDArray[np.generic]:
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


def widened(stored: bytes | memoryview, type_: TensorType) -> Floats:
    """Little-endian numbers of a type of :data:`FLOAT_TYPES` as float32, exactly; flat."""
    if type_ is TensorType.FLOAT32:
        return np.frombuffer(stored, "<f4")
    if type_ is TensorType.BFLOAT16:
        # A bfloat16 is the upper half of a float32.
        bits = np.frombuffer(stored, "<u2").astype(np.uint32)
        bits <<= np.uint32(16)
        return bits.view(np.float32)
    return np.frombuffer(stored, "<f2").astype(np.float32)


def float_bytes(values: Floats, type_: TensorType, name: str) -> bytes:
    """float32 values, flat, as the floating-point type ``type_``, rounded to the nearest.

    Raises:
        UnsupportedError: a value leaves the type.
    """
    if np.isfinite(values).all():
        with suppress(OverflowError):
            return round_floats(values, type_).tobytes()
    raise UnsupportedError(f"{name}: holds values beyond the range of {type_.name}, which the file stores.")


@dataclass(frozen=True)
class Storage:
    """How a constant lies in its file, which is how what replaces it has to lie.

    In stored order it is ``[repeats, groups, columns]``: rows of ``columns`` neighbours that share a scale, of which
    there are ``groups``; row ``r`` has scale ``r % groups``.
    """

    type: TensorType
    shape: tuple[int, ...]
    kind: str
    """"none" (floats), "per_tensor", "per_channel" or "blockwise"."""
    axis: int = 0
    """Of the channels, for per_channel."""
    block_size: int = 0
    """Elements of the last axis that share a scale, for blockwise; else 0."""
    symmetric: bool = True
    """Whether zero points are all 0, and stay so."""

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
    def by_rows(self) -> bool:
        """Whether each of :attr:`rows` has a scale of its own, so that some of them can be taken alone."""
        return self.packing is not None and self.rows == self.groups

    def quantized(self, values: Floats) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
        """Scales and zero points, each ``[groups]``, and codes, shaped like ``values`` and still float32.

        Args:
            values: all of the constant, or, where it is :attr:`by_rows`, some whole rows.

        Raises:
            UnsupportedError: a scale of blocks leaves FP16.
        """
        scale, zero_point = self.scales_for(values)
        return scale, zero_point, self.coded(values, scale, zero_point)

    def coded(self, values: Floats, scale: Floats, zero_point: npt.NDArray[np.int64]) -> Floats:
        """The codes of ``values`` with these scales and zero points, as :meth:`quantized` gives them."""
        codes: npt.NDArray[Any] = self.by_scale(values) / scale[:, None]
        if not self.symmetric:
            codes += zero_point[:, None].astype(np.float32)
        np.clip(np.rint(codes, out=codes), *self.bounds, out=codes)
        return codes.reshape(values.shape)

    def by_scale(self, values: Floats) -> npt.NDArray[Any]:
        """``values`` as ``[repeats, groups, columns]``."""
        return values.reshape((1, -1, self.columns) if self.by_rows else (-1, self.groups, self.columns))

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest and the highest code that the rule uses."""
        assert self.packing is not None
        is_narrow = self.symmetric and self.packing.signed and self.packing.bits >= 8
        return self.packing.lowest + is_narrow, self.packing.highest

    def scale_codes(self, codes: Floats, scale: Floats, zero_point: npt.NDArray[np.int64], begin: int = 0) -> None:
        """Turn ``codes`` of elements from ``begin`` on, flat, into the numbers that they stand for, in place."""
        groups_of_rows: slice | Integers = slice(0, 1)
        columns = codes.size
        if self.groups > 1:
            # A range may begin or end within a row of a constant with more axes than its weight.
            columns = self.columns if not (begin % self.columns or codes.size % self.columns) else 1
            first, last = begin // columns, (begin + codes.size) // columns
            groups_of_rows = slice(first, last)
            if columns < self.columns or not self.by_rows:
                groups_of_rows = np.arange(first, last) * columns // self.columns % self.groups
        rows = codes.reshape(-1, max(columns, 1))
        if not self.symmetric:
            rows -= zero_point[groups_of_rows, None].astype(np.float32)
        rows *= scale[groups_of_rows, None]

    def stored(self, codes: npt.NDArray[Any]) -> bytes:
        """Codes of any type, flat, as bytes; they begin on one."""
        assert self.packing is not None
        return pack_codes(codes.astype(self.packing.dtype, copy=False), self.packing).tobytes()

    def scales_for(self, values: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Scales and zero points of ``values``, as :meth:`quantized` gives them."""
        rows = self.by_scale(values)
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
        return _scales_of_blocks(scale) if self.kind == "blockwise" else scale, zero_point.astype(np.int64)


def _scales_of_blocks(scale: Floats) -> Floats:
    """Scales as a file stores them for blocks: BF16 numbers, in FP16."""
    try:
        brains = widened(round_floats(scale, TensorType.BFLOAT16).tobytes(), TensorType.BFLOAT16)
        halves = round_floats(brains, TensorType.FLOAT16)
    except OverflowError as error:
        raise UnsupportedError("A scale of blocks leaves FP16, in which the file stores them.") from error
    # What underflows FP16 is a block of nothing but zeros.
    stored: Floats = np.maximum(halves.astype(np.float32), _SMALLEST_F16)
    return stored


@dataclass(frozen=True)
class QuantizedTensor:
    """A constant with what is needed to read it. Nothing is read until asked for.

    Attributes:
        storage: how it lies in the file: as rows of elements that share a scale.
        scale: float32; ``[1]``, ``[channels]`` or ``[…, blocks]``; empty for floats. As stored, but blockwise FP16
            scales are widened.
        zero_point: int64, shaped like ``scale`` (zeros when none are stored); empty for floats.
    """

    tensor: Tensor
    location: Region
    storage: Storage
    scale: Floats
    zero_point: npt.NDArray[np.int64]

    @classmethod
    def of(cls, model: TfliteModel, tensor: Tensor) -> QuantizedTensor:
        """``tensor`` with its quantization, checked.

        Raises:
            UnsupportedError: sparse, multi-axis or custom quantization, or an element type without numbers.
            FormatError: scales that do not fit the shape, or are not finite and non-negative.
        """
        if tensor.sparse:
            raise UnsupportedError(f"{tensor.label} is stored sparse, which this release cannot read.")
        location = model.locate(tensor)
        type_ = TensorType(tensor.type_id)
        quantization = tensor.quantization
        if type_ in FLOAT_TYPES:
            plain = Storage(type_, tensor.shape, "none")
            return cls(tensor, location, plain, np.empty(0, np.float32), np.empty(0, np.int64))
        if type_ not in CODE_TYPES:
            raise UnsupportedError(f"{tensor.label}: weights of type {tensor.type_name} are not supported.")
        if quantization is None:
            raise FormatError(f"{tensor.label} holds integers and no scale to read them with.")
        if quantization.details not in ("none", "blockwise"):
            raise UnsupportedError(
                f"{tensor.label} has {quantization.details} quantization, which this release cannot read."
            )
        scale, zero_point = _checked(tensor, CODE_TYPES[type_], *_scales_of(model, tensor, quantization))
        storage = _storage_of(type_, tensor, quantization, symmetric=not zero_point.any())
        return cls(tensor, location, storage, scale, zero_point)

    @property
    def packing(self) -> Packing | None:
        """How the codes are packed; None for floats."""
        return self.storage.packing

    def codes(self, begin: int = 0, end: int | None = None) -> Integers:
        """The codes of elements ``[begin, end)``, flat, as stored; zero points are not subtracted.

        Args:
            begin: of an element that begins on a byte, such as a multiple of 8.

        Raises:
            UnsupportedError: a tensor of floats has none.
        """
        if self.packing is None:
            raise UnsupportedError(f"{self.tensor.label} holds real numbers, not codes.")
        end = self.tensor.elements if end is None else end
        return self.packing.unpack(self._bytes(begin, end))[: end - begin]

    def floats(self, begin: int = 0, end: int | None = None) -> Floats:
        """The numbers of elements ``[begin, end)``, flat, float32; ``begin`` as for :meth:`codes`.

        Raises:
            FormatError: a floating-point tensor holds values that are not finite.
        """
        end = self.tensor.elements if end is None else end
        result = np.empty(end - begin, np.float32)
        # Whole rows where they are short, so that each is multiplied by its scale at once.
        row = math.lcm(max(self.storage.columns, 1), 8)
        step = CHUNK_ELEMENTS // row * row or CHUNK_ELEMENTS
        for at in range(begin, end, step):
            part = result[at - begin : at - begin + step]
            # By the type, never by the scales: floats may carry some that mean nothing.
            if self.packing is None:
                np.copyto(part, widened(self._bytes(at, at + part.size), self.storage.type))
                if not np.isfinite(part).all():
                    raise FormatError(f"{self.tensor.label} holds values that are not finite: the file is damaged.")
            else:
                np.copyto(part, self.codes(at, at + part.size))
                self.storage.scale_codes(part, self.scale.reshape(-1), self.zero_point.reshape(-1), at)
        return result

    def dequantize(self) -> Floats:
        """All numbers, float32, in the tensor's shape."""
        return self.floats().reshape(self.tensor.shape)

    def _bytes(self, begin: int, end: int) -> bytes:
        bits = ELEMENT_BITS[self.storage.type]
        return self.location.read(begin * bits // 8, -(-end * bits // 8) - begin * bits // 8)


def _scales_of(model: TfliteModel, tensor: Tensor, quantization: Quantization) -> tuple[Floats, npt.NDArray[np.int64]]:
    if quantization.blockwise is not None:
        return _block_scales(model, tensor, quantization.blockwise)
    return _channel_scales(tensor, quantization)


def _storage_of(type_: TensorType, tensor: Tensor, quantization: Quantization, *, symmetric: bool) -> Storage:
    """How codes lie with scales that were checked."""
    if quantization.blockwise is not None:
        return Storage(type_, tensor.shape, "blockwise", 0, quantization.blockwise.block_size, symmetric)
    if quantization.scales.count == 1:
        return Storage(type_, tensor.shape, "per_tensor", symmetric=symmetric)
    return Storage(type_, tensor.shape, "per_channel", quantization.axis, symmetric=symmetric)


def _channel_scales(tensor: Tensor, quantization: Quantization) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Scales and zero points, one of all or one a channel."""
    # Counted before they are read: a vector may claim the rest of the file.
    scales = quantization.scales.count
    zeros = quantization.zero_points.count
    axis = quantization.axis
    if scales != 1 and not (0 <= axis < len(tensor.shape) and scales == tensor.shape[axis] and scales > 0):
        raise FormatError(f"{tensor.label} has {scales} scales along axis {axis}; expected 1, or one per channel.")
    if zeros not in (0, 1, scales):
        raise FormatError(
            f"{tensor.label} has {several(zeros, 'zero point')} for {several(scales, 'scale')}; expected none, 1, or "
            "one per scale. The file is damaged: fetch it again."
        )
    return quantization.scale, quantization.zero_point


def _block_scales(model: TfliteModel, tensor: Tensor, details: Blockwise) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Scales and zero points of blocks, ``[…, blocks]``: in tensors that the details name, whatever else there is."""
    size = details.block_size
    if size <= 0 or not tensor.shape or tensor.shape[-1] % size:
        raise FormatError(f"{tensor.label} has blocks of {size} along an axis of {tensor.shape[-1:]}.")
    tensors = model.subgraphs[tensor.subgraph].tensors
    _check_index(tensor, details.scales, 0, len(tensors))
    _check_index(tensor, details.zero_points, -1, len(tensors))
    blocks = (*tensor.shape[:-1], tensor.shape[-1] // size)
    scales = tensors[details.scales]
    # Floats only: scales that had scales of their own could lead back here.
    if scales.type not in FLOAT_TYPES or scales.elements != math.prod(blocks):
        raise FormatError(f"{tensor.label} has {scales.label} for its block scales; expected floats {list(blocks)}.")
    scale = read_floats(model, scales).reshape(blocks)
    if details.zero_points < 0:
        return scale, np.empty(0, np.int64)
    zero_points = tensors[details.zero_points]
    if zero_points.elements not in (1, scale.size):
        raise FormatError(f"{tensor.label} has {scale.size} block scales and {zero_points.elements} zero points.")
    return scale, _plain_integers(model, zero_points)


def _check_index(tensor: Tensor, index: int, fewest: int, count: int) -> None:
    if not fewest <= index < count:
        raise FormatError(f"{tensor.label} names tensor {index} for its blocks; there are {count}.")


def _checked(
    tensor: Tensor, packing: Packing, scale: Floats, zero_point: npt.NDArray[np.int64]
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Scales that a weight may have, and zero points, one for each."""
    if not (np.isfinite(scale).all() and (scale >= 0).all()):
        raise FormatError(f"{tensor.label} has scales that are negative or not finite: the file is damaged.")
    if scale.size and scale.max() > LARGEST_SCALE:
        raise FormatError(f"{tensor.label} has a scale of {scale.max():g}: the file is damaged.")
    if packing.bits > 8 and (scale.size != 1 or zero_point.any()):
        raise UnsupportedError(f"{tensor.label}: INT16 with several scales or a zero point is not supported.")
    outside = (zero_point < packing.lowest) | (zero_point > packing.highest)
    if outside.any():
        codes = f"{packing.lowest}…{packing.highest}"
        raise FormatError(f"{tensor.label} has zero points outside the range of its codes, {codes}.")
    if zero_point.size != scale.size:
        zero_point = np.broadcast_to(zero_point[0] if zero_point.size else np.int64(0), scale.shape)
    return scale, zero_point.reshape(scale.shape)


def _plain_integers(model: TfliteModel, tensor: Tensor) -> npt.NDArray[np.int64]:
    stored, type_ = model.locate(tensor).read(), TensorType(tensor.type_id)
    if type_ in CODE_TYPES:
        return CODE_TYPES[type_].unpack(stored)[: tensor.elements].astype(np.int64)
    if type_ not in (TensorType.INT32, TensorType.INT64):
        raise UnsupportedError(f"{tensor.label} should hold zero points, which are integers.")
    return np.frombuffer(stored, f"<i{ELEMENT_BITS[type_] // 8}").astype(np.int64)


def read_floats(model: TfliteModel, tensor: Tensor) -> Floats:
    """A small constant as float32 in its shape, dequantized where its type holds codes."""
    return QuantizedTensor.of(model, tensor).dequantize()
