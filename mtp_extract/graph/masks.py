"""What mask inputs and positions make of the masks of an attention, case by case.

A mask acts slot by slot: no operator may bring two slots together, so what mask inputs hold at a slot are all the cases
that there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.call import NUMPY_TYPES, Array, refused
from mtp_extract.graph.evaluate import ELEMENTWISE, LAYOUT, evaluate, inputs_of
from mtp_extract.graph.expressions import Ids
from mtp_extract.graph.flat import MASK, MASK_LOCAL, Depends, FlatGraph, Node, Value, ancestors
from mtp_extract.graph.forms import Attention, OutputGuard
from mtp_extract.graph.mask_trees import Bools, Cases, SlotWindow
from mtp_extract.graph.positions import Positions, fill_input
from mtp_extract.litertlm.tflite import TensorType

HIDDEN_BY_FLOATS: dict[TensorType | None, float] = {
    TensorType.FLOAT32: -0.7 * float(np.finfo(np.float32).max),
    TensorType.FLOAT16: -45824.0,
}
"""What LiteRT's runtime writes where a mask of floats hides a slot; it writes 0 where the mask shows one."""
_KEEP_SLOTS = frozenset({"RESHAPE", "EXPAND_DIMS", "SQUEEZE", "BROADCAST_TO", "CONCATENATION"})


class Masks:
    """The masks of a graph."""

    def __init__(self, graph: FlatGraph, positions: Positions) -> None:
        self.graph = graph
        self.positions = positions
        self.slots = positions.slots

    def window(self, attention: Attention) -> int | None:
        """How many slots the last query sees where mask inputs hide none; None for all."""
        cases = self.cases(attention, np.array([self.slots - 1]), {})
        effect = attention.scores.tree.effect(cases)
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
        at = np.repeat(positions, len(contents))
        chosen = np.tile(contents, (len(positions), 1))
        step = max(1, numbers_at_once // self.slots)
        for first in range(0, at.size, step):
            columns = chosen[first : first + step].T[..., None]
            yield self.cases(attention, at[first : first + step], dict(zip(either, columns, strict=True)))

    def cases(self, attention: Attention, at: Ids, free: Mapping[str | SlotWindow, Bools]) -> Cases:
        """Positions ``at``, ``[samples]``, with what ``free`` says of mask inputs and windows there, ``[samples, 1]``;
        a mask input that it does not name shows all."""
        values = attention.mask_values
        contents = {name: free.get(name, np.ones((at.size, 1), bool)) for name in (MASK, MASK_LOCAL)}
        inputs = self._inputs(inputs_of(values), at, contents)
        for value in values:
            self._check_slot_by_slot(value)
        arrays = evaluate(self.graph, inputs, values) if values else []
        numbers = {id(value): array for value, array in zip(values, arrays, strict=True)}
        within = {window: self._within(window, at, free.get(window)) for window in attention.all_windows}
        return Cases(at, self.slots, contents, numbers, within)

    def _inputs(self, names: frozenset[str], at: Ids, contents: Mapping[str, Bools]) -> dict[str, Array]:
        """The inputs ``names`` at positions ``at``, as runtimes fill them where masks show what ``contents`` says."""
        inputs = self.positions.fed(names, at)
        for name in names & set(contents):
            value = self.graph.inputs[name]
            rows = np.broadcast_to(contents[name], (at.size, self.slots))
            hidden = HIDDEN_BY_FLOATS.get(value.tensor.type)
            inputs[name] = fill_input(value, rows if hidden is None else np.where(rows, 0, hidden))
        return inputs

    def _within(self, window: SlotWindow, at: Ids, free: Bools | None) -> Bools:
        """Whether slots are in ``window`` at positions ``at``, as the position or ``free`` says."""
        if free is None:
            slots = np.arange(self.slots)
            first = self.positions.first_slots[window.table][at][:, None]
            free = (slots >= first) & (slots < first + window.size)
        return np.broadcast_to(free, (at.size, self.slots))

    def guard_keeps(self, guard: OutputGuard, largest: float) -> Bools:
        """Whether ``guard`` keeps what heads mixed where the largest number of its mask is ``largest``, by element."""
        reduced = guard.reduced.tensor
        largest_shown = np.full((1, *reduced.shape), largest, NUMPY_TYPES[reduced.type])
        (condition,) = evaluate(self.graph, {}, [guard.condition], {id(guard.reduced): largest_shown})
        return np.asarray(condition == guard.keeps)

    def _check_slot_by_slot(self, start: Value) -> None:
        """Check that on the way to ``start`` no operator brings slots of a mask together, or moves them.

        Raises:
            UnsupportedError: one does.
        """
        for value in ancestors(start):
            node = value.producer
            if not value.depends & Depends.MASK:
                continue
            if not is_by_slot(value, self.slots):
                raise UnsupportedError(f"{value.label} is a mask whose last axis is not that of the slots.")
            if node is not None and not (node.kind in ELEMENTWISE or keeps_slots(node, self.slots)):
                raise refused(
                    node,
                    "brings slots of a mask together, or moves them; a drafter's masks act slot by slot. Nothing is "
                    "written.",
                )


def is_by_slot(value: Value, slots: int) -> bool:
    """Whether its last axis is that of the slots."""
    return value.tensor.shape[-1:] == (slots,)


def keeps_slots(node: Node, slots: int) -> bool:
    """Whether an operator that moves elements leaves every slot in its place."""
    if node.kind not in _KEEP_SLOTS:
        return False
    places = LAYOUT[node.kind]
    operands = [(value, place in places) for place, value in enumerate(node.inputs) if value is not None]
    return all(is_by_slot(value, slots) if is_moved else not value.depends for value, is_moved in operands)
