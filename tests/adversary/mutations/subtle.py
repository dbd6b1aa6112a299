"""Small changes: one element, one slot, one part in a thousand, or only where numbers are large."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, Edit, add, chain, edge, mul, put, with_number
from adversary.mutations.gelu import activated, spelled_gelu
from adversary.mutations.heads import cache_edit
from adversary.mutations.masks import constant_mask, visible
from adversary.mutations.norms import normed_by
from adversary.mutations.outputs import recapped
from adversary.mutations.residuals import scalar_by
from adversary.mutations.rope import position, table


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


def slot(which: str, value: float) -> Change:
    return cache_edit(which, mul(one(256, 2, value, 4, 2)), 1)


def head_of(role: str) -> Callable[[Graph], object]:
    return lambda g: g.linear(role)


SUBTLE: dict[str, Change] = {
    "scores_by_a_thousandth": edge("0.scores", mul(1.001)),
    "scores_by_slot": edge("1.scores", add(1e-3 * np.arange(256).reshape(1, 1, 1, 256))),
    "query_by_a_thousandth": edge("0.rotated", mul(0.999)),
    "value_of_one_dimension": cache_edit("value", mul(one(32, 3, -1.0, 4))),
    "key_of_one_dimension": cache_edit("key", mul(one(32, 7, 0.0, 4))),
    "key_of_one_slot": slot("key", 2.0),
    "value_of_one_slot": slot("value", 0.0),
    "slot_2_hidden": visible(1, constant_mask(lambda s: s != 2)),
    "one_channel_of_the_embedding": edge("activations", mul(one(128, 5, 1.05))),
    "one_channel_of_the_hidden_state": edge("activations", mul(one(128, 127, 0.0))),
    "one_channel_of_the_product": edge("0.product", mul(one(128, 100, 0.9))),
    "one_channel_of_the_stream": edge("1.stream", mul(one(64, 9, 1.01))),
    "one_channel_of_the_state": put("state", mul(one(64, 3, 1.02)), head_of("lm_head")),
    "one_channel_of_the_projected": edge("projected_activations", add(one(64, 0, 0.01, other=0.0))),
    "one_token": edge("logits", add(one(512, 500, 0.05, other=0.0))),
    "one_token_before_cap": edge("lm_head", mul(one(512, 11, 1.1))),
    "scalar_by_two_thousandths": scalar_by(mul(1.002)),
    "cap_of_30.05": recapped(1 / 30, 30.05),
    "mean_without_last_channel": normed_by("layers.0.pre_ffw_norm", without_last),
    "gelu_cubic_0.046": activated(spelled_gelu(0.046)),
    "gelu_slope_0.8": activated(spelled_gelu(0.044715, 0.8)),
    "one_frequency": table(lambda t: np.where(np.arange(t.size) == t.size - 4, t * 1.05, t)),
    "theta_10100": table(lambda t: 10100 ** (-np.arange(t.size) / t.size)),
    "position_and_a_hundredth": position(add(0.01)),
    "activations_within_6": edge("activations", within(6.0)),
    "values_within_8": cache_edit("value", within(8.0)),
    "result_within_6": edge("0.attended", within(6.0)),
}
