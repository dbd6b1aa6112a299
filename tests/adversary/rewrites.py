"""Other ways of writing the same function, as exporters and optimizers do.

A rewrite may be refused, and must not be extracted into something else. ``ACCEPTED`` in the tests lists those that are
read today; that list only grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Case, Change, Edit, at, chain, edge, put, unary, with_number
from adversary.mutations import (
    activated,
    both,
    bounded,
    compare,
    gelu,
    halves,
    normed_by,
    parameters,
    real_weight,
    slots,
    spelled_gelu,
    stored_weight,
    turn,
    visible,
)

__all__ = ["REWRITES"]

WINDOW = 16
LOWEST = np.float32(-1e9)


# Masks and windows.


def summed(build: Callable[[Graph, int], int], layers: Sequence[int] = (0, 1)) -> Change:
    """Scores plus ``build`` of the mask."""

    def change(g: Graph) -> None:
        for index in layers:
            layer = g.layer(index)
            g.set_input(layer.softmax, 0, g.call("ADD", layer.scores, build(g, layer.visible)))

    return change


def selected(build: Callable[[Graph, Any], int], layers: Sequence[int] = (0, 1)) -> Change:
    """Another way to choose between scores and a number far below."""

    def change(g: Graph) -> None:
        for index in layers:
            layer = g.layer(index)
            g.set_input(layer.softmax, 0, build(g, layer))

    return change


def within(build: Callable[[Graph], int]) -> Change:
    """Another way to say the window, beside the mask input."""
    return visible(0, lambda g, _: both(g, g.input("mask"), build(g)))


def distance(g: Graph) -> int:
    return g.call("SUB", g.input("input_pos"), slots(g))


def floats(g: Graph) -> int:
    return g.cast(g.input("input_pos"), np.float32)


def hidden_sum(g: Graph, mask: int) -> int:
    """(1 − mask) · (−1e9)."""
    return g.call("MUL", g.call("SUB", np.float32(1), g.cast(mask, np.float32)), LOWEST)


MASKS: dict[str, Change] = {
    "float_sum": summed(lambda g, m: g.call("SELECT_V2", m, np.float32(0), LOWEST, shape=g.shape(m))),
    "bool_select": selected(lambda g, p: g.call("SELECT_V2", p.visible, p.scores, LOWEST, shape=g.shape(p.scores))),
    "one_minus_mask": summed(hidden_sum),
    "mask_minus_one": summed(
        lambda g, m: g.call("MUL", g.call("SUB", g.cast(m, np.float32), np.float32(1)), np.float32(1e9))
    ),
    "negated_and_swapped": selected(
        lambda g, p: g.call("SELECT_V2", g.call("LOGICAL_NOT", p.visible), LOWEST, p.scores, shape=g.shape(p.scores))
    ),
    "lowest_float": selected(
        lambda g, p: g.call(
            "SELECT_V2", p.visible, p.scores, np.float32(np.finfo(np.float32).min), shape=g.shape(p.scores)
        )
    ),
    "minus_10000": selected(
        lambda g, p: g.call("SELECT_V2", p.visible, p.scores, np.float32(-1e4), shape=g.shape(p.scores))
    ),
    "minimum": selected(
        lambda g, p: g.call(
            "MINIMUM",
            p.scores,
            g.call("SELECT_V2", p.visible, np.float32(1e9), LOWEST, shape=g.shape(p.visible)),
        )
    ),
    "mask_spread_over_heads": selected(
        lambda g, p: g.call(
            "SELECT_V2",
            g.call("BROADCAST_TO", p.visible, np.array(g.shape(p.scores), np.int32), shape=g.shape(p.scores)),
            p.scores,
            g.constant(np.full(g.shape(p.scores), LOWEST)),
        )
    ),
    "not_or": within(
        lambda g: g.call(
            "LOGICAL_NOT",
            g.call("LOGICAL_OR", compare("LESS", 0)(g), compare("GREATER_EQUAL", WINDOW)(g)),
        )
    ),
    "not_and_not": within(
        lambda g: both(
            g, g.call("LOGICAL_NOT", compare("LESS", 0)(g)), g.call("LOGICAL_NOT", compare("GREATER_EQUAL", WINDOW)(g))
        )
    ),
    "strict": bounded(compare("GREATER", -1), compare("LESS_EQUAL", WINDOW - 1)),
    "one_sided": within(compare("LESS", WINDOW)),
    "two_sided": within(
        lambda g: g.call("LESS", g.call("ABS", distance(g)), np.array([WINDOW], np.int32))
    ),
    "two_sided_by_bounds": bounded(compare("GREATER", -WINDOW), compare("LESS", WINDOW)),
    "distances": within(
        lambda g: both(
            g,
            g.call("GREATER_EQUAL", distance(g), np.array([0], np.int32)),
            g.call("LESS", distance(g), np.array([WINDOW], np.int32)),
        )
    ),
    "distances_in_floats": within(
        lambda g: both(
            g,
            g.call("GREATER_EQUAL", g.cast(distance(g), np.float32), np.float32(0)),
            g.call("LESS", g.cast(distance(g), np.float32), np.float32(WINDOW)),
        )
    ),
    "positions_in_floats": within(
        lambda g: both(
            g,
            g.call("GREATER_EQUAL", floats(g), slots(g).astype(np.float32)),
            g.call("LESS", floats(g), slots(g).astype(np.float32) + np.float32(WINDOW)),
        )
    ),
    "half_steps": within(
        lambda g: both(
            g,
            g.call("GREATER", floats(g), slots(g).astype(np.float32) - np.float32(0.5)),
            g.call("LESS", floats(g), slots(g).astype(np.float32) + np.float32(WINDOW - 0.5)),
        )
    ),
    "slots_first": within(
        lambda g: both(
            g,
            g.call("LESS_EQUAL", g.constant(slots(g), np.int32), g.input("input_pos")),
            g.call("GREATER", g.constant(slots(g), np.int32), g.call("SUB", g.input("input_pos"), np.array([WINDOW], np.int32))),
        )
    ),
    "multiplied": within(
        lambda g: g.cast(
            g.call("MUL", g.cast(compare("GREATER_EQUAL", 0)(g), np.float32), g.cast(compare("LESS", WINDOW)(g), np.float32)),
            np.bool_,
        )
    ),
    "int64_positions": within(
        lambda g: both(
            g,
            g.call("GREATER_EQUAL", g.cast(g.input("input_pos"), np.int64), slots(g).astype(np.int64)),
            g.call("LESS", g.cast(g.input("input_pos"), np.int64), slots(g).astype(np.int64) + WINDOW),
        )
    ),
    "two_sums": summed(
        lambda g, m: g.call("ADD", hidden_sum(g, g.input("mask")), hidden_sum(g, m)),
        (0,),
    ),
}


# Caches in other layouts.


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


def each(*changes: Change) -> Change:
    def change(g: Graph) -> None:
        for step in changes:
            step(g)

    return change


def flat_caches(g: Graph) -> None:
    """Heads and batch in one axis."""
    for which in "kv":
        for number in (2, 3):
            tensor = g.input(f"kv_cache_{which}_{number}")
            shape, readers = g.shape(tensor), g.readers(tensor)
            g.main.tensors[tensor].shape = shape[1:]
            g.rewire(tensor, g.reshape(tensor, shape), readers)
            g.adapt[f"kv_cache_{which}_{number}"] = lambda array: np.ascontiguousarray(array[0])


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


def head_by_head(g: Graph) -> None:
    """A product a KV head."""
    layer = g.layer(0)
    key, value = g.input("kv_cache_k_2"), g.input("kv_cache_v_2")
    mixed = []
    for head in range(2):
        query, k, v = (g.part(t, head, 1, 1) for t in (layer.queries, key, value))
        scores = g.call("BATCH_MATMUL", query, k, shape=[1, 1, 2, 256], adjY=True)
        hidden = g.call("SELECT_V2", layer.visible, scores, LOWEST, shape=[1, 1, 2, 256])
        weights = g.call("SOFTMAX", hidden, beta=1.0)
        mixed.append(g.call("BATCH_MATMUL", weights, v, shape=[1, 1, 2, 32], adjY=True))
    g.rewire(layer.merged, g.reshape(g.join(mixed, 1), g.shape(layer.merged)))


def keys_first(g: Graph) -> None:
    """K·qᵀ, transposed."""
    layer = g.layer(0)
    key = g.input("kv_cache_k_2")
    product = g.call("BATCH_MATMUL", key, layer.queries, shape=[1, 2, 256, 2], adjY=True)
    g.rewire(layer.scores, g.transpose(product, [0, 1, 3, 2]))


def values_first(g: Graph) -> None:
    """Vᵀ·pᵀ, transposed."""
    layer = g.layer(0)
    value = g.input("kv_cache_v_2")
    product = g.call("BATCH_MATMUL", value, layer.probabilities, shape=[1, 2, 32, 2], adjY=True)
    g.rewire(layer.attended, g.transpose(product, [0, 1, 3, 2]))


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
    g.rewire(layer.query_normed, g.join(parts, 2), [op for op in g.readers(layer.query_normed) if g.kind(op) != "SPLIT"])


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
    "without_batch": flat_caches,
    "heads_repeated": repeated_heads,
    "head_by_head": head_by_head,
    "keys_first": keys_first,
    "values_first": values_first,
    "three_axes": three_axes,
    "queries_permuted_and_back": consistently_permuted,
    "heads_by_split": by_split,
    "heads_by_unpack": by_unpack,
}


# Scores, softmax, RoPE.


def softmax(build: Callable[[Graph, int], int]) -> Change:
    def change(g: Graph) -> None:
        for index in range(2):
            layer = g.layer(index)
            g.rewire(layer.probabilities, build(g, layer.masked))

    return change


def spelled(g: Graph, x: int) -> int:
    powers = g.call("EXP", g.call("SUB", x, g.reduce("REDUCE_MAX", x, 3)))
    return g.call("DIV", powers, g.reduce("SUM", powers, 3))


def spelled_without_largest(g: Graph, x: int) -> int:
    powers = g.call("EXP", x)
    return g.call("DIV", powers, g.reduce("SUM", powers, 3))


def spelled_in_base_2(g: Graph, x: int) -> int:
    less = g.call("SUB", x, g.reduce("REDUCE_MAX", x, 3))
    powers = g.call("POW", np.float32(2), g.call("MUL", less, np.float32(1 / np.log(2))))
    return g.call("DIV", powers, g.reduce("SUM", powers, 3))


def by_logarithm(g: Graph, x: int) -> int:
    return g.call("EXP", g.call("LOG_SOFTMAX", x))


def beta_undone(g: Graph) -> None:
    layer = g.layer(0)
    layer.softmax.builtinOptions.beta = 0.5
    g.set_input(layer.softmax, 0, g.call("MUL", layer.masked, np.float32(2)))


def rotated(build: Callable[[Graph, int, int, int], int]) -> Change:
    """RoPE written otherwise, in every layer."""

    def change(g: Graph) -> None:
        for index in range(2):
            layer = g.layer(index)
            half = g.shape(layer.query_normed)[-1] // 2
            cos, sin = (g.part(t, 0, half) for t in (layer.cos, layer.sin))
            g.rewire(layer.rotated, build(g, layer.query_normed, cos, sin))

    return change


def wide_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    """q · [cos, cos] + [−b, a] · [sin, sin]."""
    a, b = halves(g, q)
    turned = g.join([g.call("NEG", b), a])
    return g.call("ADD", g.call("MUL", q, g.join([cos, cos])), g.call("MUL", turned, g.join([sin, sin])))


def signed_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    """q · [cos, cos] + [b, a] · [−sin, sin]."""
    a, b = halves(g, q)
    signed = g.join([g.call("NEG", sin), sin])
    return g.call("ADD", g.call("MUL", q, g.join([cos, cos])), g.call("MUL", g.join([b, a]), signed))


def gathered_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    width = g.shape(q)[-1]
    a, b = (g.gather(q, range(start, start + width // 2), -1) for start in (0, width // 2))
    return g.join(turn(g, a, b, cos, sin))


def strided_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    shape, half = g.shape(q), g.shape(q)[-1] // 2
    parts = []
    for start in (0, half):
        begin, end = np.array([0, 0, 0, start], np.int32), np.array([*shape[:3], start + half], np.int32)
        parts.append(
            g.call("STRIDED_SLICE", q, begin, end, np.ones(4, np.int32), shape=[*shape[:3], half])
        )
    return g.join(turn(g, *parts, cos, sin))


def split_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    shape = [*g.shape(q)[:-1], g.shape(q)[-1] // 2]
    parts = [g.tensor(shape), g.tensor(shape)]
    g.emit("SPLIT", [g.constant(np.array(3), np.int32), q], parts, numSplits=2)
    return g.join(turn(g, *parts, cos, sin))


def matrix_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    """[−b, a] by a constant matrix."""
    width = g.shape(q)[-1]
    half = width // 2
    matrix = np.zeros((width, width))
    matrix[np.arange(half), half + np.arange(half)] = -1
    matrix[half + np.arange(half), np.arange(half)] = 1
    return g.call(
        "ADD", g.call("MUL", q, g.join([cos, cos])), g.call("MUL", g.product(q, g.constant(matrix)), g.join([sin, sin]))
    )


def table_divides(g: Graph) -> None:
    """Position divided by the reciprocals of the table."""
    for layer in (0, 1):
        product = next(op for op in g.before(g.layer(layer).cos) if g.kind(op) == "MUL")
        table = next(int(i) for i in product.inputs if g.is_constant(int(i)))
        with np.errstate(divide="ignore"):
            inverse = g.constant(1 / g.value(table).astype(np.float64))
        position = next(int(i) for i in product.inputs if int(i) != table)
        g.rewire(int(product.outputs[0]), g.call("DIV", position, inverse))


SCORES: dict[str, Change] = {
    "softmax_spelled": softmax(spelled),
    "softmax_without_largest": softmax(spelled_without_largest),
    "softmax_in_base_2": softmax(spelled_in_base_2),
    "softmax_by_logarithm": softmax(by_logarithm),
    "softmax_beta_undone": beta_undone,
    "scale_and_back": each(edge("0.queries", with_number("MUL", 0.25)), edge("0.scores", with_number("MUL", 4.0))),
    "key_scaled_and_back": each(edge("0.queries", with_number("DIV", 8.0)), edge("0.scores", with_number("MUL", 8.0))),
    "constant_added": edge("0.scores", with_number("ADD", 1.5)),
    "rope_wide": rotated(wide_rotation),
    "rope_signed": rotated(signed_rotation),
    "rope_halves": rotated(lambda g, q, cos, sin: g.join(turn(g, *halves(g, q), cos, sin))),
    "rope_gathered": rotated(gathered_rotation),
    "rope_strided": rotated(strided_rotation),
    "rope_split": rotated(split_rotation),
    "rope_by_matrix": rotated(matrix_rotation),
    "rope_negated_twice": rotated(
        lambda g, q, cos, sin: g.join(turn(g, *halves(g, q), cos, g.call("NEG", sin), -1))
    ),
    "rope_table_divides": table_divides,
}


# Norms.


def every_norm(edit: Callable[[Graph, Any], object]) -> Change:
    def change(g: Graph) -> None:
        for role in [role for role in g.roles if role.endswith("_norm")]:
            normed_by(role, edit)(g)

    return change


def axis_of(g: Graph, norm: Any) -> int:
    return len(g.shape(norm.x)) - 1


def variance(g: Graph, norm: Any) -> int:
    return g.call("ADD", g.reduce("MEAN", g.call("MUL", norm.x, norm.x), axis_of(g, norm)), np.float32(1e-6))


def rebuilt(build: Callable[[Graph, Any], int]) -> Callable[[Graph, Any], object]:
    """x over its root, written otherwise; the product with the weight stays."""
    return lambda g, norm: g.rewire(int(norm.scale.outputs[0]), build(g, norm))


def by_sum(g: Graph, norm: Any) -> int:
    size = g.shape(norm.x)[-1]
    total = g.reduce("SUM", g.call("MUL", norm.x, norm.x), axis_of(g, norm))
    mean = g.call("ADD", g.call("DIV", total, np.float32(size)), np.float32(1e-6))
    return g.call("MUL", norm.x, g.call("RSQRT", mean))


def by_length(g: Graph, norm: Any) -> int:
    """x · sqrt(N) / sqrt(sum + N·eps)."""
    size = g.shape(norm.x)[-1]
    total = g.reduce("SUM", g.call("MUL", norm.x, norm.x), axis_of(g, norm))
    inverse = g.call("RSQRT", g.call("ADD", total, np.float32(size * 1e-6)))
    return g.call("MUL", g.call("MUL", norm.x, inverse), np.float32(size**0.5))


def squares_by(name: str) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        old = int(norm.square.outputs[0])
        x = norm.x if g.shape(norm.x) == g.shape(old) else g.reshape(norm.x, g.shape(old))
        numbers = {"POW": [np.float32(2)], "SQUARED_DIFFERENCE": [np.float32(0)], "MUL": [g.call("ABS", x)]}
        g.rewire(old, g.call(name, g.call("ABS", x) if name == "MUL" else x, *numbers.get(name, [])))

    return edit


def weight_first(g: Graph, norm: Any) -> None:
    root = int(norm.root.outputs[0])
    g.rewire(norm.out, g.call("MUL", g.call("MUL", norm.x, norm.weight), root, shape=g.shape(norm.out)))


def root_times_weight(g: Graph, norm: Any) -> None:
    root = int(norm.root.outputs[0])
    factor = g.call("MUL", root, norm.weight)
    g.rewire(norm.out, g.call("MUL", norm.x, factor, shape=g.shape(norm.out)))


def mean_without_axis(g: Graph, norm: Any) -> int:
    mean = g.reduce("MEAN", g.call("MUL", norm.x, norm.x), axis_of(g, norm), keep=False)
    wide = g.reshape(mean, [*g.shape(norm.x)[:-1], 1])
    return g.call("MUL", norm.x, g.call("RSQRT", g.call("ADD", wide, np.float32(1e-6))))


NORMS: dict[str, Change] = {
    "square": every_norm(squares_by("SQUARE")),
    "power_2": every_norm(squares_by("POW")),
    "squared_difference": every_norm(squares_by("SQUARED_DIFFERENCE")),
    "absolutes_squared": every_norm(squares_by("MUL")),
    "divided_by_root": every_norm(rebuilt(lambda g, n: g.call("DIV", n.x, g.call("SQRT", variance(g, n))))),
    "inverse_of_root": every_norm(
        rebuilt(lambda g, n: g.call("MUL", n.x, g.call("DIV", np.float32(1), g.call("SQRT", variance(g, n)))))
    ),
    "root_of_inverse": every_norm(
        rebuilt(lambda g, n: g.call("MUL", n.x, g.call("SQRT", g.call("DIV", np.float32(1), variance(g, n)))))
    ),
    "divided_by_power": every_norm(
        rebuilt(lambda g, n: g.call("DIV", n.x, g.call("POW", variance(g, n), np.float32(0.5))))
    ),
    "power": every_norm(rebuilt(lambda g, n: g.call("MUL", n.x, g.call("POW", variance(g, n), np.float32(-0.5))))),
    "sum_over_n": every_norm(rebuilt(by_sum)),
    "length": every_norm(rebuilt(by_length)),
    "mean_without_axis": every_norm(rebuilt(mean_without_axis)),
    "weight_first": every_norm(weight_first),
    "root_times_weight": every_norm(root_times_weight),
    "weight_as_one_minus": every_norm(
        lambda g, n: g.insert(
            n.weight, lambda w: g.call("ADD", g.constant(g.value(w) - np.float32(1)), np.float32(1)), [n.weigh]
        )
    ),
    "eps_on_the_left": every_norm(lambda g, n: setattr(n.add, "inputs", list(n.add.inputs)[::-1])),
    "scaled_before": normed_by(
        "layers.0.post_ffw_norm",
        lambda g, n: g.rewire(n.x, g.call("MUL", n.x, np.float32(2)), [n.square, n.scale]),
    ),
}


# GELU, soft cap, residuals, scalars.


def gelu_everywhere(function: Callable[[Graph, int], int]) -> Change:
    def change(g: Graph) -> None:
        for index in range(2):
            layer = g.layer(index)
            g.rewire(layer.activated, function(g, layer.gate))

    return change


def gelu_by_sigmoid(g: Graph, x: int) -> int:
    """x · σ(2·sqrt(2/π)·(x + 0.044715·x³))."""
    cube = g.call("MUL", g.call("MUL", x, x), x)
    inner = g.call("ADD", x, g.call("MUL", cube, np.float32(0.044715)))
    return g.call("MUL", x, g.call("LOGISTIC", g.call("MUL", inner, np.float32(2 * (2 / np.pi) ** 0.5))))


def gelu_by_power(g: Graph, x: int) -> int:
    inner = g.call("ADD", x, g.call("MUL", g.call("POW", x, np.float32(3)), np.float32(0.044715)))
    tanh = g.call("TANH", g.call("MUL", inner, np.float32((2 / np.pi) ** 0.5)))
    return g.call("MUL", g.call("MUL", g.call("ADD", tanh, np.float32(1)), x), np.float32(0.5))


def capped(build: Callable[[Graph, int], int]) -> Change:
    return lambda g: g.rewire(g.output("logits"), build(g, at(g, "lm_head")))


def scalar_in_both(g: Graph) -> None:
    """h·s + branch·s."""
    layer = g.layer(0)
    scalar = g.roles["layers.0.layer_scalar"]
    g.rewire(
        layer.out, g.call("ADD", g.call("MUL", layer.middle, scalar), g.call("MUL", layer.ffw_branch, scalar))
    )


def commuted(kinds: Sequence[str]) -> Change:
    """Operands change sides, in composites too."""

    def change(g: Graph) -> None:
        g.open_all()
        for op in g.ops:
            if g.kind(op) in kinds and len(op.inputs) == 2:
                op.inputs = [int(i) for i in op.inputs][::-1]

    return change


def residual_in_one(g: Graph) -> None:
    """stream + (attention + mlp)."""
    layer = g.layer(0)
    both_ = g.call("ADD", layer.attention_branch, layer.ffw_branch)
    g.rewire(layer.summed, g.call("ADD", layer.stream, both_))


def residual_by_difference(g: Graph) -> None:
    layer = g.layer(0)
    g.rewire(layer.summed, g.call("SUB", layer.middle, g.call("NEG", layer.ffw_branch)))


BLOCKS: dict[str, Change] = {
    "gelu_spelled": gelu_everywhere(spelled_gelu(0.044715)),
    "gelu_builtin": gelu_everywhere(gelu),
    "gelu_by_sigmoid": gelu_everywhere(gelu_by_sigmoid),
    "gelu_by_power": gelu_everywhere(gelu_by_power),
    "gate_and_up_exchanged": lambda g: setattr(
        g.producer(g.layer(0).product), "inputs", list(g.producer(g.layer(0).product).inputs)[::-1]
    ),
    "cap_divides": capped(lambda g, x: g.call("MUL", g.call("TANH", g.call("DIV", x, np.float32(30))), np.float32(30))),
    "cap_multiplies": capped(
        lambda g, x: g.call("MUL", np.float32(30), g.call("TANH", g.call("MUL", np.float32(1 / 30), x)))
    ),
    "cap_divides_twice": capped(
        lambda g, x: g.call("DIV", g.call("TANH", g.call("DIV", x, np.float32(30))), np.float32(1 / 30))
    ),
    "cap_in_steps": capped(
        lambda g, x: g.call(
            "MUL",
            g.call("TANH", g.call("DIV", g.call("DIV", x, np.float32(5)), np.float32(6))),
            np.float32(30),
        )
    ),
    "cap_bound_in_steps": capped(
        lambda g, x: g.call(
            "MUL", g.call("MUL", g.call("TANH", g.call("DIV", x, np.float32(30))), np.float32(5)), np.float32(6)
        )
    ),
    "cap_by_sigmoid": capped(
        lambda g, x: g.call(
            "SUB", g.call("MUL", g.call("LOGISTIC", g.call("DIV", x, np.float32(15))), np.float32(60)), np.float32(30)
        )
    ),
    "scalar_in_both": scalar_in_both,
    "scalar_divides_inverse": lambda g: g.rewire(
        g.layer(0).out,
        g.call("DIV", g.layer(0).summed, (1 / g.value(g.roles["layers.0.layer_scalar"])).astype(np.float32)),
    ),
    "scalar_by_channel": lambda g: g.rewire(
        g.layer(0).out,
        g.call("MUL", g.layer(0).summed, np.full((1, 1, 64), g.value(g.roles["layers.0.layer_scalar"]), np.float32)),
    ),
    "scalar_in_two_factors": lambda g: g.rewire(
        g.layer(0).out,
        g.call(
            "MUL",
            g.call("MUL", g.layer(0).summed, (g.value(g.roles["layers.0.layer_scalar"]) / 2).astype(np.float32)),
            np.float32(2),
        ),
    ),
    "sums_commuted": commuted(["ADD"]),
    "products_commuted": commuted(["MUL"]),
    "ands_commuted": commuted(["LOGICAL_AND", "LOGICAL_OR"]),
    "residual_in_one": residual_in_one,
    "residual_by_difference": residual_by_difference,
}


# Detours that change nothing.


def dead_operator(g: Graph) -> None:
    """An operator whose result nothing reads is there, as some converters leave it."""
    g.main.outputs = [*map(int, g.main.outputs), g.call("NEG", g.layer(1).out)]


def extra_output(name: str, build: Callable[[Graph], int]) -> Change:
    def change(g: Graph) -> None:
        made = build(g)
        entry = schema.TensorMapT()
        entry.name, entry.tensorIndex = name.encode(), made
        g.model.signatureDefs[0].outputs.append(entry)
        g.main.outputs = [*map(int, g.main.outputs), made]

    return change


def extra_input(g: Graph) -> None:
    entry = schema.TensorMapT()
    entry.name, entry.tensorIndex = b"mask_local", g.tensor([1, 1, 1, 256], np.bool_)
    g.model.signatureDefs[0].inputs.append(entry)
    g.main.inputs = [*map(int, g.main.inputs), entry.tensorIndex]


def arg_max(g: Graph) -> int:
    return g.call(
        "ARG_MAX",
        g.output("logits"),
        np.array([2], np.int32),
        shape=[1, 1],
        dtype=np.int32,
        outputType=schema.TensorType.INT32,
    )


def turned_twice(g: Graph, x: int) -> int:
    order = list(range(len(g.shape(x))))[::-1]
    return g.transpose(g.transpose(x, order), order)


def there_and_back(g: Graph, x: int) -> int:
    return g.reshape(g.reshape(x, [int(np.prod(g.shape(x)))]), g.shape(x))


def squeezed(g: Graph, x: int) -> int:
    shape = g.shape(x)
    narrow = g.call("SQUEEZE", x, shape=shape[1:], squeezeDims=[0])
    return g.call("EXPAND_DIMS", narrow, np.array([0], np.int32), shape=shape)


def cut_and_joined(g: Graph, x: int) -> int:
    return g.join(halves(g, x))


def reversed_twice(g: Graph, x: int) -> int:
    order = range(g.shape(x)[-1] - 1, -1, -1)
    return g.gather(g.gather(x, order, -1), order, -1)


PLACES = ("activations", "pre_projection", "1.stream", "0.query", "0.scores", "0.merged", "0.product", "state", "logits")
NOTHING: dict[str, Edit] = {
    "times_1": with_number("MUL", 1.0),
    "plus_0": with_number("ADD", 0.0),
    "minus_0": with_number("SUB", 0.0),
    "over_1": with_number("DIV", 1.0),
    "negated_twice": chain(unary("NEG"), unary("NEG")),
    "bounded_far_out": with_number("MAXIMUM", -3e38),
    "turned_twice": turned_twice,
    "reshaped_and_back": there_and_back,
    "squeezed": squeezed,
    "cut_and_joined": cut_and_joined,
    "reversed_twice": reversed_twice,
}

DETOURS: dict[str, Change] = {
    **{
        f"{name}_{PLACES[(index + shift) % len(PLACES)]}": edge(PLACES[(index + shift) % len(PLACES)], edit)
        for index, (name, edit) in enumerate(NOTHING.items())
        for shift in (0, 4)
    },
    "composites_opened": lambda g: g.open_all(),
    "token_as_output": extra_output("token", arg_max),
    "state_as_output": extra_output("state", lambda g: g.normed("final_norm")),
    "output_without_a_name": dead_operator,
    "input_that_nothing_reads": extra_input,
}


# Weights.


def transposed_storage(role: str) -> Change:
    def change(g: Graph) -> None:
        stored = g.constant(np.ascontiguousarray(g.floats(g.roles[role]).T))
        g.set_input(g.linear(role), 1, g.transpose(stored, [1, 0]))

    return change


def as_batch_product(role: str, *, transposed: bool) -> Change:
    """BATCH_MATMUL with a constant, in place of FULLY_CONNECTED."""

    def change(g: Graph) -> None:
        op = g.linear(role)
        values = g.floats(g.roles[role])
        weight = g.constant(values if transposed else np.ascontiguousarray(values.T))
        x, out = int(op.inputs[0]), int(op.outputs[0])
        g.rewire(out, g.call("BATCH_MATMUL", x, weight, shape=g.shape(out), adjY=transposed))

    return change


def in_two_parts(role: str, axis: int) -> Change:
    """Rows (0) or columns (1) of a weight in two constants, and two products."""

    def change(g: Graph) -> None:
        op = g.linear(role)
        x, out = int(op.inputs[0]), int(op.outputs[0])
        values = np.split(g.floats(g.roles[role]), 2, axis)
        constants = [g.constant(np.ascontiguousarray(part)) for part in values]
        if axis == 0:
            g.rewire(out, g.join([g.product(x, part) for part in constants]))
        else:
            g.rewire(out, g.call("ADD", *(g.product(a, b) for a, b in zip(halves(g, x), constants, strict=True))))

    return change


def gate_and_up_in_one(g: Graph) -> None:
    layer = g.layer(0)
    weight = np.concatenate([g.floats(g.roles[f"layers.0.{name}_proj"]) for name in ("gate", "up")])
    wide = g.product(layer.ffw_in, g.constant(weight))
    parts = halves(g, wide)
    g.rewire(layer.gate, parts[0])
    g.rewire(layer.up, parts[1])


def joined_weight(role: str) -> Change:
    def change(g: Graph) -> None:
        parts = [g.constant(np.ascontiguousarray(part)) for part in np.split(g.floats(g.roles[role]), 2)]
        g.set_input(g.linear(role), 1, g.join(parts, 0))

    return change


def in_half_precision(role: str, how: str) -> Change:
    """The weight's own numbers at FP16 precision."""

    def change(g: Graph) -> None:
        values = g.floats(g.roles[role]).astype(np.float16)
        stored = g.constant(values, np.float16)
        real = g.tensor(list(values.shape))
        g.emit(how, [stored], [real])
        g.set_input(g.linear(role), 1, real)

    return change


def without_kept_dimensions(role: str) -> Change:
    """The op leaves [1, out], and a RESHAPE brings the axes back."""

    def change(g: Graph) -> None:
        op = g.linear(role)
        out = int(op.outputs[0])
        shape = g.shape(out)
        flat = g.tensor([1, shape[-1]])
        op.outputs = [flat]
        op.builtinOptions.keepNumDims = False
        g.rewire(out, g.reshape(flat, shape))

    return change


def zero_bias(role: str) -> Change:
    def change(g: Graph) -> None:
        op = g.linear(role)
        op.inputs = [*(int(i) for i in op.inputs[:2]), g.constant(np.zeros(g.shape(int(op.outputs[0]))[-1]))]

    return change


def every_weight(make: Callable[[str], Change]) -> Change:
    def change(g: Graph) -> None:
        for role in [role for role in g.roles if role.endswith(("_proj", "_projection", "lm_head"))]:
            make(role)(g)

    return change


def half_norms(g: Graph) -> None:
    """Norm weights at FP16 precision, behind a CAST or DEQUANTIZE."""
    for index, role in enumerate([role for role in g.roles if role.endswith("_norm")]):
        weight = g.roles[role]
        stored = g.constant(g.value(weight).astype(np.float16), np.float16)
        real = g.tensor(g.shape(weight))
        g.emit(("CAST", "DEQUANTIZE")[index % 2], [stored], [real])
        g.rewire(weight, real)


def scalar_quantized(g: Graph) -> None:
    """A layer's scalar as an INT8 code and its scale."""
    scalar = g.roles["layers.0.layer_scalar"]
    value = float(g.value(scalar).reshape(-1)[0])
    stored = g.constant(np.full(g.shape(scalar), 127), np.int8)
    g.main.tensors[stored].quantization = parameters(value / 127)
    real = g.tensor(g.shape(scalar))
    g.emit("DEQUANTIZE", [stored], [real])
    g.rewire(scalar, real)


def shared_weights(g: Graph) -> None:
    """Layer 1 has the norm weights and projections of layer 0, wherever they have the same shape."""
    for name in ("gate_proj", "up_proj", "down_proj", "pre_ffw_norm", "post_ffw_norm", "post_attention_norm"):
        mine, theirs = g.roles[f"layers.0.{name}"], g.roles[f"layers.1.{name}"]
        g.rewire(theirs, mine)


def layer_twice(g: Graph) -> None:
    """Layer 1 of these three is layer 0 again, with the same constants."""
    for role, tensor in g.roles.items():
        if role.startswith("layers.1."):
            g.rewire(tensor, g.roles[role.replace("layers.1.", "layers.0.")])


def exact(role: str) -> Change:
    return stored_weight(role, lambda g, w: w)


WEIGHTS: dict[str, Change] = {
    "dequantized_by_an_operator": every_weight(lambda role: real_weight(role, lambda g, w: w)),
    "floats": every_weight(exact),
    "floats_of_one": exact("layers.0.o_proj"),
    "transposed_floats": every_weight(transposed_storage),
    "transposed_floats_of_one": transposed_storage("layers.0.down_proj"),
    "batch_product": every_weight(lambda role: as_batch_product(role, transposed=False)),
    "batch_product_transposed": every_weight(lambda role: as_batch_product(role, transposed=True)),
    "batch_product_of_one": as_batch_product("layers.0.o_proj", transposed=False),
    "rows_in_two_products": in_two_parts("post_projection", 0),
    "embedding_and_hidden_apart": in_two_parts("pre_projection", 1),
    "gate_and_up_in_one": gate_and_up_in_one,
    "joined": joined_weight("layers.0.up_proj"),
    "reshaped": stored_weight("layers.0.o_proj", there_and_back),
    "turned_twice": stored_weight("layers.0.o_proj", turned_twice),
    "times_1": stored_weight("layers.0.o_proj", with_number("MUL", 1.0)),
    "without_kept_dimensions": without_kept_dimensions("layers.0.up_proj"),
    "zero_bias": every_weight(zero_bias),
    "fp16_cast": every_weight(lambda role: in_half_precision(role, "CAST")),
    "fp16_dequantized": every_weight(lambda role: in_half_precision(role, "DEQUANTIZE")),
    "fp16_norms": half_norms,
    "quantized_scalar": scalar_quantized,
    "shared_by_layers": shared_weights,
}


# What the next norm divides away again.


ABSORBED: dict[str, Change] = {
    "probabilities_halved": edge("0.probabilities", with_number("MUL", 0.5)),
    "result_doubled": edge("0.attended", with_number("MUL", 2.0)),
    "attention_out_halved": edge("0.attention_out", with_number("MUL", 0.5)),
    "weight_doubled": real_weight("layers.0.o_proj", with_number("MUL", 2.0)),
    "down_halved": stored_weight("layers.0.down_proj", with_number("MUL", 0.5)),
    "gelu_doubled": activated(lambda g, x: g.call("MUL", gelu(g, x), np.float32(2))),
    "up_scaled": edge("0.up", with_number("MUL", 3.0)),
    "query_doubled": edge("0.query", with_number("MUL", 2.0)),
    "query_input_doubled": edge("0.query_in", with_number("MUL", 2.0)),
    "state_scaled_and_back": each(
        put("state", with_number("MUL", 4.0), lambda g: g.linear("post_projection")),
        edge("projected_activations", with_number("MUL", 0.25)),
    ),
}

_FAMILIES: dict[str, dict[str, Change]] = {
    "masks": MASKS,
    "caches": CACHES,
    "scores and rope": SCORES,
    "norms": NORMS,
    "blocks": BLOCKS,
    "detours": DETOURS,
    "weights": WEIGHTS,
    "absorbed": ABSORBED,
}
_OTHERS = {"fp16_cast", "fp16_dequantized", "fp16_norms", "shared_by_layers"}

REWRITES: tuple[Case, ...] = (
    *(
        Case(f"same: {family}", name, change, rounds=name in _OTHERS)
        for family, changes in _FAMILIES.items()
        for name, change in changes.items()
    ),
    Case("same: weights", "layer_twice", layer_twice, layers=(0, 1, 3), rounds=True),
)
