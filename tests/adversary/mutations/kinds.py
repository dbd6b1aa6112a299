"""What the mask input decides otherwise than slot by slot, or hides only while K is quiet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import LOWEST, WINDOW, Case, Change, Edit, Sample, add, chosen, edge, mul, with_number
from adversary.mutations.masks import both, compare, masked_value, slots, visible
from adversary.mutations.positions import between, is_at, when


def floats(g: Graph) -> int:
    return g.cast(g.input("mask"), np.float32)


def counted(g: Graph) -> int:
    """How many slots the mask shows, [1, 1, 1, 1]."""
    return g.reduce("SUM", floats(g), 3)


def holes(g: Graph) -> int:
    """How many of the past's slots the mask hides."""
    past = g.reshape(g.cast(compare("GREATER_EQUAL", 0)(g), np.float32), [1, 1, 1, 256])
    return g.reduce("SUM", g.mul(past, g.sub(1.0, floats(g))), 3)


def slot(g: Graph, at: int) -> int:
    """Whether the mask shows the slot ``at``."""
    return g.slice(g.input("mask"), [0, 0, 0, at], [1, 1, 1, 1])


def where(condition: Callable[[Graph], int], then: Edit) -> Edit:
    return chosen(lambda g, x: g.reshape(condition(g), [1] * len(g.shape(x))), then)


def no_holes(g: Graph) -> int:
    return g.equal(holes(g), 0.0)


def hidden_scores(build: Callable[[Graph, Any], int], layers: tuple[int, ...] = (0, 1)) -> Change:
    """Another score for what is hidden: ``build(g, layer)``."""

    def change(g: Graph) -> None:
        for index in layers:
            layer = g.layer(index)
            made = g.call("SELECT_V2", layer.visible, layer.scores, build(g, layer), shape=g.shape(layer.scores))
            g.set_input(layer.softmax, 0, made)

    return change


def or_slots(pick: Callable[[np.ndarray], np.ndarray]) -> Edit:
    return lambda g, x: g.logical_or(x, g.constant(pick(slots(g)), np.bool_))


def own_always(g: Graph, x: int) -> int:
    return g.logical_or(x, g.reshape(g.equal(g.input("input_pos"), slots(g)), g.shape(x)))


def rolled(g: Graph, x: int) -> int:
    """The last hundred slots' mask, one slot late."""
    codes = g.cast(x, np.int32)
    late = g.join([g.part(codes, 0, 150), g.part(codes, 149, 106)])
    return g.cast(late, np.bool_)


def first_shown(g: Graph, x: int) -> int:
    """One more for the first slot that is shown."""
    first = g.call("ARG_MAX", floats(g), np.array(3, np.int32), shape=[1, 1, 1], dtype=np.int32, outputType=2)
    chosen_ = g.cast(g.equal(g.reshape(first, [1, 1, 1, 1]), slots(g)), np.float32)
    return g.add(x, chosen_)


def at_most(count: int) -> Edit:
    """The first ``count`` slots that are shown."""

    def edit(g: Graph, x: int) -> int:
        sums = g.call("CUMSUM", floats(g), np.array(3, np.int32), shape=[1, 1, 1, 256])
        return both(g, x, g.less_equal(sums, np.float32(count)))

    return edit


def far_sum(g: Graph) -> int:
    """The neighbours' mask, by a matrix."""
    matrix = np.eye(256) + np.eye(256, k=1)
    return g.greater(g.product(floats(g), g.constant(matrix.T)), 1.5)


ORDINARY: dict[str, Change] = {
    "first_slot_shown_halves_scores": edge("1.scores", where(lambda g: slot(g, 0), mul(0.5))),
    "slot_3_turns_query": edge("1.rotated", where(lambda g: slot(g, 3), mul(-1.0))),
    "count_scales_scores": edge("1.scores", lambda g, x: g.mul(x, g.mul(counted(g), 0.01))),
    "count_moves_stream": edge("1.stream", lambda g, x: g.add(x, g.reshape(g.mul(counted(g), 0.01), [1, 1, 1]))),
    "first_shown_favoured": edge("1.scores", first_shown),
    "one_row_negated": visible(1, when(is_at(40), lambda g, x: g.logical_not(x))),
    "last_slot_always": visible(1, or_slots(lambda s: s == 255)),
    "slot_100_always": visible(1, or_slots(lambda s: s == 100)),
    "slot_230_from_120_to_250": visible(1, when(between(120, 250), or_slots(lambda s: s == 230))),
    "slot_77_never": visible(1, lambda g, x: both(g, x, g.constant(slots(g) != 77, np.bool_))),
    "late_slots_shifted": visible(1, rolled),
    "early_count_only": visible(1, at_most(20)),
    "neighbours_decide": visible(1, lambda g, x: far_sum(g)),
    "hidden_by_own_size": hidden_scores(lambda g, p: g.mul(g.abs(p.scores), -1000.0)),
    "window_of_hidden_scores": hidden_scores(lambda g, p: g.constant(-12.0), (0,)),
    "gathered_by_slot_3": edge(
        "1.scores",
        lambda g, x: g.mul(
            x, g.call("GATHER", g.constant([1.0, 0.5]), g.cast(slot(g, 3), np.int32), shape=[1, 1, 1, 1], axis=0)
        ),
    ),
    "any_of_16_slots": edge(
        "1.scores",
        where(lambda g: g.reduce("REDUCE_ANY", g.slice(g.input("mask"), [0, 0, 0, 100], [1, 1, 1, 16]), 3), mul(0.5)),
    ),
    "largest_of_16_slots": edge(
        "0.rotated", lambda g, x: g.mul(x, g.add(1.0, g.reduce("REDUCE_MAX", g.part(floats(g), 0, 16), 3)))
    ),
}
LIKE_RUNTIMES: dict[str, Change] = {
    "no_holes_double_scores": edge("1.scores", where(no_holes, mul(2.0))),
    "no_holes_move_logits": edge("lm_head", where(no_holes, lambda g, x: g.add(x, 0.5))),
    "no_holes_other_window": visible(
        0, where(no_holes, lambda g, x: both(g, x, g.reshape(compare("LESS", WINDOW - 1)(g), g.shape(x))))
    ),
    "all_of_16_shown": edge(
        "0.queries", where(lambda g: g.equal(g.reduce("SUM", g.part(floats(g), 100, 16), 3), 16.0), mul(0.5))
    ),
    "at_most_180_shown": visible(1, at_most(180)),
    "holes_move_stream_in_steps": edge("1.stream", where(no_holes, add(0.25))),
    "product_of_the_past": edge("0.scores", where(lambda g: g.less(holes(g), 4.0), with_number("MUL", 1.25))),
}
WITHOUT_OWN: dict[str, Change] = {
    "own_slot_always_in_full": visible(1, own_always),
    "own_slot_always_in_sliding": visible(0, own_always),
}
LOUD: dict[str, Change] = {
    "minus_50": masked_value(-50.0),
    "minus_100": masked_value(-100.0),
    "minus_1000": masked_value(-1000.0),
    "set_to_minus_50": hidden_scores(lambda g, p: g.constant(-50.0)),
    "set_to_minus_100": hidden_scores(lambda g, p: g.constant(-100.0)),
    "at_most_minus_100": hidden_scores(lambda g, p: g.minimum(p.scores, -100.0)),
    "plus_scores_minus_200": hidden_scores(lambda g, p: g.add(p.scores, -200.0), (1,)),
    "a_tenth_minus_60": hidden_scores(lambda g, p: g.sub(g.mul(p.scores, 0.1), 60.0), (1,)),
    "loud_slots_always": hidden_scores(
        lambda g, p: g.call("SELECT_V2", g.greater(p.scores, 100.0), p.scores, LOWEST, shape=g.shape(p.scores))
    ),
}

KINDS = tuple(
    Case("mask kinds", name, change, shows=shows, rounding=rounding)
    for changes, shows, rounding in (
        (ORDINARY, (Sample(40, mask="past"), Sample(201, mask="past")), 0.0),
        (LIKE_RUNTIMES, (Sample(40, mask="past"), Sample(201, mask="past")), 0.0),
        (WITHOUT_OWN, (Sample(40, mask="before"),), 0.0),
        (
            LOUD,
            (Sample(40, keys=40.0), Sample(40, keys=400.0), *(Sample(p, keys=400.0, mask="one") for p in (40, 41))),
            0.01,
        ),
    )
    for name, change in changes.items()
)
