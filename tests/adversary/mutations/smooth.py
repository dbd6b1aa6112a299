"""Choices without an operator that chooses: analytic ones too narrow or too far out to be met, and roots of squares."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Case, Change, Edit, Sample, chain, chosen, edge, mul, unary, with_number
from adversary.mutations.heads import cache_edit
from adversary.mutations.kinds import slot
from adversary.mutations.masks import both, visible
from adversary.mutations.positions import hides, is_at, number, when
from adversary.mutations.rope import angle


def plus(*edits: Edit) -> Edit:
    """x plus the chained ``edits`` of it."""
    return lambda g, x: g.add(x, chain(*edits)(g, x))


def times(*edits: Edit) -> Edit:
    return lambda g, x: g.mul(x, chain(*edits)(g, x))


def less(bound: float) -> Edit:
    return with_number("SUB", bound)


def bell(at: float, width: float) -> Edit:
    """A bell around one number."""
    return chain(less(at), mul(1 / width), unary("SQUARE"), unary("NEG"), unary("EXP"))


def to_the_9th(factor: float) -> Edit:
    """factor · x⁹, without an overflow on the way."""

    def edit(g: Graph, x: int) -> int:
        made = g.mul(x, np.float32(factor))
        for _ in range(4):
            made = g.mul(made, g.mul(x, x))
        return made

    return edit


def length(name: str) -> Edit:
    """|x| as the root of a square."""
    return {
        "SQRT": chain(unary("SQUARE"), unary("SQRT")),
        "POW": chain(unary("SQUARE"), with_number("POW", 0.5)),
        "RSQRT": lambda g, x: g.div(1.0, g.rsqrt(g.square(x))),
        "LOG": chain(unary("SQUARE"), unary("LOG"), mul(0.5), unary("EXP")),
    }[name]


def at_most(bound: float, root: str) -> Edit:
    """The smaller of x and ``bound``: (x + bound − |x − bound|) / 2."""

    def edit(g: Graph, x: int) -> int:
        far = length(root)(g, g.sub(x, np.float32(bound)))
        return g.mul(g.sub(g.add(x, np.float32(bound)), far), 0.5)

    return edit


def nines(arrays: dict[str, Any]) -> None:
    """A 9 in a channel of the activations, and in a dimension of K and V of both layers, slots 30 to 40."""
    arrays["activations"][..., 77] = 9.0
    for bank in (2, 3):
        arrays[f"kv_cache_k_{bank}"][:, :, 30:41, 7] = arrays[f"kv_cache_v_{bank}"][:, :, 7, 30:41] = 9.0


def smooth_rows(g: Graph, x: int) -> int:
    """One more between 120 and 250, by two sigmoids of the position."""
    p = number(g)
    up = g.logistic(g.mul(g.sub(p, 119.5), 60.0))
    down = g.logistic(g.mul(g.sub(250.5, p), 60.0))
    return g.add(x, g.mul(up, down))


def row_and_hole(g: Graph, x: int) -> int:
    """Slot 5 is hidden at position 37 where slot 12 is."""
    hole = g.logical_and(g.reshape(is_at(37)(g), [1, 1, 1, 1]), g.logical_not(slot(g, 12)))
    return g.call("SELECT_V2", hole, hides(5)(g, x), x, shape=g.shape(x))


def hole_12(arrays: dict[str, Any]) -> None:
    arrays["mask"][..., 12] = False


LOUD: dict[str, Change] = {
    "activations_plus_exp": edge("activations", plus(less(110.0), unary("EXP"))),
    "activations_times_sigmoid_above_300": edge("activations", plus(times(less(300.0), unary("LOGISTIC")))),
    "activations_plus_gelu_above_300": edge("activations", plus(less(300.0), lambda g, x: g.call("GELU", x))),
    "activations_to_the_9th": edge("activations", plus(to_the_9th(1e-24))),
    "activations_in_two_steps_of_tanh": edge(
        "activations", plus(less(200.0), unary("TANH"), with_number("ADD", 1.0), mul(150.0))
    ),
    "activations_at_most_150_by_root": edge("activations", at_most(150.0, "SQRT")),
    "activations_at_most_150_by_power": edge("activations", at_most(150.0, "POW")),
    "activations_at_most_150_by_inverse": edge("activations", at_most(150.0, "RSQRT")),
    "stream_at_most_500_by_root": edge("1.stream", at_most(500.0, "SQRT")),
    "stream_plus_exp": edge("1.stream", plus(mul(0.01), less(8.0), unary("EXP"))),
    "keys_plus_exp": cache_edit("key", plus(less(45.0), unary("EXP"))),
    "keys_at_most_6_by_root": cache_edit("key", at_most(6.0, "SQRT")),
    "scores_plus_sigmoid_above_90": edge("1.scores", plus(times(less(90.0), unary("LOGISTIC"), mul(-0.9)))),
    "values_at_most_500_by_root": cache_edit("value", at_most(500.0, "SQRT")),
    "values_at_most_700_by_logarithm": cache_edit("value", at_most(700.0, "LOG"), 1),
    "values_to_the_9th": cache_edit("value", plus(to_the_9th(1e-26))),
    "attention_out_plus_exp": edge("0.attention_out", plus(mul(0.05), less(30.0), unary("EXP"))),
}
NARROW: dict[str, Change] = {
    "channel_of_9_by_a_bell": edge("activations", plus(bell(9.0, 1e-3), mul(3.0))),
    "channel_of_9_equal": edge("activations", chosen(with_number("EQUAL", 9.0), mul(0.0))),
    "channel_of_9_by_a_narrow_tanh": edge(
        "activations", plus(less(8.9), mul(1e4), unary("TANH"), with_number("ADD", 1.0))
    ),
    "value_of_9_by_a_bell": cache_edit("value", plus(bell(9.0, 1e-3), mul(5.0))),
    "value_of_9_equal": cache_edit("value", chosen(with_number("EQUAL", 9.0), mul(0.0)), 1),
    "key_of_9_by_a_bell": cache_edit("key", plus(bell(9.0, 1e-3), mul(-9.0)), 1),
    "key_of_9_by_a_narrow_tanh": cache_edit("key", plus(less(8.9), mul(1e4), unary("TANH"), with_number("ADD", 1.0))),
    "row_and_loud_channel": edge("activations", when(is_at(40), chosen(with_number("GREATER", 8.5), mul(-1.0)))),
}
ROWS: dict[str, Change] = {
    "angle_between_two_sigmoids": angle(smooth_rows),
    "row_and_hole": visible(1, row_and_hole),
    "row_and_slot_11": visible(0, when(is_at(37), lambda g, x: g.logical_or(x, both(g, g.input("mask"), slot(g, 11))))),
}

SMOOTH = tuple(
    Case("smooth", name, change, shows=shows, rounding=rounding)
    for changes, shows, rounding in (
        (
            LOUD,
            (*(Sample(40, a, k, v) for a, k, v in ((1, 15, 300), (300, 80, 3000), (3000, 200, 1), (1, 1, 3e4))),),
            1e-3,
        ),
        (NARROW, (Sample(40, change=nines),), 1e-3),
        (ROWS, (Sample(37, mask="past"), Sample(37, change=hole_12), Sample(180)), 0.0),
    )
    for name, change in changes.items()
)
