"""What differs at a few slots, dimensions or positions alone, or by less than a tolerance that grows with scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, Sample, add, cases, edge, mul
from adversary.mutations.attention import cache_edit
from adversary.mutations.positions import is_at, rows, tabled, when
from adversary.mutations.second import EVERY, of_row

Array = np.ndarray


def turned(g: Graph, x: int) -> int:
    """By an orthogonal matrix."""
    size = g.shape(x)[-1]
    matrix, _ = np.linalg.qr(np.random.default_rng(5).standard_normal([size, size]))
    return g.product(x, g.constant(matrix))


DIMENSIONS: dict[str, Change] = {
    "values_turned": cache_edit("value", turned, 1),
    "heads_of_weights_exchanged_at_37": edge("0.probabilities", when(is_at(37), lambda g, x: g.gather(x, [1, 0], 2))),
}


def sloped(slopes: Sequence[float] | Array) -> Change:
    """Every score times a number of the position's."""
    return edge("1.scores", of_row("MUL", np.asarray(slopes, float).reshape(256, 1)))


SLOPES: dict[str, Change] = {
    "0_at_37": sloped(np.where(EVERY == 37, 0.0, 1.0)),
    "of_a_head_at_37": edge("1.queries", when(is_at(37), lambda g, x: g.mul(x, heads_by(g, x)))),
}


def heads_by(g: Graph, x: int) -> int:
    shape = g.shape(x)
    return g.constant(np.linspace(0.9, 1.1, shape[2]).reshape(1, 1, shape[2], 1))


ALTERNATE = np.where(EVERY % 2, 1.0, -1.0)
TOLERANCES: dict[str, Change] = {
    "slots_plus_8e-4": edge("1.masked", add(8e-4 * ALTERNATE.reshape(1, 1, 1, 256))),
    "slots_plus_8e-4_at_137": edge("1.masked", of_row("ADD", np.where(EVERY[:, None] == 137, 8e-4, 0) * ALTERNATE)),
}


FAR: dict[str, Change] = {
    "angles_off_by_0.01_from_240": tabled(angle=rows(240, 255, lambda t: t + 0.01)),
    "angles_off_by_0.01_at_254": tabled(angle=rows(254, 254, lambda t: t + 0.01), layers=(1,)),
}

LONG = 4096


def at_far_slot(slot: int, number: float, rest: float) -> Array:
    return np.where(np.arange(LONG) == slot, number, rest)


FAR_SLOTS: dict[str, Change] = {
    "score_of_3000_plus_1": edge("1.scores", add(at_far_slot(3000, 1.0, 0.0).reshape(1, 1, 1, LONG))),
    "weight_of_3000_halved": edge("1.probabilities", mul(at_far_slot(3000, 0.5, 1.0).reshape(1, 1, 1, LONG))),
}

_AT = (*(Sample(p, mask="past") for p in (37, 137, 250, 252, 254, 255)), Sample(50), Sample(255), Sample(240))
_LOUD = tuple(Sample(40, keys=loud) for loud in (40.0, 130.0, 400.0)) + tuple(
    Sample(p, keys=loud, mask="one") for p in (40, 41, 42, 43) for loud in (130.0, 400.0)
)

CASES = (
    *cases("third: dimensions", DIMENSIONS, *_AT),
    *cases("third: slopes", SLOPES, *_AT),
    *cases("third: tolerances", TOLERANCES, *_AT, *_LOUD),
    *cases(
        "third: long caches",
        FAR_SLOTS,
        *(Sample(p, mask="past", keys=0.3) for p in (3000, 3005, 4090, 4091)),
        slots=LONG,
    ),
    *cases("third: far rows", FAR, *_AT),
)
