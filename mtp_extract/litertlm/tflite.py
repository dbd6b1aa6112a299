"""A read-only view of one TFLite model: subgraphs, tensors, operators, signatures, and where constants lie.

Field slots are those of the TFLite schema, in the order in which it declares them. The published Python bindings
(``tflite`` 2.18.0) predate INT2, blockwise quantization and external buffers, and misread operator codes that the
quantizer writes into the newer field only; the schema's wire format has not changed, so it is read directly.

A constant's bytes lie in one of three places:

- inline, in ``Buffer.data``;
- after the flatbuffer, at ``Buffer.offset``/``size`` relative to the start of the model (0 and 1 are sentinels);
- in the ``TFLiteWeights`` section with the same ``model_type``, through ``Tensor.external_buffer``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, TruncatedError, UnsupportedError, escape
from mtp_extract.io.source import Region
from mtp_extract.litertlm.flatbuffer import Table, Vector


class TensorType(IntEnum):
    """Element types of the TFLite schema."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT32 = 2
    UINT8 = 3
    INT64 = 4
    STRING = 5
    BOOL = 6
    INT16 = 7
    COMPLEX64 = 8
    INT8 = 9
    FLOAT64 = 10
    COMPLEX128 = 11
    UINT64 = 12
    RESOURCE = 13
    VARIANT = 14
    UINT32 = 15
    UINT16 = 16
    INT4 = 17
    BFLOAT16 = 18
    INT2 = 19
    UINT4 = 20
    FLOAT8_E4M3FN = 21
    FLOAT8_E5M2 = 22


_TYPES_BY_BITS = {
    2: "INT2",
    4: "INT4 UINT4",
    8: "INT8 UINT8 BOOL FLOAT8_E4M3FN FLOAT8_E5M2",
    16: "INT16 UINT16 FLOAT16 BFLOAT16",
    32: "INT32 UINT32 FLOAT32",
    64: "INT64 UINT64 FLOAT64 COMPLEX64",
    128: "COMPLEX128",
}
ELEMENT_BITS = MappingProxyType({TensorType[n]: bits for bits, names in _TYPES_BY_BITS.items() for n in names.split()})
"""Bits an element takes in a buffer. Types under 8 bits are packed, first element in the low bits."""

_LONGEST_LABEL = 90
# What Google's own externalizer writes for bytes as they would stand in Buffer.data; nothing of LiteRT reads it.
_PLAIN_PACKINGS = frozenset({"", "unpacked"})
_EXTERNAL_GROUP = "tflite_weights"


@dataclass(frozen=True)
class Blockwise:
    """Details of blockwise quantization: the scales sit in another tensor, ``[…, blocks]``, usually FP16.

    Attributes:
        scales: index of the tensor with the scales.
        zero_points: index of the tensor with the zero points; -1 for none.
        block_size: elements of the last axis that share a scale.
    """

    scales: int
    zero_points: int
    block_size: int


@dataclass(frozen=True)
class Quantization:
    """Quantization metadata of a tensor. Presence proves nothing: F32 tensors carry it too.

    Attributes:
        axis: ``quantized_dimension``, the axis the scales run along.
        details: "none", "custom", "blockwise", "multi-axis" or "unknown (N)".
    """

    axis: int
    details: str
    blockwise: Blockwise | None
    _scale: Vector = field(repr=False)
    _zero_point: Vector = field(repr=False)

    @property
    def scale_count(self) -> int:
        """Number of scales; 0 when there are none."""
        return self._scale.count

    @property
    def zero_point_count(self) -> int:
        """Number of zero points; 0 when there are none."""
        return self._zero_point.count

    @property
    def scale_at(self) -> int:
        """Where the scales stand, from the start of the model; 0 when there are none."""
        return self._scale.start

    @property
    def zero_point_at(self) -> int:
        """Where the zero points stand, from the start of the model; 0 when there are none."""
        return self._zero_point.start

    @cached_property
    def scale(self) -> npt.NDArray[np.float32]:
        """Scales as stored, float32 ``[scale_count]``."""
        return np.frombuffer(self._scale.bytes(), "<f4")

    @cached_property
    def zero_point(self) -> npt.NDArray[np.int64]:
        """Zero points as stored, int64 ``[zero_point_count]``."""
        return np.frombuffer(self._zero_point.bytes(), "<i8")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a subgraph. ``type_id`` is kept as stored: it may be one this package does not know."""

    subgraph: int
    index: int
    name: str
    shape: tuple[int, ...]
    type_id: int
    buffer: int
    external_buffer: int
    quantization: Quantization | None
    sparse: bool
    variable: bool

    @property
    def type(self) -> TensorType | None:
        """Element type; None for an id this package does not know."""
        return TensorType(self.type_id) if self.type_id in TensorType._value2member_map_ else None

    @property
    def type_name(self) -> str:
        """Name of the element type; ``unknown (N)`` for an id this package does not know."""
        return self.type.name if self.type is not None else f"unknown ({self.type_id})"

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def label(self) -> str:
        """What messages call it."""
        # Exporters put a module's whole path in front; what tells tensors apart is at the end.
        name = self.name if len(self.name) <= _LONGEST_LABEL else f"…{self.name[-_LONGEST_LABEL:]}"
        return f"tensor {self.index} {escape(name)!r} ({self.type_name} {list(self.shape)})"


@dataclass(frozen=True)
class Operator:
    """An operator. ``kind`` is the builtin's name, or ``CUSTOM:code``.

    Attributes:
        inputs: tensor indices; -1 for an optional input that is absent.
        composite: name of a STABLEHLO_COMPOSITE; None for any other operator.
        body: subgraph with the composite's decomposition; -1 for none.
        attributes: what the composite says of itself, a flexbuffer; empty for none.
        activation: fused activation function of the kinds that have one (0 none).
    """

    subgraph: int
    index: int
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    composite: str | None
    body: int
    attributes: bytes = field(repr=False)
    activation: int
    options: Table | None = field(repr=False, compare=False)

    @property
    def label(self) -> str:
        """What messages call it."""
        name = f"{self.kind} {escape(self.composite)}" if self.composite is not None else escape(self.kind)
        where = f" of subgraph {self.subgraph}" if self.subgraph else ""
        return f"op {self.index} {name}{where}"


@dataclass(frozen=True)
class Subgraph:
    """A subgraph: tensors, operators in execution order, and the tensor indices of its inputs and outputs."""

    index: int
    name: str
    tensors: tuple[Tensor, ...] = field(repr=False)
    operators: tuple[Operator, ...] = field(repr=False)
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """A signature: names of a subgraph's inputs and outputs, with their tensor indices."""

    key: str
    subgraph: int
    inputs: MappingProxyType[str, int]
    outputs: MappingProxyType[str, int]


@dataclass(frozen=True)
class BufferLocation:
    """Where a constant's bytes lie: ``length`` bytes at ``offset`` of ``region``; ``place`` says which of the three."""

    region: Region
    offset: int
    length: int
    place: str

    @property
    def file_offset(self) -> int:
        """From the start of the file."""
        return self.region.begin + self.offset

    def read(self, start: int = 0, length: int | None = None) -> bytes:
        """``length`` bytes (to the end when None) from ``start``."""
        return self.region.read(self.offset + start, self.length - start if length is None else length)


@dataclass(frozen=True)
class ExternalBuffer:
    """Where a constant lies in the TFLiteWeights section, as the model lists it."""

    group: str
    offset: int
    length: int
    packing: str


@dataclass(frozen=True)
class TfliteModel:
    """One TFLite model. ``weights`` is the TFLiteWeights section that belongs to it, if there is one."""

    region: Region
    weights: Region | None
    description: str
    subgraphs: tuple[Subgraph, ...]
    signatures: tuple[Signature, ...]
    _buffers: tuple[tuple[Vector, int, int], ...] = field(repr=False)
    _external: MappingProxyType[int, ExternalBuffer] = field(repr=False)

    def signature(self, key: str) -> Signature | None:
        """The signature called ``key``; None when there is none."""
        return next((s for s in self.signatures if s.key == key), None)

    def tensor(self, subgraph: int, index: int) -> Tensor:
        return self.subgraphs[subgraph].tensors[index]

    def has_data(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` names a buffer with bytes in it."""
        if tensor.external_buffer:
            return True
        data, offset, _ = self._buffers[tensor.buffer]
        return offset > 1 or data.count > 0

    def locate(self, tensor: Tensor) -> BufferLocation:
        """Where the bytes of the constant ``tensor`` lie; their number is checked against shape and type.

        Raises:
            FormatError: there are none, or not as many as the shape says.
            TruncatedError: they lie outside the section.
            UnsupportedError: the element type is unknown or has no fixed size, or the bytes are packed in an
                unknown way.
        """
        bits = ELEMENT_BITS.get(tensor.type) if tensor.type is not None else None
        if bits is None:
            raise UnsupportedError(
                f"{tensor.label} has an element type this release cannot read. Look for a newer release."
            )
        location = self._location(tensor)
        needed = (tensor.elements * bits + 7) // 8
        if location.length != needed:
            raise FormatError(
                f"{self.region.source.name}: {tensor.label} needs {needed} bytes, its buffer has {location.length}."
            )
        return location

    def span(self, tensor: Tensor) -> tuple[int, int] | None:
        """The bytes of the file that ``tensor`` names as its own, whatever it is; None where there are none.

        Raises:
            FormatError, TruncatedError, UnsupportedError: as :meth:`locate`, less what its type says.
        """
        if not self.has_data(tensor):
            return None
        location = self._location(tensor)
        return location.file_offset, location.file_offset + location.length

    def _location(self, tensor: Tensor) -> BufferLocation:
        if tensor.external_buffer:
            return self._external_location(tensor)
        data, offset, size = self._buffers[tensor.buffer]
        # Of a buffer with both, LiteRT takes the data.
        if offset > 1 and not data.count:
            return _location_in(self.region, tensor, offset, size, "appended")
        return BufferLocation(self.region, data.start, data.count, "inline")

    def _external_location(self, tensor: Tensor) -> BufferLocation:
        external = self._external.get(tensor.external_buffer)
        if external is None:
            raise FormatError(
                f"{self.region.source.name}: {tensor.label} points to external buffer {tensor.external_buffer:#x}, "
                "which the model does not list."
            )
        if external.packing not in _PLAIN_PACKINGS:
            raise UnsupportedError(
                f"{tensor.label} is stored with packing {escape(external.packing)!r}, which this release cannot read."
            )
        if external.group != _EXTERNAL_GROUP:
            raise UnsupportedError(
                f"{tensor.label} lies in external group {escape(external.group)!r}; only {_EXTERNAL_GROUP!r}, the "
                "TFLiteWeights section of the bundle, can be read."
            )
        if self.weights is None:
            raise FormatError(
                f"{self.region.source.name}: {tensor.label} lies in a TFLiteWeights section with the model_type of "
                f"{self.region.what}, and there is none. Give the whole .litertlm, not the model alone."
            )
        return _location_in(self.weights, tensor, external.offset, external.length, "external")


def _location_in(region: Region, tensor: Tensor, offset: int, length: int, place: str) -> BufferLocation:
    if offset + length > region.size:
        raise TruncatedError(
            f"{region.source.name}: the bytes of {tensor.label} lie at {offset}…{offset + length} of {region.what}, "
            f"which has {region.size}. Fetch the file again."
        )
    return BufferLocation(region, offset, length, place)
