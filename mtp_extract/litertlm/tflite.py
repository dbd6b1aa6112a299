"""Read a TFLite model: subgraphs, tensors, operators, signatures, and the locations of constants.

Field slots follow the order of the TFLite schema. The published Python bindings (``tflite`` 2.18.0) predate INT2,
blockwise quantization and external buffers, and misread operator codes that the quantizer writes into the newer field
only; the wire format has not changed, so it is read directly.

A constant's bytes lie in one of three places:

- inline, in ``Buffer.data``;
- after the flatbuffer, at ``Buffer.offset``/``size`` relative to the start of the model (0 and 1 are sentinels);
- in the ``TFLiteWeights`` section with the same ``model_type``, through ``Tensor.external_buffer``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from mtp_extract.data import load_mapping
from mtp_extract.errors import FormatError, TruncatedError, UnsupportedError, escape
from mtp_extract.io.source import Region
from mtp_extract.litertlm.container import TFLITE_IDENTIFIER
from mtp_extract.litertlm.flatbuffer import Budget, FlatBuffer, Table, Vector


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


ELEMENT_BITS: MappingProxyType[TensorType, int] = MappingProxyType(
    {TensorType.BOOL: 8} | {t: int(bits[0]) for t in TensorType if (bits := re.search("[0-9]+", t.name))}
)
"""Bits an element takes in a buffer. Types under 8 bits are packed, first element in the low bits."""

_LONGEST_LABEL = 90
_LARGEST_DIMENSION_PRODUCT = 1 << 40
# Packings that change no bytes: Google's externalizer writes the second, which LiteRT never reads.
_PLAIN_PACKINGS = frozenset({"", "unpacked"})
_EXTERNAL_GROUP = "tflite_weights"

_COMPOSITE = "STABLEHLO_COMPOSITE"
_COMPOSITE_OPTIONS = 21
_BLOCKWISE = 2
_DETAILS = MappingProxyType({0: "none", 1: "custom", _BLOCKWISE: "blockwise", 3: "multi-axis"})

# Operator → id of its options in the union, for operators whose options matter here.
_OPTION_TYPES: dict[str, int] = load_mapping("tflite_schema")["option_types"]

# Operator → slot of `fused_activation_function` in its options.
_ACTIVATION_SLOT = dict.fromkeys(("FULLY_CONNECTED", "ADD", "MUL", "SUB", "DIV", "L2_NORMALIZATION"), 0) | {
    "CONCATENATION": 1,
    "CONV_2D": 3,
}


@dataclass(frozen=True)
class Blockwise:
    """Details of blockwise quantization, whose scales are another tensor, ``[…, blocks]``, usually FP16."""

    scales: int  # index of the tensor with the scales
    zero_points: int  # index of the tensor with the zero points; -1 for none
    block_size: int  # elements of the last axis that share a scale


@dataclass(frozen=True)
class Quantization:
    """Quantization metadata of a tensor. F32 tensors may have it, too."""

    axis: int  # ``quantized_dimension``, the axis of the scales
    details: str  # "none", "custom", "blockwise", "multi-axis" or "unknown (N)"
    blockwise: Blockwise | None
    scales: Vector = field(repr=False)
    zero_points: Vector = field(repr=False)

    @cached_property
    def scale(self) -> npt.NDArray[np.float32]:
        """Scales as stored, float32 ``[scales.count]``."""
        return np.frombuffer(self.scales.stored(), "<f4")

    @cached_property
    def zero_point(self) -> npt.NDArray[np.int64]:
        """Zero points as stored, int64 ``[zero_points.count]``."""
        return np.frombuffer(self.zero_points.stored(), "<i8")

    def has_same_scales(self, other: Quantization) -> bool:
        """Whether scales and zero points equal those of ``other``; the same bytes need not be read."""
        pairs = ((self.scales, other.scales), (self.zero_points, other.zero_points))
        return all(a.count == b.count and (a.start == b.start or a.stored() == b.stored()) for a, b in pairs)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a subgraph; its ``type_id`` may be unknown to this package."""

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
        """Description for messages."""
        # Exporters prefix the path of the module; the end of a name identifies the tensor.
        name = self.name if len(self.name) <= _LONGEST_LABEL else f"…{self.name[-_LONGEST_LABEL:]}"
        return f"tensor {self.index} {escape(name)!r} ({self.type_name} {list(self.shape)})"


@dataclass(frozen=True)
class Operator:
    """An operator. ``kind`` is the builtin's name, or ``CUSTOM:code``."""

    subgraph: int
    index: int
    kind: str
    inputs: tuple[int, ...]  # tensor indices; -1 for an optional input that is absent
    outputs: tuple[int, ...]
    composite: str | None  # name of a STABLEHLO_COMPOSITE; None for any other operator
    body: int  # subgraph with the composite's decomposition; -1 for none
    attributes: Vector | None = field(repr=False)  # of a composite: a flexbuffer
    activation: int  # fused activation function of the kinds that have one (0 none)
    options: Table | None = field(repr=False, compare=False)

    @property
    def label(self) -> str:
        """Description for messages."""
        name = f"{self.kind} {escape(self.composite)}" if self.composite is not None else escape(self.kind)
        suffix = f" of subgraph {self.subgraph}" if self.subgraph else ""
        return f"op {self.index} {name}{suffix}"


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
class TfliteModel:
    """One TFLite model. ``weights`` is the TFLiteWeights section that belongs to it, if there is one."""

    region: Region
    weights: Region | None
    subgraphs: tuple[Subgraph, ...]
    signatures: tuple[Signature, ...]
    _buffers: tuple[tuple[Vector, int, int], ...] = field(repr=False)
    _external: MappingProxyType[int, tuple[str, int, int, str]] = field(repr=False)

    def signature(self, key: str) -> Signature | None:
        """Find the signature ``key``; None if there is none."""
        return next((s for s in self.signatures if s.key == key), None)

    def tensor(self, subgraph: int, index: int) -> Tensor:
        return self.subgraphs[subgraph].tensors[index]

    def has_data(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` names a buffer with bytes in it."""
        if tensor.external_buffer:
            return True
        data, offset, _ = self._buffers[tensor.buffer]
        return offset > 1 or data.count > 0

    def locate(self, tensor: Tensor) -> Region:
        """Locate the bytes of the constant ``tensor``, and check their number against shape and type.

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
        location, needed = self.locate_data(tensor), (tensor.elements * bits + 7) // 8
        if location.size != needed:
            raise FormatError(
                f"{self.region.source.name}: {tensor.label} needs {needed} bytes, its buffer has {location.size}."
            )
        return location

    def locate_data(self, tensor: Tensor) -> Region:
        """Locate the bytes of ``tensor`` without checking their number; empty if it has none.

        Raises:
            FormatError, TruncatedError, UnsupportedError: as :meth:`locate`.
        """
        if tensor.external_buffer:
            region, (offset, size) = self.weights, self._find_external_range(tensor)
        else:
            data, offset, size = self._buffers[tensor.buffer]
            region = self.region
            # If a buffer has data and an offset, LiteRT reads the data.
            if offset <= 1 or data.count:
                offset, size = data.start, data.count
        if region is None:
            raise FormatError(
                f"{self.region.source.name}: {tensor.label} lies in a TFLiteWeights section with the model_type of "
                f"{self.region.what}, and there is none. Give the whole .litertlm, not the model alone."
            )
        if offset + size > region.size:
            raise TruncatedError(
                f"{region.source.name}: the bytes of {tensor.label} lie at {offset}…{offset + size} of {region.what}, "
                f"which has {region.size}. Fetch the file again."
            )
        return region.part(offset, size, tensor.label)

    def _find_external_range(self, tensor: Tensor) -> tuple[int, int]:
        """Return (offset, length) in the TFLiteWeights section."""
        if tensor.external_buffer not in self._external:
            raise FormatError(
                f"{self.region.source.name}: {tensor.label} points to external buffer {tensor.external_buffer:#x}, "
                "which the model does not list."
            )
        group, offset, length, packing = self._external[tensor.external_buffer]
        if packing not in _PLAIN_PACKINGS or group != _EXTERNAL_GROUP:
            raise UnsupportedError(
                f"{tensor.label} lies in external group {escape(group)!r} with packing {escape(packing)!r}; only "
                f"{_EXTERNAL_GROUP!r}, the TFLiteWeights section of the bundle, without a packing can be read."
            )
        return offset, length


def read_model(region: Region, weights: Region | None = None, budget: Budget | None = None) -> TfliteModel:
    """Read the structure of the TFLite model in ``region``, without its constants.

    ``budget`` bounds the work, and can be shared by several models.

    Raises:
        FormatError: it is no TFLite model, or an inconsistent one.
        TruncatedError: it ends beyond the region.
    """
    if region.size < 8 or region.read(4, 4) != TFLITE_IDENTIFIER:
        why = "is not a TFLite model (no TFL3 identifier). The file is damaged: fetch it again."
        raise FormatError(f"{region.source.name}: {region.what} {why}")
    root = FlatBuffer(region, budget).read_root()
    codes = tuple(_read_operator_code(table) for table in root.tables(1))
    buffers = tuple((t.vector(0, 1), t.integer(1, "Q"), t.integer(2, "Q")) for t in root.tables(4))
    subgraphs = tuple(_read_subgraph(table, index, codes, len(buffers)) for index, table in enumerate(root.tables(2)))
    if not subgraphs:
        raise FormatError(f"{region.source.name}: {region.what} has no subgraph.")
    external = _read_external_buffers(root)
    return TfliteModel(region, weights, subgraphs, _read_signatures(root, subgraphs), buffers, external)


def _read_external_buffers(root: Table) -> MappingProxyType[int, tuple[str, int, int, str]]:
    """Map the id of each external buffer to its group, offset, length and packing."""
    groups = tuple(table.string(0) or "" for table in root.tables(8))
    external = {}
    for table in root.tables(9):
        group = table.integer(1, "I")
        name = groups[group] if group < len(groups) else f"(group {group} of {len(groups)})"
        offset, length = table.integer(2, "Q"), table.integer(3, "Q")
        external[table.integer(0, "I")] = (name, offset, length, table.string(4) or "")
    return MappingProxyType(external)


def _read_signatures(root: Table, subgraphs: tuple[Subgraph, ...]) -> tuple[Signature, ...]:
    """Read the signatures, each once even if it is listed several times."""
    signatures = dict[object, Signature]()
    for table in root.tables(7):
        key, index = table.string(2) or "", table.integer(4, "I")
        subject = f"signature {escape(key)!r} names"
        if index >= len(subgraphs):
            raise table.buffer.make_error(f"{subject} subgraph {index} of {len(subgraphs)}")
        count = len(subgraphs[index].tensors)
        inputs, outputs = (_read_named_tensors(table, slot, count, subject) for slot in (0, 1))
        interface = (*inputs.items(), None, *outputs.items())
        signatures.setdefault((key, index, interface), Signature(key, index, inputs, outputs))
    return tuple(signatures.values())


def _read_named_tensors(table: Table, slot: int, count: int, subject: str) -> MappingProxyType[str, int]:
    """Map names to tensor indices below ``count``; ``subject`` begins the messages of errors."""
    tensors = {}
    for entry in table.tables(slot):
        name, tensor = entry.string(0) or "", entry.integer(1, "I")
        if tensor >= count:
            raise table.buffer.make_error(f"{subject} tensor {tensor} as {escape(name)!r}")
        if name in tensors:
            raise table.buffer.make_error(f"{subject} {escape(name)!r} twice")
        tensors[name] = tensor
    return MappingProxyType(tensors)


def _read_operator_code(table: Table) -> str:
    # Writers fill the old one-byte field, the new field, or both; the larger is the code.
    code = max(table.integer(0, "b"), table.integer(3, "i"))
    names: list[str] = load_mapping("tflite_schema")["builtin_operators"]
    name = names[code] if 0 <= code < len(names) else f"unknown ({code})"
    return f"CUSTOM:{table.string(1) or ''}" if name == "CUSTOM" else name


def _read_subgraph(table: Table, index: int, codes: tuple[str, ...], buffers: int) -> Subgraph:
    tensors = tuple(_read_tensor(t, index, i, buffers) for i, t in enumerate(table.tables(0)))
    return Subgraph(
        index,
        table.string(4) or "",
        tensors,
        tuple(_read_operator(entry, index, i, codes, len(tensors)) for i, entry in enumerate(table.tables(3))),
        _read_tensor_indices(table, 1, len(tensors), f"the input list of subgraph {index}"),
        _read_tensor_indices(table, 2, len(tensors), f"the output list of subgraph {index}"),
    )


def _read_tensor_indices(table: Table, slot: int, count: int, subject: str) -> tuple[int, ...]:
    """Read tensor indices below ``count``, or -1; ``subject`` begins the messages of errors."""
    indices = table.integers(slot, "i")
    for tensor in indices:
        if not -1 <= tensor < count:
            raise table.buffer.make_error(f"{subject} names tensor {tensor}, and it has {count}")
    return indices


def _read_operator(entry: Table, subgraph: int, index: int, codes: tuple[str, ...], tensors: int) -> Operator:
    subject = f"op {index} of subgraph {subgraph}"
    code = entry.integer(0, "I")
    if code >= len(codes):
        raise entry.buffer.make_error(f"{subject} has operator code {code} of {len(codes)}")
    kind = codes[code]
    # LiteRT ignores options of another operator's type.
    options = entry.table(4) if entry.integer(3, "B") == _OPTION_TYPES.get(kind) else None
    slot = _ACTIVATION_SLOT.get(kind)
    composite = entry.table(12) if kind == _COMPOSITE and entry.integer(11, "B") == _COMPOSITE_OPTIONS else None
    return Operator(
        subgraph,
        index,
        kind,
        _read_tensor_indices(entry, 1, tensors, subject),
        _read_tensor_indices(entry, 2, tensors, subject),
        (composite.string(0) or "") if composite else None,
        composite.integer(1, "i", -1) if composite else -1,
        composite.vector(2, 1) if composite else None,
        options.integer(slot, "b") if options and slot is not None else 0,
        options,
    )


def _read_tensor(table: Table, subgraph: int, index: int, buffers: int) -> Tensor:
    shape = table.integers(0, "i")
    product = 1
    for size in shape:
        product *= size
        if size < 0 or product > _LARGEST_DIMENSION_PRODUCT:
            raise table.buffer.make_error(f"tensor {index} of subgraph {subgraph} has shape {list(shape[:8])}")
    buffer = table.integer(2, "I")
    if buffer >= buffers:
        raise table.buffer.make_error(f"tensor {index} of subgraph {subgraph} names buffer {buffer} of {buffers}")
    quantization = table.table(4)
    return Tensor(
        subgraph,
        index,
        table.string(3) or "",
        shape,
        table.integer(1, "b"),
        buffer,
        table.integer(10, "I"),
        _read_quantization(quantization) if quantization else None,
        table.table(6) is not None,
        bool(table.integer(5, "B")),
    )


def _read_quantization(table: Table) -> Quantization | None:
    kind, details = table.integer(4, "B"), table.table(5)
    if not (table.at(2) or table.at(3) or kind):
        return None
    blockwise = None
    if kind == _BLOCKWISE and details:
        blockwise = Blockwise(details.integer(0, "i"), details.integer(1, "i"), details.integer(2, "i"))
    name = _DETAILS.get(kind, f"unknown ({kind})")
    return Quantization(table.integer(6, "i"), name, blockwise, table.vector(2, 4), table.vector(3, 8))
