"""RoPE: its table, its angles, what is rotated by them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, Edit, add, chain, edge, halves, mul, turn, unary, with_number


def angle(edit: Edit, layer: int = 0) -> Change:
    return edge(f"{layer}.angle", edit)


def table(edit: Callable[[np.ndarray], np.ndarray], layer: int = 0) -> Change:
    """Another table, shape kept."""

    def change(g: Graph) -> None:
        found = frequencies(g, layer)
        g.set_value(found, edit(g.value(found).reshape(-1)))

    return change


def frequencies(g: Graph, layer: int) -> int:
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
    g.insert(rotated, lambda x: g.mul(x, weight))


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
        lambda g, x: g.mul(x, np.resize(np.linspace(1, 1.2, 16), g.shape(x)).astype(np.float32))
    ),
    "angle_squared": angle(lambda g, x: g.mul(x, x)),
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
    "first_half_only": rotated_by(
        lambda g, q, cos, sin: g.join([turn(g, *halves(g, q), cos, sin)[0], halves(g, q)[1]])
    ),
    "reflected": rotated_by(
        lambda g, q, cos, sin: g.join([turn(g, *halves(g, q), cos, sin)[0], g.neg(turn(g, *halves(g, q), cos, sin)[1])])
    ),
    "two_heads_only": rotated_by(heads_rotated),
    "first_quarter_by_itself": rotated_by(first_quarter, 1),
    "twice": rotated_by(lambda g, q, cos, sin: g.join(turn(g, *turn(g, *halves(g, q), cos, sin), cos, sin))),
    "cos_and_sin_swapped": cos_and_sin(lambda g, cos, sin: (sin, cos)),
    "cos_twice": cos_and_sin(lambda g, cos, sin: (cos, cos)),
    "sin_doubled": cos_and_sin(lambda g, cos, sin: (cos, g.mul(sin, 2.0))),
    "sin_negated": cos_and_sin(lambda g, cos, sin: (cos, g.neg(sin))),
    "both_scaled": cos_and_sin(lambda g, cos, sin: (g.mul(cos, 1.1), g.mul(sin, 1.1))),
    "cos_is_1": cos_and_sin(lambda g, cos, sin: (g.constant(np.ones(g.shape(cos))), sin)),
    "sin_is_its_angle": cos_and_sin(lambda g, cos, sin: (cos, g.layer(0).angle)),
    "table_of_other_layer": cos_and_sin(
        lambda g, cos, sin: (g.part(g.layer(1).cos, 0, g.shape(cos)[-1]), g.part(g.layer(1).sin, 0, g.shape(sin)[-1]))
    ),
    "weight_after_rotation": weight_after_rotation,
    "added_to_the_query": rotated_by(lambda g, q, cos, sin: g.add(q, g.join([cos, sin]))),
}
