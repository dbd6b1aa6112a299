"""Heads, and what the caches hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, Edit, add, chain, edge, halves, mul, unary, with_number
from adversary.mutations.masks import slots


def cache_edit(which: str, edit: Edit, layer: int = 0) -> Change:
    """``edit`` of a cache, as [1, heads, slots, width] for keys and values alike."""

    def change(g: Graph) -> None:
        place = g.layer(layer)
        number = 2 if layer == 0 else 3
        tensor = g.input(f"kv_cache_{'k' if which == 'key' else 'v'}_{number}")
        readers = g.readers(tensor)
        if which == "value":
            upright = g.transpose(tensor, [0, 1, 3, 2])
            new = g.transpose(edit(g, upright), [0, 1, 3, 2])
        else:
            new = edit(g, tensor)
        assert g.shape(new) == g.shape(tensor) and place
        g.rewire(tensor, new, readers)

    return change


def laid_out(name: str, order: Sequence[int]) -> Change:
    """The cache ``name`` comes with its axes in ``order``, and is brought back."""

    def change(g: Graph) -> None:
        for number in (2, 3):
            tensor = g.input(f"kv_cache_{name}_{number}")
            shape = g.shape(tensor)
            readers = g.readers(tensor)
            g.main.tensors[tensor].shape = [shape[i] for i in order]
            g.rewire(tensor, g.transpose(tensor, list(np.argsort(order))), readers)
            g.adapt[f"kv_cache_{name}_{number}"] = lambda array: np.ascontiguousarray(array.transpose(order))

    return change


def from_other(which: str) -> Change:
    """K in place of V, or V in place of K."""

    def change(g: Graph) -> None:
        key, value = g.input("kv_cache_k_2"), g.input("kv_cache_v_2")
        old, new = (key, value) if which == "key" else (value, key)
        readers = g.readers(old)
        g.rewire(old, g.transpose(new, [0, 1, 3, 2]), readers)

    return change


def both_exchanged(g: Graph) -> None:
    key, value = g.input("kv_cache_k_2"), g.input("kv_cache_v_2")
    readers = g.readers(key), g.readers(value)
    g.rewire(key, g.transpose(value, [0, 1, 3, 2]), readers[0])
    g.rewire(value, g.transpose(key, [0, 1, 3, 2]), readers[1])


def of_full_layer(which: str) -> Change:
    """The sliding layer reads a part of the full layer's cache."""

    def change(g: Graph) -> bool | None:
        mine, theirs = (g.input(f"kv_cache_{which}_{n}") for n in (2, 3))
        if g.shape(mine)[1] != g.shape(theirs)[1]:
            return False
        readers = g.readers(mine)
        g.rewire(mine, g.slice(theirs, [0, 0, 0, 0], g.shape(mine)), readers)
        return None

    return change


def queries_tiled(g: Graph) -> None:
    """Query head h reads KV head h mod 2, not h div 2."""
    layer = g.layer(0)
    order = [0, 2, 1, 3]
    g.insert(layer.rotated, lambda x: g.gather(x, order, 2))
    back = g.reshape(layer.attended, [1, 1, 4, 32])
    g.insert(layer.merged, lambda _: g.reshape(g.gather(back, order, 2), g.shape(layer.merged)))


def slots_rolled(g: Graph, x: int) -> int:
    count = g.shape(x)[2]
    return g.join([g.part(x, 1, count - 1, 2), g.part(x, 0, 1, 2)], 2)


def extra_slot(g: Graph) -> None:
    """A slot that no cache holds, and every query sees."""
    layer = g.layer(1)
    random = np.random.default_rng(5)
    key, value = g.input("kv_cache_k_3"), g.input("kv_cache_v_3")
    last_key = random.standard_normal([1, g.shape(key)[1], 1, 64])
    last_value = random.standard_normal([1, g.shape(value)[1], 64, 1])
    for tensor, last, axis in ((key, last_key, 2), (value, last_value, 3)):
        readers = g.readers(tensor)
        count = g.shape(tensor)[axis]
        g.rewire(tensor, g.join([g.part(tensor, 0, count - 1, axis), g.constant(last)], axis), readers)
    g.insert(layer.visible, lambda x: g.logical_or(x, g.constant(slots(g) == 255, np.bool_)), [layer.select])


def caches_cut(g: Graph) -> None:
    """Nothing beyond slot 127 is read."""
    layer = g.layer(1)
    key, value = g.input("kv_cache_k_3"), g.input("kv_cache_v_3")
    readers = g.readers(key), g.readers(value)
    zeros = g.constant(np.zeros([1, g.shape(key)[1], 128, 64])), g.constant(np.zeros([1, g.shape(value)[1], 64, 128]))
    g.rewire(key, g.join([g.part(key, 0, 128, 2), zeros[0]], 2), readers[0])
    g.rewire(value, g.join([g.part(value, 0, 128, 3), zeros[1]], 3), readers[1])
    g.insert(layer.visible, lambda x: g.logical_and(x, g.constant(slots(g) < 128, np.bool_)), [layer.select])


def updated_slot(g: Graph) -> None:
    """The newest slot of the keys is overwritten."""
    key = g.input("kv_cache_k_3")
    readers = g.readers(key)
    update = g.constant(np.full([1, g.shape(key)[1], 1, 64], 0.5))
    zero = np.zeros(1, np.int32)
    start = g.join(
        [g.constant(zero, np.int32), g.constant(zero, np.int32), g.input("input_pos"), g.constant(zero, np.int32)]
    )
    g.rewire(key, g.call("DYNAMIC_UPDATE_SLICE", key, update, start, shape=g.shape(key)), readers)


def merged_by(order: Sequence[int]) -> Change:
    """The heads' results leave in another order of axes."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        g.insert(layer.merged, lambda _: g.reshape(g.transpose(layer.attended, order), g.shape(layer.merged)))

    return change


def query_by(order: Sequence[int], shape: Sequence[int]) -> Change:
    """The query's heads are read in another order of axes."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        reshaped = next(op for op in g.readers(layer.query) if g.kind(op) == "RESHAPE")
        turned = g.transpose(g.reshape(layer.query, shape), order)
        g.rewire(int(reshaped.outputs[0]), g.reshape(turned, g.shape(int(reshaped.outputs[0]))))

    return change


mask_out = lambda size, dead, axis: np.where(np.arange(size) == dead, 0.0, 1.0).reshape(  # noqa: E731
    [size if i == axis else 1 for i in range(4)]
)

HEADS: dict[str, Change] = {
    "value_is_key": from_other("value"),
    "key_is_value": from_other("key"),
    "key_and_value_exchanged": both_exchanged,
    "key_of_full_layer": of_full_layer("k"),
    "value_of_full_layer": of_full_layer("v"),
    "key_heads_swapped": cache_edit("key", lambda g, x: g.gather(x, [1, 0], 1)),
    "value_heads_swapped": cache_edit("value", lambda g, x: g.gather(x, [1, 0], 1)),
    "kv_heads_swapped": lambda g: [
        cache_edit(which, lambda g, x: g.gather(x, [1, 0], 1))(g) for which in ("key", "value")
    ],
    "first_key_head_twice": cache_edit("key", lambda g, x: g.gather(x, [0, 0], 1)),
    "first_value_head_twice": cache_edit("value", lambda g, x: g.gather(x, [0, 0], 1)),
    "queries_tiled_over_kv_heads": queries_tiled,
    "query_heads_permuted": edge("0.rotated", lambda g, x: g.gather(x, [1, 2, 3, 0], 2)),
    "query_heads_averaged": edge("0.rotated", lambda g, x: g.add(g.reduce("MEAN", x, 2), g.mul(x, 0.0))),
    "head_dropped": edge("0.attended", mul(mask_out(2, 1, 2))),
    "kv_head_dropped": edge("0.attended", mul(mask_out(2, 1, 1))),
    "results_of_heads_swapped": edge("0.attended", lambda g, x: g.gather(x, [1, 0], 1)),
    "results_of_queries_swapped": edge("0.attended", lambda g, x: g.gather(x, [1, 0], 2)),
    "merged_by_width": merged_by([0, 3, 1, 2]),
    "merged_by_query": merged_by([0, 2, 1, 3]),
    "query_split_by_width": query_by([0, 1, 3, 2], [1, 1, 32, 4]),
    "query_halves_swapped": edge("0.query", lambda g, x: g.join(halves(g, x)[::-1])),
    "key_slots_reversed": cache_edit("key", lambda g, x: g.gather(x, range(255, -1, -1), 2), 1),
    "value_slots_reversed": cache_edit("value", lambda g, x: g.gather(x, range(255, -1, -1), 2), 1),
    "key_slots_rolled": cache_edit("key", slots_rolled, 1),
    "value_slots_rolled": cache_edit("value", slots_rolled, 1),
    "key_width_reversed": cache_edit("key", lambda g, x: g.gather(x, range(31, -1, -1), 3)),
    "value_width_reversed": cache_edit("value", lambda g, x: g.gather(x, range(31, -1, -1), 3)),
    "key_halves_swapped": cache_edit("key", lambda g, x: g.join(halves(g, x)[::-1])),
    "key_scaled": cache_edit("key", mul(0.5)),
    "key_scaled_by_width": cache_edit("key", mul(np.linspace(0.5, 1.5, 32).reshape(1, 1, 1, 32))),
    "value_scaled_by_head": cache_edit("value", mul(np.array([1.0, 0.5]).reshape(1, 2, 1, 1))),
    "key_absolute": cache_edit("key", unary("ABS")),
    "value_bounded": cache_edit("value", chain(with_number("MINIMUM", 1.0), with_number("MAXIMUM", -1.0))),
    "value_negated": cache_edit("value", unary("NEG")),
    "value_plus_key": cache_edit("value", lambda g, x: g.add(x, g.input("kv_cache_k_2"))),
    "value_shifted": cache_edit("value", add(0.25)),
    "key_half_cleared": cache_edit("key", mul(np.repeat([1.0, 0.0], 16).reshape(1, 1, 1, 32))),
    "value_of_every_second_slot": cache_edit("value", lambda g, x: g.gather(x, [i // 2 * 2 for i in range(256)], 2), 1),
    "extra_slot": extra_slot,
    "caches_cut": caches_cut,
    "newest_key_overwritten": updated_slot,
    "result_plus_newest_value": edge("1.attended", lambda g, x: g.add(x, g.constant(np.full(g.shape(x), 0.1)))),
    "result_minus_query": edge("0.attended", lambda g, x: g.sub(x, g.layer(0).queries)),
}
