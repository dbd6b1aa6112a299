"""Attentions that read some slots alone, from where the position says: as many when they score as when they weigh."""

from __future__ import annotations

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Case, Change, Sample, cases

REACH = 31
"""How far before the position such a window begins: twice as far as a sliding layer sees."""


def windowed(scored: int, weighed: int, begin: int = REACH) -> Change:
    """The sliding layer scores ``scored`` slots and weighs ``weighed``, both from the position less ``begin`` on."""

    def change(g: Graph) -> bool | None:
        place = g.layer(0)
        options = [op.builtinOptions for op in (place.score, place.mix)]
        if None in options:
            return False

        def cut(x: int, size: int) -> int:
            shape = g.shape(x)
            at = shape.index(256)
            shape[at] = size
            return g.call("SLICE", x, start(at), np.array(shape, np.int32), shape=shape)

        def start(axis: int) -> int:
            far = g.sub(g.input("input_pos"), np.array([begin], np.int32))
            first = g.maximum(far, np.array([0], np.int32))
            zero = g.constant(np.zeros(1), np.int32)
            return g.join([first if i == axis else zero for i in range(4)], 0)

        flips = [bool(option.adjY) for option in options]
        shape = [*g.shape(place.scores)[:-1], scored]
        some = g.call("BATCH_MATMUL", place.queries, cut(place.key, scored), shape=shape, adjY=flips[0])
        around = g.constant(np.full(g.shape(place.scores), -1e9))
        placed = g.call("DYNAMIC_UPDATE_SLICE", around, some, start(3), shape=g.shape(place.scores))
        g.rewire(place.scores, placed)
        weights, values = cut(place.probabilities, weighed), cut(place.value, weighed)
        mixed = g.call("BATCH_MATMUL", weights, values, shape=g.shape(place.attended), adjY=flips[1])
        g.rewire(place.attended, mixed)
        return None

    return change


WINDOWS: tuple[Case, ...] = cases(
    "windows of slots",
    {
        "fewer_scored_than_weighed": windowed(24, 32),
        "fewer_weighed_than_scored": windowed(32, 24),
        "own_slot_left_out": windowed(31, 31),
        "first_slots_left_out": windowed(14, 14, 13),
    },
    *(Sample(position, mask="past") for position in (40, 201, 255)),
)
"""A window that is too short for some positions, of both products or of one."""
