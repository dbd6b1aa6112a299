"""What masks do to a score: ``slope · score + offset``, by slot, by what mask inputs hold there, and by the position.

A mask acts slot by slot: no operator may bring two slots together, so what mask inputs hold at a slot are all the cases
that there are. Where everything that leads to a mask depends on *slot less position* besides, all rows (positions) are
the same up to a shift, and the first and the last show all; else every row is computed, of caches that are not long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.evaluate import evaluate, inputs_of
from mtp_extract.graph.expressions import Ids
from mtp_extract.graph.fill import fill_mask
from mtp_extract.graph.flat import MASK, MASK_LOCAL, Depends, FlatGraph, Node, Value, ancestors
from mtp_extract.graph.forms import Attention, Tree, leaves_of, windows_of
from mtp_extract.graph.kernels import ELEMENTWISE
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.graph.positions import Positions
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES

Bools = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]

_LARGEST_OFFSET = 64.0
"""What may be added to a score that is seen: more would round it away."""
_LARGEST_SLOPE = 1e6
_MOST_NUMBERS = 64


@dataclass(frozen=True)
class Effect:
    """``slope · score + offset``, ``[samples, slots]``; ``lost`` where the score was rounded away."""

    slope: Doubles
    offset: Doubles
    lost: Bools

    def where(self, chosen: Bools, other: Effect) -> Effect:
        """This where ``chosen``, ``other`` elsewhere."""
        return Effect(
            np.where(chosen, self.slope, other.slope),
            np.where(chosen, self.offset, other.offset),
            np.where(chosen, self.lost, other.lost),
        )


@dataclass(frozen=True)
class Cases:
    """Some positions with some contents of the mask inputs, and what the leaves of a tree are there.

    Attributes:
        positions: ``[samples]``.
        shown: mask input → whether it shows slots, ``[samples]``.
        numbers: by ``id``, what a leaf is, ``[samples, *shape]``.
        within: by number of a table of first slots, whether slots are in its window, ``[samples, slots]``.
    """

    positions: Ids
    shown: Mapping[str, Bools]
    numbers: Mapping[int, npt.NDArray[np.generic]]
    within: Mapping[int, Bools]


class Masks:
    """The masks of a graph."""

    def __init__(self, graph: FlatGraph, positions: Positions) -> None:
        self.graph, self.positions, self.slots = graph, positions, positions.slots
        self._lines: dict[int, Line | None] = {}

    def window(self, attention: Attention) -> int | None:
        """How many slots the last query sees where mask inputs hide none; None for all."""
        last, shown = np.array([self.slots - 1]), [dict.fromkeys((MASK, MASK_LOCAL), True)]
        cases = self.cases(attention, last, shown)
        effect = self.effect(attention.scores.tree, cases)
        finite = effect.offset[np.isfinite(effect.offset)]
        with np.errstate(invalid="ignore"):
            seen = (effect.slope != 0) & (effect.offset >= finite.max(initial=-np.inf) - 1)
        for table, _ in attention.windows:
            seen &= cases.within[table]
        count = int(seen.sum())
        return count if 0 < count < self.slots and seen[0, -count:].all() else None

    def cases(
        self,
        attention: Attention,
        positions: Ids,
        contents: Sequence[Mapping[str, bool]],
        within: Mapping[int, bool] | None = None,
    ) -> Cases:
        """Every position with every content of the mask inputs.

        Args:
            contents: mask input → whether it shows slots.
            within: whether slots are in a window, by its table; the positions say it if None.
        """
        leaves = list({id(value): value for value in leaves_of(attention.scores.tree)}.values())
        at = np.repeat(positions, len(contents))
        needed = inputs_of(leaves) if leaves else frozenset()
        fed, shown = self.positions.fed(needed, at), {}
        for name in (MASK, MASK_LOCAL):
            shown[name] = np.tile(np.array([c.get(name, True) for c in contents]), len(positions))
            if name in needed:
                rows = np.broadcast_to(shown[name][:, None], (at.size, self.slots))
                fed[name] = fill_mask(self.graph.inputs[name], rows)
        for value in leaves:
            self._check_slot_by_slot(value)
        found = evaluate(self.graph, fed, leaves) if leaves else []
        numbers = {id(value): made for value, made in zip(leaves, found, strict=True)}
        sizes, slots = dict([*windows_of(attention.scores.tree), *attention.windows]), np.arange(self.slots)
        inside = {}
        for table, size in sizes.items():
            first = self.positions.first_slots[table][at][:, None]
            own = (slots >= first) & (slots < first + size)
            inside[table] = own if within is None else np.full_like(own, within[table])
        return Cases(at, shown, numbers, inside)

    def effect(self, tree: Tree, cases: Cases) -> Effect:
        """What ``tree`` does in ``cases``."""
        shape, kind = (cases.positions.size, self.slots), tree[0]
        if kind == "score":
            return Effect(np.ones(shape), np.zeros(shape), np.zeros(shape, bool))
        if kind == "window":
            return self.effect(tree[1], cases).where(cases.within[tree[2]], _fixed(np.full(shape, tree[4])))
        if kind == "select":
            chosen = self._numbers(tree[1], cases) != 0
            yes, no = (
                self.effect(part, cases)
                if isinstance(part, tuple) and part[0] != "leaf"
                else _fixed(self._numbers(part, cases))
                for part in tree[2:]
            )
            return yes.where(chosen, no)
        one, number = self.effect(tree[1], cases), self._numbers(tree[2], cases)
        with np.errstate(all="ignore"):
            if kind == "add":
                offset = one.offset + tree[3] * number
                return Effect(one.slope, offset, one.lost | (one.slope != 0) & ~(np.abs(offset) <= _LARGEST_OFFSET))
            factor = number if kind == "times" else 1 / number
            slope, offset = one.slope * factor, one.offset * factor
            odd = (factor != 0) & ~((np.abs(factor) < _LARGEST_SLOPE) & (np.abs(factor) > 1 / _LARGEST_SLOPE))
            return Effect(slope, offset, one.lost | odd | (slope != 0) & ~(np.abs(offset) <= _LARGEST_OFFSET))

    def _numbers(self, leaf: object, cases: Cases) -> Doubles:
        """A leaf slot by slot, ``[samples, slots]``."""
        shape = (cases.positions.size, self.slots)
        if isinstance(leaf, float | int):
            return np.full(shape, float(leaf))
        assert isinstance(leaf, tuple)
        _, value, axis = leaf
        found = cases.numbers[id(value)]
        wide = found.reshape(len(found), -1, 1) if axis is None else np.moveaxis(found, 1 + axis, -1)
        table = wide.reshape(len(found), -1, wide.shape[-1]).astype(np.float64)
        if not np.array_equal(table, np.broadcast_to(table[:, :1], table.shape), equal_nan=True):
            raise UnsupportedError(f"{value.label} masks heads differently, which no checkpoint does.")
        return np.broadcast_to(table[:, 0], shape)

    # A mask acts slot by slot.

    def _check_slot_by_slot(self, start: Value) -> None:
        """Check that on the way to ``start`` no operator brings slots of a mask together, or moves them.

        Raises:
            UnsupportedError: one does.
        """
        for value in ancestors(start):
            node = value.producer
            if not value.depends & Depends.MASK:
                continue
            if not self._is_by_slot(value):
                raise UnsupportedError(f"{value.label} is a mask whose last axis is not that of the slots.")
            if node is not None and not (node.kind in ELEMENTWISE or self._keeps_slots(node)):
                raise UnsupportedError(
                    f"{node.op.label} brings slots of a mask together, or moves them; a drafter's masks act slot by "
                    "slot. Nothing is written. Please report the file."
                )

    def _keeps_slots(self, node: Node) -> bool:
        """Whether an operator that moves elements leaves every slot in its place."""
        moved = [v for i, v in enumerate(node.inputs) if i in LAYOUT.get(node.kind, ()) and v is not None]
        others = [v for v in node.inputs if v is not None and v not in moved]
        return node.kind in _KEEP_SLOTS and all(map(self._is_by_slot, moved)) and not any(v.depends for v in others)

    # Rows that are alike.

    def rows_are_alike(self, tree: Tree) -> bool:
        """Whether all rows of the masks of ``tree`` are the same, up to a shift."""
        return all(self._line(value) in (SHIFTED, UNIFORM) for value in leaves_of(tree))

    def _line(self, value: Value) -> Line | None:
        """How ``value`` depends on position and slot; None where neither a line nor a shift says it."""
        if id(value) not in self._lines:
            self._lines[id(value)] = self._found_line(value)
        return self._lines[id(value)]

    def _found_line(self, value: Value) -> Line | None:
        if value.constant:
            return self._constant_line(value)
        if not self._is_by_slot(value):
            return self._position_line(value)
        if value.producer is None:
            return SHIFTED if value.depends == Depends.MASK else None
        return self._computed_line(value.producer)

    def _is_by_slot(self, value: Value) -> bool:
        return value.tensor.shape[-1:] == (self.slots,)

    def _computed_line(self, node: Node) -> Line | None:
        kind = node.kind
        if kind in LAYOUT:
            copied = kind == "BROADCAST_TO" and node.operand(0).tensor.shape[-1:] in ((), (1,))
            found = {self._line(v) for i, v in enumerate(node.inputs) if i in LAYOUT[kind] and v is not None}
            return found.pop() if (copied or self._keeps_slots(node)) and len(found) == 1 else None
        lines = [self._line(v) for v in node.inputs if v is not None]
        known = [line for line in lines if line is not None]
        if kind not in ELEMENTWISE or len(known) < len(lines) or node.op.activation:
            return None
        if all(line.shifts for line in known):
            return SHIFTED if any(line != UNIFORM for line in known) else UNIFORM
        if SHIFTED in known:
            return None
        sign = 1 if kind == "ADD" else -1
        line = known[0] if kind == "CAST" else Line(*(a + sign * b for a, b in zip(known[0], known[-1], strict=True)))
        if kind in _COMPARISONS:
            return SHIFTED if line.shifts else None
        return line if kind in ("ADD", "SUB", "CAST") and self._is_exact(node.outputs[0], line) else None

    def _is_exact(self, value: Value, line: Line) -> bool:
        """Whether ``value`` is a line as it is computed, and not only before it is rounded: so at both ends."""
        ends = np.array([0, self.slots - 1])
        rows = evaluate(self.graph, self.positions.fed(inputs_of([value]), ends), [value])[0].astype(np.float64)
        table = np.broadcast_to(rows, (2, *value.tensor.shape)).reshape(2, -1, self.slots)
        expected = table[:1, :, :1] + ends[:, None, None] * line.position + np.arange(self.slots) * line.slot
        return bool((table == expected).all())

    def _constant_line(self, value: Value) -> Line | None:
        """A constant that counts slots, or that has none."""
        tensor = value.tensor
        if self.slots not in tensor.shape:
            return UNIFORM
        if not self._is_by_slot(value) or (tensor.type in NUMBER_TYPES and tensor.type not in FLOAT_TYPES):
            return None
        numbers = self.graph.floats(value) if tensor.type in FLOAT_TYPES else self.graph.integers(value)
        step = _step(np.diff(numbers.reshape(-1, self.slots), axis=1))
        return None if step is None else Line(0, step)

    def _position_line(self, value: Value) -> Line | None:
        """A few numbers that count positions."""
        if value.tensor.elements > _MOST_NUMBERS or value.depends & ~Depends.POSITION:
            return None
        step = _step(np.diff(self.positions.table(value), axis=0))
        return None if step is None else Line(step, 0)


class Line(NamedTuple):
    """``position · p + slot · s`` + a number that is the same at all positions and slots."""

    position: float
    slot: float

    @property
    def shifts(self) -> bool:
        """Whether it is a function of *slot less position*."""
        return self == SHIFTED or self.position + self.slot == 0


UNIFORM = Line(0, 0)
"""A number that is the same at all positions and slots."""

SHIFTED = Line(-math.inf, math.inf)
"""Any function of *slot less position* and of a mask input at the slot."""

_COMPARISONS = frozenset({"EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"})
_KEEP_SLOTS = frozenset({"RESHAPE", "EXPAND_DIMS", "SQUEEZE", "BROADCAST_TO", "CONCATENATION"})


def _step(steps: npt.NDArray[np.generic]) -> int | None:
    """The one whole number that all ``steps`` are; 0 where there are none."""
    if not steps.size:
        return 0
    first = float(steps.flat[0])
    return int(first) if first.is_integer() and bool((steps == steps.flat[0]).all()) else None


def _fixed(numbers: Doubles) -> Effect:
    return Effect(np.zeros_like(numbers), numbers.astype(np.float64), np.zeros(numbers.shape, bool))
