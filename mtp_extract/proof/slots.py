"""Which slots a layer sees, and that it scores them by q · K: at every position, with every content of the masks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.errors import ProofError, UnsupportedError
from mtp_extract.graph.drafter import Layer
from mtp_extract.graph.flat import MASK, MASK_LOCAL, PARAM_TENSOR
from mtp_extract.graph.forms import OutputGuard
from mtp_extract.graph.mask_trees import Bools, Cases, Effect, SlotWindow
from mtp_extract.graph.masks import Masks

_SAME_OFFSET = 1e-6
_WEIGHS_NOTHING = 104.0
"""How far below another a score is nothing beside it in float32."""
_MOST_ROWS = 1 << 11
_MOST_MASK_NUMBERS = 16
_NUMBERS_AT_ONCE = 1 << 19


class SlotsOfLayer:
    """What the masks of one layer do, to be compared with the config."""

    def __init__(
        self, index: int, layer: Layer, config: DrafterConfig, masks: Masks, inputs: frozenset[str], largest: float
    ) -> None:
        """``inputs`` are the signature's inputs that the graph reads; no score is larger than ``largest``."""
        self.index = index
        self.layer = layer
        self.masks = masks
        self.inputs = inputs
        self.largest = largest
        self.window = config.layers[index].sliding_window
        self.local_window = config.sliding_window or masks.slots

    def check(self) -> tuple[int, bool]:
        """Check every row.

        Returns:
            how many were computed, and whether all others are the same as these up to a shift.

        Raises:
            ProofError: a slot is seen that should not be, or the other way round, or is scored otherwise.
            UnsupportedError: rows are neither alike nor few.
        """
        slots = self.masks.slots
        attention = self.layer.attention
        alike = self.masks.rows_are_alike(attention.mask_values)
        if not alike and slots > _MOST_ROWS:
            raise UnsupportedError(
                f"layers.{self.index}: its {slots} rows of masks are neither alike up to a shift nor few. Nothing is "
                "written."
            )
        for window in attention.all_windows:
            self._check_window(window)
        rows = np.array([0, slots - 1]) if alike else np.arange(slots)
        either: list[str | SlotWindow] = [name for name in (MASK, MASK_LOCAL) if name in self.inputs]
        # Where a window lies is no function of slot less position: of rows that stand for others, a slot is in or not.
        either += attention.all_windows if alike else ()
        self._check_cases(self.masks.each_case(attention, rows, either, _NUMBERS_AT_ONCE))
        return len(rows), alike

    def _check_cases(self, each_case: Iterable[Cases]) -> None:
        attention = self.layer.attention
        of_visible, of_hidden = set[float](), set[float]()
        for cases in each_case:
            visible, possible = self._visible(cases), self._possible(cases)
            # That a window covers what is seen is checked by itself.
            for inside in cases.within.values():
                possible &= inside | ~visible
            self._check_scores(cases, attention.scores.tree.effect(cases), visible & possible, ~visible & possible)
            if attention.guard is not None:
                numbers = attention.guard.mask.numbers(cases)
                of_visible.update(np.unique(numbers[visible & possible]).tolist())
                of_hidden.update(np.unique(numbers[~visible & possible]).tolist())
        if attention.guard is not None:
            self._check_guard(attention.guard, of_visible, of_hidden)

    def _check_window(self, window: SlotWindow) -> None:
        """Check that a window of slots holds all that the config sees, at every position."""
        at = np.arange(self.masks.slots)
        first = self.masks.positions.first_slots[window.table]
        size = window.size
        needed = np.zeros(at.size, np.int64) if self.window is None else np.maximum(at - self.window + 1, 0)
        bad = ~((first >= 0) & (first <= needed) & (first + size > at) & (first + size <= at.size))
        if bad.any():
            row = int(np.argmax(bad))
            self._refuse(row, f"it reads slots {first[row]} to {first[row] + size - 1}, and the config sees others")

    def _possible(self, cases: Cases) -> Bools:
        """Which cases there are, ``[samples, slots]``: runtimes show nothing that is to come, and by a local mask
        nothing beyond its window. A mask that no input holds shows all.
        """
        slots = np.arange(self.masks.slots)
        position = cases.positions[:, None]
        past = slots <= position
        possible = np.full(cases.shape, True)
        if MASK in self.inputs:
            possible &= past | ~cases.shown[MASK]
        if MASK_LOCAL in self.inputs:
            possible &= past & (slots > position - self.local_window) | ~cases.shown[MASK_LOCAL]
        return possible

    def _visible(self, cases: Cases) -> Bools:
        """Which slots the config sees, ``[samples, slots]``."""
        slots = np.arange(self.masks.slots)
        position = cases.positions[:, None]
        past = slots <= position
        if self.window is None:
            return np.broadcast_to(cases.shown[MASK], cases.shape) if MASK in self.inputs else past
        visible = past & (slots > position - self.window) & cases.shown[MASK_LOCAL]
        # Where the runtime tells the range of slots, or hands a local mask in, a sliding layer need not read the mask.
        range_is_given = PARAM_TENSOR in self.inputs or MASK_LOCAL in self.inputs
        return visible if range_is_given and MASK not in self.layer.masks else visible & cases.shown[MASK]

    def _check_scores(self, cases: Cases, effect: Effect, visible: Bools, hidden: Bools) -> None:
        if not visible.any():
            return
        # Softmax ignores a constant that is added to a row.
        base = float(effect.offset.flat[np.argmax(visible)])
        with np.errstate(invalid="ignore"):
            sound = effect.scored & ~effect.lost & (np.abs(effect.offset - base) <= _SAME_OFFSET * max(1, abs(base)))
            lowered = base - self.largest - (effect.offset + effect.scored * self.largest)
        for wrong, what in (
            (visible & ~(sound & math.isfinite(base)), "is hidden, or scored otherwise than by q · K"),
            (hidden & ~(lowered >= _WEIGHS_NOTHING), "should be hidden, and is not lowered below every score"),
        ):
            if wrong.any():
                row, slot = (int(i) for i in np.argwhere(wrong)[0])
                reckoned = f"|q · K| may be {self.largest:.4g}"
                self._refuse(int(cases.positions[row]), f"slot {slot} {what} ({reckoned})")

    def _check_guard(self, guard: OutputGuard, shown_offsets: Collection[float], hidden: Collection[float]) -> None:
        """The output guard keeps what heads mixed exactly where the layer sees a slot; runtimes show the query's own.

        Args:
            shown, hidden: all numbers that the guard's mask has at slots that the layer sees, and at others.
        """
        lowest, highest = min(shown_offsets, default=math.nan), max(hidden, default=-math.inf)
        if len(shown_offsets) + len(hidden) > _MOST_MASK_NUMBERS or not lowest > highest:
            wrong = "looks at other slots than the layer sees"
        elif not all(self.masks.guard_keeps(guard, number).all() for number in shown_offsets):
            wrong = "replaces what heads mixed by 0 where a slot is seen"
        elif any(self.masks.guard_keeps(guard, number).any() for number in hidden):
            wrong = "keeps what heads mixed where the layer sees no slot"
        else:
            return
        raise ProofError(
            f"layers.{self.index}.attention: its output guard, by {guard.condition.label}, {wrong}; a checkpoint's "
            "attention has no such guard. Nothing is written."
        )

    def _refuse(self, position: int, what: str) -> None:
        raise ProofError(
            f"layers.{self.index}.attention: the graph and the checkpoint differ at position {position}: {what}. "
            "Nothing is written."
        )
