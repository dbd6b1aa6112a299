"""What shows at some inputs alone: small changes, loud numbers, single rows, smooth switches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import (
    WINDOW,
    Case,
    Change,
    Edit,
    Sample,
    add,
    chain,
    chosen,
    clamped,
    edge,
    mul,
    put,
    unary,
    with_number,
)
from adversary.mutations.attention import both, cache_edit, constant_mask, end_param, slots, softmax_spelled, visible
from adversary.mutations.blocks import normed_by, recapped, scalar_by
from adversary.mutations.positions import (
    angle,
    between,
    hides,
    is_at,
    number,
    position,
    rest_is,
    shifted,
    slot,
    table,
    when,
    whole,
)


def one(size: int, index: int, value: float, axes: int = 3, axis: int = -1, other: float = 1.0) -> np.ndarray:
    """``other`` along ``axis``, but ``value`` at ``index``."""
    shape = [1] * axes
    shape[axis] = size
    return np.where(np.arange(size) == index, value, other).reshape(shape)


def within(bound: float) -> Edit:
    return chain(with_number("MINIMUM", bound), with_number("MAXIMUM", -bound))


def without_last(g: Graph, norm: object) -> None:
    """The mean of squares leaves the last channel out."""
    squares = int(norm.square.outputs[0])  # type: ignore[attr-defined]
    kept = one(g.shape(squares)[-1], g.shape(squares)[-1] - 1, 0.0, len(g.shape(squares)))
    g.insert(squares, lambda x: g.mul(x, kept.astype(np.float32)))


def one_slot(which: str, value: float) -> Change:
    return cache_edit(which, mul(one(256, 2, value, 4, 2)), 1)


def head_of(role: str) -> Callable[[Graph], object]:
    return lambda g: g.linear(role)


SUBTLE: dict[str, Change] = {
    "scores_by_a_thousandth": edge("0.scores", mul(1.001)),
    "scores_by_slot": edge("1.scores", add(1e-3 * np.arange(256).reshape(1, 1, 1, 256))),
    "query_by_a_thousandth": edge("0.rotated", mul(0.999)),
    "key_of_one_slot": one_slot("key", 2.0),
    "slot_2_hidden": visible(1, constant_mask(lambda s: s != 2)),
    "one_channel_of_the_embedding": edge("activations", mul(one(128, 5, 1.05))),
    "one_channel_of_the_product": edge("0.product", mul(one(128, 100, 0.9))),
    "one_channel_of_the_stream": edge("1.stream", mul(one(64, 9, 1.01))),
    "one_channel_of_the_state": put("state", mul(one(64, 3, 1.02)), head_of("lm_head")),
    "one_channel_of_the_projected": edge("projected_activations", add(one(64, 0, 0.01, other=0.0))),
    "one_token_before_cap": edge("lm_head", mul(one(512, 11, 1.1))),
    "scalar_by_two_thousandths": scalar_by(mul(1.002)),
    "branch_by_two_hundredths": edge("0.ffw_branch", mul(1.02)),
    "cap_of_30.05": recapped(1 / 30, 30.05),
    "mean_without_last_channel": normed_by("layers.0.pre_ffw_norm", without_last),
    "one_frequency": table(lambda t: np.where(np.arange(t.size) == t.size - 4, t * 1.05, t)),
    "theta_10100": table(lambda t: 10100 ** (-np.arange(t.size) / t.size)),
    "position_and_a_hundredth": position(add(0.01)),
    "activations_within_6": edge("activations", within(6.0)),
}


def above(bound: float) -> Edit:
    return with_number("GREATER", bound)


def pieces(name: str, scale: float, shift: float) -> Edit:
    """A bounded activation, stretched."""
    return chain(mul(1 / scale), with_number("ADD", shift), unary(name), with_number("SUB", shift), mul(scale))


def led(g: Graph, x: int) -> int:
    """A logit is favoured where one channel of the activations is the largest."""
    best = g.call("ARG_MAX", g.input("activations"), np.array(2, np.int32), shape=[1, 1], dtype=np.int32, outputType=2)
    row = g.call("GATHER", g.constant(np.eye(1, 128, 77).reshape(128)), best, shape=[1, 1], axis=0)
    return g.add(x, g.reshape(row, [1, 1, 1]))


def channel_77(arrays: dict[str, Any]) -> None:
    arrays["activations"][..., 77] = 9.0


def when_loudest(bound: float, then: Edit) -> Edit:
    """``then`` where the largest score is above ``bound``."""
    return chosen(lambda g, x: above(bound)(g, g.reduce("REDUCE_MAX", x, 3)), then)


STREAM: dict[str, Change] = {
    "activations_by_tanh": edge("activations", pieces("TANH", 1000.0, 0.0)),
    "activations_leaky_below": edge("activations", lambda g, x: g.maximum(x, g.sub(g.mul(x, 0.5), 500.0))),
}
PLAIN: dict[str, Change] = {
    "largest_channel_favours_a_token": edge("lm_head", led),
    "powers_of_at_least_-9": softmax_spelled(lambda g, x: g.exp(g.maximum(x, -9.0))),
    "largest_score_favoured": edge(
        "1.scores", chosen(lambda g, x: g.equal(x, g.reduce("REDUCE_MAX", x, 3)), with_number("ADD", 0.5))
    ),
}
KEYS: dict[str, Change] = {
    "keys_within_30": cache_edit("key", clamped(30.0)),
    "keys_by_tanh": cache_edit("key", pieces("TANH", 100.0, 0.0)),
    "scores_within_100": edge("1.scores", clamped(100.0)),
    "largest_score_above_80": edge("1.scores", when_loudest(80.0, mul(0.25))),
}

LOUDNESS = tuple(
    Case("loudness", name, change, shows=shows, rounding=rounding)
    for changes, shows, rounding in (
        (STREAM, (Sample(40, activations=1e3), Sample(40, activations=1e5)), 2e-4),
        (PLAIN, (Sample(40, change=channel_77),), 0.0),
        (KEYS, tuple(Sample(40, keys=loud) for loud in (40.0, 100.0, 400.0)), 1e-2),
    )
    for name, change in changes.items()
)


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


_CHANGES = {
    "even_positions_for_odd": minus(rest_is(2, 1)),
    "one_less_at_position_200": minus(is_at(200)),
    "one_less_beyond_the_window": minus(between(17, 254)),
    "rope_restarts_at_the_window": angle(when(between(112, 254), lambda g, x: g.mul(x, 0.125))),
    "rope_starts_at_the_window": position(lambda g, x: g.maximum(x, np.float32(WINDOW))),
    "rope_by_int16": position(wrapped),
    "rope_by_param_tensor": position(lambda g, x: g.reshape(g.cast(end_param(g), np.float32), g.shape(x))),
    "window_in_blocks_of_4": visible(0, lower(in_blocks(4))),
    "window_in_blocks_of_3_above_120": visible(0, when(between(120, 250), lower(in_blocks(3)))),
    "window_never_below_100": visible(
        0, when(between(112, 254), lower(lambda g, p: whole(g, "MINIMUM", first_seen(g, p), 160)))
    ),
    "slots_reversed_from_200": cache_edit("key", from_slot(200, lambda s: s[::-1])),
    "slots_rolled_from_128": cache_edit("value", from_slot(128, lambda s: np.roll(s, 1)), 1),
    "padded_with_0": padded(0.0),
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
    "activations_plus_gelu_above_300": edge("activations", plus(less(300.0), lambda g, x: g.call("GELU", x))),
    "activations_at_most_150_by_root": edge("activations", at_most(150.0, "SQRT")),
    "keys_plus_exp": cache_edit("key", plus(less(45.0), unary("EXP"))),
    "scores_plus_sigmoid_above_90": edge("1.scores", plus(times(less(90.0), unary("LOGISTIC"), mul(-0.9)))),
}
NARROW: dict[str, Change] = {
    "channel_of_9_by_a_bell": edge("activations", plus(bell(9.0, 1e-3), mul(3.0))),
}
ROWS: dict[str, Change] = {
    "angle_between_two_sigmoids": angle(smooth_rows),
    "row_and_hole": visible(1, row_and_hole),
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
