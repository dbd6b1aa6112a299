"""What masks do to a score, by slot, by what mask inputs hold there, and by the position.

The score is kept or replaced, and a number added.
A mask acts slot by slot: no operator may bring two slots together, so what mask inputs hold at a slot are all the cases
that there are. Where everything that leads to a mask depends on *slot less position* besides, all rows (positions) are
the same up to a shift, and the first and the last show all; else every row is computed, of caches that are not long.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.call import NUMPY_TYPES, refused
from mtp_extract.graph.evaluate import ELEMENTWISE, LAYOUT, evaluate, inputs_of
from mtp_extract.graph.expressions import Ids
from mtp_extract.graph.flat import MASK, MASK_LOCAL, Depends, FlatGraph, Node, Value, ancestors
from mtp_extract.graph.forms import Attention, MaskTree, OutputGuard, SlotWindow
from mtp_extract.graph.positions import Positions, fill_input
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES
from mtp_extract.litertlm.tflite import TensorType

Bools = npt.NDArray[np.bool_]
Doubles = npt.NDArray[np.float64]

HIDDEN_BY_FLOATS = {TensorType.FLOAT32: -0.7 * float(np.finfo(np.float32).max), TensorType.FLOAT16: -45824.0}
"""What LiteRT's runtime writes where a mask of floats hides a slot; it writes 0 where the mask shows one."""
_LARGEST_OFFSET = 64.0
"""What may be added to a score that is seen: more would round it away."""
_MOST_NUMBERS = 64


@dataclass(frozen=True)
class Effect:
    """What becomes of a score, ``[samples, slots]``: ``offset``, added to the score where it is ``scored``; ``lost``
    where that rounds the score away.
    """

    scored: Bools
    offset: Doubles
    lost: Bools


@dataclass(frozen=True)
class Cases:
    """Some positions with some contents of the mask inputs, and what the leaves of a tree are there.

    Attributes:
        positions: ``[samples]``.
        shown: mask input → whether it shows slots, ``[samples, 1]``.
        numbers: by ``id``, what a leaf is, ``[samples, *shape]``.
        within: whether slots are in a window, ``[samples, slots]``.
    """

    positions: Ids
    shown: Mapping[str, Bools]
    numbers: Mapping[int, npt.NDArray[np.generic]]
    within: Mapping[SlotWindow, Bools]


class Masks:
    """The masks of a graph."""

    def __init__(self, graph: FlatGraph, positions: Positions) -> None:
        self.graph = graph
        self.positions = positions
        self.slots = positions.slots
        self._lines: dict[int, ShiftedRow | None] = {}

    def window(self, attention: Attention) -> int | None:
        """How many slots the last query sees where mask inputs hide none; None for all."""
        cases = self.cases(attention, np.array([self.slots - 1]), {})
        effect = self.effect(attention.scores.tree, cases)
        finite = effect.offset[np.isfinite(effect.offset)]
        visible = effect.scored & (effect.offset >= finite.max(initial=-np.inf) - 1)
        if attention.window is not None:
            visible &= cases.within[attention.window]
        count = int(visible.sum())
        return count if 0 < count < self.slots and visible[0, -count:].all() else None

    def each_case(
        self, attention: Attention, positions: Ids, either: Sequence[str | SlotWindow], numbers_at_once: int
    ) -> Iterator[Cases]:
        """Every position with every content of what is in ``either``: mask inputs, which else show all, and windows: a
        slot is in one or not, whatever the position says. Some at once, and of the longest caches one.
        """
        contents = np.array(list(itertools.product((True, False), repeat=len(either))))
        at, chosen = np.repeat(positions, len(contents)), np.tile(contents, (len(positions), 1))
        step = max(1, numbers_at_once // self.slots)
        for first in range(0, at.size, step):
            columns = chosen[first : first + step].T[..., None]
            yield self.cases(attention, at[first : first + step], dict(zip(either, columns, strict=True)))

    def cases(self, attention: Attention, at: Ids, free: Mapping[str | SlotWindow, Bools]) -> Cases:
        """Positions ``at``, ``[samples]``, with what ``free`` says of mask inputs and windows there, ``[samples, 1]``;
        a mask input that it does not name shows all."""
        leaves = attention.mask_values
        needed = inputs_of(leaves) if leaves else frozenset()
        shown_by = {name: free.get(name, np.ones((at.size, 1), bool)) for name in (MASK, MASK_LOCAL)}
        fed = self.positions.fed(needed, at)
        for name in needed & set(shown_by):
            value, rows = self.graph.inputs[name], np.broadcast_to(shown_by[name], (at.size, self.slots))
            hidden = HIDDEN_BY_FLOATS.get(value.tensor.type) if value.tensor.type is not None else None
            fed[name] = fill_input(value, rows if hidden is None else np.where(rows, 0, hidden))
        for value in leaves:
            self._check_slot_by_slot(value)
        arrays = evaluate(self.graph, fed, leaves) if leaves else []
        within, slots = {}, np.arange(self.slots)
        for window in attention.all_windows:
            first = self.positions.first_slots[window.table][at][:, None]
            inside = free.get(window, (slots >= first) & (slots < first + window.size))
            within[window] = np.broadcast_to(inside, (at.size, self.slots))
        return Cases(at, shown_by, {id(value): array for value, array in zip(leaves, arrays, strict=True)}, within)

    def effect(self, tree: MaskTree | float, cases: Cases) -> Effect:
        """What ``tree`` does in ``cases``; a leaf stands in the place of a score."""
        shape, kind = (cases.positions.size, self.slots), tree[0] if isinstance(tree, tuple) else "leaf"
        if kind == "score":
            return Effect(np.ones(shape, bool), np.zeros(shape), np.zeros(shape, bool))
        if kind == "leaf":
            return Effect(np.zeros(shape, bool), self.numbers(tree, cases), np.zeros(shape, bool))
        assert isinstance(tree, tuple)
        if kind == "add":
            one = self.effect(tree[1], cases)
            offset = one.offset + tree[3] * self.numbers(tree[2], cases)
            return Effect(one.scored, offset, one.lost | one.scored & ~(np.abs(offset) <= _LARGEST_OFFSET))
        if kind == "within":
            inner = self.effect(tree[1], cases)
            # A score that was seen is rounded, and cut off by less; one that was hidden stands at an end of the grid.
            hidden = ~inner.scored | ~(np.abs(inner.offset) <= _LARGEST_OFFSET)
            return replace(inner, offset=np.where(hidden, np.clip(inner.offset, *tree[2:]), inner.offset))
        if kind == "window":
            chosen = cases.within[tree[2]]
            yes = self.effect(tree[1], cases)
            no = self.effect(tree[3], cases)
        else:
            chosen = self.numbers(tree[1], cases) != 0
            yes, no = (self.effect(part, cases) for part in tree[2:])
        scored, lost = np.where(chosen, yes.scored, no.scored), np.where(chosen, yes.lost, no.lost)
        return Effect(scored, np.where(chosen, yes.offset, no.offset), lost)

    def numbers(self, leaf: MaskTree | float, cases: Cases) -> Doubles:
        """A leaf slot by slot, ``[samples, slots]``."""
        shape = (cases.positions.size, self.slots)
        if not isinstance(leaf, tuple):
            return np.full(shape, float(leaf))
        _, value, axis = leaf
        numbers = cases.numbers[id(value)]
        wide = numbers.reshape(len(numbers), -1, 1) if axis is None else np.moveaxis(numbers, 1 + axis, -1)
        table = wide.reshape(len(numbers), -1, wide.shape[-1]).astype(np.float64)
        if not np.array_equal(table, np.broadcast_to(table[:, :1], table.shape), equal_nan=True):
            raise UnsupportedError(f"{value.label} masks heads differently, which no checkpoint does.")
        return np.broadcast_to(table[:, 0], shape)

    def guard_keeps(self, guard: OutputGuard, largest: float) -> Bools:
        """Whether ``guard`` keeps what heads mixed where the largest number of its mask is ``largest``, by element."""
        reduced = guard.reduced.tensor
        largest_shown = np.full((1, *reduced.shape), largest, NUMPY_TYPES[reduced.type])
        (condition,) = evaluate(self.graph, {}, [guard.condition], {id(guard.reduced): largest_shown})
        return np.asarray(condition == guard.keeps)

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
                raise refused(
                    node,
                    "brings slots of a mask together, or moves them; a drafter's masks act slot by slot. Nothing is "
                    "written.",
                )

    def _keeps_slots(self, node: Node) -> bool:
        """Whether an operator that moves elements leaves every slot in its place."""
        moved = [v for i, v in enumerate(node.inputs) if i in LAYOUT.get(node.kind, ()) and v is not None]
        others = [v for v in node.inputs if v is not None and v not in moved]
        return node.kind in _KEEP_SLOTS and all(map(self._is_by_slot, moved)) and not any(v.depends for v in others)

    # Rows that are alike.

    def rows_are_alike(self, values: Iterable[Value]) -> bool:
        """Whether all rows of the masks ``values`` are the same, up to a shift."""
        return all(self._line(value) in (SHIFTED, UNIFORM) for value in values)

    def _line(self, value: Value) -> ShiftedRow | None:
        """How ``value`` depends on position and slot; None where neither a line nor a shift says it."""
        if id(value) not in self._lines:
            self._lines[id(value)] = self._found_line(value)
        return self._lines[id(value)]

    def _found_line(self, value: Value) -> ShiftedRow | None:
        if value.constant:
            return self._constant_line(value)
        if not self._is_by_slot(value):
            return self._position_line(value)
        if value.producer is None:
            return SHIFTED if value.depends == Depends.MASK else None
        return self._computed_line(value.producer)

    def _is_by_slot(self, value: Value) -> bool:
        return value.tensor.shape[-1:] == (self.slots,)

    def _computed_line(self, node: Node) -> ShiftedRow | None:
        kind = node.kind
        if kind in LAYOUT:
            copied = kind == "BROADCAST_TO" and node.operand(0).tensor.shape[-1:] in ((), (1,))
            moved_lines = {self._line(v) for i, v in enumerate(node.inputs) if i in LAYOUT[kind] and v is not None}
            return moved_lines.pop() if (copied or self._keeps_slots(node)) and len(moved_lines) == 1 else None
        lines = [self._line(v) for v in node.inputs if v is not None]
        lines_known = [line for line in lines if line is not None]
        if kind not in ELEMENTWISE or len(lines_known) < len(lines) or node.op.activation:
            return None
        if all(line.shifts for line in lines_known):
            return SHIFTED if any(line != UNIFORM for line in lines_known) else UNIFORM
        if SHIFTED in lines_known:
            return None
        sign = 1 if kind == "ADD" else -1
        line = (
            lines_known[0]
            if kind == "CAST"
            else ShiftedRow(*(a + sign * b for a, b in zip(lines_known[0], lines_known[-1], strict=True)))
        )
        if kind in _COMPARISONS:
            return SHIFTED if line.shifts else None
        # Sums of floats are rounded; integers that wrap are refused.
        return line if kind in ("ADD", "SUB", "CAST") and node.outputs[0].tensor.type in _WHOLE else None

    def _constant_line(self, value: Value) -> ShiftedRow | None:
        """A constant that counts slots, or that has none."""
        tensor = value.tensor
        if self.slots not in tensor.shape:
            return UNIFORM
        if not self._is_by_slot(value) or (tensor.type in NUMBER_TYPES and tensor.type not in FLOAT_TYPES):
            return None
        is_float = tensor.type in FLOAT_TYPES
        numbers = self.graph.floats(value) if is_float else self.graph.integers(value).astype(np.int64)
        step = _step(np.diff(numbers.reshape(-1, self.slots), axis=1))
        return None if step is None else ShiftedRow(0, step)

    def _position_line(self, value: Value) -> ShiftedRow | None:
        """A few numbers that count positions."""
        if value.tensor.elements > _MOST_NUMBERS or value.depends & ~Depends.POSITION:
            return None
        step = _step(np.diff(self.positions.table(value), axis=0))
        return None if step is None else ShiftedRow(step, 0)


class ShiftedRow(NamedTuple):
    """``position · p + slot · s`` + a number that is the same at all positions and slots."""

    position: float
    slot: float

    @property
    def shifts(self) -> bool:
        """Whether it is a function of *slot less position*."""
        return self == SHIFTED or self.position + self.slot == 0


UNIFORM = ShiftedRow(0, 0)
"""A number that is the same at all positions and slots."""

SHIFTED = ShiftedRow(-math.inf, math.inf)
"""Any function of *slot less position* and of a mask input at the slot."""

_COMPARISONS = frozenset({"EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"})
_WHOLE = frozenset({TensorType.INT32, TensorType.INT64})
_KEEP_SLOTS = frozenset({"RESHAPE", "EXPAND_DIMS", "SQUEEZE", "BROADCAST_TO", "CONCATENATION"})


def _step(steps: npt.NDArray[np.generic]) -> int | None:
    """The one whole number that all ``steps`` are; 0 where there are none."""
    if not steps.size:
        return 0
    first = float(steps.flat[0])
    return int(first) if first.is_integer() and bool((steps == steps.flat[0]).all()) else None
