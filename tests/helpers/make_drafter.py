"""A drafter's ``.tflite`` written by code: plain operators only, names that say nothing.

The sample in the package is an export with composites and Google's names. This is the other extreme: every RMSNorm
and the mask spelled out, constants called ``c0``, ``c1``, …, and as small as a drafter can be, so that thousands of
damaged copies can be read in a minute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from helpers.make_bundle import pack

__all__ = ["DrafterSpec", "plain_drafter", "plain_model"]

_TYPES = {"f32": schema.TensorType.FLOAT32, "i32": schema.TensorType.INT32, "bool": schema.TensorType.BOOL}
_DTYPES = {"f32": np.float32, "i32": np.int32}


@dataclass(frozen=True)
class DrafterSpec:
    """Shape of a drafter. ``windows`` has an entry per layer: the length of its window, or None for a full layer."""

    windows: tuple[int | None, ...] = (None,)
    hidden: int = 8
    ffn: int = 16
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 4
    vocab: int = 12
    backbone: int = 8
    cache: int = 16
    soft_cap: float | None = 30.0
    theta: float = 10000.0


@dataclass
class _Graph:
    model: Any
    rng: np.random.Generator
    codes: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)

    @property
    def main(self) -> Any:
        return self.model.subgraphs[0]

    def tensor(self, name: str, shape: Sequence[int], kind: str = "f32", data: bytes | None = None) -> int:
        tensor = schema.TensorT()
        tensor.name, tensor.shape = name.encode(), list(shape)
        tensor.type, tensor.buffer = _TYPES.get(kind, schema.TensorType.INT8), 0
        if data is not None:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(data, np.uint8)
            self.model.buffers.append(buffer)
            tensor.buffer = len(self.model.buffers) - 1
        self.main.tensors.append(tensor)
        return len(self.main.tensors) - 1

    def input(self, name: str, shape: Sequence[int], kind: str = "f32") -> int:
        self.inputs[name] = self.tensor(name, shape, kind)
        return self.inputs[name]

    def constant(self, values: npt.ArrayLike, kind: str = "f32") -> int:
        array = np.asarray(values, _DTYPES[kind])
        return self.tensor(f"c{len(self.main.tensors)}", array.shape, kind, array.tobytes())

    def matrix(self, out: int, width: int) -> int:
        codes = self.rng.integers(-127, 128, (out, width)).astype(np.int8)
        index = self.tensor(f"c{len(self.main.tensors)}", codes.shape, "i8", codes.tobytes())
        quantization = schema.QuantizationParametersT()
        quantization.scale = self.rng.uniform(0.01, 0.02, out).astype(np.float32)
        quantization.zeroPoint = np.zeros(out, np.int64)
        self.main.tensors[index].quantization = quantization
        return index

    def op(self, name: str, inputs: Sequence[int], shape: Sequence[int], kind: str = "f32", options: Any = None) -> int:
        if name not in self.codes:
            code = schema.OperatorCodeT()
            code.builtinCode = getattr(schema.BuiltinOperator, name)
            code.deprecatedBuiltinCode = min(code.builtinCode, 127)
            self.codes[name] = len(self.model.operatorCodes)
            self.model.operatorCodes.append(code)
        made = schema.OperatorT()
        made.opcodeIndex, made.inputs = self.codes[name], list(inputs)
        result = self.tensor(f"v{len(self.main.tensors)}", shape, kind)
        made.outputs = [result]
        if options is not None:
            made.builtinOptions = options
            made.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__.removesuffix("T"))
        self.main.operators.append(made)
        return result

    def shape_of(self, index: int) -> list[int]:
        return list(self.main.tensors[index].shape)

    def reshape(self, x: int, shape: Sequence[int]) -> int:
        return self.op("RESHAPE", [x, self.constant(list(shape), "i32")], shape)

    def linear(self, x: int, out: int) -> int:
        *front, width = self.shape_of(x)
        options = schema.FullyConnectedOptionsT()
        # Without it, LiteRT makes two axes of what has three.
        options.keepNumDims = True
        return self.op("FULLY_CONNECTED", [x, self.matrix(out, width), -1], [*front, out], options=options)

    def norm(self, x: int) -> int:
        shape = self.shape_of(x)
        squared = self.op("MUL", [x, x], shape)
        kept = schema.ReducerOptionsT()
        kept.keepDims = True
        mean = self.op("MEAN", [squared, self.constant([len(shape) - 1], "i32")], [*shape[:-1], 1], options=kept)
        above = self.op("ADD", [mean, self.constant(1e-6)], [*shape[:-1], 1])
        normed = self.op("MUL", [x, self.op("RSQRT", [above], [*shape[:-1], 1])], shape)
        return self.op("MUL", [normed, self.constant(self.rng.uniform(0.5, 2, shape[-1]))], shape)

    def finish(self) -> None:
        signature = schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = b"mtp_drafter", 0
        for names, maps in ((self.inputs, "inputs"), (self.outputs, "outputs")):
            entries = []
            for name, index in names.items():
                entry = schema.TensorMapT()
                entry.name, entry.tensorIndex = name.encode(), index
                entries.append(entry)
            setattr(signature, maps, entries)
            setattr(self.main, maps, list(names.values()))
        self.model.signatureDefs = [signature]


def plain_model(spec: DrafterSpec = DrafterSpec()) -> Any:
    """The ``ModelT`` of a drafter; the same spec gives the same model."""
    model = schema.ModelT()
    model.version, model.description = 3, b"plain"
    model.operatorCodes, model.buffers, model.subgraphs = [], [schema.BufferT()], [schema.SubGraphT()]
    main = model.subgraphs[0]
    main.name, main.tensors, main.operators = b"main", [], []
    graph = _Graph(model, np.random.default_rng(7))
    activations = graph.input("activations", [1, 1, 2 * spec.backbone])
    position = graph.input("input_pos", [1], "i32")
    mask = graph.input("mask", [1, 1, 1, spec.cache], "bool")
    caches = {}
    for bank, windows in enumerate(((w for w in spec.windows if w), (w for w in spec.windows if not w))):
        if any(True for _ in windows):
            kv = [1, spec.kv_heads, spec.cache, spec.head_dim]
            caches[bank] = (graph.input(f"kv_cache_k_{bank}", kv), graph.input(f"kv_cache_v_{bank}", kv))
    stream = graph.linear(activations, spec.hidden)
    for window in spec.windows:
        stream = _layer(graph, spec, stream, window, position, mask, caches[1 if window is None else 0])
    state = graph.norm(stream)
    logits = graph.linear(state, spec.vocab)
    if spec.soft_cap is not None:
        shape = graph.shape_of(logits)
        below = graph.op("MUL", [logits, graph.constant(1 / spec.soft_cap)], shape)
        bounded = graph.op("TANH", [below], shape)
        logits = graph.op("MUL", [bounded, graph.constant(spec.soft_cap)], shape)
    graph.outputs = {"logits": logits, "projected_activations": graph.linear(state, spec.backbone)}
    graph.finish()
    return model


def _layer(
    graph: _Graph, spec: DrafterSpec, stream: int, window: int | None, position: int, mask: int, kv: tuple[int, int]
) -> int:
    shape = graph.shape_of(stream)
    query = graph.linear(graph.norm(stream), spec.heads * spec.head_dim)
    query = graph.norm(graph.reshape(query, [1, 1, spec.heads, spec.head_dim]))
    query = _rotated(graph, spec, query, position)
    query = graph.reshape(query, [1, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim])
    seen = mask if window is None else _windowed(graph, spec, window, position, mask)
    attended = _attention(graph, spec, query, seen, kv)
    attended = graph.linear(graph.reshape(attended, [1, 1, spec.heads * spec.head_dim]), spec.hidden)
    middle = graph.op("ADD", [stream, graph.norm(attended)], shape)
    x = graph.norm(middle)
    wide = [1, 1, spec.ffn]
    gelu = schema.GeluOptionsT()
    gelu.approximate = True
    gate = graph.op("GELU", [graph.linear(x, spec.ffn)], wide, options=gelu)
    product = graph.op("MUL", [gate, graph.linear(x, spec.ffn)], wide)
    out = graph.op("ADD", [middle, graph.norm(graph.linear(product, spec.hidden))], shape)
    return graph.op("MUL", [out, graph.constant(graph.rng.uniform(0.5, 1))], shape)


def _rotated(graph: _Graph, spec: DrafterSpec, query: int, position: int) -> int:
    half, shape = spec.head_dim // 2, graph.shape_of(query)
    table = graph.constant((spec.theta ** (-np.arange(half) / half)).reshape(1, 1, 1, half))
    angle = graph.op("MUL", [graph.op("CAST", [position], [1]), table], [1, 1, 1, half])
    cos, sin = (graph.op(name, [angle], [1, 1, 1, half]) for name in ("COS", "SIN"))
    size = [*shape[:-1], half]
    first, second = (
        graph.op("SLICE", [query, graph.constant([0, 0, 0, at], "i32"), graph.constant(size, "i32")], size)
        for at in (0, half)
    )

    def times(a: int, b: int) -> int:
        return graph.op("MUL", [a, b], size)

    left = graph.op("SUB", [times(first, cos), times(second, sin)], size)
    right = graph.op("ADD", [times(second, cos), times(first, sin)], size)
    return graph.op("CONCATENATION", [left, right], shape, options=_concatenation())


def _concatenation() -> Any:
    options = schema.ConcatenationOptionsT()
    options.axis = 3
    return options


def _windowed(graph: _Graph, spec: DrafterSpec, window: int, position: int, mask: int) -> int:
    shape = [1, 1, 1, spec.cache]
    slots = np.arange(spec.cache).reshape(shape)
    causal = graph.op("GREATER_EQUAL", [position, graph.constant(slots, "i32")], shape, "bool")
    near = graph.op("LESS", [position, graph.constant(slots + window, "i32")], shape, "bool")
    both = graph.op("LOGICAL_AND", [causal, near], shape, "bool")
    return graph.op("LOGICAL_AND", [mask, both], shape, "bool")


def _attention(graph: _Graph, spec: DrafterSpec, query: int, seen: int, kv: tuple[int, int]) -> int:
    front = graph.shape_of(query)[:-1]
    transposed = schema.BatchMatMulOptionsT()
    transposed.adjY = True
    scores = graph.op("BATCH_MATMUL", [query, kv[0]], [*front, spec.cache], options=transposed)
    scores = graph.op("SELECT_V2", [seen, scores, graph.constant(-1e9)], [*front, spec.cache])
    softmax = schema.SoftmaxOptionsT()
    softmax.beta = 1.0
    weights = graph.op("SOFTMAX", [scores], [*front, spec.cache], options=softmax)
    return graph.op("BATCH_MATMUL", [weights, kv[1]], [*front, spec.head_dim], options=schema.BatchMatMulOptionsT())


def plain_drafter(spec: DrafterSpec = DrafterSpec()) -> bytes:
    """:func:`plain_model`, packed."""
    return pack(plain_model(spec))
