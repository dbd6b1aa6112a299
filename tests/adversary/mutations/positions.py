"""What happens at some positions alone: between those that a sample asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from helpers.surgery import Graph

from adversary.edits import WINDOW, Case, Change, Edit, Sample, add, chosen, edge, mul, unary, with_number
from adversary.mutations.heads import cache_edit
from adversary.mutations.masks import both, compare, slots, visible
from adversary.mutations.rope import angle, position

Where = Callable[[Graph], int]


def number(g: Graph) -> int:
    return g.cast(g.input("input_pos"), np.float32)


def is_at(row: int) -> Where:
    return lambda g: g.equal(g.input("input_pos"), np.array([row], np.int32))


def between(first: int, last: int) -> Where:
    def where(g: Graph) -> int:
        above = g.greater_equal(g.input("input_pos"), np.array([first], np.int32))
        return both(g, above, g.less_equal(g.input("input_pos"), np.array([last], np.int32)))

    return where


def rest_is(size: int, rest: int) -> Where:
    return lambda g: g.equal(
        g.call("FLOOR_MOD", g.input("input_pos"), np.array([size], np.int32)), np.array([rest], np.int32)
    )


def when(where: Where, then: Edit) -> Edit:
    """``then`` of a value at some positions, and the value itself at others."""
    return chosen(lambda g, x: where(g), then)


def bump(row: int, height: float, width: float = 0.5) -> Edit:
    """Plus a bell around ``row``: no operator that chooses."""

    def edit(g: Graph, x: int) -> int:
        far = g.mul(g.sub(number(g), np.float32(row)), np.float32(1 / width))
        bell = g.exp(g.neg(g.mul(far, far)))
        return g.add(x, g.mul(bell, np.float32(height)))

    return edit


def vanishing(rows: Sequence[int], height: float) -> Edit:
    """Plus a polynomial of the position that is zero at ``rows``."""

    def edit(g: Graph, x: int) -> int:
        made = g.constant(np.float32(height))
        for row in rows:
            made = g.mul(made, g.mul(g.sub(number(g), np.float32(row)), np.float32(1 / 64)))
        return g.add(x, made)

    return edit


def shifted(build: Callable[[Graph, int], int]) -> Change:
    """``input_pos`` plus an integer computed of it, for everything."""
    return edge("input_pos", lambda g, p: g.add(p, build(g, p)))


def whole(g: Graph, name: str, x: int, other: int) -> int:
    return g.call(name, x, np.array([other], np.int32))


def looked_up(values: np.ndarray) -> Edit:
    """Plus a number from a table with a row a position."""
    return lambda g, x: g.add(x, g.call("GATHER", g.constant(values), g.input("input_pos"), shape=[1], axis=0))


def reset(size: int, shift: int) -> Edit:
    """The mask within a window of ``size`` that begins ``shift`` slots late."""
    return lambda g, x: both(
        g, g.input("mask"), both(g, compare("GREATER_EQUAL", shift)(g), compare("LESS", size + shift)(g))
    )


def hides(slot: int) -> Edit:
    return lambda g, x: both(g, x, g.constant(slots(g) != slot, np.bool_))


SAMPLED = (1, 8, 15, 16, 111, 255)
"""Positions that an earlier release asked for in a drafter of 256 slots and a window of 16."""

_ROWS: dict[int, dict[str, Change]] = {
    37: {
        "angle_at_37": angle(when(is_at(37), add(1.0))),
        "angle_bump_at_37": angle(bump(37, 1.0)),
        "cos_negated_at_37": edge("0.cos", when(is_at(37), unary("NEG"))),
        "sin_bump_at_37": edge("1.sin", bump(37, -0.3, 2.0)),
        "scores_halved_at_37": edge("1.scores", when(is_at(37), mul(0.5))),
        "stream_shifted_at_37": edge("1.stream", when(is_at(37), add(0.25))),
        "mask_hides_0_at_37": visible(1, when(is_at(37), hides(0))),
        "window_of_all_at_37": visible(0, when(is_at(37), lambda g, x: g.input("mask"))),
        "window_late_at_37": visible(0, when(is_at(37), reset(WINDOW, 1))),
        "logits_by_table_at_37": edge("lm_head", looked_up(np.where(np.arange(256) == 37, np.nan, 0.0))),
    },
    2: {
        "sin_at_2": edge("0.sin", when(is_at(2), mul(-1.0))),
        "value_halved_at_2": cache_edit("value", when(is_at(2), mul(np.linspace(0.5, 1, 32).reshape(1, 1, 1, 32)))),
        "residue_of_13": angle(when(rest_is(13, 2), add(0.3))),
    },
    0: {
        "angle_at_0": angle(when(is_at(0), add(1.0)), 1),
        "full_layer_sees_all_at_0": visible(1, when(is_at(0), lambda g, x: g.constant(slots(g) < 2, np.bool_))),
        "activations_cleared_at_0": edge(
            "activations", when(is_at(0), mul(np.tile([1.0, 0.0], 64).reshape(1, 1, 128)))
        ),
    },
    254: {
        "angle_at_254": angle(when(is_at(254), add(1.0))),
        "query_at_254": edge("1.query_normed", when(is_at(254), unary("NEG"))),
        "position_254_is_253": shifted(lambda g, p: g.mul(g.cast(is_at(254)(g), np.int32), np.array([-1], np.int32))),
    },
    140: {
        "theta_from_120_to_250": angle(when(between(120, 250), mul(0.9))),
        "sin_negated_from_120_to_250": edge("0.sin", when(between(120, 250), unary("NEG"))),
        "window_of_32_from_120_to_250": visible(0, when(between(120, 250), reset(2 * WINDOW, 0))),
        "full_layer_slides_from_120_to_250": visible(
            1, when(between(120, 250), lambda g, x: both(g, x, compare("LESS", 64)(g)))
        ),
        "position_clipped_at_120_until_250": position(when(between(120, 250), lambda g, x: g.minimum(x, 120.0))),
        "position_plus_1_from_120_to_250": shifted(lambda g, p: g.cast(between(120, 250)(g), np.int32)),
        "steps_of_111": shifted(lambda g, p: whole(g, "FLOOR_DIV", whole(g, "FLOOR_MOD", p, 111), 20)),
        "keys_scaled_from_120_to_250": edge("0.key", when(between(120, 250), mul(1.5))),
        "token_favoured_from_120_to_250": edge(
            "logits", when(between(120, 250), add(np.eye(1, 512, 7).reshape(1, 1, 512)))
        ),
        "scalar_from_120_to_250": edge("0.out", when(between(120, 250), mul(1.1))),
        "gate_from_120_to_250": edge("0.gate", when(between(120, 250), mul(1.1))),
    },
    200: {
        "position_clipped_at_230": position(with_number("MINIMUM", 230.0)),
        "positions_above_200_clipped": position(
            when(between(200, 254), lambda g, x: g.constant(np.full(g.shape(x), 199.0)))
        ),
        "polynomial_angle": angle(vanishing(SAMPLED, 0.02)),
        "polynomial_cos": edge("1.cos", vanishing(SAMPLED, 0.01)),
        "polynomial_stream": edge("1.stream", vanishing(SAMPLED, 0.01)),
        "polynomial_logits": edge("projected_activations", vanishing(SAMPLED, 0.05)),
        "position_of_7_bits_until_250": position(when(between(128, 250), add(-128.0))),
        "no_mask_from_200_to_250": visible(
            0, when(between(200, 250), lambda g, x: both(g, compare("GREATER_EQUAL", 0)(g), compare("LESS", WINDOW)(g)))
        ),
    },
}

POSITIONS = tuple(
    Case("positions", name, change, shows=(Sample(row, mask="all"), Sample(min(row + 50, 254))))
    for row, changes in _ROWS.items()
    for name, change in changes.items()
)
