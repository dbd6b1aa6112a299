"""What an exporter could write by mistake."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary.edits import WINDOW, Case, Change, Edit, Sample, edge, put
from adversary.mutations.heads import cache_edit
from adversary.mutations.masks import both, compare, end_param, slots, visible
from adversary.mutations.positions import between, is_at, rest_is, shifted, when, whole
from adversary.mutations.rope import angle, position


def minus(where: Callable[[Graph], int]) -> Change:
    """The position less one where it holds, for the angles alone."""
    return position(when(where, lambda g, x: g.sub(x, 1.0)))


def lower(build: Callable[[Graph, int], int]) -> Edit:
    """The mask from the slot ``build(g, input_pos)`` on."""
    return lambda g, x: both(
        g,
        g.input("mask"),
        g.reshape(
            both(
                g,
                g.greater_equal(g.constant(slots(g), np.int32), build(g, g.input("input_pos"))),
                g.less_equal(g.constant(slots(g), np.int32), g.input("input_pos")),
            ),
            g.shape(x),
        ),
    )


def first_seen(g: Graph, p: int) -> int:
    return whole(g, "SUB", p, WINDOW - 1)


def in_blocks(size: int) -> Callable[[Graph, int], int]:
    return lambda g, p: whole(g, "MUL", whole(g, "FLOOR_DIV", first_seen(g, p), size), size)


def from_slot(first: int, pick: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """K's slots from ``first`` on in another order."""
    return lambda g, x: g.gather(x, [*range(first), *(int(i) for i in pick(np.arange(first, 256)))], 2)


def padded(value: float) -> Change:
    """Scores of slots that do not exist take part in the softmax."""

    def change(g: Graph) -> None:
        layer = g.layer(1)
        *front, count = g.shape(layer.masked)
        pads = np.array([[0, 0], [0, 0], [0, 0], [0, 16]], np.int32)
        wide = g.call("PADV2", layer.masked, pads, np.float32(value), shape=[*front, count + 16])
        g.set_input(layer.softmax, 0, wide)
        result = g.tensor([*front, count + 16])
        layer.softmax.outputs = [result]
        g.rewire(layer.probabilities, g.part(result, 0, count))

    return change


def wrapped(g: Graph, x: int) -> int:
    """Multiplied by 300 as INT16, and divided again: what is above 109 wraps around."""
    narrow = g.cast(g.cast(g.mul(g.cast(x, np.int32), np.array([300], np.int32)), np.int16), np.float32)
    return g.reshape(g.mul(narrow, np.float32(1 / 300)), g.shape(x))


def own_slot_from_param(g: Graph, x: int) -> int:
    """The slot that ``param_tensor`` calls the next one is hidden."""
    return both(g, x, g.reshape(g.not_equal(whole(g, "SUB", end_param(g), 2), slots(g)), g.shape(x)))


def two_angles(g: Graph, x: int) -> int:
    """Angles of two rotations of which the second is of the position's high part."""
    high = g.cast(whole(g, "FLOOR_DIV", g.input("input_pos"), 128), np.float32)
    return g.add(x, g.mul(high, 0.1))


_CHANGES = {
    "even_positions_for_odd": minus(rest_is(2, 1)),
    "one_less_at_multiples_of_16": minus(rest_is(16, 0)),
    "one_less_at_multiples_of_64": minus(lambda g: both(g, rest_is(64, 0)(g), between(1, 255)(g))),
    "one_less_at_position_200": minus(is_at(200)),
    "one_less_beyond_the_window": minus(between(17, 254)),
    "rope_restarts_at_the_window": angle(when(between(112, 254), lambda g, x: g.mul(x, 0.125))),
    "rope_starts_at_the_window": position(lambda g, x: g.maximum(x, np.float32(WINDOW))),
    "rope_by_int16": position(wrapped),
    "rope_of_the_high_part": angle(two_angles),
    "rope_by_param_tensor": position(lambda g, x: g.reshape(g.cast(end_param(g), np.float32), g.shape(x))),
    "window_in_blocks_of_4": visible(0, lower(in_blocks(4))),
    "window_in_blocks_of_3_above_120": visible(0, when(between(120, 250), lower(in_blocks(3)))),
    "window_by_position_modulo_128": visible(0, lower(lambda g, p: first_seen(g, whole(g, "FLOOR_MOD", p, 128)))),
    "window_by_position_modulo_200": visible(
        0, when(between(112, 254), lower(lambda g, p: first_seen(g, whole(g, "FLOOR_MOD", p, 200))))
    ),
    "two_windows": visible(
        0,
        when(
            rest_is(2, 0),
            lambda g, x: both(
                g, g.input("mask"), both(g, compare("GREATER_EQUAL", 0)(g), compare("LESS", WINDOW + 8)(g))
            ),
        ),
    ),
    "window_never_below_100": visible(
        0, when(between(112, 254), lower(lambda g, p: whole(g, "MINIMUM", first_seen(g, p), 160)))
    ),
    "slots_reversed_from_200": cache_edit("key", from_slot(200, lambda s: s[::-1])),
    "slots_rolled_from_128": cache_edit("value", from_slot(128, lambda s: np.roll(s, 1)), 1),
    "padded_with_0": padded(0.0),
    "padded_with_-5": padded(-5.0),
    "slot_before_hidden_by_param": visible(1, own_slot_from_param),
    "position_1_behind_from_128_to_250": shifted(
        lambda g, p: g.mul(g.cast(between(128, 250)(g), np.int32), np.array([-1], np.int32))
    ),
    "hidden_state_of_0_at_the_start": edge(
        "activations", when(between(2, 7), lambda g, x: g.join([g.part(x, 0, 64), g.mul(g.part(x, 64, 64), 0.0)]))
    ),
    "norm_skipped_at_the_start": put(
        "0.stream",
        when(between(2, 7), lambda g, x: g.mul(x, np.linspace(0.5, 1, 64, dtype=np.float32).reshape(1, 1, 64))),
        lambda g: g.layer(0).first,
    ),
}

MISTAKES = tuple(
    Case("mistakes", name, change, shows=tuple(Sample(p, mask="past") for p in (5, 37, 64, 200, 222, 253)))
    for name, change in _CHANGES.items()
)
