"""What differs at a few slots, dimensions or positions alone, or by less than a tolerance that grows with scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, Edit, Sample, add, an_edit, cases, edge, mul
from adversary.mutations.attention import cache_edit
from adversary.mutations.positions import is_at, rows, tabled, when
from adversary.mutations.second import EVERY, next_mask, of_row

Array = np.ndarray


def at_slot(slot: int, edit: Edit) -> Edit:
    """``edit`` of one slot of a cache, [1, heads, 1, width]."""
    return lambda g, x: g.join(
        [g.part(x, 0, slot, 2), edit(g, g.part(x, slot, 1, 2)), g.part(x, slot + 1, 255 - slot, 2)], 2
    )


@an_edit
def dimensions(g: Graph, x: int, *exchanged: int) -> int:
    """Two dimensions exchanged."""
    order = np.arange(g.shape(x)[-1])
    order[list(exchanged)] = order[list(exchanged)[::-1]]
    return g.gather(x, [int(i) for i in order], -1)


def turned(g: Graph, x: int) -> int:
    """By an orthogonal matrix."""
    size = g.shape(x)[-1]
    matrix, _ = np.linalg.qr(np.random.default_rng(5).standard_normal([size, size]))
    return g.product(x, g.constant(matrix))


@an_edit
def by_position(g: Graph, x: int, at_row: int, axis: int, a: int = 3, b: int = 40) -> int:
    """Elements along ``axis`` in the order that the position's row of a table says: in one row two are exchanged."""
    size = g.shape(x)[axis]
    orders = np.tile(np.arange(size), (256, 1))
    orders[at_row, [a, b]] = b, a
    order = g.call("GATHER", g.constant(orders, np.int32), g.input("input_pos"), shape=[1, size], axis=0)
    return g.call("GATHER", x, g.reshape(order, [size]), shape=g.shape(x), axis=axis % len(g.shape(x)))


@an_edit
def by_masked_slots(g: Graph, x: int, factor: float) -> int:
    """What sums to nothing over the dimensions is added where the next slot is shown."""
    mask = g.reshape(g.mul(next_mask(g), np.float32(factor)), [1, 1, 256, 1])
    size = np.arange(g.shape(x)[-1])
    return g.add(x, g.mul(mask, g.constant(1.0 * (size == 3) - 1.0 * (size == 5))))


SLOTS: dict[str, Change] = {
    f"{which}_{name}": cache_edit(which, edit, 1)
    for which in ("key", "value")
    for name, edit in {
        "dimensions_exchanged_at_250": at_slot(250, dimensions(3, 40)),
        "turned_at_250": at_slot(250, turned),
        "dimensions_exchanged_at_position_37": by_position(37, -1),
        "plus_what_sums_to_0_by_the_next_mask": by_masked_slots(0.1),
        "times_numbers_near_1_by_slot": mul(1 + 1e-3 * np.sin(EVERY).reshape(1, 1, 256, 1)),
    }.items()
}
DIMENSIONS: dict[str, Change] = {
    "attended_by_position_37": edge("1.attended", by_position(37, -1)),
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
    *cases("third: slots", SLOTS, *_AT),
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
