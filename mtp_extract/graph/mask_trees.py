"""What masks do to a score: a tree of the operators between query · K and the softmax.

A mask acts slot by slot: it keeps or replaces the score of a slot, and adds numbers to it. So the numbers of the leaves
at a slot decide what becomes of the score there, and :meth:`MaskTree.compute_effect` computes that for many cases.
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
"""The most that may be added to the score of a visible slot: a larger number would round the score away."""


class SlotWindow(NamedTuple):
    """``size`` slots in a row; ``table`` is the number of the table that has, for each position, the first of them."""

    table: int
    size: int


@dataclass(frozen=True)
class Cases:
    """Samples of positions and contents of mask inputs, with the numbers that the leaves of a mask tree have there."""

    positions: Ids  # ``[samples]``
    slots: int  # of the caches
    shown: Mapping[str, Bools]  # mask input → whether it shows the slots, ``[samples, 1]``
    numbers: Mapping[int, npt.NDArray[np.generic]]  # ``id`` of a leaf's value → its numbers, ``[samples, *shape]``
    within: Mapping[SlotWindow, Bools]  # window → which slots are in it, ``[samples, slots]``

    @property
    def shape(self) -> tuple[int, int]:
        return self.positions.size, self.slots


@dataclass(frozen=True)
class Effect:
    """The result of a mask tree, ``[samples, slots]``: score + ``offset`` where ``scored``, else ``offset`` alone."""

    scored: Bools
    offset: Doubles
    lost: Bools  # whether an offset has rounded the score away

    @property
    def is_seen(self) -> Bools:
        """Where the result contains the score, with an offset that does not round it away."""
        return self.scored & (np.abs(self.offset) <= _LARGEST_OFFSET)

    def select(self, chosen: Bools, alternative: Effect) -> Effect:
        return Effect(
            np.where(chosen, self.scored, alternative.scored),
            np.where(chosen, self.offset, alternative.offset),
            np.where(chosen, self.lost, alternative.lost),
        )


class MaskTree:
    """A number for each slot, computed of the score, masks and the position."""

    def compute_effect(self, cases: Cases) -> Effect:
        raise NotImplementedError

    def list_parts(self) -> list[MaskTree]:
        return [part for part in vars(self).values() if isinstance(part, MaskTree)]

    def iterate_nodes(self) -> Iterator[MaskTree]:
        yield self
        for part in self.list_parts():
            yield from part.iterate_nodes()

    @cached_property
    def size(self) -> int:
        """The number of nodes; a node that several share is counted for each of them."""
        return 1 + sum(part.size for part in self.list_parts())

    @property
    def values(self) -> list[Value]:
        """The values that positions and masks decide, each once."""
        return list(
            {id(node.value): node.value for node in self.iterate_nodes() if isinstance(node, MaskValue)}.values()
        )

    @property
    def windows(self) -> set[SlotWindow]:
        return {node.window for node in self.iterate_nodes() if isinstance(node, InWindow)}


@dataclass(frozen=True, eq=False)
class Score(MaskTree):
    """The score itself, query · K."""

    def compute_effect(self, cases: Cases) -> Effect:
        return Effect(np.ones(cases.shape, bool), np.zeros(cases.shape), np.zeros(cases.shape, bool))


SCORE = Score()


class Leaf(MaskTree):
    """A number for each slot that does not depend on the score."""

    def read_numbers(self, cases: Cases) -> Doubles:
        """Return the number of each slot, ``[samples, slots]``."""
        raise NotImplementedError

    def compute_effect(self, cases: Cases) -> Effect:
        return Effect(np.zeros(cases.shape, bool), self.read_numbers(cases), np.zeros(cases.shape, bool))


@dataclass(frozen=True)
class MaskNumber(Leaf):
    """The same number for each slot."""

    number: float

    def read_numbers(self, cases: Cases) -> Doubles:
        return np.full(cases.shape, float(self.number))


@dataclass(frozen=True)
class MaskValue(Leaf):
    """A value that positions and masks decide; ``slot_axis`` is None if all slots have the same number."""

    value: Value
    slot_axis: int | None

    def read_numbers(self, cases: Cases) -> Doubles:
        array = cases.numbers[id(self.value)]
        if self.slot_axis is None:
            by_slot = array.reshape(len(array), -1, 1)
        else:
            by_slot = np.moveaxis(array, 1 + self.slot_axis, -1)
        # Any other axis of the mask is one of heads.
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

    def compute_effect(self, cases: Cases) -> Effect:
        before = self.tree.compute_effect(cases)
        after = replace(before, offset=before.offset + self.sign * self.leaf.read_numbers(cases))
        return replace(after, lost=before.lost | after.scored & ~after.is_seen)


@dataclass(frozen=True, eq=False)
class Select(MaskTree):
    """``yes`` if ``condition`` is not 0, else ``no``."""

    condition: Leaf
    yes: MaskTree
    no: MaskTree

    def compute_effect(self, cases: Cases) -> Effect:
        chosen = self.condition.read_numbers(cases) != 0
        return self.yes.compute_effect(cases).select(chosen, self.no.compute_effect(cases))


@dataclass(frozen=True, eq=False)
class InWindow(MaskTree):
    """``tree`` in a window of slots, and one number in all others."""

    tree: MaskTree
    window: SlotWindow
    elsewhere: MaskNumber

    def compute_effect(self, cases: Cases) -> Effect:
        return self.tree.compute_effect(cases).select(cases.within[self.window], self.elsewhere.compute_effect(cases))


@dataclass(frozen=True, eq=False)
class Clipped(MaskTree):
    """``tree`` after quantization, which clips the numbers that masks write for hidden slots."""

    tree: MaskTree
    lowest: float
    highest: float

    def compute_effect(self, cases: Cases) -> Effect:
        before = self.tree.compute_effect(cases)
        # Clipping hardly changes a visible score, and leaves a hidden one at an end of the range.
        clipped = np.clip(before.offset, self.lowest, self.highest)
        return replace(before, offset=np.where(before.is_seen, before.offset, clipped))
