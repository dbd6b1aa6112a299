"""Changes to what a drafter's graph computes, by family. Each is data: a name, and what is done to the graph.

A few of them make another *drafter* (another window, another soft cap, another theta), which a checkpoint can express: then
what is written must compute that. Most make something that is no drafter. In either case the rule is the same: refused, or
the same function as the changed file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Case, Change, Edit, at, chain, edge, grid, put, unary, with_number

__all__ = ["MUTATIONS"]

WINDOW = 16
mul = lambda number: with_number("MUL", number)  # noqa: E731 - a word, beside those of edits
add = lambda number: with_number("ADD", number)  # noqa: E731


# Masks and windows.


def slots(g: Graph) -> np.ndarray:
    return np.arange(g.shape(g.input("mask"))[-1], dtype=np.int32).reshape(1, 1, 1, -1)


def visible(layer: int, edit: Edit) -> Change:
    """Let ``layer`` select by ``edit`` of its mask."""

    def change(g: Graph) -> None:
        place = g.layer(layer)
        g.insert(place.visible, lambda x: edit(g, x), [place.select])

    return change


def compare(name: str, offset: int) -> Callable[[Graph], int]:
    """``input_pos`` compared with slot + offset."""
    return lambda g: g.call(name, g.input("input_pos"), slots(g) + np.int32(offset))


def both(g: Graph, a: int, b: int) -> int:
    return g.call("LOGICAL_AND", a, b)


def bounded(lower: Callable[[Graph], int], upper: Callable[[Graph], int], layer: int = 0) -> Change:
    """The mask input within two bounds, in place of the layer's own mask."""
    return visible(layer, lambda g, _: both(g, g.input("mask"), both(g, lower(g), upper(g))))


def window(size: int, *, layer: int = 0) -> Change:
    return bounded(compare("GREATER_EQUAL", 0), compare("LESS", size), layer)


def masked_value(value: float) -> Change:
    """Hidden scores get ``value`` more instead of −1e9 (added in torch style, set in place in JAX style)."""

    def change(g: Graph) -> None:
        for index in range(2):
            layer = g.layer(index)
            if layer.select is layer.masker:
                g.set_input(layer.select, 2, g.call("ADD", layer.scores, value))
            else:
                g.set_input(layer.select, 2, g.constant(value))

    return change


def by_distance(name: str, size: int) -> Edit:
    """The mask, where slots of the same group of ``size`` (or of the same rest) as the position are."""

    def edit(g: Graph, x: int) -> int:
        position = g.call(name, g.input("input_pos"), np.array([size], np.int32))
        kept = slots(g) // size if name == "FLOOR_DIV" else slots(g) % size
        return both(g, x, g.call("EQUAL", position, kept.astype(np.int32)))

    return edit


def constant_mask(pick: Callable[[np.ndarray], np.ndarray]) -> Edit:
    return lambda g, x: both(g, x, g.constant(pick(slots(g)), np.bool_))


def after_softmax(g: Graph) -> None:
    """Everything is scored; what is hidden is cleared from the probabilities."""
    layer = g.layer(0)
    g.set_input(layer.softmax, 0, layer.scores)
    kept = g.cast(layer.visible, np.float32)
    g.insert(layer.probabilities, lambda p: g.call("MUL", p, kept), [layer.mix])


def select_swapped(g: Graph) -> None:
    layer = g.layer(0)
    condition, yes, no = (int(i) for i in layer.select.inputs)
    layer.select.inputs = [condition, no, yes]


def unmasked(index: int) -> Change:
    def change(g: Graph) -> None:
        layer = g.layer(index)
        g.set_input(layer.softmax, 0, layer.scores)

    return change


def multiplied_mask(g: Graph) -> None:
    layer = g.layer(0)
    kept = g.cast(layer.visible, np.float32)
    g.set_input(layer.softmax, 0, g.call("MUL", layer.scores, kept))


def masked_sums(build: Callable[[Graph, Any], int]) -> Change:
    """The scores of layer 0 with ``build`` (a mask in floats) added instead of its mask."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        g.set_input(layer.softmax, 0, g.call("ADD", layer.scores, build(g, layer)))

    return change


def group_sees_all(axis: int) -> Change:
    """The first of two KV heads (axis 1) or queries (axis 2) sees by the mask, the second everything in the past."""

    def change(g: Graph) -> bool | None:
        layer = g.layer(0)
        past = g.reshape(compare("GREATER_EQUAL", 0)(g), g.shape(layer.visible))
        joined = g.cast(g.join([g.cast(layer.visible, np.int32), g.cast(past, np.int32)], axis), np.bool_)
        hidden = g.call("SELECT_V2", joined, layer.scores, np.float32(-1e9), shape=g.shape(layer.scores))
        g.set_input(layer.softmax, 0, hidden)
        return None

    return change


def other_mask(index: int) -> Change:
    def change(g: Graph) -> None:
        mine, theirs = g.layer(index), g.layer(1 - index)
        g.insert(mine.visible, lambda _: theirs.visible, [mine.select])

    return change


def comparison(old: str, new: str) -> Change:
    """Another comparison of the position with the slots."""

    def change(g: Graph) -> None:
        (op,) = [op for op in g.ops if g.kind(op) == old]
        g.recode(op, new)

    return change


def compared_with(old: str, number: Callable[[Graph], int]) -> Change:
    """A comparison of something else than ``input_pos``."""

    def change(g: Graph) -> None:
        for op in [op for op in g.ops if g.kind(op) == old]:
            g.set_input(op, 0, g.reshape(number(g), g.shape(int(op.inputs[0]))))

    return change


def first_param(g: Graph) -> int:
    return g.reshape(g.slice(g.input("param_tensor"), [0, 0, 0, 0], [1, 1, 1, 1]), [1])


def joined_comparison(g: Graph) -> None:
    (op,) = [op for op in g.ops if g.kind(op) == "LOGICAL_AND" and g.input("mask") not in list(op.inputs)]
    g.recode(op, "LOGICAL_OR")


MASKS: dict[str, Change] = {
    "window_plus_1": window(WINDOW + 1),
    "window_minus_1": window(WINDOW - 1),
    "window_of_1": window(1),
    "window_on_full_layer": window(WINDOW, layer=1),
    "window_of_the_future": bounded(compare("LESS_EQUAL", 0), compare("GREATER", -WINDOW)),
    "window_outside": visible(0, lambda g, x: both(g, g.input("mask"), g.call("LOGICAL_NOT", x))),
    "window_gap_of_one": bounded(compare("GREATER_EQUAL", 1), compare("LESS", WINDOW)),
    "window_position_plus_1": bounded(compare("GREATER_EQUAL", -1), compare("LESS", WINDOW - 1)),
    "window_position_minus_1": bounded(compare("GREATER_EQUAL", 1), compare("LESS", WINDOW + 1)),
    "window_or_mask": visible(
        0, lambda g, x: g.call("LOGICAL_OR", x, both(g, compare("GREATER_EQUAL", 0)(g), compare("LESS", WINDOW)(g)))
    ),
    "window_xor_mask": visible(0, lambda g, x: g.call("NOT_EQUAL", x, g.input("mask"))),
    "bounds_or": joined_comparison,
    "mask_ignored_sliding": visible(0, lambda g, _: both(g, compare("GREATER_EQUAL", 0)(g), compare("LESS", WINDOW)(g))),
    "mask_ignored_full": visible(1, lambda g, _: compare("GREATER_EQUAL", 0)(g)),
    "mask_negated_sliding": visible(0, lambda g, x: g.call("LOGICAL_NOT", x)),
    "mask_negated_full": visible(1, lambda g, x: g.call("LOGICAL_NOT", x)),
    "no_mask_sliding": unmasked(0),
    "no_mask_full": unmasked(1),
    "stale_slots_visible": visible(1, lambda g, x: g.call("LOGICAL_OR", x, compare("LESS", 0)(g))),
    "causal_is_strict": comparison("GREATER_EQUAL", "GREATER"),
    "causal_is_reversed": comparison("GREATER_EQUAL", "LESS_EQUAL"),
    "window_is_closed": comparison("LESS", "LESS_EQUAL"),
    "window_is_reversed": comparison("LESS", "GREATER"),
    "window_is_one_slot": comparison("LESS", "EQUAL"),
    "value_minus_5": masked_value(-5.0),
    "value_minus_30_of_one": masked_value(-1.0),
    "value_0": masked_value(0.0),
    "values_swapped": select_swapped,
    "after_softmax": after_softmax,
    "multiplied": multiplied_mask,
    "added_as_0_and_1": masked_sums(lambda g, p: g.cast(p.visible, np.float32)),
    "added_as_minus_4": masked_sums(
        lambda g, p: g.call("MUL", g.call("SUB", np.float32(1), g.cast(p.visible, np.float32)), np.float32(-4))
    ),
    "linear_bias": edge(
        "1.scores",
        lambda g, x: g.call(
            "ADD",
            x,
            g.call(
                "MUL",
                g.cast(g.call("SUB", slots(g), g.input("input_pos")), np.float32),
                np.float32(0.02),
            ),
        ),
    ),
    "first_slot_always": visible(0, lambda g, x: g.call("LOGICAL_OR", x, g.constant(slots(g) == 0, np.bool_))),
    "even_slots": visible(1, constant_mask(lambda s: s % 2 == 0)),
    "without_first_slot": visible(1, constant_mask(lambda s: s > 0)),
    "early_slots_only": visible(1, constant_mask(lambda s: s < 100)),
    "shifted_by_a_slot": visible(
        1,
        lambda g, x: g.cast(
            g.join([g.part(g.cast(x, np.int32), 1, slots(g).size - 1), g.part(g.cast(x, np.int32), 0, 1)]), np.bool_
        ),
    ),
    "sliding_sees_all": other_mask(0),
    "full_sees_window": other_mask(1),
    "second_kv_head_sees_all": group_sees_all(1),
    "second_query_sees_all": group_sees_all(2),
    "in_chunks": visible(1, by_distance("FLOOR_DIV", 16)),
    "dilated": visible(1, by_distance("FLOOR_MOD", 2)),
    "causal_by_param_tensor": compared_with("LESS", first_param),
    "position_doubled": compared_with("LESS", lambda g: g.call("ADD", g.input("input_pos"), g.input("input_pos"))),
    "window_below_128": compared_with(
        "LESS", lambda g: g.call("MINIMUM", g.input("input_pos"), np.array([128], np.int32))
    ),
}


# RoPE.


def angle(edit: Edit, layer: int = 0) -> Change:
    return edge(f"{layer}.angle", edit)


def table(edit: Callable[[np.ndarray], np.ndarray], layer: int = 0) -> Change:
    """Another table, shape kept."""

    def change(g: Graph) -> None:
        found = _table(g, layer)
        g.set_value(found, edit(g.value(found).reshape(-1)))

    return change


def _table(g: Graph, layer: int) -> int:
    operators = [*g.before(g.layer(layer).cos)]
    constants = {int(i) for op in operators for i in op.inputs if g.kind(op) == "MUL" and g.is_constant(int(i))}
    (found,) = constants
    return found


def position(edit: Edit) -> Change:
    """Another position, for the angles alone: of what is cast to floats."""

    def change(g: Graph) -> None:
        (cast,) = [op for op in g.ops if g.kind(op) == "CAST" and op in list(g.before(g.layer(0).angle))]
        g.insert(int(cast.outputs[0]), lambda x: edit(g, x))

    return change


def rotated_by(build: Callable[[Graph, int, int, int], int], layer: int = 0) -> Change:
    """Another rotation: ``build(g, q, cos, sin)`` with cos and sin of half the head's width."""

    def change(g: Graph) -> None:
        place = g.layer(layer)
        half = g.shape(place.query_normed)[-1] // 2
        cos, sin = (g.part(t, 0, half) for t in (place.cos, place.sin))
        g.insert(place.rotated, lambda _: build(g, place.query_normed, cos, sin))

    return change


def turn(g: Graph, a: int, b: int, cos: int, sin: int, sign: float = 1.0) -> tuple[int, int]:
    if sign < 0:
        sin = g.call("NEG", sin)
    left = g.call("SUB", g.call("MUL", a, cos), g.call("MUL", b, sin))
    return left, g.call("ADD", g.call("MUL", b, cos), g.call("MUL", a, sin))


def halves(g: Graph, q: int) -> tuple[int, int]:
    half = g.shape(q)[-1] // 2
    return g.part(q, 0, half), g.part(q, half, half)


def interleaved(g: Graph, q: int, cos: int, sin: int) -> int:
    width = g.shape(q)[-1]
    even, odd = (g.gather(q, range(start, width, 2), -1) for start in (0, 1))
    left, right = turn(g, even, odd, cos, sin)
    order = [i // 2 + (i % 2) * width // 2 for i in range(width)]
    return g.gather(g.join([left, right]), order, -1)


def heads_rotated(g: Graph, q: int, cos: int, sin: int) -> int:
    """The first two heads alone are rotated."""
    full = g.join(turn(g, *halves(g, q), cos, sin))
    return g.join([g.part(full, 0, 2, 2), g.part(q, 2, 2, 2)], 2)


def first_quarter(g: Graph, q: int, cos: int, sin: int) -> int:
    """The first quarter of a head is rotated by itself, the way other models rotate in part."""
    width = g.shape(q)[-1]
    size = width // 8
    left, right = turn(g, g.part(q, 0, size), g.part(q, size, size), g.part(cos, 0, size), g.part(sin, 0, size))
    return g.join([left, right, g.part(q, 2 * size, width - 2 * size)])


def cos_and_sin(edit: Callable[[Graph, int, int], tuple[int, int]], layer: int = 0) -> Change:
    def change(g: Graph) -> None:
        place = g.layer(layer)
        readers = g.readers(place.cos), g.readers(place.sin)
        for old, new, into in zip((place.cos, place.sin), edit(g, place.cos, place.sin), readers, strict=True):
            g.rewire(old, new, into)

    return change


def weight_after_rotation(g: Graph) -> None:
    """The q norm's weight is multiplied after RoPE, not before."""
    norm = g.norm("layers.0.q_norm")
    rotated = g.layer(0).rotated
    width = g.shape(rotated)[-1]
    g.rewire(norm.out, int(norm.scale.outputs[0]))
    weight = g.value(norm.weight).reshape(width)
    g.insert(rotated, lambda x: g.call("MUL", x, weight))


ROPE: dict[str, Change] = {
    "theta_100": table(lambda t: 100 ** (-np.arange(16) / 16)),
    "theta_of_full_layer_in_sliding": table(lambda t: 1e6 ** (-np.arange(16) / 16)),
    "half_of_the_head": table(lambda t: np.where(np.arange(t.size) < 8, t, 0)),
    "full_layer_in_full": table(lambda t: 1e6 ** (-np.arange(t.size) / t.size), 1),
    "table_scaled": table(lambda t: t * 2),
    "table_divided_by_8": table(lambda t: t / 8),
    "table_reversed": table(lambda t: t[::-1]),
    "table_rolled": table(lambda t: np.roll(t, 1)),
    "table_one_frequency": table(lambda t: np.where(np.arange(t.size) == 3, t * 1.5, t)),
    "table_negative": table(lambda t: -t),
    "table_gap": table(lambda t: np.where(np.arange(t.size) == 2, 0, t)),
    "table_last_quarter": table(lambda t: np.roll(t, t.size // 2), 1),
    "angle_doubled": angle(mul(2.0)),
    "angle_shifted": angle(add(0.5)),
    "angle_negated": angle(unary("NEG")),
    "angle_bounded": angle(with_number("MINIMUM", 6.0)),
    "angle_doubled_in_full": angle(mul(2.0), 1),
    "angle_by_dimension": angle(
        lambda g, x: g.call("MUL", x, np.resize(np.linspace(1, 1.2, 16), g.shape(x)).astype(np.float32))
    ),
    "angle_squared": angle(lambda g, x: g.call("MUL", x, x)),
    "position_plus_1": position(add(1.0)),
    "position_doubled": position(mul(2.0)),
    "position_bounded": position(with_number("MINIMUM", 32.0)),
    "position_halved_and_floored": position(chain(mul(0.5), unary("FLOOR"))),
    "position_modulo_64": position(with_number("FLOOR_MOD", 64.0)),
    "position_negated": position(unary("NEG")),
    "position_root": position(unary("SQRT")),
    "no_rotation": rotated_by(lambda g, q, cos, sin: q),
    "no_rotation_in_full": rotated_by(lambda g, q, cos, sin: q, 1),
    "other_direction": rotated_by(lambda g, q, cos, sin: g.join(turn(g, *halves(g, q), cos, sin, -1))),
    "interleaved": rotated_by(interleaved),
    "halves_swapped_after": rotated_by(lambda g, q, cos, sin: g.join(turn(g, *halves(g, q), cos, sin)[::-1])),
    "halves_swapped_before": rotated_by(lambda g, q, cos, sin: g.join(turn(g, *halves(g, q)[::-1], cos, sin))),
    "first_half_only": rotated_by(lambda g, q, cos, sin: g.join([turn(g, *halves(g, q), cos, sin)[0], halves(g, q)[1]])),
    "reflected": rotated_by(
        lambda g, q, cos, sin: g.join([turn(g, *halves(g, q), cos, sin)[0], g.call("NEG", turn(g, *halves(g, q), cos, sin)[1])])
    ),
    "two_heads_only": rotated_by(heads_rotated),
    "first_quarter_by_itself": rotated_by(first_quarter, 1),
    "twice": rotated_by(lambda g, q, cos, sin: g.join(turn(g, *turn(g, *halves(g, q), cos, sin), cos, sin))),
    "cos_and_sin_swapped": cos_and_sin(lambda g, cos, sin: (sin, cos)),
    "cos_twice": cos_and_sin(lambda g, cos, sin: (cos, cos)),
    "sin_doubled": cos_and_sin(lambda g, cos, sin: (cos, g.call("MUL", sin, np.float32(2)))),
    "sin_negated": cos_and_sin(lambda g, cos, sin: (cos, g.call("NEG", sin))),
    "both_scaled": cos_and_sin(
        lambda g, cos, sin: (g.call("MUL", cos, np.float32(1.1)), g.call("MUL", sin, np.float32(1.1)))
    ),
    "cos_is_1": cos_and_sin(lambda g, cos, sin: (g.constant(np.ones(g.shape(cos))), sin)),
    "sin_is_its_angle": cos_and_sin(lambda g, cos, sin: (cos, g.layer(0).angle)),
    "table_of_other_layer": cos_and_sin(
        lambda g, cos, sin: (
            g.part(g.layer(1).cos, 0, g.shape(cos)[-1]),
            g.part(g.layer(1).sin, 0, g.shape(sin)[-1]),
        )
    ),
    "weight_after_rotation": weight_after_rotation,
    "added_to_the_query": rotated_by(lambda g, q, cos, sin: g.call("ADD", q, g.join([cos, sin]))),
}


# Scores and their scale.


def beta(number: float) -> Change:
    def change(g: Graph) -> None:
        g.layer(0).softmax.builtinOptions.beta = number

    return change


def softmax_over_heads(g: Graph) -> None:
    layer = g.layer(0)
    turned = g.transpose(layer.masked, [0, 1, 3, 2])
    g.set_input(layer.softmax, 0, turned)
    result = g.tensor(g.shape(turned))
    layer.softmax.outputs = [result]
    g.rewire(layer.probabilities, g.transpose(result, [0, 1, 3, 2]))


def sink(g: Graph) -> None:
    """A score of zero that takes part in the softmax and has no value."""
    layer = g.layer(1)
    *front, slots_ = g.shape(layer.masked)
    widened = g.join([layer.masked, g.constant(np.zeros([*front, 1]))])
    result = g.tensor([*front, slots_ + 1])
    g.set_input(layer.softmax, 0, widened)
    layer.softmax.outputs = [result]
    g.rewire(layer.probabilities, g.part(result, 0, slots_))


def softmax_spelled(power: Callable[[Graph, int], int]) -> Change:
    def change(g: Graph) -> None:
        layer = g.layer(0)
        over = g.call("SUB", layer.masked, g.reduce("REDUCE_MAX", layer.masked, 3))
        powers = power(g, over)
        g.rewire(layer.probabilities, g.call("DIV", powers, g.reduce("SUM", powers, 3)))

    return change


scores = lambda edit, layer=0: edge(f"{layer}.scores", edit)  # noqa: E731
probabilities = lambda edit, layer=0: edge(f"{layer}.probabilities", edit)  # noqa: E731

SCORES: dict[str, Change] = {
    "by_root_of_width": scores(mul(32**-0.5)),
    "by_root_of_width_in_full": scores(mul(64**-0.5), 1),
    "doubled": scores(lambda g, x: g.call("ADD", x, x)),
    "divided_by_2": scores(with_number("DIV", 2.0)),
    "query_scaled": edge("0.queries", mul(0.25)),
    "key_scaled": edge("0.key", mul(0.5)),
    "minus": scores(unary("NEG")),
    "absolute": scores(unary("ABS")),
    "squared": scores(lambda g, x: g.call("MUL", x, x)),
    "soft_cap": scores(chain(mul(0.5), unary("TANH"), mul(2.0))),
    "clipped_above": scores(with_number("MINIMUM", 2.0)),
    "clipped_below": scores(with_number("MAXIMUM", -1.0)),
    "relu": scores(unary("RELU")),
    "leaky": scores(lambda g, x: g.call("MAXIMUM", x, g.call("MUL", x, np.float32(0.1)))),
    "bias_by_slot": scores(add(np.linspace(-2, 2, 256).reshape(1, 1, 1, 256)), 1),
    "scale_by_slot": scores(mul(np.linspace(0.5, 2, 256).reshape(1, 1, 1, 256)), 1),
    "scale_by_kv_head": scores(mul(np.array([1.0, 0.5]).reshape(1, 2, 1, 1))),
    "scale_by_query": scores(mul(np.array([1.0, 0.5]).reshape(1, 1, 2, 1))),
    "beta_an_eighth": beta(0.125),
    "beta_2": beta(2.0),
    "beta_nearly_1": beta(1.05),
    "minus_mean": scores(lambda g, x: g.call("SUB", x, g.call("MUL", g.reduce("MEAN", x, 2), np.float32(0.5)))),
    "mean_of_heads": scores(lambda g, x: g.call("ADD", g.reduce("MEAN", x, 1), g.call("MUL", x, np.float32(0.0)))),
    "times_position": scores(
        lambda g, x: g.call("MUL", x, g.call("MUL", g.cast(g.input("input_pos"), np.float32), np.float32(0.01)))
    ),
    "softmax_over_queries": softmax_over_heads,
    "softmax_with_sink": sink,
    "softmax_base_2": softmax_spelled(lambda g, x: g.call("POW", np.float32(2), x)),
    "softmax_plus_1": softmax_spelled(lambda g, x: g.call("ADD", g.call("EXP", x), np.float32(1e-3))),
    "softmax_of_squares": softmax_spelled(lambda g, x: g.call("POW", g.call("EXP", x), np.float32(2))),
    "sigmoid": lambda g: g.recode(g.layer(0).softmax, "LOGISTIC"),
    "log_softmax": lambda g: g.recode(g.layer(0).softmax, "LOG_SOFTMAX"),
    "softmax_twice": probabilities(lambda g, x: g.call("SOFTMAX", x, beta=1.0)),
    "probabilities_squared": probabilities(lambda g, x: g.call("MUL", x, x)),
    "probabilities_root": probabilities(unary("SQRT")),
    "probabilities_cut": probabilities(chain(add(-0.05), unary("RELU"))),
    "probabilities_bounded": probabilities(with_number("MINIMUM", 0.25)),
    "probabilities_in_sixteenths": probabilities(grid(1 / 16)),
    "probabilities_plus": probabilities(add(1 / 256), 1),
    "probabilities_by_slot": probabilities(mul(np.tile([1.0, 0.0], 128).reshape(1, 1, 1, 256)), 1),
    "probabilities_of_other_head": probabilities(lambda g, x: g.gather(x, [1, 0], 1)),
    "probabilities_of_other_query": probabilities(lambda g, x: g.gather(x, [1, 0], 2)),
    "one_minus": probabilities(with_number("SUB", 1.0, left=True)),
}


# Heads and caches.


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
    g.insert(layer.visible, lambda x: g.call("LOGICAL_OR", x, g.constant(slots(g) == 255, np.bool_)), [layer.select])


def updated_slot(g: Graph) -> None:
    """The newest slot of the keys is overwritten."""
    key = g.input("kv_cache_k_3")
    readers = g.readers(key)
    update = g.constant(np.full([1, g.shape(key)[1], 1, 64], 0.5))
    zero = np.zeros(1, np.int32)
    start = g.join([g.constant(zero, np.int32), g.constant(zero, np.int32), g.input("input_pos"), g.constant(zero, np.int32)])
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
    "query_heads_averaged": edge(
        "0.rotated", lambda g, x: g.call("ADD", g.reduce("MEAN", x, 2), g.call("MUL", x, np.float32(0)))
    ),
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
    "value_plus_key": cache_edit("value", lambda g, x: g.call("ADD", x, g.input("kv_cache_k_2"))),
    "value_shifted": cache_edit("value", add(0.25)),
    "key_half_cleared": cache_edit("key", mul(np.repeat([1.0, 0.0], 16).reshape(1, 1, 1, 32))),
    "value_of_every_second_slot": cache_edit("value", lambda g, x: g.gather(x, [i // 2 * 2 for i in range(256)], 2), 1),
    "extra_slot": extra_slot,
    "newest_key_overwritten": updated_slot,
    "result_plus_newest_value": edge(
        "1.attended", lambda g, x: g.call("ADD", x, g.constant(np.full(g.shape(x), 0.1)))
    ),
    "result_minus_query": edge("0.attended", lambda g, x: g.call("SUB", x, g.layer(0).queries)),
}


# Order of elements.


def permuted(place: str, order: Callable[[int], Sequence[int]]) -> Change:
    return edge(place, lambda g, x: g.gather(x, order(g.shape(x)[-1]), -1))


def turned(place: str, rows: int) -> Change:
    """The elements of the last axis as a matrix, transposed."""

    def edit(g: Graph, x: int) -> int:
        shape = g.shape(x)
        matrix = g.reshape(x, [rows, shape[-1] // rows])
        return g.reshape(g.transpose(matrix, [1, 0]), shape)

    return edge(place, edit)


def rolled(place: str) -> Change:
    return edge(place, lambda g, x: g.join([g.part(x, 1, g.shape(x)[-1] - 1), g.part(x, 0, 1)]))


def slice_moved(g: Graph) -> bool | None:
    """The second half of the head begins one element early."""
    layer = g.layer(0)
    for op in g.before(layer.rotated, layer.query_normed):
        if g.kind(op) == "SLICE" and g.value(int(op.inputs[1]))[-1] == 16:
            g.set_input(op, 1, g.constant(np.array([0, 0, 0, 15]), np.int32))
            return None
    return False


reverse = lambda size: range(size - 1, -1, -1)  # noqa: E731
swap_halves = lambda size: [*range(size // 2, size), *range(size // 2)]  # noqa: E731

ORDER: dict[str, Change] = {
    "hidden_before_embedding": permuted("activations", swap_halves),
    "activations_reversed": permuted("activations", reverse),
    "activations_interleaved": permuted("activations", lambda n: [i // 2 + i % 2 * (n // 2) for i in range(n)]),
    "embedding_rolled": edge(
        "activations", lambda g, x: g.join([g.part(x, 1, 63), g.part(x, 0, 1), g.part(x, 64, 64)])
    ),
    "activations_transposed": turned("activations", 8),
    "stream_transposed": turned("1.stream", 8),
    "stream_reversed": permuted("pre_projection", reverse),
    "query_transposed": turned("0.query", 4),
    "query_reversed_within_heads": permuted("0.query_normed", reverse),
    "rotated_rolled": rolled("0.rotated"),
    "merged_reversed": permuted("0.merged", reverse),
    "merged_transposed": turned("0.merged", 32),
    "attention_out_rolled": rolled("0.attention_out"),
    "gate_reversed": permuted("0.gate", reverse),
    "up_halves_swapped": permuted("0.up", swap_halves),
    "product_transposed": turned("0.product", 16),
    "down_rolled": rolled("0.down"),
    "state_reversed": permuted("state", reverse),
    "state_for_head_rolled": put(
        "state", lambda g, x: g.join([g.part(x, 1, 63), g.part(x, 0, 1)]), lambda g: g.linear("lm_head")
    ),
    "logits_reversed": permuted("logits", reverse),
    "logits_rolled": rolled("logits"),
    "logits_transposed": turned("logits", 16),
    "projected_halves_swapped": permuted("projected_activations", swap_halves),
    "projected_transposed": turned("projected_activations", 8),
    "second_half_begins_early": slice_moved,
}


# Casts and grids.


def through(dtype: Any) -> Edit:
    return lambda g, x: g.cast(g.cast(x, dtype), np.float32)


def quantized(scale: float, back: float | None = None, zero_point: int = 0) -> Edit:
    """QUANTIZE to INT8 with ``scale``, DEQUANTIZE with ``back``."""

    def edit(g: Graph, x: int) -> int:
        codes = g.call("QUANTIZE", x, dtype=np.int8)
        g.main.tensors[codes].quantization = parameters(scale, zero_point)
        if back is None:
            return g.call("DEQUANTIZE", codes, dtype=np.float32)
        other = g.call("QUANTIZE", codes, dtype=np.int8)
        g.main.tensors[other].quantization = parameters(back, zero_point)
        shifted = g.call("RESHAPE", codes, np.array(g.shape(x), np.int32), shape=g.shape(x))
        g.main.tensors[shifted].quantization = parameters(back, zero_point)
        return g.call("DEQUANTIZE", shifted, dtype=np.float32)

    return edit


def parameters(scale: float | Sequence[float], zero_point: int | Sequence[int] = 0) -> Any:
    made = schema.QuantizationParametersT()
    made.scale = np.atleast_1d(np.asarray(scale, np.float32))
    made.zeroPoint = np.broadcast_to(np.asarray(zero_point, np.int64), made.scale.shape).copy()
    return made


GRIDS: dict[str, Change] = {
    **{
        f"{place}_{name}": edge(place, edit)
        for place, edits in {
            "activations": {"int32": through(np.int32), "floor": unary("FLOOR"), "quarters": grid(0.25)},
            "pre_projection": {"int32": through(np.int32), "int8": through(np.int8), "round": unary("ROUND")},
            "0.query": {"round": unary("ROUND"), "ceil": unary("CEIL"), "int16": through(np.int16)},
            "0.query_normed": {"quarters": grid(0.25), "sign": unary("SIGN")},
            "0.scores": {"int32": through(np.int32), "halves": grid(0.5)},
            "0.probabilities": {"round": unary("ROUND")},
            "0.attended": {"quarters": grid(0.25)},
            "0.attention_branch": {"int32": through(np.int32), "eighths": grid(0.125)},
            "0.ffw_in": {"int32": through(np.int32)},
            "0.product": {"floor": unary("FLOOR"), "halves": grid(0.5), "uint8": through(np.uint8)},
            "0.down": {"round": unary("ROUND"), "int64": through(np.int64)},
            "1.stream": {"bool": through(np.bool_), "quarters": grid(0.25)},
            "state": {"int8": through(np.int8), "halves": grid(0.5)},
            "lm_head": {"int32": through(np.int32)},
            "logits": {"int32": through(np.int32), "halves": grid(0.5)},
            "projected_activations": {"round": unary("ROUND")},
        }.items()
        for name, edit in edits.items()
    },
    "state_quantized_coarsely": edge("state", quantized(0.5)),
    "product_saturated": edge("0.product", quantized(0.002)),
    "stream_quantized_with_two_scales": edge("1.stream", quantized(0.05, 0.1)),
    "projected_quantized_with_two_scales": edge("projected_activations", quantized(0.05, 0.04)),
    "query_quantized_with_two_scales": edge("0.query", quantized(0.1, 0.15)),
    "down_quantized_off_centre": edge("0.down", quantized(0.05, zero_point=120)),
}


# Norms.

NORM_ROLES = ("layers.0.pre_ffw_norm", "layers.0.q_norm", "layers.1.post_ffw_norm", "final_norm")


def normed_by(role: str, edit: Callable[[Graph, Any], object]) -> Change:
    return lambda g: edit(g, g.norm(role))


def eps(number: float) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        constant = next(int(i) for i in norm.add.inputs if g.is_constant(int(i)))
        g.set_input(norm.add, list(norm.add.inputs).index(constant), g.constant(np.full(g.shape(constant), number)))

    return edit


def every_eps(number: float) -> Change:
    def change(g: Graph) -> None:
        for role in [role for role in g.roles if role.endswith("_norm")]:
            eps(number)(g, g.norm(role))

    return change


def power(number: float) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        g.rewire(int(norm.root.outputs[0]), g.call("POW", int(norm.root.inputs[0]), np.float32(number)))

    return edit


def averaged(edit: Callable[[Graph, int], int]) -> Callable[[Graph, Any], object]:
    """``edit`` of the mean (JAX style: the sum) of squares."""
    return lambda g, norm: g.insert(int(norm.average.outputs[0]), lambda x: edit(g, x))


def rooted(edit: Callable[[Graph, int], int]) -> Callable[[Graph, Any], object]:
    """``edit`` of one over the root."""
    return lambda g, norm: g.insert(int(norm.root.outputs[0]), lambda x: edit(g, x))


def from_squares(edit: Callable[[Graph, int], int]) -> Callable[[Graph, Any], object]:
    """``edit`` of x in place of x·x."""
    return lambda g, norm: g.rewire(int(norm.square.outputs[0]), edit(g, norm.x))


def centred(g: Graph, norm: Any) -> None:
    """A layer norm: the mean is subtracted first."""
    axis = len(g.shape(norm.x)) - 1
    less = g.call("SUB", norm.x, g.reduce("MEAN", norm.x, axis))
    g.rewire(norm.x, less, [norm.square, norm.scale])


def weighted(edit: Callable[[Graph, int], int]) -> Callable[[Graph, Any], object]:
    """``edit`` of the weight."""
    return lambda g, norm: g.insert(norm.weight, lambda w: edit(g, w), [norm.weigh])


def weight_of(role: str) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        other = g.roles[role]
        g.rewire(norm.weight, g.reshape(other, g.shape(norm.weight)), [norm.weigh])

    return edit


def over_heads(g: Graph, norm: Any) -> None:
    """The q norm's mean is that of all heads."""
    axes = [i for i, size in enumerate(g.shape(int(norm.average.outputs[0]))) if size == 4]
    g.insert(
        int(norm.average.outputs[0]),
        lambda x: g.call("ADD", g.reduce("MEAN", x, axes[0]), g.call("MUL", x, np.float32(0))),
    )


def in_halves(g: Graph, norm: Any) -> None:
    """Each half is normed by itself."""
    squares = int(norm.square.outputs[0])
    parts = [g.reduce("MEAN", half, len(g.shape(squares)) - 1) for half in halves(g, squares)]
    shape = [*g.shape(squares)[:-1], g.shape(squares)[-1] // 2]
    wide = [g.call("BROADCAST_TO", part, np.array(shape, np.int32), shape=shape) for part in parts]
    inverse = g.call("RSQRT", g.call("ADD", g.join(wide), np.float32(1e-6)))
    g.set_input(norm.scale, list(norm.scale.inputs).index(int(norm.root.outputs[0])), inverse)


def skipped(g: Graph, norm: Any) -> None:
    g.rewire(norm.out, g.reshape(norm.x, g.shape(norm.out)))


def unweighted(g: Graph, norm: Any) -> None:
    g.rewire(norm.out, int(norm.scale.outputs[0]))


def only_weighted(g: Graph, norm: Any) -> None:
    g.set_input(norm.weigh, list(norm.weigh.inputs).index(int(norm.scale.outputs[0])), norm.x)


def root_of_another(role: str) -> Callable[[Graph, Any], object]:
    """Divided by the root that another norm of the same width computes."""

    def edit(g: Graph, norm: Any) -> None:
        other = g.norm(role)
        g.set_input(norm.scale, list(norm.scale.inputs).index(int(norm.root.outputs[0])), int(other.root.outputs[0]))

    return edit


def largest(g: Graph, norm: Any) -> None:
    """Divided by the largest element instead of the root of the mean of squares."""
    top = g.reduce("REDUCE_MAX", g.call("ABS", norm.x), len(g.shape(norm.x)) - 1)
    g.set_input(norm.scale, list(norm.scale.inputs).index(int(norm.root.outputs[0])), g.call("DIV", np.float32(1), top))


NORM_EDITS: dict[str, Callable[[Graph, Any], object]] = {
    "eps_0.01": eps(1e-2),
    "eps_1": eps(1.0),
    "power_0.4": power(-0.4),
    "power_1": power(-1.0),
    "sum_for_mean": averaged(lambda g, x: g.call("MUL", x, np.float32(64))),
    "mean_halved": averaged(lambda g, x: g.call("MUL", x, np.float32(0.5))),
    "mean_bounded": averaged(lambda g, x: g.call("MAXIMUM", x, np.float32(1e4))),
    "eps_after_root": rooted(lambda g, x: g.call("ADD", x, np.float32(0.05))),
    "root_bounded": rooted(lambda g, x: g.call("MINIMUM", x, np.float32(0.6))),
    "mean_of_absolutes": from_squares(lambda g, x: g.call("ABS", x)),
    "mean_of_cubes": from_squares(lambda g, x: g.call("ABS", g.call("MUL", g.call("MUL", x, x), x))),
    "squares_shifted": from_squares(lambda g, x: g.call("SQUARE", g.call("ADD", x, np.float32(0.5)))),
    "centred": centred,
    "weight_plus_1": weighted(lambda g, w: g.call("ADD", w, np.float32(1))),
    "weight_squared": weighted(lambda g, w: g.call("MUL", w, w)),
    "weight_reversed": weighted(lambda g, w: g.gather(w, range(g.shape(w)[-1] - 1, -1, -1), -1)),
    "weight_doubled": weighted(lambda g, w: g.call("ADD", w, w)),
    "weight_inverted": weighted(lambda g, w: g.call("DIV", np.float32(1), w)),
    "in_halves": in_halves,
    "skipped": skipped,
    "unweighted": unweighted,
    "only_weighted": only_weighted,
    "by_the_largest": largest,
}
SPREAD = {name: NORM_ROLES[index % len(NORM_ROLES)] for index, name in enumerate(NORM_EDITS)}
"""Every way of changing a norm, at one of the norms."""

NORMS: dict[str, Change] = {
    **{f"{name}_{SPREAD[name].split('.')[-1]}": normed_by(SPREAD[name], edit) for name, edit in NORM_EDITS.items()},
    "every_eps_0.01": every_eps(1e-2),
    "q_norm_over_heads": normed_by("layers.0.q_norm", over_heads),
    "q_norm_skipped": normed_by("layers.0.q_norm", skipped),
    "q_norm_unweighted": normed_by("layers.1.q_norm", unweighted),
    "q_norm_centred": normed_by("layers.0.q_norm", centred),
    "q_norm_weight_plus_1": normed_by("layers.0.q_norm", weighted(lambda g, w: g.call("ADD", w, np.float32(1)))),
    "q_norm_power_0.45": normed_by("layers.0.q_norm", power(-0.45)),
    "final_norm_skipped": normed_by("final_norm", skipped),
    "final_norm_centred": normed_by("final_norm", centred),
    "pre_ffw_weight_of_post_ffw": normed_by("layers.0.pre_ffw_norm", weight_of("layers.0.post_ffw_norm")),
    "pre_attention_weight_of_layer_1": normed_by("layers.0.pre_attention_norm", weight_of("layers.1.pre_attention_norm")),
    "post_attention_weight_of_final": normed_by("layers.1.post_attention_norm", weight_of("final_norm")),
    "pre_ffw_root_of_pre_attention": normed_by("layers.0.pre_ffw_norm", root_of_another("layers.0.pre_attention_norm")),
    "post_attention_skipped": normed_by("layers.0.post_attention_norm", skipped),
    "post_ffw_only_weighted": normed_by("layers.0.post_ffw_norm", only_weighted),
    "pre_ffw_sum_for_mean": normed_by("layers.1.pre_ffw_norm", averaged(lambda g, x: g.call("MUL", x, np.float32(64)))),
    "result_bounded": edge("state", with_number("MINIMUM", 1.0)),
    "result_absolute": edge("0.query_in", unary("ABS")),
    "result_shifted": edge("0.ffw_in", add(0.1)),
    "twice": edge(
        "0.attention_branch",
        lambda g, x: g.call(
            "MUL", x, g.call("RSQRT", g.call("ADD", g.reduce("MEAN", g.call("MUL", x, x), -1 % len(g.shape(x))), np.float32(1e-6)))
        ),
    ),
}


# Residuals and layer scalars.


def operand(op_of: Callable[[Any], Any], old_of: Callable[[Any], int], edit: Callable[[Graph, Any, int], int]) -> Change:
    """In layer 0, another value where the operator reads ``old``."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        op, old = op_of(layer), old_of(layer)
        g.rewire(old, edit(g, layer, old), [op])

    return change


def first(old: str, edit: Callable[[Graph, Any, int], int]) -> Change:
    return operand(lambda p: p.first, lambda p: int(getattr(p, old)), edit)


def second(old: str, edit: Callable[[Graph, Any, int], int]) -> Change:
    return operand(lambda p: p.second, lambda p: int(getattr(p, old)), edit)


def bypass(attribute: str, keep: str) -> Change:
    """An addition is left out; ``keep`` of its operands goes on."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        g.rewire(int(getattr(layer, attribute).outputs[0]), int(getattr(layer, keep)))

    return change


def scalar_elsewhere(target: str) -> Change:
    """The layer's scalar multiplies only a part of what it should."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        scalar = g.roles["layers.0.layer_scalar"]
        g.rewire(layer.out, layer.summed)
        g.insert(int(getattr(layer, target)), lambda x: g.call("MUL", x, scalar), [layer.second])

    return change


def scalars_swapped(g: Graph) -> None:
    scalars = [g.roles[f"layers.{i}.layer_scalar"] for i in (0, 1)]
    ops = [g.layer(i).scaler for i in (0, 1)]
    g.rewire(scalars[0], scalars[1], [ops[0]])
    g.rewire(scalars[1], scalars[0], [ops[1]])


def scalar_by(edit: Edit) -> Change:
    def change(g: Graph) -> None:
        scalar = g.roles["layers.0.layer_scalar"]
        g.insert(scalar, lambda x: edit(g, x), [g.layer(0).scaler])

    return change


def fused(attribute: str, activation: int) -> Change:
    def change(g: Graph) -> None:
        getattr(g.layer(0), attribute).builtinOptions.fusedActivationFunction = activation

    return change


def recoded(attribute: str, name: str) -> Change:
    return lambda g: g.recode(getattr(g.layer(0), attribute), name)


def parallel(g: Graph) -> None:
    """The MLP reads what the attention reads."""
    layer = g.layer(0)
    norm = g.norm("layers.0.pre_ffw_norm")
    g.rewire(layer.middle, layer.stream, [norm.square, norm.scale])


def layers_exchanged(g: Graph) -> None:
    """The MLP's result of layer 0 is added in layer 1, and the other way round."""
    one, two = g.layer(0), g.layer(1)
    g.rewire(one.attention_branch, g.call("MUL", one.attention_branch, np.float32(0.0)), [one.first])
    g.rewire(two.attention_branch, g.call("ADD", two.attention_branch, one.attention_branch), [two.first])


RESIDUALS: dict[str, Change] = {
    "first_left_out": bypass("first", "attention_branch"),
    "second_left_out": bypass("second", "ffw_branch"),
    "attention_left_out": bypass("first", "stream"),
    "mlp_left_out": bypass("second", "middle"),
    "first_stream_doubled": first("stream", lambda g, p, x: g.call("ADD", x, x)),
    "first_stream_halved": first("stream", lambda g, p, x: g.call("MUL", x, np.float32(0.5))),
    "first_branch_halved": first("attention_branch", lambda g, p, x: g.call("MUL", x, np.float32(0.5))),
    "second_branch_doubled": second("ffw_branch", lambda g, p, x: g.call("ADD", x, x)),
    "second_branch_negated": second("ffw_branch", lambda g, p, x: g.call("NEG", x)),
    "first_from_normed": first("stream", lambda g, p, x: p.query_in),
    "second_from_stream": second("middle", lambda g, p, x: p.stream),
    "second_from_normed": second("middle", lambda g, p, x: p.ffw_in),
    "second_branch_before_its_norm": second("ffw_branch", lambda g, p, x: p.down),
    "first_branch_before_its_norm": first(
        "attention_branch", lambda g, p, x: g.reshape(p.attention_out, g.shape(x))
    ),
    "first_subtracted": recoded("first", "SUB"),
    "second_subtracted": recoded("second", "SUB"),
    "second_multiplied": recoded("second", "MUL"),
    "first_the_larger": recoded("first", "MAXIMUM"),
    "first_with_relu": fused("first", schema.ActivationFunctionType.RELU),
    "second_with_relu6": fused("second", schema.ActivationFunctionType.RELU6),
    "second_with_tanh": edge("0.summed", unary("TANH")),
    "first_with_tanh": edge("0.middle", unary("TANH")),
    "scaler_with_relu": fused("scaler", schema.ActivationFunctionType.RELU_N1_TO_1),
    "scalar_on_branch": scalar_elsewhere("ffw_branch"),
    "scalar_on_stream": scalar_elsewhere("middle"),
    "scalar_left_out": lambda g: g.rewire(g.layer(0).out, g.layer(0).summed),
    "scalar_twice": edge("0.out", lambda g, x: g.call("MUL", x, g.roles["layers.0.layer_scalar"])),
    "scalar_divides": recoded("scaler", "DIV"),
    "scalar_added": recoded("scaler", "ADD"),
    "scalar_squared": scalar_by(lambda g, x: g.call("MUL", x, x)),
    "scalar_negated": scalar_by(lambda g, x: g.call("NEG", x)),
    "scalars_swapped": scalars_swapped,
    "scalar_by_channel": edge("0.out", mul(np.linspace(0.5, 1.5, 64).reshape(1, 1, 64))),
    "constant_added": edge("0.out", add(0.05)),
    "constant_by_channel_added": edge("0.middle", add(0.1 * np.sin(np.arange(64.0)).reshape(1, 1, 64))),
    "first_input_added_again": edge("1.stream", lambda g, x: g.call("ADD", x, g.layer(0).stream)),
    "input_subtracted_at_the_end": edge("1.out", lambda g, x: g.call("SUB", x, g.layer(0).stream)),
    "activations_added": edge("1.stream", lambda g, x: g.call("ADD", x, g.part(g.input("activations"), 0, 64))),
    "parallel_mlp": parallel,
    "attention_a_layer_late": layers_exchanged,
    "stream_bounded": edge("1.stream", chain(with_number("MINIMUM", 1.0), with_number("MAXIMUM", -1.0))),
    "stream_centred": edge("1.stream", lambda g, x: g.call("SUB", x, g.reduce("MEAN", x, 2))),
}


# The two heads.


def head_reads(role: str, place: Callable[[Graph], int]) -> Change:
    def change(g: Graph) -> None:
        op = g.linear(role)
        g.set_input(op, 0, g.reshape(place(g), g.shape(int(op.inputs[0]))))

    return change


def cap(edit: Callable[[Graph, Any], object]) -> Change:
    """``edit(g, TANH)``: the soft cap's own operator."""

    def change(g: Graph) -> None:
        tanh = next(op for op in g.before(g.output("logits"), at(g, "lm_head")) if g.kind(op) == "TANH")
        edit(g, tanh)

    return change


def recapped(scale: float, bound: float) -> Change:
    return lambda g: g.rewire(
        g.output("logits"),
        g.call("MUL", g.call("TANH", g.call("MUL", at(g, "lm_head"), np.float32(scale))), np.float32(bound)),
    )


def capped_by(function: Callable[[Graph, int], int]) -> Change:
    """30 · f(x / 30) with another f."""
    return lambda g: g.rewire(
        g.output("logits"),
        g.call("MUL", function(g, g.call("MUL", at(g, "lm_head"), np.float32(1 / 30))), np.float32(30)),
    )


def half_capped(g: Graph) -> None:
    plain = at(g, "lm_head")
    g.insert(g.output("logits"), lambda capped: g.join([g.part(capped, 0, 256), g.part(plain, 256, 256)]))


def logit_at(token: int, value: float) -> np.ndarray:
    return np.where(np.arange(512) == token, value, 0.0).reshape(1, 1, 512)


HEAD: dict[str, Change] = {
    "cap_50": recapped(1 / 50, 50.0),
    "cap_5": recapped(1 / 5, 5.0),
    "cap_with_other_slope": recapped(1 / 15, 30.0),
    "cap_with_other_bound": recapped(1 / 30, 20.0),
    "cap_without_bound": recapped(1 / 30, 1.0),
    "cap_without_slope": recapped(1.0, 30.0),
    "cap_negative": recapped(-1 / 30, 30.0),
    "cap_left_out": lambda g: g.rewire(g.output("logits"), at(g, "lm_head")),
    "cap_slope_only": lambda g: g.rewire(g.output("logits"), g.call("MUL", at(g, "lm_head"), np.float32(1 / 30))),
    "cap_twice": edge("logits", chain(mul(1 / 5), unary("TANH"), mul(5.0))),
    "cap_of_other_function": capped_by(lambda g, x: g.call("SUB", g.call("LOGISTIC", x), np.float32(0.5))),
    "cap_by_softsign": capped_by(lambda g, x: g.call("DIV", x, g.call("ADD", g.call("ABS", x), np.float32(1)))),
    "cap_by_clipping": edge(
        "lm_head", chain(with_number("MINIMUM", 3.0), with_number("MAXIMUM", -3.0))
    ),
    "cap_on_half_of_the_tokens": half_capped,
    "cap_on_projected": edge("projected_activations", chain(unary("TANH"), mul(1.0))),
    "logits_shifted_before_cap": edge("lm_head", add(1.0)),
    "logits_shifted": edge("logits", add(1.0)),
    "logits_doubled": edge("logits", mul(2.0)),
    "logits_halved_before_cap": edge("lm_head", mul(0.5)),
    "logits_by_token_before_cap": edge("lm_head", mul(np.linspace(0.5, 1.5, 512).reshape(1, 1, 512))),
    "logits_with_bias": edge("lm_head", add(np.sin(np.arange(512.0)).reshape(1, 1, 512))),
    "logits_softmax": edge("logits", lambda g, x: g.call("SOFTMAX", x, beta=1.0)),
    "logits_log_softmax": edge("logits", unary("LOG_SOFTMAX")),
    "logits_relu": edge("logits", unary("RELU")),
    "logits_bounded_below": edge("lm_head", with_number("MAXIMUM", -1.0)),
    "logits_bounded_above": edge("logits", with_number("MINIMUM", 1.0)),
    "logits_without_their_mean": edge("logits", lambda g, x: g.call("SUB", x, g.reduce("MEAN", x, 2))),
    "token_forbidden": edge("logits", add(logit_at(7, -1e9))),
    "token_favoured": edge("lm_head", add(logit_at(3, 4.0))),
    "logits_negated": edge("logits", unary("NEG")),
    "logits_of_the_best_only": edge(
        "logits",
        lambda g, x: g.call("MUL", x, g.cast(g.call("EQUAL", x, g.reduce("REDUCE_MAX", x, 2)), np.float32)),
    ),
    "head_before_final_norm": head_reads("lm_head", lambda g: g.norm("final_norm").x),
    "head_from_layer_0": head_reads("lm_head", lambda g: g.layer(0).out),
    "head_from_last_mlp": head_reads("lm_head", lambda g: g.layer(1).ffw_in),
    "head_state_scaled": put("state", mul(0.5), lambda g: g.linear("lm_head")),
    "post_state_scaled": put("state", mul(0.5), lambda g: g.linear("post_projection")),
    "post_before_final_norm": head_reads("post_projection", lambda g: g.norm("final_norm").x),
    "post_from_layer_0": head_reads("post_projection", lambda g: g.layer(0).out),
    "post_from_the_stream": head_reads("post_projection", lambda g: g.layer(1).ffw_in),
    "projected_plus_hidden": edge(
        "projected_activations", lambda g, x: g.call("ADD", x, g.part(g.input("activations"), 64, 64))
    ),
    "projected_plus_state": edge("projected_activations", lambda g, x: g.call("ADD", x, g.normed("final_norm"))),
    "projected_scaled": edge("projected_activations", mul(8.0)),
    "projected_tanh": edge("projected_activations", unary("TANH")),
    "projected_by_channel": edge("projected_activations", mul(np.linspace(0.5, 1.5, 64).reshape(1, 1, 64))),
    "projected_is_state": lambda g: g.rewire(g.output("projected_activations"), g.normed("final_norm")),
    "projected_with_logits": edge(
        "projected_activations", lambda g, x: g.call("ADD", x, g.reduce("REDUCE_MAX", g.output("logits"), 2))
    ),
    "logits_with_projected": edge(
        "logits", lambda g, x: g.call("ADD", x, g.reduce("MEAN", g.output("projected_activations"), 2))
    ),
}


# GELU and the gate.


def activated(function: Callable[[Graph, int], int]) -> Change:
    """Another activation of the gate."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        g.rewire(layer.activated, function(g, layer.gate))

    return change


def spelled_gelu(cubic: float, slope: float = (2 / np.pi) ** 0.5) -> Callable[[Graph, int], int]:
    def function(g: Graph, x: int) -> int:
        cube = g.call("MUL", g.call("MUL", x, x), x)
        inner = g.call("MUL", g.call("ADD", x, g.call("MUL", cube, np.float32(cubic))), np.float32(slope))
        return g.call("MUL", g.call("MUL", x, np.float32(0.5)), g.call("ADD", g.call("TANH", inner), np.float32(1)))

    return function


def gelu(g: Graph, x: int, *, approximate: bool = True) -> int:
    return g.call("GELU", x, approximate=approximate)


def gated(function: Callable[[Graph, Any], int]) -> Change:
    """Another product of gate and up."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        g.rewire(layer.product, function(g, layer))

    return change


GELU: dict[str, Change] = {
    "erf_of_all": lambda g: [
        g.rewire(g.layer(i).activated, gelu(g, g.layer(i).gate, approximate=False)) for i in (0, 1)
    ],
    "erf_of_one": activated(lambda g, x: gelu(g, x, approximate=False)),
    "relu": activated(lambda g, x: g.call("RELU", x)),
    "relu_squared": activated(lambda g, x: g.call("SQUARE", g.call("RELU", x))),
    "silu": activated(lambda g, x: g.call("MUL", x, g.call("LOGISTIC", x))),
    "sigmoid": activated(lambda g, x: g.call("LOGISTIC", x)),
    "quick": activated(lambda g, x: g.call("MUL", x, g.call("LOGISTIC", g.call("MUL", x, np.float32(1.702))))),
    "identity": activated(lambda g, x: g.call("MUL", x, np.float32(1))),
    "none": lambda g: g.rewire(g.layer(0).activated, g.layer(0).gate),
    "tanh": activated(lambda g, x: g.call("TANH", x)),
    "elu": activated(lambda g, x: g.call("ELU", x)),
    "hard_swish": activated(lambda g, x: g.call("HARD_SWISH", x)),
    "absolute": activated(lambda g, x: g.call("ABS", gelu(g, x))),
    "cubic_0.1": activated(spelled_gelu(0.1)),
    "cubic_0": activated(spelled_gelu(0.0)),
    "slope_1": activated(spelled_gelu(0.044715, 1.0)),
    "shifted": activated(lambda g, x: g.call("ADD", gelu(g, x), np.float32(0.1))),
    "of_gate_doubled": activated(lambda g, x: gelu(g, g.call("MUL", x, np.float32(2)))),
    "of_gate_shifted": activated(lambda g, x: gelu(g, g.call("ADD", x, np.float32(0.5)))),
    "twice": activated(lambda g, x: gelu(g, gelu(g, x))),
    "bounded": activated(lambda g, x: g.call("MINIMUM", gelu(g, x), np.float32(0.5))),
    "on_up": gated(lambda g, p: g.call("MUL", p.gate, gelu(g, p.up))),
    "on_both": gated(lambda g, p: g.call("MUL", p.activated, gelu(g, p.up))),
    "on_product": gated(lambda g, p: gelu(g, g.call("MUL", p.gate, p.up))),
    "gate_squared": gated(lambda g, p: g.call("MUL", p.activated, p.activated)),
    "gate_and_up_added": gated(lambda g, p: g.call("ADD", p.activated, p.up)),
    "up_plus_1": gated(lambda g, p: g.call("MUL", p.activated, g.call("ADD", p.up, np.float32(1)))),
    "up_alone": gated(lambda g, p: g.call("MUL", p.activated, g.call("MUL", p.up, p.up))),
    "gate_times_up_without_gelu": gated(lambda g, p: g.call("MUL", p.gate, p.up)),
    "product_bounded": edge("0.product", with_number("MINIMUM", 1.0)),
    "product_relu": edge("0.product", unary("RELU")),
    "product_scaled_by_channel": edge("0.product", mul(np.linspace(0.2, 2, 128).reshape(1, 1, 128))),
    "product_plus_gate": gated(lambda g, p: g.call("ADD", g.call("MUL", p.activated, p.up), p.gate)),
}


# Weights and quantization.


def weight(role: str, edit: Callable[[Any], object]) -> Change:
    """``edit`` of the weight's tensor, as described in the file."""

    def change(g: Graph) -> None:
        edit(g.main.tensors[g.roles[role]])

    return change


def real_weight(role: str, edit: Edit) -> Change:
    """The weight as numbers, then ``edit``: what an exporter leaves that multiplies weights at run time."""

    def change(g: Graph) -> None:
        op, tensor = g.linear(role), g.roles[role]
        real = g.tensor(g.shape(tensor))
        g.emit("DEQUANTIZE", [tensor], [real])
        g.set_input(op, 1, edit(g, real))

    return change


def stored_weight(role: str, edit: Edit) -> Change:
    """``edit`` of the weight's numbers stored as floats, without a DEQUANTIZE."""

    def change(g: Graph) -> None:
        op, tensor = g.linear(role), g.roles[role]
        g.set_input(op, 1, edit(g, g.constant(g.floats(tensor))))

    return change


def bias(role: str, edit: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(g: Graph) -> None:
        op = g.linear(role)
        op.inputs = [*(int(i) for i in op.inputs[:2]), g.constant(edit(np.arange(g.shape(int(op.outputs[0]))[-1])))]

    return change


def option(role: str, name: str, setting: Any) -> Change:
    return lambda g: setattr(g.linear(role).builtinOptions, name, setting)


def shared(role: str, other: str) -> Change:
    return lambda g: g.set_input(g.linear(role), 1, g.roles[other])


def exchanged(role: str, other: str) -> Change:
    def change(g: Graph) -> None:
        one, two = g.linear(role), g.linear(other)
        g.set_input(one, 1, g.roles[other])
        g.set_input(two, 1, g.roles[role])

    return change


def low_rank(g: Graph) -> None:
    """A second path beside a projection."""
    op = g.linear("layers.0.down_proj")
    random = np.random.default_rng(3)
    x, out = int(op.inputs[0]), int(op.outputs[0])
    narrow = g.product(x, g.constant(random.standard_normal([4, 128]) * 0.2))
    wide = g.product(narrow, g.constant(random.standard_normal([64, 4]) * 0.2))
    g.insert(out, lambda y: g.call("ADD", y, wide), [r for r in g.readers(out)])


def rotation(place: str) -> Change:
    """Multiplied by an orthogonal matrix that nothing undoes."""

    def edit(g: Graph, x: int) -> int:
        size = g.shape(x)[-1]
        matrix, _ = np.linalg.qr(np.random.default_rng(4).standard_normal([size, size]))
        return g.product(x, g.constant(matrix))

    return edge(place, edit)


def scales(edit: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        tensor.quantization.scale = edit(np.asarray(tensor.quantization.scale, np.float32)).astype(np.float32)

    return change


def zero_points(value: int) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        tensor.quantization.zeroPoint = np.full(len(tensor.quantization.scale), value, np.int64)

    return change


def typed(name: str) -> Callable[[Any], None]:
    return lambda tensor: setattr(tensor, "type", getattr(schema.TensorType, name))


def dimension(axis: int) -> Callable[[Any], None]:
    return lambda tensor: setattr(tensor.quantization, "quantizedDimension", axis)


def data_and_offset(role: str) -> Change:
    """A buffer that has bytes, and says that it has others, elsewhere in the file."""

    def change(g: Graph) -> None:
        tensor = g.main.tensors[g.roles[role]]
        data = bytes(g.model.buffers[tensor.buffer].data)
        tensor.buffer = g.buffer(data)
        g.model.buffers[tensor.buffer].offset, g.model.buffers[tensor.buffer].size = 4096, len(data)

    return change


OUT, UP, POST = "layers.0.o_proj", "layers.0.up_proj", "post_projection"
reversed_rows: Edit = lambda g, w: g.gather(w, range(g.shape(w)[0] - 1, -1, -1), 0)  # noqa: E731

WEIGHTS: dict[str, Change] = {
    "transposed_by_an_operator": real_weight(POST, lambda g, w: g.transpose(w, [1, 0])),
    "stored_and_transposed": stored_weight(POST, lambda g, w: g.transpose(w, [1, 0])),
    "scaled_by_row": real_weight(POST, mul(np.linspace(0.5, 1.5, 64).reshape(64, 1))),
    "scaled_by_column": real_weight(POST, mul(np.linspace(0.5, 1.5, 64).reshape(1, 64))),
    "shifted": real_weight(OUT, add(0.01)),
    "absolute": real_weight(POST, unary("ABS")),
    "negated": real_weight(POST, unary("NEG")),
    "rounded": real_weight("pre_projection", grid(0.05)),
    "bounded": stored_weight("pre_projection", with_number("MINIMUM", 0.05)),
    "rows_reversed": real_weight(POST, reversed_rows),
    "columns_reversed": real_weight(POST, lambda g, w: g.gather(w, range(63, -1, -1), 1)),
    "rows_rolled": real_weight(OUT, lambda g, w: g.join([g.part(w, 1, 63, 0), g.part(w, 0, 1, 0)], 0)),
    "reshaped_from_transposed": real_weight(OUT, lambda g, w: g.reshape(g.transpose(w, [1, 0]), g.shape(w))),
    "plus_another": real_weight(UP, lambda g, w: g.call("ADD", w, g.constant(g.floats(g.roles["layers.0.gate_proj"])))),
    "int32_and_back": real_weight("lm_head", chain(mul(20.0), through(np.int32), mul(0.05))),
    "embedding_columns_scaled": stored_weight(
        "pre_projection", mul(np.repeat([1.0, 0.5], 64).reshape(1, 128))
    ),
    "bias": bias(OUT, lambda i: 0.2 * np.sin(i)),
    "bias_of_head": bias("lm_head", lambda i: np.cos(i)),
    "bias_of_pre_projection": bias("pre_projection", lambda i: 0.5 + 0 * i),
    "bias_of_one_channel": bias(POST, lambda i: np.where(i == 5, 3.0, 0.0)),
    "fused_relu": option(UP, "fusedActivationFunction", schema.ActivationFunctionType.RELU),
    "fused_relu6_on_head": option("lm_head", "fusedActivationFunction", schema.ActivationFunctionType.RELU6),
    "fused_relu_on_query": option("layers.0.q_proj", "fusedActivationFunction", schema.ActivationFunctionType.RELU),
    "up_reads_gate": shared(UP, "layers.0.gate_proj"),
    "gate_of_layer_1": shared("layers.0.gate_proj", "layers.1.gate_proj"),
    "gate_and_up_exchanged": exchanged("layers.0.gate_proj", UP),
    "down_projections_exchanged": exchanged("layers.0.down_proj", "layers.1.down_proj"),
    "second_path": low_rank,
    "state_rotated": rotation("state"),
    "stream_rotated": rotation("1.stream"),
    "mlp_rotated": rotation("0.product"),
    "projected_rotated": rotation("projected_activations"),
    "input_scaled_by_channel": put(
        "state", mul(np.linspace(0.5, 1.5, 64).reshape(1, 1, 64)), lambda g: g.linear(POST)
    ),
    "int4_typed_int8": weight(UP, typed("INT8")),
    "int8_typed_int4": weight(OUT, typed("INT4")),
    "int8_typed_uint8": weight(OUT, typed("UINT8")),
    "int8_typed_bool": weight(OUT, typed("BOOL")),
    "scales_nan": weight(OUT, scales(lambda s: np.where(np.arange(s.size) == 3, np.nan, s))),
    "scales_infinite": weight(POST, scales(lambda s: np.where(np.arange(s.size) == 3, np.inf, s))),
    "scales_too_few": weight(OUT, scales(lambda s: s[:-1])),
    "scales_too_many": weight(OUT, scales(lambda s: np.append(s, s[:1]))),
    "axis_of_columns": weight(POST, dimension(1)),
    "axis_out_of_range": weight(POST, dimension(5)),
    "axis_negative": weight(POST, dimension(-1)),
    "zero_points": weight(OUT, zero_points(5)),
    "zero_points_of_int4": weight(UP, zero_points(-2)),
    "zero_points_of_head": weight("lm_head", zero_points(1)),
    "data_and_offset": data_and_offset(OUT),
    "shuffled_format": option(UP, "weightsFormat", schema.FullyConnectedOptionsWeightsFormat.SHUFFLED4x16INT8),
}

REFUSED_BY_MEANING = {
    "axis_of_columns": "the file says that scales are by column; LiteRT's kernels take them by row",
    "axis_out_of_range": "no such axis",
    "axis_negative": "no such axis",
    "zero_points": "LiteRT's kernels ignore zero points of weights; the file says that they count",
    "zero_points_of_int4": "as above",
    "zero_points_of_head": "as above",
    "data_and_offset": "LiteRT takes the bytes of the buffer, not those at its offset",
    "shuffled_format": "the order of elements is another",
    "int8_typed_bool": "BOOL holds no weights",
    "int8_typed_uint8": "the codes mean other numbers",
    "int4_typed_int8": "half of the bytes are missing",
    "int8_typed_int4": "half of the bytes are left over",
    "scales_too_few": "a row has no scale",
    "scales_too_many": "a scale has no row",
    "scales_nan": "not a number",
    "scales_infinite": "not a number",
}


# Inputs.


def half(which: int, edit: Edit) -> Change:
    """``edit`` of the embedding (0) or the hidden state (1)."""

    def change(g: Graph, x: int) -> int:
        parts = [g.part(x, 0, 64), g.part(x, 64, 64)]
        parts[which] = edit(g, parts[which])
        return g.join(parts)

    return edge("activations", change)


def position_everywhere(edit: Edit) -> Change:
    return edge("input_pos", edit)


INPUTS: dict[str, Change] = {
    "activations_doubled": edge("activations", mul(2.0)),
    "activations_bounded": edge("activations", with_number("MINIMUM", 1.0)),
    "activations_tanh": edge("activations", unary("TANH")),
    "activations_normed": edge(
        "activations", lambda g, x: g.call("MUL", x, g.call("RSQRT", g.reduce("MEAN", g.call("MUL", x, x), 2)))
    ),
    "activations_shifted": edge("activations", add(0.1)),
    "activations_plus_position": edge(
        "activations",
        lambda g, x: g.call("ADD", x, g.call("MUL", g.cast(g.input("input_pos"), np.float32), np.float32(0.01))),
    ),
    "activations_times_mask": edge(
        "activations", lambda g, x: g.call("MUL", x, g.cast(g.slice(g.input("mask"), [0] * 4, [1, 1, 1, 1]), np.float32))
    ),
    "embedding_halved": half(0, mul(0.5)),
    "embedding_times_root_of_width": half(0, mul(8.0)),
    "embedding_cleared": half(0, mul(0.0)),
    "embedding_negated": half(0, unary("NEG")),
    "hidden_cleared": half(1, mul(0.0)),
    "hidden_halved": half(1, mul(0.5)),
    "hidden_tanh": half(1, unary("TANH")),
    "hidden_by_channel": half(1, mul(np.linspace(0.5, 1.5, 64).reshape(1, 1, 64))),
    "hidden_normed": half(
        1, lambda g, x: g.call("MUL", x, g.call("RSQRT", g.reduce("MEAN", g.call("MUL", x, x), 2)))
    ),
    "hidden_is_embedding": edge("activations", lambda g, x: g.join([g.part(x, 0, 64), g.part(x, 0, 64)])),
    "embedding_plus_hidden": half(
        0, lambda g, x: g.call("ADD", x, g.part(g.input("activations"), 64, 64))
    ),
    "position_plus_1": position_everywhere(lambda g, x: g.call("ADD", x, np.array([1], np.int32))),
    "position_minus_1": position_everywhere(lambda g, x: g.call("SUB", x, np.array([1], np.int32))),
    "position_modulo_64": position_everywhere(lambda g, x: g.call("FLOOR_MOD", x, np.array([64], np.int32))),
    "position_bounded": position_everywhere(lambda g, x: g.call("MINIMUM", x, np.array([100], np.int32))),
    "position_doubled": position_everywhere(lambda g, x: g.call("ADD", x, x)),
    "position_is_param_tensor": position_everywhere(lambda g, x: first_param(g)),
    "position_plus_param_tensor": position_everywhere(lambda g, x: g.call("ADD", x, first_param(g))),
    "position_is_constant": position_everywhere(lambda g, x: g.constant([7], np.int32)),
    "stream_plus_position": edge(
        "1.stream",
        lambda g, x: g.call("ADD", x, g.call("MUL", g.cast(g.input("input_pos"), np.float32), np.float32(0.01))),
    ),
    "logits_plus_param_tensor": edge("logits", lambda g, x: g.call("ADD", x, g.cast(first_param(g), np.float32))),
    "stream_plus_key": edge(
        "1.stream", lambda g, x: g.call("ADD", x, g.reshape(g.slice(g.input("kv_cache_k_3"), [0] * 4, [1, 1, 1, 64]), [1, 1, 64]))
    ),
    "mask_of_param_tensor": visible(
        1, lambda g, x: both(g, x, g.call("GREATER", first_param(g), slots(g) + np.int32(8)))
    ),
}


# Bodies of composites, and what the signature says.


def body_of(name: bytes, edit: Callable[[Graph], object]) -> Change:
    """``edit`` of the bodies of every composite called ``name``; their names go on to say what they were."""

    def change(g: Graph) -> bool | None:
        ops = [op for op in g.ops if g.kind(op) == "STABLEHLO_COMPOSITE" and op.builtinOptions2.name == name]
        if not ops:
            return False
        for op in ops:
            edit(g.body(op))
        return None

    return change


def body_number(old: float, new: float) -> Callable[[Graph], object]:
    def edit(g: Graph) -> None:
        for index, tensor in enumerate(g.main.tensors):
            if tensor.type == schema.TensorType.FLOAT32 and g.is_constant(index) and g.value(index).size == 1:
                if abs(float(g.value(index).reshape(-1)[0]) - old) < 1e-6 * max(1.0, abs(old)) and old != new:
                    g.set_value(index, np.full(g.value(index).shape, new))

    return edit


def body_result(edit: Edit) -> Callable[[Graph], object]:
    """``edit`` of what the composite returns."""

    def change(g: Graph) -> None:
        (old,) = (int(i) for i in g.main.outputs)
        g.main.outputs = [edit(g, old)]

    return change


COMPOSITES: dict[str, Change] = {
    "bmm_scaled": body_of(b"odml.runtime_bmm", body_result(mul(0.5))),
    "bmm_plus": body_of(b"odml.runtime_bmm", body_result(add(0.1))),
    "bmm_tanh": body_of(b"odml.runtime_bmm", body_result(unary("TANH"))),
    "norm_doubled": body_of(b"odml.rms_norm", body_result(mul(2.0))),
    "norm_shifted": body_of(b"odml.rms_norm", body_result(add(0.1))),
    "norm_eps": body_of(b"odml.rms_norm", body_number(1e-6, 1e-2)),
    "norm_without_root": body_of(
        b"odml.rms_norm", lambda g: [g.recode(op, "SQRT") for op in g.ops if g.kind(op) == "RSQRT"]
    ),
    "norm_of_a_sum": body_of(b"odml.rms_norm", body_number(1 / 64, 1.0)),
    "gelu_cubic": body_of(b"odml.gelu_tanh", body_number(0.044715, 0.1)),
    "gelu_relu": body_of(
        b"odml.gelu_tanh",
        lambda g: setattr(g.main, "outputs", [g.call("RELU", int(g.main.inputs[0]))]),
    ),
    "gelu_sigmoid": body_of(
        b"odml.gelu_tanh", lambda g: [g.recode(op, "LOGISTIC") for op in g.ops if g.kind(op) == "TANH"]
    ),
}


def renamed(names: dict[str, str], which: str = "inputs") -> Change:
    """The signature calls its tensors otherwise."""

    def change(g: Graph) -> None:
        for entry in getattr(g.model.signatureDefs[0], which):
            entry.name = names.get(entry.name.decode(), entry.name.decode()).encode()

    return change


NAMES: dict[str, Change] = {
    "key_and_value": renamed({"kv_cache_k_2": "kv_cache_v_2", "kv_cache_v_2": "kv_cache_k_2"}),
    "key_and_value_of_both": renamed(
        {f"kv_cache_{a}_{n}": f"kv_cache_{b}_{n}" for n in (2, 3) for a, b in (("k", "v"), ("v", "k"))}
    ),
    "sliding_and_full_keys": renamed({"kv_cache_k_2": "kv_cache_k_3", "kv_cache_k_3": "kv_cache_k_2"}),
    "outputs": renamed(
        {"logits": "projected_activations", "projected_activations": "logits"}, "outputs"
    ),
    "no_mask": renamed({"mask": "attention_bias"}),
}
_RUNTIME = "the runtime fills the signature by these names: it would pass something else, or nothing"

_FAMILIES: dict[str, dict[str, Change]] = {
    "masks": MASKS,
    "rope": ROPE,
    "scores": SCORES,
    "heads and caches": HEADS,
    "order": ORDER,
    "casts and grids": GRIDS,
    "norms": NORMS,
    "residuals": RESIDUALS,
    "outputs": HEAD,
    "gelu": GELU,
    "weights": WEIGHTS,
    "inputs": INPUTS,
    "composites": COMPOSITES,
    "names": NAMES,
}

MUTATIONS: tuple[Case, ...] = tuple(
    Case(
        family,
        name,
        change,
        why=_RUNTIME if family == "names" else REFUSED_BY_MEANING.get(name, "") if family == "weights" else "",
    )
    for family, changes in _FAMILIES.items()
    for name, change in changes.items()
)
