"""From stored bytes to numbers: codes, scales, zero points; ``real = scale · (code − zero_point)``.

The element type decides, never the presence of metadata: an F32 tensor is taken as it is, whatever scales it
carries (dequantizing the norms of published drafters zeroes them).

Dequantizing looks one or two bytes of codes at a time up in a table of the 2 or 4 floats they stand for, into a chunk
that fits the cache, and multiplies the chunk by its scales in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, UnsupportedError
from mtp_extract.litertlm.storage import (
    CHUNK_ELEMENTS,
    CODE_TYPES,
    FLOAT_TYPES,
    Floats,
    Integers,
    Packing,
    Storage,
    gathered,
    widened,
)
from mtp_extract.litertlm.tflite import ELEMENT_BITS, BufferLocation, Tensor, TensorType, TfliteModel

LARGEST_SCALE = float(np.finfo(np.float32).max) / 1024
"""No code, less its zero point, times this leaves float32."""

# Bytes looked up at a time, by the bits of a code: INT4 and INT8 in pairs, INT2 singly.
_UNIT_BYTES = MappingProxyType({2: 1, 4: 2, 8: 2})
# The floats of a table entry are moved as one wide element; the type only says how wide.
_WIDE: MappingProxyType[int, np.dtype[np.generic]] = MappingProxyType(
    {2: np.dtype(np.uint64), 4: np.dtype(np.complex128)}
)


@cache
def _codes_of_units(packing: Packing) -> Integers:
    """The codes every value of a unit stands for, first element first: ``[values, codes of a unit]``."""
    codes = packing.codes
    if _UNIT_BYTES[packing.bits] == 2:
        # The unit is little-endian: its low byte comes first.
        codes = np.concatenate([np.tile(codes, (256, 1)), np.repeat(codes, 256, axis=0)], axis=1)
        codes.setflags(write=False)
    return codes


@lru_cache(maxsize=8)
def _floats_of_units(packing: Packing, zero_point: int) -> npt.NDArray[np.generic]:
    """code − zero_point for every value of a unit, its floats as one wide element; at most 1 MiB."""
    codes = _codes_of_units(packing).astype(np.float32) - np.float32(zero_point)
    table: npt.NDArray[np.generic] = codes.view(_WIDE[codes.shape[1]]).reshape(-1)
    table.setflags(write=False)
    return table


def _units(stored: bytes, packing: Packing) -> npt.NDArray[np.unsignedinteger]:
    unit = _UNIT_BYTES[packing.bits]
    return np.frombuffer(stored + b"\0" * (-len(stored) % unit), f"<u{unit}")


@dataclass(frozen=True)
class QuantizedTensor:
    """A constant with what is needed to read it. Nothing is read until asked for.

    Attributes:
        kind, axis, block_size: as :class:`~mtp_extract.litertlm.storage.Storage` has them. INT16, the vectors of models
            whose every operator is quantized, is of kind "none".
        scale: float32; ``[1]``, ``[channels]`` or ``[…, blocks]``; empty for floats. As stored, but blockwise FP16
            scales are widened.
        zero_point: int64, shaped like ``scale`` (zeros when none are stored); empty for floats.
    """

    tensor: Tensor
    location: BufferLocation
    kind: str
    axis: int
    block_size: int
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
        if tensor.type in FLOAT_TYPES:
            return cls(tensor, location, "none", 0, 0, np.empty(0, np.float32), np.empty(0, np.int64))
        if tensor.type is TensorType.INT16 and tensor.quantization is not None:
            return cls._wide(tensor, location)
        if tensor.type not in CODE_TYPES:
            raise UnsupportedError(f"{tensor.label}: weights of type {tensor.type_name} are not supported.")
        quantization = tensor.quantization
        if quantization is None:
            raise FormatError(f"{tensor.label} holds integers and no scale to read them with.")
        if quantization.details not in ("none", "blockwise"):
            raise UnsupportedError(
                f"{tensor.label} has {quantization.details} quantization, which this release cannot read."
            )
        if quantization.blockwise is not None:
            return cls._blockwise(model, tensor, location)
        # Counted before they are read: a vector may claim the rest of the file.
        scales, axis = quantization.scale_count, quantization.axis
        if scales != 1 and not (0 <= axis < len(tensor.shape) and scales == tensor.shape[axis] and scales > 0):
            raise FormatError(f"{tensor.label} has {scales} scales along axis {axis}; expected 1, or one per channel.")
        if quantization.zero_point_count not in (0, 1, scales):
            raise FormatError(f"{tensor.label} has {scales} scales and {quantization.zero_point_count} zero points.")
        scale, zero_point = quantization.scale, quantization.zero_point
        kind = "per_tensor" if scale.size == 1 else "per_channel"
        return cls(tensor, location, kind, axis if scale.size > 1 else 0, 0, scale, zero_point)._checked()

    @classmethod
    def _wide(cls, tensor: Tensor, location: BufferLocation) -> QuantizedTensor:
        assert tensor.quantization is not None
        if tensor.quantization.scale_count != 1 or tensor.quantization.zero_point.any():
            raise UnsupportedError(f"{tensor.label}: INT16 with several scales or a zero point is not supported.")
        scale = tensor.quantization.scale
        if not 0 <= scale[0] < LARGEST_SCALE / (1 << 15):
            raise FormatError(f"{tensor.label} has a scale of {scale[0]:g}: the file is damaged.")
        return cls(tensor, location, "none", 0, 0, scale, np.zeros(1, np.int64))

    @classmethod
    def _blockwise(cls, model: TfliteModel, tensor: Tensor, location: BufferLocation) -> QuantizedTensor:
        # The tensor's own scale vector, if any, is to be ignored: the details name the tensors that count.
        assert tensor.quantization is not None and tensor.quantization.blockwise is not None
        details = tensor.quantization.blockwise
        tensors = model.subgraphs[tensor.subgraph].tensors
        size = details.block_size
        if size <= 0 or not tensor.shape or tensor.shape[-1] % size:
            raise FormatError(f"{tensor.label} has blocks of {size} along an axis of {tensor.shape[-1:]}.")
        for index, fewest in ((details.scales, 0), (details.zero_points, -1)):
            if not fewest <= index < len(tensors):
                raise FormatError(f"{tensor.label} names tensor {index} for its blocks; there are {len(tensors)}.")
        blocks = (*tensor.shape[:-1], tensor.shape[-1] // size)
        count, stored = math.prod(blocks), tensors[details.scales]
        # Floats only: scales that had scales of their own could lead back here.
        if stored.type not in FLOAT_TYPES or stored.elements != count:
            raise FormatError(
                f"{tensor.label} has {stored.label} for its block scales; expected floats {list(blocks)}."
            )
        scale = read_floats(model, stored)
        zero_point = np.empty(0, np.int64)
        if details.zero_points >= 0:
            stored = tensors[details.zero_points]
            if stored.elements not in (1, count):
                raise FormatError(f"{tensor.label} has {count} block scales and {stored.elements} zero points.")
            zero_point = _plain_integers(model, stored)
        return cls(tensor, location, "blockwise", 0, size, scale.reshape(blocks), zero_point)._checked()

    def _checked(self) -> QuantizedTensor:
        """The same with a zero point for each scale."""
        label, scale, zero_point = self.tensor.label, self.scale, self.zero_point
        if not (np.isfinite(scale).all() and (scale >= 0).all()):
            raise FormatError(f"{label} has scales that are negative or not finite: the file is damaged.")
        if scale.size and scale.max() > LARGEST_SCALE:
            raise FormatError(f"{label} has a scale of {scale.max():g}: the file is damaged.")
        assert self.packing is not None
        low, high = self.packing.lowest, self.packing.highest
        if zero_point.size and (zero_point.min() < low or zero_point.max() > high):
            raise FormatError(f"{label} has zero points outside the range of its codes, {low}…{high}.")
        if zero_point.size != scale.size:
            zero_point = np.broadcast_to(zero_point[0] if zero_point.size else np.int64(0), scale.shape)
        return replace(self, zero_point=zero_point.reshape(scale.shape))

    def rows(self, first: int, count: int) -> QuantizedTensor:
        """Rows ``[first, first + count)`` of the first axis, as a constant of their own.

        Raises:
            UnsupportedError: they do not lie on whole bytes, or their scales run along another axis.
        """
        size, bits = self.tensor.elements // self.tensor.shape[0], ELEMENT_BITS[TensorType(self.tensor.type_id)]
        begin, length = first * size * bits, count * size * bits
        if begin % 8 or length % 8 or (self.kind == "per_channel" and self.axis):
            raise UnsupportedError(
                f"{self.tensor.label} holds several weights, which do not lie on bytes, or have scales, of their own."
            )
        parts = slice(first, first + count) if self.kind in ("per_channel", "blockwise") else slice(None)
        return replace(
            self,
            tensor=replace(self.tensor, shape=(count, *self.tensor.shape[1:])),
            location=replace(self.location, offset=self.location.offset + begin // 8, length=length // 8),
            scale=self.scale[parts],
            zero_point=self.zero_point[parts],
        )

    @property
    def packing(self) -> Packing | None:
        """How the codes are packed; None for floats."""
        return CODE_TYPES.get(self.tensor.type) if self.tensor.type is not None else None

    @cached_property
    def symmetric(self) -> bool:
        """Whether every zero point is 0."""
        return not self.zero_point.any()

    def codes(self) -> Integers:
        """All codes, unpacked, int8 or uint8, in the tensor's shape. Zero points are not subtracted.

        Raises:
            UnsupportedError: a tensor of floats has none.
        """
        packing = self.packing
        if packing is None:
            raise UnsupportedError(f"{self.tensor.label} holds real numbers, not codes.")
        return _unpacked(self.location, packing, self.tensor.elements).reshape(self.tensor.shape)

    @cached_property
    def storage(self) -> Storage:
        """How it lies in the file: as rows of elements that share a scale."""
        type_ = TensorType(self.tensor.type_id)
        return Storage(type_, self.tensor.shape, self.kind, self.axis, self.block_size, self.symmetric)

    def chunks(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        """The dequantized values of rows ``[first, last)`` of :attr:`storage`, float32, flat, chunk by chunk.

        Every chunk is a view of one buffer that the next chunk overwrites. ``first`` begins on a byte.

        Raises:
            FormatError: a floating-point tensor holds values that are not finite.
        """
        last = self.storage.rows if last is None else last
        return self._float_chunks(first, last) if self.packing is None else self._code_chunks(first, last)

    def code_chunks(self, first: int = 0, last: int | None = None) -> Iterator[Integers]:
        """The codes of rows ``[first, last)``, int8 or uint8, flat, chunk by chunk."""
        packing = self.packing
        assert packing is not None
        for row, rows in self._steps(first, self.storage.rows if last is None else last):
            stored = self._stored(row, rows)
            if packing.per_byte == 1:
                yield np.frombuffer(stored, packing.dtype)
                continue
            units = _units(stored, packing)
            # All codes of a unit are moved as one element.
            table = _codes_of_units(packing).view(np.uint32).reshape(-1)
            yield np.take(table, units, mode="clip").view(packing.dtype)[: rows * self.storage.columns]

    @cached_property
    def step(self) -> int:
        """Rows of :attr:`storage` in a chunk, so many that every chunk begins on a byte."""
        per_byte = self.packing.per_byte if self.packing else 1
        return -(-max(1, CHUNK_ELEMENTS // max(self.storage.columns, 1)) // per_byte) * per_byte

    def _steps(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """(first row, number of rows) of each chunk."""
        return ((row, min(self.step, last - row)) for row in range(first, last, self.step))

    def _stored(self, row: int, rows: int) -> bytes:
        """The bytes that hold ``rows`` rows of codes from ``row``, which begins on a byte."""
        assert self.packing is not None
        begin = row * self.storage.columns // self.packing.per_byte
        end = -(-(row + rows) * self.storage.columns // self.packing.per_byte)
        return self.location.read(begin, end - begin)

    def _float_chunks(self, first: int, last: int) -> Iterator[Floats]:
        width = 4 if self.tensor.type is TensorType.FLOAT32 else 2
        for row, rows in self._steps(first, last):
            values = stored_floats(self.location.read(row * width, rows * width), self.tensor)
            # By the type, never by the scales: floats may carry some that mean nothing.
            if self.tensor.type is TensorType.INT16:
                values = values * self.scale[0]
            if not np.isfinite(values).all():
                raise FormatError(f"{self.tensor.label} holds values that are not finite: the file is damaged.")
            yield values

    def _code_chunks(self, first: int, last: int) -> Iterator[Floats]:
        packing, columns = self.packing, self.storage.columns
        assert packing is not None
        # One zero point for all is part of the table; several are subtracted row by row.
        zeros = self.zero_point.reshape(-1)
        one = zeros.size < 2 or self.symmetric or bool(np.ptp(zeros) == 0)
        table = _floats_of_units(packing, int(zeros[0]) if one and zeros.size else 0)
        zero_point = None if one else zeros.astype(np.float32)
        per_unit = _UNIT_BYTES[packing.bits] * packing.per_byte
        buffer = np.empty(-(-self.step * columns // per_unit) * per_unit, np.float32)
        for row, rows in self._steps(first, last):
            units = _units(self._stored(row, rows), packing)
            whole = buffer[: units.size * per_unit]
            # mode: "raise" would make NumPy check into a second buffer; the table has an entry for every unit.
            np.take(table, units, out=whole.view(table.dtype), mode="clip")
            chunk = whole[: rows * columns]
            self.storage.scale_rows(chunk, row, self.scale.reshape(-1), zero_point)
            yield chunk

    def dequantize(self) -> Floats:
        """All values, float32, in the tensor's shape. For large tensors prefer :meth:`chunks`."""
        return gathered(self.chunks(), self.tensor.shape)


def stored_floats(stored: bytes, tensor: Tensor) -> Floats:
    """The bytes of a tensor of a floating-point type, or of INT16, as float32; flat, as they are."""
    return widened(stored, TensorType(tensor.type_id))


def _unpacked(location: BufferLocation, packing: Packing, count: int) -> Integers:
    """The first ``count`` codes, flat."""
    return packing.codes[np.frombuffer(location.read(), np.uint8)].reshape(-1)[:count]


def _plain_integers(model: TfliteModel, tensor: Tensor) -> npt.NDArray[np.int64]:
    if tensor.type in CODE_TYPES:
        packing = CODE_TYPES[TensorType(tensor.type_id)]
        return _unpacked(model.locate(tensor), packing, tensor.elements).astype(np.int64)
    if tensor.type not in (TensorType.INT16, TensorType.INT32, TensorType.INT64):
        raise UnsupportedError(f"{tensor.label} should hold zero points, which are integers.")
    width = ELEMENT_BITS[TensorType(tensor.type_id)] // 8
    return np.frombuffer(model.locate(tensor).read(), f"<i{width}").astype(np.int64)


def read_floats(model: TfliteModel, tensor: Tensor) -> Floats:
    """A small constant as float32 in its shape, dequantized where its type holds codes."""
    return QuantizedTensor.of(model, tensor).dequantize()
