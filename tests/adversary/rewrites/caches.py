"""Caches in other layouts, and their products in other orders."""

from __future__ import annotations

import numpy as np
from helpers.surgery import Graph

from adversary.edits import LOWEST, Change, each
from adversary.mutations.heads import laid_out


def repeated_heads(g: Graph) -> bool | None:
    """Every query head has a KV head of its own: the caches' heads are repeated."""
    layer = g.layer(0)
    key, value = g.input("kv_cache_k_2"), g.input("kv_cache_v_2")
    wide = [g.gather(t, [0, 0, 1, 1], 1) for t in (key, value)]
    query = g.reshape(layer.queries, [1, 4, 1, 32])
    scores = g.call("BATCH_MATMUL", query, wide[0], shape=[1, 4, 1, 256], adjY=True)
    hidden = g.call("SELECT_V2", layer.visible, scores, LOWEST, shape=[1, 4, 1, 256])
    weights = g.call("SOFTMAX", hidden, beta=1.0)
    mixed = g.call("BATCH_MATMUL", weights, wide[1], shape=[1, 4, 1, 32], adjY=True)
    g.rewire(layer.merged, g.reshape(mixed, g.shape(layer.merged)))
    return None


def three_axes(g: Graph) -> None:
    """The products without a batch axis."""
    layer = g.layer(0)
    key = g.reshape(g.input("kv_cache_k_2"), [2, 256, 32])
    query = g.reshape(layer.queries, [2, 2, 32])
    product = g.call("BATCH_MATMUL", query, key, shape=[2, 2, 256], adjY=True)
    g.rewire(layer.scores, g.reshape(product, [1, 2, 2, 256]))


def consistently_permuted(g: Graph) -> None:
    """Queries of a KV head change places, and their results change back."""
    layer = g.layer(0)
    g.insert(layer.queries, lambda x: g.gather(x, [1, 0], 2))
    g.insert(layer.attended, lambda x: g.gather(x, [1, 0], 2))


def by_split(g: Graph) -> None:
    """The query's heads by SPLIT, joined again."""
    layer = g.layer(0)
    parts = [g.tensor([1, 1, 1, 32]) for _ in range(4)]
    g.emit("SPLIT", [g.constant(np.array(2), np.int32), layer.query_normed], parts, numSplits=4)
    g.rewire(
        layer.query_normed, g.join(parts, 2), [op for op in g.readers(layer.query_normed) if g.kind(op) != "SPLIT"]
    )


def by_unpack(g: Graph) -> None:
    """The query's heads by UNPACK, and PACK."""
    layer = g.layer(0)
    readers = g.readers(layer.query_normed)
    parts = [g.tensor([1, 1, 32]) for _ in range(4)]
    g.emit("UNPACK", [layer.query_normed], parts, num=4, axis=2)
    packed = g.call("PACK", *parts, shape=[1, 1, 4, 32], valuesCount=4, axis=2)
    g.rewire(layer.query_normed, packed, readers)


CACHES: dict[str, Change] = {
    "key_transposed": laid_out("k", [0, 1, 3, 2]),
    "key_by_slot": laid_out("k", [0, 2, 1, 3]),
    "value_upright": laid_out("v", [0, 1, 3, 2]),
    "value_by_slot": laid_out("v", [0, 3, 1, 2]),
    "both_by_slot": each(laid_out("k", [0, 2, 1, 3]), laid_out("v", [0, 3, 1, 2])),
    "heads_repeated": repeated_heads,
    "three_axes": three_axes,
    "queries_permuted_and_back": consistently_permuted,
    "heads_by_split": by_split,
    "heads_by_unpack": by_unpack,
}
