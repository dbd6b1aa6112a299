"""Masks that meet scores along another axis than their last, and operators whose operands are none of theirs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary.edits import WINDOW, Case, Change, Sample, cases


def beside(g: Graph, scores: int, edit: Callable[[int, list[int]], int], kept: int) -> int:
    """``scores`` repeated along an axis as long as the slots, edited there, of which one row is kept."""
    shape = g.shape(scores)
    slots, heads = shape[-1], int(np.prod(shape[:-1]))
    wide = [1, heads, slots, slots]
    x = g.call("BROADCAST_TO", g.reshape(scores, [1, heads, slots, 1]), np.array(wide, np.int32), shape=wide)
    return g.reshape(g.part(edit(x, wide), kept, 1), shape)


def by_one_entry(entry: int) -> Change:
    """One entry of the mask hides or shows every slot."""

    def change(g: Graph) -> None:
        place = g.layer(1)
        shape = g.shape(place.scores)

        def masked(x: int, wide: list[int]) -> int:
            return g.call("SELECT_V2", g.input("mask"), x, -1e9, shape=wide)

        x = beside(g, place.scores, masked, entry)
        slots = np.arange(shape[-1], dtype=np.int32).reshape(1, 1, 1, -1)
        past = g.call("GREATER_EQUAL", g.input("input_pos"), slots)
        g.set_input(place.softmax, 0, g.call("SELECT_V2", past, x, -1e9, shape=shape))

    return change


def by_slot(g: Graph) -> None:
    """A constant hides what lies between the first slot and the last window."""
    place = g.layer(0)

    def masked(x: int, wide: list[int]) -> int:
        slot = np.arange(wide[-1])
        shown = (slot == 0) | (slot > wide[-1] - 1 - WINDOW)
        table = np.broadcast_to(shown[:, None], wide[2:]).reshape(1, 1, *wide[2:])
        return g.call("SELECT_V2", g.constant(table, np.bool_), x, -1e9, shape=wide)

    g.insert(place.masked, lambda x: beside(g, x, masked, 3), [place.softmax])


def by_numbers(g: Graph) -> None:
    """A select whose condition is of floats, which LiteRT has none of."""
    place = g.layer(1)
    shape = g.shape(place.masked)
    g.insert(
        place.masked,
        lambda x: g.call("SELECT_V2", g.constant(np.ones((1, 1, 1, shape[-1]))), x, -1e9, shape=shape),
        [place.softmax],
    )


ALONG: tuple[Case, ...] = cases(
    "masks along another axis",
    {
        "mask_entry_0": by_one_entry(0),
        "mask_entry_5": by_one_entry(5),
        "constant_by_slot": by_slot,
        "condition_of_floats": by_numbers,
    },
    *(Sample(position, mask="past") for position in (40, 201, 255)),
)
