"""Masks and windows in other words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import LOWEST, WINDOW, Change
from adversary.mutations.masks import both, bounded, compare, hidden_sum, slots, summed, visible


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
    return g.sub(g.input("input_pos"), slots(g))


def floats(g: Graph) -> int:
    return g.cast(g.input("input_pos"), np.float32)


MASKS: dict[str, Change] = {
    "float_sum": summed(lambda g, m: g.call("SELECT_V2", m, 0.0, LOWEST, shape=g.shape(m))),
    "bool_select": selected(lambda g, p: g.call("SELECT_V2", p.visible, p.scores, LOWEST, shape=g.shape(p.scores))),
    "one_minus_mask": summed(hidden_sum),
    "mask_minus_one": summed(lambda g, m: g.mul(g.sub(g.cast(m, np.float32), 1.0), 1e9)),
    "negated_and_swapped": selected(
        lambda g, p: g.call("SELECT_V2", g.logical_not(p.visible), LOWEST, p.scores, shape=g.shape(p.scores))
    ),
    "lowest_float": selected(
        lambda g, p: g.call(
            "SELECT_V2", p.visible, p.scores, np.float32(np.finfo(np.float32).min), shape=g.shape(p.scores)
        )
    ),
    "minus_10000": selected(lambda g, p: g.call("SELECT_V2", p.visible, p.scores, -1e4, shape=g.shape(p.scores))),
    "mask_spread_over_heads": selected(
        lambda g, p: g.call(
            "SELECT_V2",
            g.call("BROADCAST_TO", p.visible, np.array(g.shape(p.scores), np.int32), shape=g.shape(p.scores)),
            p.scores,
            g.constant(np.full(g.shape(p.scores), LOWEST)),
        )
    ),
    "not_or": within(lambda g: g.logical_not(g.logical_or(compare("LESS", 0)(g), compare("GREATER_EQUAL", WINDOW)(g)))),
    "not_and_not": within(
        lambda g: both(g, g.logical_not(compare("LESS", 0)(g)), g.logical_not(compare("GREATER_EQUAL", WINDOW)(g)))
    ),
    "strict": bounded(compare("GREATER", -1), compare("LESS_EQUAL", WINDOW - 1)),
    "one_sided": within(compare("LESS", WINDOW)),
    "two_sided": within(lambda g: g.less(g.abs(distance(g)), np.array([WINDOW], np.int32))),
    "two_sided_by_bounds": bounded(compare("GREATER", -WINDOW), compare("LESS", WINDOW)),
    "distances": within(
        lambda g: both(
            g, g.greater_equal(distance(g), np.array([0], np.int32)), g.less(distance(g), np.array([WINDOW], np.int32))
        )
    ),
    "distances_in_floats": within(
        lambda g: both(
            g,
            g.greater_equal(g.cast(distance(g), np.float32), 0.0),
            g.less(g.cast(distance(g), np.float32), np.float32(WINDOW)),
        )
    ),
    "positions_in_floats": within(
        lambda g: both(
            g,
            g.greater_equal(floats(g), slots(g).astype(np.float32)),
            g.less(floats(g), slots(g).astype(np.float32) + np.float32(WINDOW)),
        )
    ),
    "half_steps": within(
        lambda g: both(
            g,
            g.greater(floats(g), slots(g).astype(np.float32) - 0.5),
            g.less(floats(g), slots(g).astype(np.float32) + np.float32(WINDOW - 0.5)),
        )
    ),
    "slots_first": within(
        lambda g: both(
            g,
            g.less_equal(g.constant(slots(g), np.int32), g.input("input_pos")),
            g.greater(g.constant(slots(g), np.int32), g.sub(g.input("input_pos"), np.array([WINDOW], np.int32))),
        )
    ),
    "multiplied": within(
        lambda g: g.cast(
            g.mul(g.cast(compare("GREATER_EQUAL", 0)(g), np.float32), g.cast(compare("LESS", WINDOW)(g), np.float32)),
            np.bool_,
        )
    ),
    "int64_positions": within(
        lambda g: both(
            g,
            g.greater_equal(g.cast(g.input("input_pos"), np.int64), slots(g).astype(np.int64)),
            g.less(g.cast(g.input("input_pos"), np.int64), slots(g).astype(np.int64) + WINDOW),
        )
    ),
    "two_sums": summed(lambda g, m: g.add(hidden_sum(g, g.input("mask")), hidden_sum(g, m)), (0,)),
}
