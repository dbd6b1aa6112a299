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

from helpers.make_bundle import added, pack
from helpers.subgraph import Subgraph

_BITS = {2: schema.TensorType.INT2, 4: schema.TensorType.INT4, 8: schema.TensorType.INT8}
_ALIGNMENT = 16
_PIECE = 1 << 24
_ATTRIBUTES = bytes(flatbuffers.flexbuffers.Dumps({"epsilon": 1e-6}))
_LATER = 1 << 40
"""An offset that is not known yet, of as many bytes as one that is."""


@dataclass
class Stored:
    """Bytes outside of the flatbuffer: random codes, or given ones."""

    size: int
    data: bytes | None
    buffer: int  # the number of its buffer, or external buffer


@dataclass
class Model:
    """A model in the making. ``external``: whether constants lie in a section of their own."""

    external: bool = False
    stored: dict[str, Stored] = field(default_factory=dict)
    outside: int = 0
    """Bytes of the constants outside of the flatbuffer."""

    def __post_init__(self) -> None:
        self.tree = schema.ModelT(version=3, description=b"by code", buffers=[schema.BufferT()])
        self.tree.operatorCodes, self.tree.subgraphs, self.tree.signatureDefs = [], [], []
        if self.external:
            group = schema.ExternalBufferGroupT(name=b"tflite_weights")
            self.tree.externalBufferGroups, self.tree.externalBuffers = [group], []

    def graph(self, name: str) -> Graph:
        subgraph = schema.SubGraphT(name=name.encode(), tensors=[], operators=[], inputs=[], outputs=[])
        return Graph(self, added(self.tree.subgraphs, subgraph))

    def place(self, key: str, size: int, data: bytes | None) -> int:
        """Buffer, or external buffer, of the constant ``key``; one for all that ask for it."""
        if key not in self.stored:
            if self.external:
                number = 0x80000000 | len(self.tree.externalBuffers)
                entry = schema.ExternalBufferT(id=number, group=0, length=size, packing=b"unpacked")
                entry.offset = self.outside
                self.tree.externalBuffers.append(entry)
            else:
                number = added(self.tree.buffers, schema.BufferT(offset=_LATER + self.outside, size=size))
            self.stored[key] = Stored(size, data, number)
            self.outside += -(-size // _ALIGNMENT) * _ALIGNMENT
        return self.stored[key].buffer

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

    def write_outside(self, file: BinaryIO, generator: np.random.Generator) -> None:
        """Write them, from where ``file`` is."""
        for stored in self.stored.values():
            for first in range(0, stored.size, _PIECE):
                count = min(_PIECE, stored.size - first)
                file.write(generator.bytes(count) if stored.data is None else stored.data[first : first + count])
            file.write(bytes(-stored.size % _ALIGNMENT))


@dataclass
class Graph(Subgraph):
    """A subgraph in the making."""

    file: Model
    index: int
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.file.tree

    def input(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike = np.float32) -> int:
        """An input of the signature."""
        self.inputs[name] = self.tensor(shape, dtype, name)
        return self.inputs[name]

    def codes(self, name: str, shape: Sequence[int], step: float) -> int:
        """An input of the signature that takes INT8, each code worth ``step``."""
        return self.scaled(self.input(name, shape, np.int8), [step])

    def scaled(self, tensor: int, scale: npt.ArrayLike) -> int:
        """``tensor``, whose codes are worth ``scale``."""
        scales = np.asarray(scale, np.float32)
        quantization = schema.QuantizationParametersT(scale=scales, zeroPoint=np.zeros(len(scales), np.int64))
        self.main.tensors[tensor].quantization = quantization
        return tensor

    def matrix(self, key: str, rows: int, width: int, bits: int) -> int:
        """Random codes that graphs share, with scales and zero points of this graph, one a row."""
        index = self.tensor((rows, width))
        self.main.tensors[index].type = _BITS[bits]
        self._put_outside(index, self.file.place(key, rows * width * bits // 8, None))
        # Their deviation is that of the base's own weights.
        return self.scaled(index, np.full(rows, 3.5 / 2**bits * width**-0.5))

    def _put_outside(self, index: int, place: int) -> None:
        setattr(self.main.tensors[index], "externalBuffer" if self.file.external else "buffer", place)

    def bounded(self, value: int, most: float) -> int:
        """``value`` between ``-most`` and ``most``, by tanh."""
        return self.mul(self.tanh(self.mul(value, 1 / most)), most)

    def linear(self, value: int, key: str, rows: int, bits: int = 8) -> int:
        """A product with a matrix ``[rows, width of value]``."""
        return self.product(value, self.matrix(key, rows, self.shape(value)[-1], bits))

    def normed(self, x: int) -> int:
        """``x`` over the root of its mean square along the last axis."""
        return self.mul(x, self.rsqrt(self.add(self.reduce("MEAN", self.mul(x, x), -1), 1e-6)))

    def norm(self, value: int, key: str = "") -> int:
        """RMSNorm over the last axis, a composite with a body of its own; without ``key`` it has no weight."""
        shape = self.shape(value)
        body = self.file.graph(f"rms_norm.{self.index}.{len(self.main.operators)}")
        result = body.normed(body.input("x", shape))
        operands = [value]
        if key:
            weight = np.linspace(0.8, 1.2, shape[-1], dtype=np.float32)
            operands.append(self.tensor(weight.shape))
            self._put_outside(operands[1], self.file.place(key, weight.nbytes, weight.tobytes()))
            result = body.mul(result, body.input("weight", weight.shape))
        body.main.inputs, body.main.outputs = list(body.inputs.values()), [result]
        normed = self.tensor(shape)
        composite = self.emit("STABLEHLO_COMPOSITE", operands, [normed])
        composite.builtinOptions2Type = schema.BuiltinOptions2.StableHLOCompositeOptions
        composite.builtinOptions2 = schema.StableHLOCompositeOptionsT(
            name=b"odml.rms_norm",
            decompositionSubgraphIndex=body.index,
            version=1,
            compositeAttributes=np.frombuffer(_ATTRIBUTES, np.uint8),
        )
        return normed

    def sign(self, key: str) -> None:
        """Make a signature of it."""
        signature = schema.SignatureDefT(signatureKey=key.encode(), subgraphIndex=self.index)
        signature.inputs, signature.outputs = _maps(self.inputs), _maps(self.outputs)
        self.main.inputs, self.main.outputs = list(self.inputs.values()), list(self.outputs.values())
        self.model.signatureDefs.append(signature)


def _maps(names: Mapping[str, int]) -> list[Any]:
    return [schema.TensorMapT(name=name.encode(), tensorIndex=index) for name, index in names.items()]


def fed_forward(graph: Graph, stream: int, key: str, ffn: int, bits: int) -> int:
    """``stream`` after the feed-forward block whose constants begin with ``key``; GELU is approximated by tanh."""
    x = graph.norm(stream, f"{key}pre_ffw")
    gate = graph.call("GELU", graph.linear(x, f"{key}gate", ffn, bits), approximate=True)
    product = graph.mul(gate, graph.linear(x, f"{key}up", ffn, bits))
    down = graph.linear(product, f"{key}down", graph.shape(stream)[-1], bits)
    return graph.add(stream, graph.norm(down, f"{key}post_ffw"))


def rotated(graph: Graph, value: int, position: int, theta: float, share: float = 1.0) -> int:
    """RoPE of ``value [1, T, heads, head_dim]`` at ``position [T]``; of the frequencies, a ``share`` is not 0."""
    _, tokens, _, head_dim = graph.shape(value)
    half = head_dim // 2
    frequencies = np.where(np.arange(half) < share * half, theta ** (-np.arange(half) / half), 0.0)
    places = graph.cast(position, np.float32)
    if tokens > 1:
        places = graph.reshape(places, [1, tokens, 1, 1])
    angle = graph.mul(places, frequencies.reshape(1, 1, 1, half).astype(np.float32))
    cos, sin = graph.cos(angle), graph.sin(angle)
    first, second = graph.part(value, 0, half), graph.part(value, half, half)
    left = graph.sub(graph.mul(first, cos), graph.mul(second, sin))
    right = graph.add(graph.mul(second, cos), graph.mul(first, sin))
    return graph.join([left, right])


def windowed(graph: Graph, position: int, mask: int, window: int) -> int:
    """``mask [1, 1, 1, slots]`` for a layer that sees the last ``window`` slots up to ``position``."""
    size = graph.shape(mask)
    slots = np.arange(size[-1], dtype=np.int32).reshape(size)
    causal, near = graph.greater_equal(position, slots), graph.less(position, slots + window)
    return graph.logical_and(mask, graph.logical_and(causal, near))
