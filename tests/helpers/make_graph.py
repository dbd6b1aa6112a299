"""TFLite models written by code, operator by operator, for ``make_drafter.py`` and for ``scripts/_rehearsal``.

A constant of some size is a :class:`Stored`: so many random bytes at an offset behind the flatbuffer or in a section of
weights, written when the file is. Small ones are inline. Signatures share codes, and each has scales of its own, as
Google's exporters have it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import flatbuffers.flexbuffers
import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from helpers.make_bundle import add_buffer, added, code_of, pack, type_of

_BITS = {2: schema.TensorType.INT2, 4: schema.TensorType.INT4, 8: schema.TensorType.INT8}
_DTYPES: dict[str, npt.DTypeLike] = {"f32": np.float32, "i32": np.int32, "i8": np.int8, "bool": np.bool_}
_ALIGNMENT = 16
_PIECE = 1 << 24
_ATTRIBUTES = bytes(flatbuffers.flexbuffers.Dumps({"epsilon": 1e-6}))
_LATER = 1 << 40
"""An offset that is not known yet, of as many bytes as one that is."""


@dataclass
class Stored:
    """Bytes outside of the flatbuffer: random codes, or given ones."""

    size: int
    data: bytes | None = None
    at: int = 0


@dataclass
class Model:
    """A model in the making. ``external``: whether constants lie in a section of their own."""

    external: bool = False
    description: str = "rehearsal"
    stored: dict[str, Stored] = field(default_factory=dict)
    _places: dict[str, int] = field(default_factory=dict)
    _end: int = 0

    def __post_init__(self) -> None:
        self.tree = schema.ModelT(version=3, description=self.description.encode(), buffers=[schema.BufferT()])
        self.tree.operatorCodes, self.tree.subgraphs, self.tree.signatureDefs = [], [], []
        if self.external:
            group = schema.ExternalBufferGroupT(name=b"tflite_weights")
            self.tree.externalBufferGroups, self.tree.externalBuffers = [group], []

    def graph(self, name: str) -> Graph:
        subgraph = schema.SubGraphT(name=name.encode(), tensors=[], operators=[], inputs=[], outputs=[])
        return Graph(self, subgraph, added(self.tree.subgraphs, subgraph))

    def place(self, key: str, size: int, data: bytes | None) -> int:
        """Buffer, or external buffer, of the constant ``key``; one for all that ask for it."""
        if key in self._places:
            return self._places[key]
        stored = self.stored[key] = Stored(size, data, self._end)
        self._end += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self.external:
            number = 0x80000000 | len(self.tree.externalBuffers)
            entry = schema.ExternalBufferT(id=number, group=0, offset=stored.at, length=size, packing=b"unpacked")
            self.tree.externalBuffers.append(entry)
        else:
            number = added(self.tree.buffers, schema.BufferT(offset=_LATER + stored.at, size=size))
        self._places[key] = number
        return number

    def packed(self) -> bytes:
        """The flatbuffer, with true offsets."""
        data = pack(self.tree)
        if not self.external and self.stored:
            start = -(-len(data) // _ALIGNMENT) * _ALIGNMENT
            for buffer in self.tree.buffers:
                if buffer.offset >= _LATER:
                    buffer.offset += start - _LATER
            data = pack(self.tree)
            data += bytes(start - len(data))
        return data

    @property
    def outside(self) -> int:
        """Bytes of the constants outside of the flatbuffer."""
        return self._end

    def write_outside(self, file: BinaryIO, generator: np.random.Generator) -> None:
        """Write them, from where ``file`` is."""
        for stored in self.stored.values():
            for first in range(0, stored.size, _PIECE):
                count = min(_PIECE, stored.size - first)
                file.write(generator.bytes(count) if stored.data is None else stored.data[first : first + count])
            file.write(bytes(-stored.size % _ALIGNMENT))


@dataclass
class Graph:
    """A subgraph in the making; values are the indices of its tensors."""

    model: Model
    made: Any
    index: int
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)

    def shape(self, value: int) -> list[int]:
        return list(self.made.tensors[value].shape)

    def tensor(self, shape: Sequence[int], kind: str = "f32", name: str = "") -> int:
        """A tensor without a buffer."""
        label, sizes = name or f"v{len(self.made.tensors)}", [int(size) for size in shape]
        tensor = schema.TensorT(name=label.encode(), shape=sizes, type=type_of(_DTYPES[kind]), buffer=0)
        return added(self.made.tensors, tensor)

    def input(self, name: str, shape: Sequence[int], kind: str = "f32") -> int:
        """An input of the signature."""
        self.inputs[name] = self.tensor(shape, kind, name)
        return self.inputs[name]

    def codes(self, name: str, shape: Sequence[int], step: float) -> int:
        """An input of the signature that takes INT8, each code worth ``step``."""
        index = self.input(name, shape, "i8")
        self.made.tensors[index].quantization = schema.QuantizationParametersT(
            scale=np.array([step], np.float32), zeroPoint=np.zeros(1, np.int64)
        )
        return index

    def constant(self, values: npt.ArrayLike, kind: str = "f32", key: str = "") -> int:
        """A constant: with ``key`` outside of the flatbuffer, and shared."""
        array = np.asarray(values, _DTYPES[kind])
        index = self.tensor(array.shape, kind, f"c{len(self.made.tensors)}")
        data = array.tobytes()
        if key:
            self._put_outside(index, self.model.place(key, len(data), data))
        else:
            self.made.tensors[index].buffer = add_buffer(self.model.tree, data)
        return index

    def matrix(self, key: str, rows: int, width: int, bits: int) -> int:
        """Random codes that graphs share, with scales and zero points of this graph, one a row."""
        index = self.tensor((rows, width))
        tensor = self.made.tensors[index]
        tensor.type = _BITS[bits]
        # Their deviation is that of the base's own weights.
        scale = np.full(rows, 3.5 / 2**bits * width**-0.5, np.float32)
        tensor.quantization = schema.QuantizationParametersT(scale=scale, zeroPoint=np.zeros(rows, np.int64))
        self._put_outside(index, self.model.place(key, rows * width * bits // 8, None))
        return index

    def _put_outside(self, index: int, place: int) -> None:
        setattr(self.made.tensors[index], "externalBuffer" if self.model.external else "buffer", place)

    def op(self, name: str, inputs: Sequence[int], shape: Sequence[int], options: Any = None, kind: str = "f32") -> int:
        """An operator of one result."""
        code, result = code_of(self.model.tree, name), self.tensor(shape, kind)
        op = schema.OperatorT(opcodeIndex=code, inputs=list(inputs), outputs=[result])
        if isinstance(options, schema.StableHLOCompositeOptionsT):
            op.builtinOptions2 = options
            op.builtinOptions2Type = schema.BuiltinOptions2.StableHLOCompositeOptions
        elif options is not None:
            op.builtinOptions = options
            op.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T"))
        self.made.operators.append(op)
        return result

    def reshape(self, value: int, shape: Sequence[int]) -> int:
        return self.op("RESHAPE", [value, self.constant(list(shape), "i32")], shape)

    def transpose(self, value: int, axes: Sequence[int]) -> int:
        shape = self.shape(value)
        return self.op("TRANSPOSE", [value, self.constant(list(axes), "i32")], [shape[axis] for axis in axes])

    def part(self, value: int, begin: Sequence[int], size: Sequence[int], kind: str = "f32") -> int:
        return self.op("SLICE", [value, self.constant(begin, "i32"), self.constant(size, "i32")], size, kind=kind)

    def joined(self, values: Sequence[int], axis: int, kind: str = "f32") -> int:
        """``values`` one after the other along ``axis``."""
        options = schema.ConcatenationOptionsT(axis=axis)
        shape = self.shape(values[0])
        shape[axis] = sum(self.shape(value)[axis] for value in values)
        return self.op("CONCATENATION", values, shape, options, kind)

    def times(self, value: int, number: float) -> int:
        return self.op("MUL", [value, self.constant(number)], self.shape(value))

    def plus(self, left: int, right: int) -> int:
        """Their sum, in the shape of ``left``."""
        return self.op("ADD", [left, right], self.shape(left))

    def bounded(self, value: int, most: float) -> int:
        """``value`` between ``-most`` and ``most``, by tanh."""
        return self.times(self.op("TANH", [self.times(value, 1 / most)], self.shape(value)), most)

    def linear(self, value: int, key: str, rows: int, bits: int = 8) -> int:
        """A product with a matrix ``[rows, width of value]``."""
        *front, width = self.shape(value)
        # Without it, LiteRT makes two axes of what has three.
        options = schema.FullyConnectedOptionsT(keepNumDims=True)
        return self.op("FULLY_CONNECTED", [value, self.matrix(key, rows, width, bits), -1], [*front, rows], options)

    def normed(self, x: int) -> int:
        """``x`` over the root of its mean square along the last axis."""
        shape = self.shape(x)
        options = schema.ReducerOptionsT(keepDims=True)
        squared = self.op("MUL", [x, x], shape)
        mean = self.op("MEAN", [squared, self.constant([len(shape) - 1], "i32")], [*shape[:-1], 1], options)
        above = self.op("ADD", [mean, self.constant(1e-6)], [*shape[:-1], 1])
        return self.op("MUL", [x, self.op("RSQRT", [above], [*shape[:-1], 1])], shape)

    def norm(self, value: int, key: str = "") -> int:
        """RMSNorm over the last axis, a composite with a body of its own; without ``key`` it has no weight."""
        shape = self.shape(value)
        body = self.model.graph(f"rms_norm.{self.index}.{len(self.made.operators)}")
        result = body.normed(body.input("x", shape))
        operands = [value]
        if key:
            operands.append(self.constant(np.linspace(0.8, 1.2, shape[-1]), key=key))
            result = body.op("MUL", [result, body.input("weight", [shape[-1]])], shape)
        body.made.inputs, body.made.outputs = list(body.inputs.values()), [result]
        composite = schema.StableHLOCompositeOptionsT(
            name=b"odml.rms_norm",
            decompositionSubgraphIndex=body.index,
            version=1,
            compositeAttributes=np.frombuffer(_ATTRIBUTES, np.uint8),
        )
        return self.op("STABLEHLO_COMPOSITE", operands, shape, composite)

    def sign(self, key: str) -> None:
        """Make a signature of it."""
        signature = schema.SignatureDefT(signatureKey=key.encode(), subgraphIndex=self.index)
        signature.inputs, signature.outputs = _maps(self.inputs), _maps(self.outputs)
        self.made.inputs, self.made.outputs = list(self.inputs.values()), list(self.outputs.values())
        self.model.tree.signatureDefs.append(signature)


def _maps(names: Mapping[str, int]) -> list[Any]:
    return [schema.TensorMapT(name=name.encode(), tensorIndex=index) for name, index in names.items()]


def gelu(graph: Graph, value: int) -> int:
    """GELU as tanh approximates it."""
    return graph.op("GELU", [value], graph.shape(value), schema.GeluOptionsT(approximate=True))


def fed_forward(graph: Graph, stream: int, key: str, ffn: int, bits: int) -> int:
    """``stream`` after the feed-forward block whose constants begin with ``key``."""
    x = graph.norm(stream, f"{key}pre_ffw")
    gate = gelu(graph, graph.linear(x, f"{key}gate", ffn, bits))
    product = graph.op("MUL", [gate, graph.linear(x, f"{key}up", ffn, bits)], graph.shape(gate))
    down = graph.linear(product, f"{key}down", graph.shape(stream)[-1], bits)
    return graph.plus(stream, graph.norm(down, f"{key}post_ffw"))


def rotated(graph: Graph, value: int, position: int, theta: float, share: float = 1.0) -> int:
    """RoPE of ``value [1, T, heads, head_dim]`` at ``position [T]``; of the frequencies, a ``share`` is not 0."""
    shape = graph.shape(value)
    half, tokens = shape[-1] // 2, shape[1]
    frequencies = np.where(np.arange(half) < share * half, theta ** (-np.arange(half) / half), 0.0)
    table, places = graph.constant(frequencies.reshape(1, 1, 1, half)), graph.op("CAST", [position], [tokens])
    if tokens > 1:
        places = graph.reshape(places, [1, tokens, 1, 1])
    turned = [1, tokens, 1, half]
    angle = graph.op("MUL", [places, table], turned)
    cos, sin = (graph.op(name, [angle], turned) for name in ("COS", "SIN"))
    size = [*shape[:-1], half]
    first, second = (graph.part(value, [0, 0, 0, at], size) for at in (0, half))

    def product(a: int, b: int) -> int:
        return graph.op("MUL", [a, b], size)

    left = graph.op("SUB", [product(first, cos), product(second, sin)], size)
    right = graph.op("ADD", [product(second, cos), product(first, sin)], size)
    return graph.joined([left, right], 3)


def windowed(graph: Graph, position: int, mask: int, window: int) -> int:
    """``mask [1, 1, 1, slots]`` for a layer that sees the last ``window`` slots up to ``position``."""
    size = graph.shape(mask)
    slots = np.arange(size[-1]).reshape(size)
    causal = graph.op("GREATER_EQUAL", [position, graph.constant(slots, "i32")], size, kind="bool")
    near = graph.op("LESS", [position, graph.constant(slots + window, "i32")], size, kind="bool")
    both = graph.op("LOGICAL_AND", [causal, near], size, kind="bool")
    return graph.op("LOGICAL_AND", [mask, both], size, kind="bool")
