"""What decoder and drafter have in common, as plain operators."""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from .graph import Graph
from .shapes import FULL, SLIDING

_ROPE = {SLIDING: (1e4, 1.0), FULL: (1e6, 0.25)}
"""The base of the frequencies, and how many of them are not 0."""


def gelu(graph: Graph, value: int) -> int:
    """GELU as tanh approximates it."""
    options = schema.GeluOptionsT()
    options.approximate = True
    return graph.op("GELU", [value], graph.shape(value), options)


def fed_forward(graph: Graph, stream: int, key: str, ffn: int, bits: int) -> int:
    """``stream`` after the feed-forward block whose constants begin with ``key``."""
    x = graph.norm(stream, f"{key}pre_ffw")
    gate = gelu(graph, graph.linear(x, f"{key}gate", ffn, bits))
    product = graph.op("MUL", [gate, graph.linear(x, f"{key}up", ffn, bits)], graph.shape(gate))
    down = graph.linear(product, f"{key}down", graph.shape(stream)[-1], bits)
    return graph.plus(stream, graph.norm(down, f"{key}post_ffw"))


def attended(graph: Graph, query: int, key: int, value: int, mask: int) -> int:
    """Attention of ``query [1, T, heads, D]`` over caches ``[1, kv, C, D]``: ``[1, T, heads · D]``."""
    _, tokens, heads, head = graph.shape(query)
    _, kv_heads, slots, _ = graph.shape(key)
    grouped = [1, kv_heads, heads // kv_heads * tokens, head]
    query = graph.reshape(graph.transpose(query, [0, 2, 1, 3]), grouped)
    options = schema.BatchMatMulOptionsT()
    options.adjY = True
    scores = graph.op("BATCH_MATMUL", [query, key], [*grouped[:-1], slots], options)
    scores = graph.reshape(scores, [1, heads, tokens, slots])
    scores = graph.op("SELECT_V2", [mask, scores, graph.constant(-1e9)], graph.shape(scores))
    softmax = schema.SoftmaxOptionsT()
    softmax.beta = 1.0
    weights = graph.op("SOFTMAX", [scores], graph.shape(scores), softmax)
    weights = graph.reshape(weights, [*grouped[:-1], slots])
    mixed = graph.op("BATCH_MATMUL", [weights, value], grouped, schema.BatchMatMulOptionsT())
    mixed = graph.transpose(graph.reshape(mixed, [1, heads, tokens, head]), [0, 2, 1, 3])
    return graph.reshape(mixed, [1, tokens, heads * head])


def rotated(graph: Graph, value: int, position: int, kind: str) -> int:
    """RoPE of ``value [1, T, heads, head_dim]`` at ``position [T]``, as layers of this ``kind`` have it."""
    theta, share = _ROPE[kind]
    shape = graph.shape(value)
    half, tokens = shape[-1] // 2, shape[1]
    frequencies = np.where(np.arange(half) < share * half, theta ** (-np.arange(half) / half), 0.0)
    places = graph.reshape(graph.op("CAST", [position], [tokens]), [1, tokens, 1, 1])
    turned = [1, tokens, 1, half]
    angle = graph.op("MUL", [places, graph.constant(frequencies.reshape(1, 1, 1, half))], turned)
    cos, sin = (graph.op(name, [angle], turned) for name in ("COS", "SIN"))
    size = [*shape[:-1], half]
    first, second = (graph.part(value, [0, 0, 0, at], size) for at in (0, half))

    def product(a: int, b: int) -> int:
        return graph.op("MUL", [a, b], size)

    left = graph.op("SUB", [product(first, cos), product(second, sin)], size)
    right = graph.op("ADD", [product(second, cos), product(first, sin)], size)
    return graph.joined([left, right], 3)
