"""Rows of a mask that differ by a shift alone: what is shown of two of them, the first and the last, is shown of all.

With tens of thousands of slots a table of all rows and slots is too large to try. It need not be: masks compare
positions with numbers of slots. Where everything that leads to one depends on *slot less position* only, and on the
mask input at the slot, so does the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mtp_extract.graph.evaluate import evaluate, inputs_of
from mtp_extract.graph.flat import Depends, FlatGraph, Node, Value
from mtp_extract.graph.kernels import ELEMENTWISE
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES
from mtp_extract.proof.attentions import AttentionOps, Side
from mtp_extract.proof.tables import feed

Form = tuple[int, int]
"""``(p, s)``: p × position + s × slot + a number that is the same at all positions and slots."""

SHIFT: Form = (-1, 1)
"""Any function of slot less position, and of a mask input at the slot."""
_UNIFORM: Form = (0, 0)

_THIN = 64
_AT_ONCE = 1 << 12
_COMPARISONS = frozenset({"EQUAL", "NOT_EQUAL", "LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL"})
_KEEPS_SLOTS = frozenset({"RESHAPE", "EXPAND_DIMS", "SQUEEZE", "BROADCAST_TO", "CONCATENATION", "PACK"})
_EXACT = frozenset({"INT32", "INT64", "FLOAT32"})
"""Types that hold positions of caches exactly."""


def rows_are_alike(graph: FlatGraph, attentions: Sequence[AttentionOps], slots: int, last: int) -> bool:
    """Whether all rows of the masks of ``attentions`` are the same, up to a shift.

    Args:
        slots: of the caches.
        last: the last position.
    """
    forms = _Forms(graph, slots, last)
    for attention in attentions:
        for node in attention.nodes:
            if attention.sides[id(node.outputs[0])] == Side.QUERY:
                continue
            for position, value in enumerate(node.inputs):
                if value is None or not value.decided:
                    continue
                # Where a window of slots begins moves with the position, but for the ends of the caches.
                begins = node.kind in LAYOUT and position not in LAYOUT[node.kind]
                if not (forms.moves(value) if begins else forms.of(value) in (SHIFT, _UNIFORM)):
                    return False
    return True


class _Forms:
    def __init__(self, graph: FlatGraph, slots: int, last: int) -> None:
        self.graph, self.slots, self.last = graph, slots, last
        self.found: dict[int, Form | None] = {}

    def of(self, value: Value) -> Form | None:
        """The form of ``value``; None where it has none."""
        if id(value) not in self.found:
            self.found[id(value)] = self._form(value)
        return self.found[id(value)]

    def moves(self, value: Value) -> bool:
        """Whether every number of ``value`` stands still, moves on with the position, and stands still again."""
        table = self._table(value)
        if table is None:
            return False
        steps = np.diff(table, axis=0)
        turns = np.diff(np.concatenate([steps[:1] * 0, steps, steps[:1] * 0]), axis=0)
        return bool(np.isin(steps, (0, 1)).all() and (np.abs(turns).sum(0) <= 2).all())

    def _form(self, value: Value) -> Form | None:
        wide = bool(value.tensor.shape) and value.tensor.shape[-1] == self.slots
        if value.constant:
            return self._constant(value) if wide else _UNIFORM
        if value.producer is None:
            return SHIFT if value.depends == Depends.MASK and wide else self._thin(value)
        if not wide:
            return self._thin(value)
        return self._node(value.producer)

    def _node(self, node: Node) -> Form | None:
        kind = node.kind
        if kind in LAYOUT:
            moved = [self.of(v) for i, v in enumerate(node.inputs) if i in LAYOUT[kind] and v is not None]
            still = all(v.constant for i, v in enumerate(node.inputs) if i not in LAYOUT[kind] and v is not None)
            return moved[0] if kind in _KEEPS_SLOTS and still and len(set(moved)) == 1 else None
        forms = [self.of(v) for v in node.inputs if v is not None]
        if kind not in ELEMENTWISE or None in forms or node.op.activation:
            return None
        known = [form for form in forms if form is not None]
        exact = all(v.tensor.type_name in _EXACT for v in (*node.inputs, *node.outputs) if v is not None)
        if kind in ("ADD", "SUB") and exact and len(known) == 2:
            sign = 1 if kind == "ADD" else -1
            return known[0][0] + sign * known[1][0], known[0][1] + sign * known[1][1]
        if kind == "CAST" and exact:
            return known[0]
        if kind in _COMPARISONS and len(known) == 2:
            apart = known[0][0] - known[1][0], known[0][1] - known[1][1]
            return SHIFT if sum(apart) == 0 and apart != _UNIFORM else _UNIFORM if set(known) == {_UNIFORM} else None
        if all(form[0] + form[1] == 0 for form in known):
            return SHIFT if any(form != _UNIFORM for form in known) else _UNIFORM
        return None

    def _constant(self, value: Value) -> Form | None:
        tensor = value.tensor
        if tensor.type in FLOAT_TYPES or tensor.type not in NUMBER_TYPES:
            numbers = self.graph.floats(value) if tensor.type in FLOAT_TYPES else self.graph.integers(value)
            steps = np.diff(numbers.reshape(-1, self.slots), axis=1)
            if steps.size and (steps == steps.flat[0]).all() and float(steps.flat[0]).is_integer():
                return 0, int(steps.flat[0])
        return None

    def _thin(self, value: Value) -> Form | None:
        table = self._table(value)
        if table is None:
            return None
        steps = np.diff(table, axis=0)
        alike = not steps.size or ((steps == steps.flat[0]).all() and float(steps.flat[0]).is_integer())
        return (int(steps.flat[0]) if steps.size else 0, 0) if alike else None

    def _table(self, value: Value) -> npt.NDArray[np.float64] | None:
        """What the position makes of ``value``, ``[positions, numbers]``; None where that is not little."""
        if value.tensor.elements > _THIN or value.depends & ~Depends.POSITION:
            return None
        needed, pieces = inputs_of([value]), []
        for at in range(0, self.last + 1, _AT_ONCE):
            positions = np.arange(at, min(at + _AT_ONCE, self.last + 1))
            found = evaluate(self.graph, feed(self.graph, needed, positions, 1), [value])[0]
            pieces.append(np.asarray(found, np.float64).reshape(len(positions), -1))
        return np.concatenate(pieces)
