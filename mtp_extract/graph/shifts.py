"""Which rows of masks are the same up to a shift, so that the first and the last show all.

A row is what a mask is at one position. Where everything that leads to a mask is a function of *slot less position*, of
a mask input at the slot, or of neither, the row of the next position is the same, one slot further on. Followed are
lines, ``position · p + slot · s`` + a number: comparing two of them gives a function of *slot less position* where the
slopes of their difference cancel out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtp_extract.graph.evaluate import ELEMENTWISE, LAYOUT
from mtp_extract.graph.flat import Depends, FlatGraph, Node, Value
from mtp_extract.graph.masks import is_by_slot, keeps_slots
from mtp_extract.graph.positions import Positions
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES
from mtp_extract.litertlm.tflite import TensorType

_COMPARISONS = frozenset({"EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"})
_INTEGERS = frozenset({TensorType.INT32, TensorType.INT64})
_MOST_NUMBERS = 64


class Line(NamedTuple):
    """``position · p + slot · s`` + a number that is the same at all positions and slots."""

    position: float
    slot: float

    @property
    def shifts(self) -> bool:
        """Whether it is a function of *slot less position*."""
        return self == SHIFTED or self.position + self.slot == 0

    def plus(self, other: Line, sign: int) -> Line:
        return Line(self.position + sign * other.position, self.slot + sign * other.slot)


UNIFORM = Line(0, 0)
"""A number that is the same at all positions and slots."""

SHIFTED = Line(-math.inf, math.inf)
"""Any function of *slot less position* and of a mask input at the slot."""


class Shifts:
    """How the masks of a graph depend on position and slot."""

    def __init__(self, graph: FlatGraph, positions: Positions) -> None:
        self.graph = graph
        self.positions = positions
        self.slots = positions.slots
        self._lines: dict[int, Line | None] = {}

    def rows_are_alike(self, values: Iterable[Value]) -> bool:
        """Whether all rows of the masks ``values`` are the same, up to a shift."""
        return all(self._line(value) in (SHIFTED, UNIFORM) for value in values)

    def _line(self, value: Value) -> Line | None:
        """How ``value`` depends on position and slot; None where neither a line nor a shift says it."""
        if id(value) not in self._lines:
            self._lines[id(value)] = self._line_of(value)
        return self._lines[id(value)]

    def _line_of(self, value: Value) -> Line | None:
        if value.constant:
            return self._constant_line(value)
        if not is_by_slot(value, self.slots):
            return self._position_line(value)
        if value.producer is None:
            return SHIFTED if value.depends == Depends.MASK else None
        if value.producer.kind in LAYOUT:
            return self._moved_line(value.producer)
        return self._computed_line(value.producer)

    def _constant_line(self, value: Value) -> Line | None:
        """A constant that counts slots, or that has none."""
        tensor = value.tensor
        if self.slots not in tensor.shape:
            return UNIFORM
        if not is_by_slot(value, self.slots) or (tensor.type in NUMBER_TYPES and tensor.type not in FLOAT_TYPES):
            return None
        is_float = tensor.type in FLOAT_TYPES
        numbers = self.graph.floats(value) if is_float else self.graph.integers(value).astype(np.int64)
        slope = _slope(np.diff(numbers.reshape(-1, self.slots), axis=1))
        return None if slope is None else Line(0, slope)

    def _position_line(self, value: Value) -> Line | None:
        """A few numbers that count positions."""
        if value.tensor.elements > _MOST_NUMBERS or value.depends & ~Depends.POSITION:
            return None
        slope = _slope(np.diff(self.positions.table(value), axis=0))
        return None if slope is None else Line(slope, 0)

    def _moved_line(self, node: Node) -> Line | None:
        """What an operator that moves elements hands on: slots stay, or one number is repeated for each."""
        repeats = node.kind == "BROADCAST_TO" and node.operand(0).tensor.shape[-1:] in ((), (1,))
        if not (repeats or keeps_slots(node, self.slots)):
            return None
        places = LAYOUT[node.kind]
        lines = {self._line(value) for i, value in enumerate(node.inputs) if i in places and value is not None}
        return lines.pop() if len(lines) == 1 else None

    def _computed_line(self, node: Node) -> Line | None:
        """What an operator computes slot by slot of lines and shifts."""
        if node.kind not in ELEMENTWISE or node.op.activation:
            return None
        lines = list[Line]()
        for value in filter(None, node.inputs):
            line = self._line(value)
            if line is None:
                return None
            lines.append(line)
        if all(line.shifts for line in lines):
            return UNIFORM if all(line == UNIFORM for line in lines) else SHIFTED
        return None if SHIFTED in lines else _line_of_lines(node, lines[0], lines[-1])


def _line_of_lines(node: Node, first: Line, other: Line) -> Line | None:
    """What ``node`` makes of two lines, or of one, which is both; of some that are no shift."""
    if node.kind in _COMPARISONS:
        return SHIFTED if first.plus(other, -1).shifts else None
    # Sums of floats are rounded; integers that wrap are refused.
    if node.outputs[0].tensor.type not in _INTEGERS:
        return None
    if node.kind in ("ADD", "SUB"):
        return first.plus(other, 1 if node.kind == "ADD" else -1)
    return first if node.kind == "CAST" else None


def _slope(steps: npt.NDArray[np.generic]) -> int | None:
    """The one integer that all ``steps`` are; 0 where there are none."""
    if not steps.size:
        return 0
    first = float(steps.flat[0])
    return int(first) if first.is_integer() and bool((steps == steps.flat[0]).all()) else None
