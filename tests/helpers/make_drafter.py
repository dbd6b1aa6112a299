"""A drafter's ``.tflite`` written by code: plain operators only, names that say nothing.

The sample in the package is an export with composites and Google's names. This is the other extreme: every RMSNorm
and the mask spelled out, tensors called ``t0``, ``t1``, …, and as small as a drafter can be, so that thousands of
damaged copies can be read in a minute. The builder is that of ``make_graph.py``, with constants inline.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from helpers.make_bundle import pack
from helpers.make_graph import Graph, Model, fed_forward, rotated, windowed
from helpers.subgraph import Subgraph


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
    cache_step: float | None = None
    """What a code of an INT8 cache is worth; None of caches in floats."""
    lowest_code: int = -127
    """Of the INT8 matrices. Symmetric quantizers leave -128 out; nothing forbids it."""


@dataclass
class _Plain(Graph):
    lowest_code: int = -127
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def matrix(self, key: str, rows: int, width: int, bits: int) -> int:
        """INT8, with a scale a row."""
        codes = self.constant(self.rng.integers(self.lowest_code, 128, (rows, width)), np.int8)
        return self.scaled(codes, self.rng.uniform(0.01, 0.02, rows))

    def norm(self, value: int, key: str = "") -> int:
        """RMSNorm, spelled out."""
        weight = self.rng.uniform(0.5, 2, self.shape(value)[-1]).astype(np.float32)
        return self.mul(self.normed(value), weight)


def plain_model(spec: DrafterSpec = DrafterSpec()) -> Any:
    """The ``ModelT`` of a drafter; the same spec gives the same model."""
    model = Model()
    graph = _Plain(model, model.graph("main").index, lowest_code=spec.lowest_code)
    activations = graph.input("activations", [1, 1, 2 * spec.backbone])
    position = graph.input("input_pos", [1], np.int32)
    mask = graph.input("mask", [1, 1, 1, spec.cache], np.bool_)
    caches = {
        bank: tuple(_cache(graph, f"kv_cache_{part}_{bank}", spec) for part in "kv")
        for bank in sorted({int(window is None) for window in spec.windows})
    }
    stream = graph.linear(activations, "", spec.hidden)
    for window in spec.windows:
        seen = mask if window is None else windowed(graph, position, mask, window)
        stream = _layer(graph, spec, stream, position, seen, caches[int(window is None)])
    state = graph.norm(stream)
    logits = graph.linear(state, "", spec.vocab)
    if spec.soft_cap is not None:
        logits = graph.bounded(logits, spec.soft_cap)
    graph.outputs = {"logits": logits, "projected_activations": graph.linear(state, "", spec.backbone)}
    graph.sign("mtp_drafter")
    return model.tree


def _cache(graph: Graph, name: str, spec: DrafterSpec) -> int:
    shape = [1, spec.kv_heads, spec.cache, spec.head_dim]
    if spec.cache_step is None:
        return graph.input(name, shape)
    return graph.call("DEQUANTIZE", graph.codes(name, shape, spec.cache_step), dtype=np.float32)


def _layer(graph: _Plain, spec: DrafterSpec, stream: int, position: int, seen: int, kv: tuple[int, ...]) -> int:
    query = graph.linear(graph.norm(stream), "", spec.heads * spec.head_dim)
    query = graph.norm(graph.reshape(query, [1, 1, spec.heads, spec.head_dim]))
    query = rotated(graph, query, position, 1e4)
    grouped = [1, spec.kv_heads, spec.heads // spec.kv_heads]
    query = graph.reshape(query, [*grouped, spec.head_dim])
    scores = graph.call("BATCH_MATMUL", query, kv[0], shape=[*grouped, spec.cache], adjY=True)
    weights = graph.call("SOFTMAX", graph.call("SELECT_V2", seen, scores, -1e9), beta=1.0)
    attended = graph.call("BATCH_MATMUL", weights, kv[1], shape=[*grouped, spec.head_dim])
    attended = graph.linear(graph.reshape(attended, [1, 1, spec.heads * spec.head_dim]), "", spec.hidden)
    middle = graph.add(stream, graph.norm(attended))
    return graph.mul(fed_forward(graph, middle, "", spec.ffn, 8), graph.rng.uniform(0.5, 1))


def plain_drafter(spec: DrafterSpec = DrafterSpec()) -> bytes:
    """:func:`plain_model`, packed."""
    return pack(plain_model(spec))


def blockwise_int2(block: int = 64, *, zeros: bool = False) -> bytes:
    """A drafter with every matrix in INT2 and FP16 scales for each ``block`` of a row: no exporter at hand makes one.

    ``zeros``: some blocks have a scale of 0, as blocks that are all 0 may have.
    """
    spec = DrafterSpec(hidden=128, ffn=128, heads=2, kv_heads=1, head_dim=64, backbone=128, windows=(4, None))
    graph, rng = Subgraph(plain_model(spec)), np.random.default_rng(0)
    for tensor in [t for t in graph.main.tensors if t.quantization is not None]:
        rows, columns = tensor.shape
        codes = rng.integers(-2, 2, (rows, columns)).astype(np.int8)
        scales = rng.uniform(0.02, 0.5, (rows, columns // block)).astype(np.float16)
        if zeros:
            scales[::3, 0] = 0
        packed = (codes.reshape(-1, 4) & 3).astype(np.uint8)
        packed = packed[:, 0] | packed[:, 1] << 2 | packed[:, 2] << 4 | packed[:, 3] << 6
        graph.model.buffers[tensor.buffer].data = packed.astype(np.uint8)
        tensor.type = schema.TensorType.INT2
        stored = graph.constant(scales, np.float16)
        details = schema.BlockwiseQuantizationT(scales=stored, zeroPoints=-1, blockSize=block)
        kind = schema.QuantizationDetails.BlockwiseQuantization
        tensor.quantization = schema.QuantizationParametersT(details=details, detailsType=kind)
    return pack(graph.model)
