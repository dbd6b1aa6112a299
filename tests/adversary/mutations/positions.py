"""What depends on the position: rotations, single positions, tables, and other kinds of masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Change, Edit, Sample, a_change, cases, edge
from adversary.mutations.attention import compare, floats, masked_value, slots, visible


@a_change
def table(g: Graph, edit: Callable[[np.ndarray], np.ndarray], layer: int = 0) -> None:
    """Another table, shape kept."""
    old = frequencies(g, layer)
    g.set_value(old, edit(g.value(old).reshape(-1)))


def frequencies(g: Graph, layer: int) -> int:
    products = [op for op in g.before(g.layer(layer).cos) if g.kind(op) == "MUL"]
    (constant,) = {int(i) for op in products for i in op.inputs if g.is_constant(int(i))}
    return constant


@a_change
def position(g: Graph, edit: Edit) -> None:
    """Another position, for the angles alone: of what is cast to floats."""
    (cast,) = [op for op in g.ops if g.kind(op) == "CAST" and op in list(g.before(g.layer(0).angle))]
    g.insert(int(cast.outputs[0]), lambda x: edit(g, x))


@a_change
def rotated_by(g: Graph, build: Callable[[Graph, int, int, int], int], layers: Sequence[int] = (0,)) -> None:
    """Another rotation: ``build(g, q, cos, sin)`` with cos and sin of half the head's width."""
    for place in (g.layer(index) for index in layers):
        half = g.shape(place.query_normed)[-1] // 2
        cos, sin = (g.part(t, 0, half) for t in (place.cos, place.sin))
        g.rewire(place.rotated, build(g, place.query_normed, cos, sin))


def interleaved(g: Graph, q: int, cos: int, sin: int) -> int:
    width = g.shape(q)[-1]
    even, odd = (g.gather(q, range(start, width, 2), -1) for start in (0, 1))
    left, right = e.turn(g, even, odd, cos, sin)
    order = [i // 2 + (i % 2) * width // 2 for i in range(width)]
    return g.gather(g.join([left, right]), order, -1)


def heads_rotated(g: Graph, q: int, cos: int, sin: int) -> int:
    """The first two heads alone are rotated."""
    full = g.join(e.turn(g, *e.halves(g, q), cos, sin))
    return g.join([g.part(full, 0, 2, 2), g.part(q, 2, 2, 2)], 2)


@a_change
def cos_and_sin(g: Graph, edit: Callable[[Graph, int, int], tuple[int, int]], layer: int = 0) -> None:
    place = g.layer(layer)
    readers = g.readers(place.cos), g.readers(place.sin)
    for old, new, into in zip((place.cos, place.sin), edit(g, place.cos, place.sin), readers, strict=True):
        g.rewire(old, new, into)


def weight_after_rotation(g: Graph) -> None:
    """The q norm's weight is multiplied after RoPE, not before."""
    norm, rotated = g.norm("layers.0.q_norm"), g.layer(0).rotated
    g.rewire(norm.out, int(norm.scale.outputs[0]))
    g.insert(rotated, lambda x: g.mul(x, g.value(norm.weight).reshape(-1)))


ROPE: dict[str, Change] = {
    "theta_100": table(lambda t: 100 ** (-np.arange(16) / 16)),
    "theta_of_full_layer_in_sliding": table(lambda t: 1e6 ** (-np.arange(16) / 16)),
    "half_of_the_head": table(lambda t: np.where(np.arange(t.size) < 8, t, 0)),
    "table_one_frequency": table(lambda t: np.where(np.arange(t.size) == 3, t * 1.5, t)),
    "angle_doubled": edge("0.angle", e.mul(2.0)),
    "no_rotation": rotated_by(lambda g, q, cos, sin: q),
    "interleaved": rotated_by(interleaved),
    "first_half_only": rotated_by(
        lambda g, q, cos, sin: g.join([e.turn(g, *e.halves(g, q), cos, sin)[0], e.halves(g, q)[1]])
    ),
    "two_heads_only": rotated_by(heads_rotated),
    "twice": rotated_by(lambda g, q, cos, sin: g.join(e.turn(g, *e.turn(g, *e.halves(g, q), cos, sin), cos, sin))),
    "sin_doubled": cos_and_sin(lambda g, cos, sin: (cos, g.mul(sin, 2.0))),
    "cos_is_1": cos_and_sin(lambda g, cos, sin: (g.constant(np.ones(g.shape(cos))), sin)),
    "table_of_other_layer": cos_and_sin(
        lambda g, cos, sin: (g.part(g.layer(1).cos, 0, g.shape(cos)[-1]), g.part(g.layer(1).sin, 0, g.shape(sin)[-1]))
    ),
    "weight_after_rotation": weight_after_rotation,
    "added_to_the_query": rotated_by(lambda g, q, cos, sin: g.add(q, g.join([cos, sin]))),
}

Where = Callable[[Graph], int]


def number(g: Graph) -> int:
    return g.cast(g.input("input_pos"), np.float32)


def is_at(row: int) -> Where:
    return lambda g: g.equal(g.input("input_pos"), np.array([row], np.int32))


def when(where: Where, then: Edit) -> Edit:
    """``then`` of a value at some positions, and the value itself at others."""
    return e.chosen(lambda g, x: where(g), then)


def reset(size: int, shift: int) -> Edit:
    """The mask within a window of ``size`` that begins ``shift`` slots late."""
    return lambda g, x: g.logical_and(
        g.input("mask"), g.logical_and(compare("GREATER_EQUAL", shift)(g), compare("LESS", size + shift)(g))
    )


AT_37: dict[str, Change] = {
    "angle_at_37": edge("0.angle", when(is_at(37), e.add(1.0))),
    "cos_negated_at_37": edge("0.cos", when(is_at(37), e.unary("NEG"))),
    "scores_halved_at_37": edge("1.scores", when(is_at(37), e.mul(0.5))),
    "window_of_all_at_37": visible(0, when(is_at(37), lambda g, x: g.input("mask"))),
    "window_late_at_37": visible(0, when(is_at(37), reset(e.WINDOW, 1))),
}

AT_0: dict[str, Change] = {
    "full_layer_sees_all_at_0": visible(1, when(is_at(0), lambda g, x: g.constant(slots(g) < 2, np.bool_))),
}


def where(condition: Callable[[Graph], int], then: Edit) -> Edit:
    return e.chosen(lambda g, x: g.reshape(condition(g), [1] * len(g.shape(x))), then)


def first_shown(g: Graph, x: int) -> int:
    """One more for the first slot that is shown."""
    first = g.call("ARG_MAX", floats(g), np.array(3, np.int32), shape=[1, 1, 1], dtype=np.int32, outputType=2)
    return g.add(x, g.cast(g.equal(g.reshape(first, [1, 1, 1, 1]), slots(g)), np.float32))


ORDINARY: dict[str, Change] = {
    "first_shown_favoured": edge("1.scores", first_shown),
    "last_slot_always": visible(1, lambda g, x: g.logical_or(x, g.constant(slots(g) == 255, np.bool_))),
    "all_of_16_shown": edge(
        "0.queries", where(lambda g: g.equal(g.reduce("SUM", g.part(floats(g), 100, 16), 3), 16.0), e.mul(0.5))
    ),
}

_LOUD = (Sample(40, keys=40.0), Sample(40, keys=400.0), *(Sample(p, keys=400.0, mask="one") for p in (40, 41)))

Array = np.ndarray
Rows = Callable[[Array], Array]
EVERY = np.arange(256)


def angles(g: Graph, layer: int) -> Array:
    """F32 angles of every position, [256, width of cos]."""
    table = g.value(frequencies(g, layer)).reshape(-1).astype(np.float32)
    width = g.shape(g.layer(layer).cos)[-1]
    return np.tile(np.arange(256, dtype=np.float32)[:, None] * table, width // table.size)


def row(g: Graph, table: int, how: str = "GATHER") -> int:
    """The position's row of ``table``, [1, width]."""
    shape = [1, g.shape(table)[1]]
    if how == "SLICE":
        start = g.join([g.input("input_pos"), g.constant(np.zeros(1), np.int32)], 0)
        return g.call(how, table, start, np.array(shape, np.int32), shape=shape)
    return g.call("GATHER", table, g.input("input_pos"), shape=shape, axis=0)


def stored_row(g: Graph, values: Array, kind: str, how: str) -> int:
    """The position's row, in floats, of a table that is stored as FP16, INT16 or floats."""
    if kind == "float":
        return row(g, g.constant(values), how)
    if kind == "fp16":
        return g.cast(row(g, g.constant(values.astype(np.float16), np.float16), how), np.float32)
    largest = np.iinfo(np.int16).max
    codes = g.constant(np.round(values * largest), np.int16)
    picked = row(g, codes, how)
    for tensor in (codes, picked):
        g.main.tensors[tensor].quantization = e.parameters(1 / largest)
    return e.dequantized(g, picked)


@a_change
def tabled(
    g: Graph,
    cos: Rows = lambda t: t,
    sin: Rows = lambda t: t,
    angle: Rows = lambda t: t,
    *,
    layers: tuple[int, ...] = (0, 1),
    kind: str = "float",
    how: str = "GATHER",
) -> None:
    """cos and sin by tables; ``angle``, ``cos`` and ``sin`` change their rows."""
    for layer in layers:
        place, all_angles = g.layer(layer), angle(angles(g, layer)).astype(np.float32)
        for old, values in ((place.cos, cos(np.cos(all_angles))), (place.sin, sin(np.sin(all_angles)))):
            g.rewire(old, g.reshape(stored_row(g, values, kind, how), g.shape(old)))


def rows(first: int, last: int, then: Rows) -> Rows:
    """``then`` of the rows ``first`` … ``last``."""
    return lambda t: np.concatenate([t[:first], then(t[first : last + 1]), t[last + 1 :]])


def window_table(edit: Callable[[Array, Array], Array] = lambda shown, far: shown) -> Change:
    """``edit`` of the window as a table of bool and of how far back slots are, [256, 256], a row a position."""
    far = np.arange(256)[:, None] - np.arange(256)
    table = edit((far >= 0) & (far < e.WINDOW), far)

    def picked(g: Graph, _: int) -> int:
        mask = g.input("mask")
        return g.logical_and(mask, g.reshape(row(g, g.constant(table, np.bool_)), g.shape(mask)))

    return visible(0, picked)


def from_row(at: int, distance: int, shows: bool) -> Change:
    """The window, but for the slot ``distance`` before the position ``at``."""
    return window_table(lambda shown, far: np.where((EVERY[:, None] == at) & (far == distance), shows, shown))


TABLES: dict[str, Change] = {
    "row_37_of_cos_is_1": tabled(cos=rows(37, 37, np.ones_like)),
    "row_37_not_a_number": tabled(cos=rows(37, 37, lambda t: t * np.nan)),
    "int16_with_a_wrong_entry": tabled(
        cos=rows(37, 37, lambda t: np.where(np.arange(t.size) == 0, 0.3, t)), kind="int16"
    ),
    "window_table_row_37": from_row(37, 3, shows=False),
}


CASES = (
    *cases("rope", ROPE),
    *cases("positions", AT_37, Sample(37, mask="all"), Sample(87)),
    *cases("positions", AT_0, Sample(0, mask="all"), Sample(50)),
    *cases("mask kinds", ORDINARY, Sample(40, mask="past"), Sample(201, mask="past")),
    *cases("mask kinds", {"minus_100": masked_value(-100.0)}, *_LOUD, rounding=0.01),
    *cases("tables", TABLES, Sample(37, mask="past"), Sample(37)),
)
