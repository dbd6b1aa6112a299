"""What masks do to a score: a tree of the operators on its way to the softmax.

A mask acts slot by slot: the score there is kept or replaced, and numbers are added. So what the leaves of a tree are
at a slot decides what becomes of the score, and :meth:`MaskTree.effect` computes that for many cases at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.expressions import Doubles, Ids
from mtp_extract.graph.flat import Value

Bools = npt.NDArray[np.bool_]

_LARGEST_OFFSET = 64.0
"""What may be added to a score that is seen: more would round it away."""


class SlotWindow(NamedTuple):
    """Some slots from where the position says: the number of its table of first slots, and how many."""

    table: int
    size: int


@dataclass(frozen=True)
class Cases:
    """Some positions with some contents of the mask inputs, and what the leaves of a tree are there."""

    positions: Ids  # ``[samples]``
    slots: int  # of the caches
    shown: Mapping[str, Bools]  # mask input → whether it shows slots, ``[samples, 1]``
    numbers: Mapping[int, npt.NDArray[np.generic]]  # by ``id``, what the value of a leaf is, ``[samples, *shape]``
    within: Mapping[SlotWindow, Bools]  # whether slots are in a window, ``[samples, slots]``

    @property
    def shape(self) -> tuple[int, int]:
        return self.positions.size, self.slots


@dataclass(frozen=True)
class Effect:
    """What becomes of a score, ``[samples, slots]``: ``offset``, added to the score where it is ``scored``; ``lost``
    where that rounds the score away.
    """

    scored: Bools
    offset: Doubles
    lost: Bools

    @property
    def is_seen(self) -> Bools:
        """Where the score is left, with an offset beside which it counts."""
        return self.scored & (np.abs(self.offset) <= _LARGEST_OFFSET)

    def where(self, chosen: Bools, other: Effect) -> Effect:
        """This one where it is ``chosen``, else ``other``."""
        return Effect(
            np.where(chosen, self.scored, other.scored),
            np.where(chosen, self.offset, other.offset),
            np.where(chosen, self.lost, other.lost),
        )


class MaskTree:
    """What stands for a score, slot by slot."""

    def effect(self, cases: Cases) -> Effect:
        """What it does in ``cases``."""
        raise NotImplementedError

    def parts(self) -> list[MaskTree]:
        """The trees that it is made of."""
        return [part for part in vars(self).values() if isinstance(part, MaskTree)]

    def nodes(self) -> Iterator[MaskTree]:
        """Itself, and all that it is made of."""
        yield self
        for part in self.parts():
            yield from part.nodes()

    @cached_property
    def size(self) -> int:
        """How many nodes it has; one that several share counts for each of them."""
        return 1 + sum(part.size for part in self.parts())

    @property
    def values(self) -> list[Value]:
        """The values that positions and masks decide, each once."""
        return list({id(node.value): node.value for node in self.nodes() if isinstance(node, MaskValue)}.values())

    @property
    def windows(self) -> set[SlotWindow]:
        return {node.window for node in self.nodes() if isinstance(node, InWindow)}


@dataclass(frozen=True, eq=False)
class Score(MaskTree):
    """The score itself, query · K."""

    def effect(self, cases: Cases) -> Effect:
        return Effect(np.ones(cases.shape, bool), np.zeros(cases.shape), np.zeros(cases.shape, bool))


SCORE = Score()


class Leaf(MaskTree):
    """A number for each slot, beside a score or in its place."""

    def numbers(self, cases: Cases) -> Doubles:
        """``[samples, slots]``."""
        raise NotImplementedError

    def effect(self, cases: Cases) -> Effect:
        return Effect(np.zeros(cases.shape, bool), self.numbers(cases), np.zeros(cases.shape, bool))


@dataclass(frozen=True)
class MaskNumber(Leaf):
    """The same number for each slot."""

    number: float

    def numbers(self, cases: Cases) -> Doubles:
        return np.full(cases.shape, float(self.number))


@dataclass(frozen=True)
class MaskValue(Leaf):
    """A value that positions and masks decide; ``slot_axis`` is None where it is the same for each slot."""

    value: Value
    slot_axis: int | None

    def numbers(self, cases: Cases) -> Doubles:
        array = cases.numbers[id(self.value)]
        if self.slot_axis is None:
            by_slot = array.reshape(len(array), -1, 1)
        else:
            by_slot = np.moveaxis(array, 1 + self.slot_axis, -1)
        # Every other axis would tell heads apart.
        table = by_slot.reshape(len(array), -1, by_slot.shape[-1]).astype(np.float64)
        if not np.array_equal(table, np.broadcast_to(table[:, :1], table.shape), equal_nan=True):
            raise UnsupportedError(f"{self.value.label} masks heads differently, which no checkpoint does.")
        return np.broadcast_to(table[:, 0], cases.shape)


@dataclass(frozen=True, eq=False)
class Add(MaskTree):
    """``tree + sign · leaf``."""

    tree: MaskTree
    leaf: Leaf
    sign: float

    def effect(self, cases: Cases) -> Effect:
        before = self.tree.effect(cases)
        after = replace(before, offset=before.offset + self.sign * self.leaf.numbers(cases))
        return replace(after, lost=before.lost | after.scored & ~after.is_seen)


@dataclass(frozen=True, eq=False)
class Select(MaskTree):
    """``yes`` where ``condition`` is not 0, else ``no``."""

    condition: Leaf
    yes: MaskTree
    no: MaskTree

    def effect(self, cases: Cases) -> Effect:
        chosen = self.condition.numbers(cases) != 0
        return self.yes.effect(cases).where(chosen, self.no.effect(cases))


@dataclass(frozen=True, eq=False)
class InWindow(MaskTree):
    """``tree`` in a window of slots, and one number elsewhere."""

    tree: MaskTree
    window: SlotWindow
    elsewhere: MaskNumber

    def effect(self, cases: Cases) -> Effect:
        return self.tree.effect(cases).where(cases.within[self.window], self.elsewhere.effect(cases))


@dataclass(frozen=True, eq=False)
class Clipped(MaskTree):
    """``tree`` on a grid of codes, which cuts off what a mask wrote for what it hides."""

    tree: MaskTree
    lowest: float
    highest: float

    def effect(self, cases: Cases) -> Effect:
        before = self.tree.effect(cases)
        # A score that was seen is rounded, and cut off by less; one that was hidden stands at an end of the grid.
        clipped = np.clip(before.offset, self.lowest, self.highest)
        return replace(before, offset=np.where(before.is_seen, before.offset, clipped))
