"""What is made of a softmax's weights, of the numbers it adds up, and of the maximum that it subtracts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, Edit, Sample, a_change, add, an_edit, cases, chain, edge, mul, unary, with_number
from adversary.mutations.attention import cache_edit
from adversary.mutations.positions import floats

EXP = unary("EXP")


def to_power(number: float) -> Edit:
    return with_number("POW", number)


WEIGHTS: dict[str, Change] = {
    "logarithm_stretched_and_back": edge("1.probabilities", chain(unary("LOG"), mul(1.01), unary("EXP"))),
}


@a_change
def spelled(
    g: Graph,
    largest: Edit = lambda g, x: g.reduce("REDUCE_MAX", x, 3),
    total: Edit = lambda g, x: x,
    powers: Edit = EXP,
) -> None:
    """The softmax of layer 1 in its parts, with another maximum, another sum, or other powers."""
    place = g.layer(1)
    raised = powers(g, g.sub(place.masked, largest(g, place.masked)))
    whole = total(g, g.reduce("SUM", raised, 3))
    g.rewire(place.probabilities, g.div(raised, whole))


@a_change
def by_log_softmax(g: Graph, edit: Edit) -> None:
    place = g.layer(1)
    g.rewire(place.probabilities, g.exp(edit(g, g.call("LOG_SOFTMAX", place.masked))))


def over_heads(g: Graph, x: int) -> int:
    shape = g.shape(x)
    return g.call("REDUCE_MAX", x, np.array([1, 2, 3], np.int32), shape=[1] * len(shape), keepDims=True)


def other_head(g: Graph, x: int) -> int:
    top = g.reduce("REDUCE_MAX", x, 3)
    return g.gather(top, [*range(1, g.shape(x)[2]), 0], 2)


TOTALS: dict[str, Change] = {
    "total_to_0.999": spelled(total=to_power(0.999)),
    "total_plus_1e-3": spelled(total=add(1e-3)),
    "logarithm_stretched": by_log_softmax(mul(1.01)),
}
LARGEST: dict[str, Change] = {
    "largest_of_all_heads": spelled(over_heads),
    "largest_of_the_next_head": spelled(other_head),
    "largest_by_0.98": spelled(lambda g, x: g.mul(g.reduce("REDUCE_MAX", x, 3), 0.98), add(1e-6)),
}


@an_edit
def formally(g: Graph, x: int, number: float, by: Callable[[Graph], int] = floats) -> int:
    """``number`` as 0 · mask + number, for every slot where a value has slots, and else by one slot's mask."""
    shape = g.shape(x)
    made = g.add(g.mul(by(g), 0.0), np.float32(number))
    if 256 not in shape:
        return g.reshape(g.part(made, 7, 1), [1] * len(shape))
    return g.reshape(made, [256 if i == shape.index(256) else 1 for i in range(len(shape))])


def bound(name: str, number: float, by: Callable[[Graph], int] = floats) -> Edit:
    return lambda g, x: g.call(name, x, formally(number, by)(g, x))


BOUNDS: dict[str, Change] = {
    "keys_at_most_40": cache_edit("key", bound("MINIMUM", 40.0), 1),
    "weights_at_least_1e-4": edge("1.probabilities", bound("MAXIMUM", 1e-4)),
    "attended_at_most_500": edge("1.attended", bound("MINIMUM", 500.0)),
    "masked_scores_at_least_-300": edge("1.masked", bound("MAXIMUM", -300.0)),
}

_SHARP = (
    *(Sample(position, keys=loud) for loud in (3.0, 6.0, 8.0, 12.0, 20.0) for position in (40, 90, 201)),
    *(Sample(position, keys=0.01, mask="past") for position in (201, 250)),
)
_LOUD = (
    *(Sample(40, keys=loud) for loud in (40.0, 100.0, 400.0)),
    *(Sample(p, keys=400.0, mask="one") for p in (41, 42, 43)),
    Sample(40, keys=1e4),
    Sample(40, values=1e4),
    Sample(40, activations=1e3),
    *_SHARP,
)


def hidden_is_loud(arrays: dict[str, Any]) -> None:
    for name in ("kv_cache_k_3", "kv_cache_v_3"):
        axis = -2 if "_k_" in name else -1
        hidden = ~arrays["mask"].reshape(-1)
        np.moveaxis(arrays[name], axis, 0)[hidden] *= 1e3


_HIDDEN = (Sample(37, change=hidden_is_loud), Sample(100, change=hidden_is_loud))

CASES = (
    *cases("third: weights of a softmax", WEIGHTS, *_SHARP, *_HIDDEN),
    *cases("third: sum of a softmax", TOTALS, *_SHARP, *_HIDDEN),
    *cases("third: largest score", LARGEST, *_LOUD, *_HIDDEN, rounding=1e-2),
    *cases("third: bounds by a mask", BOUNDS, *_LOUD, rounding=1e-3),
)
