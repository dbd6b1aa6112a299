"""From stored bytes to numbers: codes, scales, zero points; ``real = scale · (code − zero_point)``.

The element type decides, never the presence of metadata: an F32 tensor is taken as it is, whatever scales it
carries (dequantizing the norms of published drafters zeroes them).

Codes of less than a byte are packed flat in row-major order, first element in the low bits, two's complement
(unsigned for UINT4); a row need not begin on a byte. Dequantizing therefore looks one or two bytes at a time up in a
table of the 2 or 4 floats they stand for, into a chunk that fits the cache, and multiplies the chunk by its scales in
place.
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
from mtp_extract.litertlm.tflite import ELEMENT_BITS, BufferLocation, Tensor, TensorType, TfliteModel

CHUNK_ELEMENTS = 1 << 18
"""Elements dequantized at a time: 1 MiB of float32, which stays in a core's own cache."""

LARGEST_SCALE = float(np.finfo(np.float32).max) / 1024
"""No code, less its zero point, times this leaves float32."""

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.integer]


@dataclass(frozen=True)
class Packing:
    """How codes lie in bytes: ``bits`` each, two's complement where ``signed``."""

    bits: int
    signed: bool

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 8 // self.bits

    @property
    def dtype(self) -> np.dtype[np.int8] | np.dtype[np.uint8]:
        """Type that holds one unpacked code."""
        return np.dtype(np.int8) if self.signed else np.dtype(np.uint8)

    @property
    def codes(self) -> Integers:
        """The codes every byte value stands for, first element first: ``[256, per_byte]``."""
        return _codes_of_bytes(self)


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

# Bytes looked up at a time, by the bits of a code: INT4 and INT8 in pairs, INT2 singly.
_UNIT_BYTES = MappingProxyType({2: 1, 4: 2, 8: 2})
_UNITS: MappingProxyType[int, np.dtype[np.unsignedinteger]] = MappingProxyType(
    {1: np.dtype(np.uint8), 2: np.dtype("<u2")}
)
# The floats of a table entry are moved as one wide element; the type only says how wide.
_WIDE: MappingProxyType[int, np.dtype[np.generic]] = MappingProxyType(
    {2: np.dtype(np.uint64), 4: np.dtype(np.complex128)}
)


@cache
def _codes_of_bytes(packing: Packing) -> Integers:
    shifts = np.arange(packing.per_byte) * packing.bits
    codes = (np.arange(256)[:, None] >> shifts) & ((1 << packing.bits) - 1)
    if packing.signed:
        codes -= (codes >> (packing.bits - 1)) << packing.bits
    table = codes.astype(packing.dtype)
    table.setflags(write=False)
    return table


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
    return np.frombuffer(stored + b"\0" * (-len(stored) % unit), _UNITS[unit])


@dataclass(frozen=True)
class QuantizedTensor:
    """A constant with what is needed to read it. Nothing is read until asked for.

    Attributes:
        kind: "none" (floats; INT16 too, the vectors of models whose every operator is quantized), "per_tensor",
            "per_channel" or "blockwise".
        axis: axis of the channels, for per_channel.
        block_size: elements of the last axis that share a scale, for blockwise; else 0.
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
        return cls._checked(tensor, location, kind, axis if scale.size > 1 else 0, 0, scale, zero_point)

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
        return cls._checked(tensor, location, "blockwise", 0, size, scale.reshape(blocks), zero_point)

    @classmethod
    def _checked(
        cls,
        tensor: Tensor,
        location: BufferLocation,
        kind: str,
        axis: int,
        block_size: int,
        scale: Floats,
        zero_point: npt.NDArray[np.int64],
    ) -> QuantizedTensor:
        if not (np.isfinite(scale).all() and (scale >= 0).all()):
            raise FormatError(f"{tensor.label} has scales that are negative or not finite: the file is damaged.")
        if scale.size and scale.max() > LARGEST_SCALE:
            raise FormatError(f"{tensor.label} has a scale of {scale.max():g}: the file is damaged.")
        packing = CODE_TYPES[TensorType(tensor.type_id)]
        low, high = int(packing.codes.min()), int(packing.codes.max())
        if zero_point.size and (zero_point.min() < low or zero_point.max() > high):
            raise FormatError(f"{tensor.label} has zero points outside the range of its codes, {low}…{high}.")
        if zero_point.size:
            zero_point = (
                np.broadcast_to(zero_point.reshape(-1, *(1,) * (scale.ndim - 1)), scale.shape)
                if (zero_point.size == 1)
                else zero_point.reshape(scale.shape)
            )
        else:
            zero_point = np.broadcast_to(np.int64(0), scale.shape)
        return cls(tensor, location, kind, axis, block_size, scale, zero_point)

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
        stored = np.frombuffer(self.location.read(), np.uint8)
        return packing.codes[stored].reshape(-1)[: self.tensor.elements].reshape(self.tensor.shape)

    @cached_property
    def grid(self) -> Grid:
        """The tensor seen as rows of elements that are scaled alike."""
        return Grid.of(self)

    def chunks(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        """The dequantized values of rows ``[first, last)`` of :attr:`grid`, float32, flat, chunk by chunk.

        Every chunk is a view of one buffer that the next chunk overwrites. ``first`` is a multiple of
        ``grid.step``.

        Raises:
            FormatError: a floating-point tensor holds values that are not finite.
        """
        last = self.grid.rows if last is None else last
        return self._float_chunks(first, last) if self.packing is None else self._code_chunks(first, last)

    def code_chunks(self, first: int, last: int) -> Iterator[Integers]:
        """The codes of rows ``[first, last)``, int8 or uint8, flat, chunk by chunk."""
        packing = self.packing
        assert packing is not None
        for row, rows in self.grid.steps(first, last):
            stored = self._stored(row, rows)
            if packing.per_byte == 1:
                yield np.frombuffer(stored, packing.dtype)
                continue
            units = _units(stored, packing)
            # All codes of a unit are moved as one element.
            table = _codes_of_units(packing).view(np.uint32).reshape(-1)
            yield np.take(table, units, mode="clip").view(packing.dtype)[: rows * self.grid.columns]

    def _stored(self, row: int, rows: int) -> bytes:
        """The bytes that hold ``rows`` rows of codes from ``row``, which begins on a byte."""
        assert self.packing is not None
        begin = row * self.grid.columns // self.packing.per_byte
        end = -(-(row + rows) * self.grid.columns // self.packing.per_byte)
        return self.location.read(begin, end - begin)

    def _float_chunks(self, first: int, last: int) -> Iterator[Floats]:
        width = 4 if self.tensor.type is TensorType.FLOAT32 else 2
        for row, rows in self.grid.steps(first, last):
            values = stored_floats(self.location.read(row * width, rows * width), self.tensor)
            # By the type, never by the scales: floats may carry some that mean nothing.
            if self.tensor.type is TensorType.INT16:
                values = values * self.scale[0]
            if not np.isfinite(values).all():
                raise FormatError(f"{self.tensor.label} holds values that are not finite: the file is damaged.")
            yield values

    def _code_chunks(self, first: int, last: int) -> Iterator[Floats]:
        packing, grid = self.packing, self.grid
        assert packing is not None
        # One zero point for all is part of the table; several are subtracted row by row.
        offset = 0 if grid.zero_point is not None or not self.zero_point.size else int(self.zero_point.flat[0])
        table = _floats_of_units(packing, offset)
        per_unit = _UNIT_BYTES[packing.bits] * packing.per_byte
        buffer = np.empty(-(-grid.step * grid.columns // per_unit) * per_unit, np.float32)
        for row, rows in grid.steps(first, last):
            units = _units(self._stored(row, rows), packing)
            whole = buffer[: units.size * per_unit]
            # mode: "raise" would make NumPy check into a second buffer; the table has an entry for every unit.
            np.take(table, units, out=whole.view(table.dtype), mode="clip")
            chunk = whole[: rows * grid.columns]
            grid.scale_rows(chunk, row, rows)
            yield chunk

    def dequantize(self) -> Floats:
        """All values, float32, in the tensor's shape. For large tensors prefer :meth:`chunks`."""
        result = np.empty(self.tensor.elements, np.float32)
        at = 0
        for chunk in self.chunks():
            result[at : at + chunk.size] = chunk
            at += chunk.size
        return result.reshape(self.tensor.shape)


@dataclass(frozen=True)
class Grid:
    """A tensor seen as ``[rows, columns]``, every element of a row having the same scale.

    Attributes:
        scale: float32, one per row, or fewer that repeat after ``period`` rows.
        zero_point: float32 like ``scale``; None where one number serves all.
        period: 1 for one scale, ``rows`` for one each, in between for channels along an inner axis.
        step: rows in a chunk, chosen so that every chunk begins on a byte.
    """

    rows: int
    columns: int
    scale: Floats
    zero_point: Floats | None
    period: int
    step: int

    @classmethod
    def of(cls, source: QuantizedTensor) -> Grid:
        """The grid of ``source``."""
        shape = source.tensor.shape or (1,)
        if source.kind == "per_channel":
            columns, period = math.prod(shape[source.axis + 1 :]), shape[source.axis]
        elif source.kind == "blockwise":
            columns, period = source.block_size, source.scale.size
        else:
            columns, period = (1 if source.packing is None else shape[-1]), 1
        rows = source.tensor.elements // columns if columns else 0
        same = source.symmetric or source.zero_point.size == 1 or bool(np.ptp(source.zero_point) == 0)
        zero_point = None if same else source.zero_point.astype(np.float32).reshape(-1)
        per_byte = source.packing.per_byte if source.packing else 1
        step = -(-max(1, CHUNK_ELEMENTS // max(columns, 1)) // per_byte) * per_byte
        return cls(rows, columns, source.scale.reshape(-1), zero_point, 1 if source.scale.size == 1 else period, step)

    def steps(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """(first row, number of rows) of each chunk of ``[first, last)``."""
        for row in range(first, last, self.step):
            yield row, min(self.step, last - row)

    def scale_rows(self, chunk: Floats, row: int, rows: int) -> None:
        """Turn codes into values, in place; ``chunk`` holds ``rows`` rows from ``row``."""
        values = chunk.reshape(rows, self.columns)
        if self.period == 1:
            values *= self.scale[0]
            return
        index: slice | npt.NDArray[np.int64]
        index = slice(row, row + rows) if self.period == self.rows else np.arange(row, row + rows) % self.period
        if self.zero_point is not None:
            values -= self.zero_point[index, None]
        values *= self.scale[index, None]


def stored_floats(stored: bytes, tensor: Tensor) -> Floats:
    """The bytes of a tensor of a floating-point type, or of INT16, as float32; flat, as they are."""
    if tensor.type is TensorType.FLOAT32:
        return np.frombuffer(stored, "<f4")
    if tensor.type is TensorType.FLOAT16:
        return np.frombuffer(stored, "<f2").astype(np.float32)
    if tensor.type is TensorType.INT16:
        return np.frombuffer(stored, "<i2").astype(np.float32)
    # A bfloat16 is the upper half of a float32.
    return (np.frombuffer(stored, "<u2").astype(np.uint32) << 16).view(np.float32)


def _plain_integers(model: TfliteModel, tensor: Tensor) -> npt.NDArray[np.int64]:
    if tensor.type in CODE_TYPES:
        packing = CODE_TYPES[TensorType(tensor.type_id)]
        stored = np.frombuffer(model.locate(tensor).read(), np.uint8)
        return packing.codes[stored].reshape(-1)[: tensor.elements].astype(np.int64)
    for kind, dtype in ((TensorType.INT32, "<i4"), (TensorType.INT64, "<i8"), (TensorType.INT16, "<i2")):
        if tensor.type is kind:
            return np.frombuffer(model.locate(tensor).read(), dtype).astype(np.int64)
    raise UnsupportedError(f"{tensor.label} should hold zero points, which are integers.")


def read_floats(model: TfliteModel, tensor: Tensor) -> Floats:
    """A small constant as float32 in its shape, dequantized where its type holds codes."""
    return QuantizedTensor.of(model, tensor).dequantize()
