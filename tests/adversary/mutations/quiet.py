"""What shows at some inputs alone: small changes, loud numbers, single rows, smooth switches."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Change, Edit, Sample, cases, edge
from adversary.mutations.attention import cache_edit, constant_mask, softmax_spelled, visible
from adversary.mutations.blocks import normed_by, recapped
from adversary.mutations.positions import hides, is_at, slot, table


def one(size: int, index: int, value: float, axes: int = 3, axis: int = -1, other: float = 1.0) -> np.ndarray:
    """``other`` along ``axis``, but ``value`` at ``index``."""
    shape = [1] * axes
    shape[axis] = size
    return np.where(np.arange(size) == index, value, other).reshape(shape)


def without_last(g: Graph, norm: object) -> None:
    """The mean of squares leaves the last channel out."""
    squares = int(norm.square.outputs[0])  # type: ignore[attr-defined]
    kept = one(g.shape(squares)[-1], g.shape(squares)[-1] - 1, 0.0, len(g.shape(squares)))
    g.insert(squares, lambda x: g.mul(x, kept.astype(np.float32)))


def one_slot(which: str, value: float) -> Change:
    return cache_edit(which, e.mul(one(256, 2, value, 4, 2)), 1)


SUBTLE: dict[str, Change] = {
    "scores_by_slot": edge("1.scores", e.add(1e-3 * np.arange(256).reshape(1, 1, 1, 256))),
    "key_of_one_slot": one_slot("key", 2.0),
    "slot_2_hidden": visible(1, constant_mask(lambda s: s != 2)),
    "one_channel_of_the_embedding": edge("activations", e.mul(one(128, 5, 1.05))),
    "one_channel_of_the_projected": edge("projected_activations", e.add(one(64, 0, 0.01, other=0.0))),
    "one_token_before_cap": edge("lm_head", e.mul(one(512, 11, 1.1))),
    "cap_of_30.05": recapped(1 / 30, 30.05),
    "mean_without_last_channel": normed_by("layers.0.pre_ffw_norm", without_last),
    "theta_10100": table(lambda t: 10100 ** (-np.arange(t.size) / t.size)),
}


PLAIN: dict[str, Change] = {
    "powers_of_at_least_-9": softmax_spelled(lambda g, x: g.exp(g.maximum(x, -9.0))),
    "largest_score_favoured": edge(
        "1.scores", e.chosen(lambda g, x: g.equal(x, g.reduce("REDUCE_MAX", x, 3)), e.add(0.5))
    ),
}
KEYS: dict[str, Change] = {
    "keys_within_30": cache_edit("key", e.clamped(30.0)),
    "scores_within_100": edge("1.scores", e.clamped(100.0)),
}


def plus(*edits: Edit) -> Edit:
    """x plus the chained ``edits`` of it."""
    return lambda g, x: g.add(x, e.chain(*edits)(g, x))


def times(*edits: Edit) -> Edit:
    return lambda g, x: g.mul(x, e.chain(*edits)(g, x))


def less(bound: float) -> Edit:
    return e.with_number("SUB", bound)


def row_and_hole(g: Graph, x: int) -> int:
    """Slot 5 is hidden at position 37 where slot 12 is."""
    hole = g.logical_and(g.reshape(is_at(37)(g), [1, 1, 1, 1]), g.logical_not(slot(g, 12)))
    return g.call("SELECT_V2", hole, hides(5)(g, x), x, shape=g.shape(x))


def hole_12(arrays: dict[str, Any]) -> None:
    arrays["mask"][..., 12] = False


LOUD: dict[str, Change] = {
    "activations_plus_exp": edge("activations", plus(less(110.0), e.unary("EXP"))),
    "scores_plus_sigmoid_above_90": edge("1.scores", plus(times(less(90.0), e.unary("LOGISTIC"), e.mul(-0.9)))),
}
ROWS: dict[str, Change] = {
    "row_and_hole": visible(1, row_and_hole),
}

_LOUD = ((1, 15, 300), (300, 80, 3000), (3000, 200, 1), (1, 1, 3e4))
CASES = (
    *cases("subtle", SUBTLE),
    *cases("loudness", PLAIN),
    *cases("loudness", KEYS, *(Sample(40, keys=loud) for loud in (40.0, 100.0, 400.0)), rounding=1e-2),
    *cases("smooth", LOUD, *(Sample(40, *loud) for loud in _LOUD), rounding=1e-3),
    *cases("smooth", ROWS, Sample(37, mask="past"), Sample(37, change=hole_12), Sample(180)),
)
