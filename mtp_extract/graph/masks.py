"""Compute the masks of an attention for every position and content of the mask inputs.

No operator may combine two slots of a mask. So every slot has only the cases that its mask input shows or hides it. A
row is the mask at one position. If a mask depends on nothing but *slot − position* and a mask input at the slot,
the row of the next position is the same row, shifted by one slot: then the first and the last row stand for all rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.call import NUMPY_TYPES, Array, build_refusal
from mtp_extract.graph.evaluate import evaluate, find_input_names, is_rounded
from mtp_extract.graph.expressions import Ids
from mtp_extract.graph.flat import MASK, MASK_LOCAL, Depends, FlatGraph, Node, Value, walk_ancestors
from mtp_extract.graph.forms import Attention, OutputGuard
from mtp_extract.graph.kernels import ELEMENTWISE, LAYOUT
from mtp_extract.graph.mask_trees import Bools, Cases, SlotWindow
from mtp_extract.graph.positions import Positions, fill_input
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES
from mtp_extract.litertlm.tflite import TensorType

HIDDEN_BY_FLOATS: dict[TensorType | None, float] = {
    TensorType.FLOAT32: -0.7 * float(np.finfo(np.float32).max),
    TensorType.FLOAT16: -45824.0,
}
"""The number by which LiteRT's runtime hides a slot in a mask input of floats; it writes 0 for visible slots."""
_KEEP_SLOTS = frozenset({"RESHAPE", "EXPAND_DIMS", "SQUEEZE", "BROADCAST_TO", "CONCATENATION"})
_COMPARISONS = frozenset({"EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"})
_INTEGERS = frozenset({TensorType.INT32, TensorType.INT64})
_MOST_NUMBERS = 64
_NUMBERS_AT_ONCE = 1 << 19
_LARGEST_EXACT = 2.0**52
"""Integers up to here, and their differences, are exact in float64."""


class Line(NamedTuple):
    """A number ``position · p + slot · s + constant``.

    A comparison of two lines is a function of *slot − position* if the two slopes of their difference cancel out.
    """

    position: float
    slot: float

    @property
    def shifts(self) -> bool:
        """Whether it is a function of *slot − position*."""
        return self == SHIFTED or self.position + self.slot == 0

    def add(self, other: Line, sign: int) -> Line:
        return Line(self.position + sign * other.position, self.slot + sign * other.slot)


UNIFORM = Line(0, 0)
"""A number that is the same at all positions and slots."""

SHIFTED = Line(-math.inf, math.inf)
"""Any function of *slot − position* and of a mask input at the slot."""


class Masks:
    """The masks of a graph."""

    def __init__(self, graph: FlatGraph, positions: Positions) -> None:
        self.graph = graph
        self.positions = positions
        self.slots = positions.slots
        self._lines: dict[int, Line | None] = {}

    def count_visible_slots(self, attention: Attention) -> int | None:
        """Return how many slots the query at the last position sees if mask inputs show all.

        None if it sees all slots, or others than those of a window that ends at its own.
        """
        cases = self.build_cases(attention, np.array([self.slots - 1]), {})
        effect = attention.scores.tree.compute_effect(cases)
        finite = effect.offset[np.isfinite(effect.offset)]
        visible = effect.scored & (effect.offset >= finite.max(initial=-np.inf) - 1)
        if attention.window is not None:
            visible &= cases.within[attention.window]
        count = int(visible.sum())
        return count if 0 < count < self.slots and visible[0, -count:].all() else None

    def enumerate_cases(
        self, attention: Attention, positions: Ids, either: Sequence[str | SlotWindow]
    ) -> Iterator[Cases]:
        """Yield cases of every position, combined with both contents of everything in ``either``.

        A mask input in ``either`` shows all slots or hides all; a window contains all slots or none, whatever the
        position says. Other mask inputs show all slots. Samples come in batches of limited size.
        """
        contents = np.array(list(itertools.product((True, False), repeat=len(either))))
        sample_positions = np.repeat(positions, len(contents))
        sample_contents = np.tile(contents, (len(positions), 1))
        step = max(1, _NUMBERS_AT_ONCE // self.slots)
        for first in range(0, sample_positions.size, step):
            columns = sample_contents[first : first + step].T[..., None]
            free = dict(zip(either, columns, strict=True))
            yield self.build_cases(attention, sample_positions[first : first + step], free)

    def build_cases(self, attention: Attention, at: Ids, free: Mapping[str | SlotWindow, Bools]) -> Cases:
        """Return the cases of positions ``at``, ``[samples]``.

        ``free`` says, ``[samples, 1]``, whether a mask input shows all slots and whether a window contains all; by
        default a mask input shows all, and the position decides what a window contains.
        """
        values = attention.mask_values
        contents = {name: free.get(name, np.ones((at.size, 1), bool)) for name in (MASK, MASK_LOCAL)}
        needed = find_input_names(values)
        inputs = self.positions.fill_inputs(needed, at)
        inputs |= {name: self._fill_mask(name, contents[name], at.size) for name in needed & set(contents)}
        self._check_slot_by_slot(values)
        _check_exact(values)
        arrays = evaluate(self.graph, inputs, values) if values else []
        numbers = {id(value): array for value, array in zip(values, arrays, strict=True)}
        within = {window: self._find_slots_in_window(window, at, free.get(window)) for window in attention.all_windows}
        return Cases(at, self.slots, contents, numbers, within)

    def _fill_mask(self, name: str, content: Bools, samples: int) -> Array:
        """Return the mask input ``name`` as runtimes fill it; ``content`` says whether it shows the slots."""
        value = self.graph.inputs[name]
        rows = np.broadcast_to(content, (samples, self.slots))
        hidden = HIDDEN_BY_FLOATS.get(value.tensor.type)
        return fill_input(value, rows if hidden is None else np.where(rows, 0, hidden))

    def _find_slots_in_window(self, window: SlotWindow, at: Ids, free: Bools | None) -> Bools:
        """Return which slots are in ``window``, ``[samples, slots]``: by position if ``free`` is None."""
        if free is None:
            slots = np.arange(self.slots)
            first = self.positions.first_slots[window.table][at][:, None]
            free = (slots >= first) & (slots < first + window.size)
        return np.broadcast_to(free, (at.size, self.slots))

    def guard_keeps(self, guard: OutputGuard, largest: float) -> Bools:
        """Return, by element, whether ``guard`` keeps the attention's output if its mask reduces to ``largest``."""
        _check_exact([guard.condition])
        reduced = guard.reduced.tensor
        largest_shown = np.full((1, *reduced.shape), largest, NUMPY_TYPES[reduced.type])
        (condition,) = evaluate(self.graph, {}, [guard.condition], {id(guard.reduced): largest_shown})
        return np.asarray(condition == guard.keeps)

    def _check_slot_by_slot(self, masks: Sequence[Value]) -> None:
        """Raise UnsupportedError if an operator on the way to ``masks`` combines slots of a mask, or moves them."""
        for value in itertools.chain.from_iterable(map(walk_ancestors, masks)):
            node = value.producer
            if not value.depends & Depends.MASK:
                continue
            if not self._is_by_slot(value):
                raise UnsupportedError(f"{value.label} is a mask whose last axis is not that of the slots.")
            if node is not None and not (node.kind in ELEMENTWISE or self._keeps_slots(node)):
                raise build_refusal(
                    node,
                    "combines slots of a mask, or moves them; a drafter's masks act slot by slot.",
                )

    def _is_by_slot(self, value: Value) -> bool:
        return value.tensor.shape[-1:] == (self.slots,)

    def _keeps_slots(self, node: Node) -> bool:
        """Return whether an operator that moves elements leaves every slot in its place."""
        if node.kind not in _KEEP_SLOTS:
            return False
        places = LAYOUT[node.kind]
        operands = [(value, place in places) for place, value in enumerate(node.inputs) if value is not None]
        return all(self._is_by_slot(value) if is_moved else not value.depends for value, is_moved in operands)

    # Rows that are equal up to a shift.

    def are_rows_alike(self, values: Iterable[Value]) -> bool:
        """Return whether every row of the masks ``values`` equals the first, shifted."""
        return all(self._find_line(value) in (SHIFTED, UNIFORM) for value in values)

    def _find_line(self, value: Value) -> Line | None:
        """Return how ``value`` depends on position and slot; None if it is neither a line nor a shift."""
        if id(value) not in self._lines:
            self._lines[id(value)] = self._read_line(value)
        return self._lines[id(value)]

    def _read_line(self, value: Value) -> Line | None:
        if value.constant:
            return self._read_constant_line(value)
        if not self._is_by_slot(value):
            # A few numbers that have no axis of slots, such as the position itself.
            if value.tensor.elements > _MOST_NUMBERS or value.depends & ~Depends.POSITION:
                return None
            slope = _find_slope(self.positions.compute_table(value).T)
            return None if slope is None else Line(slope, 0)
        if value.producer is None:
            return SHIFTED if value.depends == Depends.MASK else None
        if value.producer.kind in LAYOUT:
            return self._move_line(value.producer)
        return self._compute_line(value.producer)

    def _read_constant_line(self, value: Value) -> Line | None:
        """Return the line of a constant that counts slots, or has no axis of slots."""
        tensor = value.tensor
        if self.slots not in tensor.shape:
            return UNIFORM
        is_float = tensor.type in FLOAT_TYPES
        if not self._is_by_slot(value) or (tensor.type in NUMBER_TYPES and not is_float):
            return None
        numbers = (
            self.graph.read_small_floats(value) if is_float else self.graph.read_small_integers(value).astype(np.int64)
        )
        slope = _find_slope(numbers.reshape(-1, self.slots))
        return None if slope is None else Line(0, slope)

    def _move_line(self, node: Node) -> Line | None:
        """Return the line after an operator that moves elements, if slots stay or one number is repeated for each."""
        repeats = node.kind == "BROADCAST_TO" and node.get_operand(0).tensor.shape[-1:] in ((), (1,))
        if not (repeats or self._keeps_slots(node)):
            return None
        places = LAYOUT[node.kind]
        lines = {self._find_line(value) for i, value in enumerate(node.inputs) if i in places and value is not None}
        return lines.pop() if len(lines) == 1 else None

    def _compute_line(self, node: Node) -> Line | None:
        """Return the line or shift that an elementwise operator computes of others."""
        if node.kind not in ELEMENTWISE or node.op.activation:
            return None
        lines = list[Line]()
        for value in filter(None, node.inputs):
            line = self._find_line(value)
            if line is None:
                return None
            lines.append(line)
        if all(line.shifts for line in lines):
            return UNIFORM if all(line == UNIFORM for line in lines) else SHIFTED
        return None if SHIFTED in lines else _combine_lines(node, lines[0], lines[-1])


def _check_exact(values: Sequence[Value]) -> None:
    """Raise UnsupportedError if ``values`` depend on a result that hardware rounds in different ways."""
    for value in itertools.chain.from_iterable(map(walk_ancestors, values)):
        if value.producer is not None and is_rounded(value.producer):
            raise build_refusal(value.producer, "decides a mask by a number that hardware rounds in ways of its own.")


def _combine_lines(node: Node, first: Line, last: Line) -> Line | None:
    """Return the line or shift that ``node`` computes of its first and its last operand; one of them is no shift."""
    if node.kind in _COMPARISONS:
        return SHIFTED if first.add(last, -1).shifts else None
    # Sums of floats are rounded, so they are no lines; of integers those that overflow are refused elsewhere.
    if node.outputs[0].tensor.type not in _INTEGERS:
        return None
    if node.kind in ("ADD", "SUB"):
        return first.add(last, 1 if node.kind == "ADD" else -1)
    return first if node.kind == "CAST" else None


def _find_slope(numbers: npt.NDArray[np.generic]) -> int | None:
    """Return the integer step of ``numbers`` along their last axis, 0 if they are equal.

    None if there is no one step, or if float64 would round the numbers.
    """
    if bool((numbers == numbers[:, :1]).all()):
        return 0
    exact = numbers.astype(np.float64)
    step = float(exact[0, 1] - exact[0, 0])
    is_exact = bool((np.abs(exact) <= _LARGEST_EXACT).all()) and bool((exact == np.rint(exact)).all())
    if not is_exact or (np.diff(exact) != step).any():
        return None
    return int(step)
