"""Attentions that read some slots alone, from where the position says: as many when they score as when they weigh."""

from __future__ import annotations

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Case, Change, Sample, cases

REACH = 31
"""How far before the position such a window begins: twice as far as a sliding layer sees."""


def cut(g: Graph, x: int, size: int, begin: int) -> int:
    """``size`` slots of ``x`` from the position less ``begin`` on."""
    shape = g.shape(x)
    at = shape.index(256)
    shape[at] = size
    return g.call("SLICE", x, start(g, at, begin), np.array(shape, np.int32), shape=shape)


def start(g: Graph, axis: int, begin: int) -> int:
    far = g.sub(g.input("input_pos"), np.array([begin], np.int32))
    first, zero = g.maximum(far, np.array([0], np.int32)), g.constant(np.zeros(1), np.int32)
    return g.join([first if i == axis else zero for i in range(4)], 0)


def weighed(g: Graph, size: int, begin: int, layer: int = 0) -> int | None:
    """What the layer mixes of some slots alone."""
    place = g.layer(layer)
    if place.mix.builtinOptions is None:
        return None
    weights, values = cut(g, place.probabilities, size, begin), cut(g, place.value, size, begin)
    flip = bool(place.mix.builtinOptions.adjY)
    return g.call("BATCH_MATMUL", weights, values, shape=g.shape(place.attended), adjY=flip)


def windowed(scored: int, mixed: int, begin: int = REACH) -> Change:
    """The sliding layer scores ``scored`` slots and weighs ``mixed``, both from the position less ``begin`` on."""

    def change(g: Graph) -> bool | None:
        place = g.layer(0)
        if place.score.builtinOptions is None:
            return False
        shape, flip = [*g.shape(place.scores)[:-1], scored], bool(place.score.builtinOptions.adjY)
        some = g.call("BATCH_MATMUL", place.queries, cut(g, place.key, scored, begin), shape=shape, adjY=flip)
        around = g.constant(np.full(g.shape(place.scores), -1e9))
        placed = g.call("DYNAMIC_UPDATE_SLICE", around, some, start(g, 3, begin), shape=g.shape(place.scores))
        readers = g.readers(place.scores)
        part = weighed(g, mixed, begin)
        g.rewire(place.scores, placed, readers)
        g.rewire(place.attended, part)
        return None

    return change


def last_head_in_a_window(layer: int) -> Change:
    """One head of V meets the weights of 8 slots, the other those of all."""

    def change(g: Graph) -> bool | None:
        place = g.layer(layer)
        readers, some = g.readers(place.attended), weighed(g, 8, 7, layer)
        if some is None:
            return False
        g.rewire(place.attended, g.join([g.part(place.attended, 0, 1, 1), g.part(some, 1, 1, 1)], 1), readers)
        return None

    return change


WINDOWS: tuple[Case, ...] = cases(
    "windows of slots",
    {
        "fewer_scored_than_weighed": windowed(24, 32),
        "fewer_weighed_than_scored": windowed(32, 24),
        "own_slot_left_out": windowed(31, 31),
        "first_slots_left_out": windowed(14, 14, 13),
        "last_head_alone_in_sliding": last_head_in_a_window(0),
        "last_head_alone_in_full": last_head_in_a_window(1),
    },
    *(Sample(position, mask="past") for position in (40, 201, 255)),
)
"""A window that is too short for some positions, of both products or of one."""
