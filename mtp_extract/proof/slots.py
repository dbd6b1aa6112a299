"""Which slots a layer sees, and that it scores them by q · K: at every position, with every content of the masks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.errors import ProofError, UnsupportedError
from mtp_extract.graph.drafter import Layer
from mtp_extract.graph.flat import MASK, MASK_LOCAL, PARAM_TENSOR
from mtp_extract.graph.forms import windows_of
from mtp_extract.graph.masks import Cases, Effect, Masks

Bools = npt.NDArray[np.bool_]

_SAME = 1e-5
_SAME_OFFSET = 1e-6
_WEIGHS_NOTHING = 104.0
"""How far below another a score is nothing beside it in float32."""
_MOST_ROWS = 1 << 11
_NUMBERS_AT_ONCE = 1 << 19


@dataclass
class SlotsOfLayer:
    """Holds what the masks of one layer do against the config.

    Attributes:
        inputs: names of the signature's inputs that the graph reads.
        largest: no score is larger.
        slope: what scores are multiplied by on their way through the masks; known once they are held.
    """

    index: int
    layer: Layer
    config: DrafterConfig
    masks: Masks
    inputs: frozenset[str]
    largest: float
    slope: float | None = field(default=None, init=False)

    def hold(self) -> tuple[int, bool]:
        """Hold every row.

        Returns:
            how many were computed, and whether all others are the same as these up to a shift.

        Raises:
            ProofError: a slot is seen that should not be, or the other way round, or is scored otherwise.
            UnsupportedError: rows are neither alike nor few.
        """
        slots, scores = self.masks.slots, self.layer.attention.scores
        alike = self.masks.rows_are_alike(scores.tree)
        if not alike and slots > _MOST_ROWS:
            raise UnsupportedError(
                f"layers.{self.index}: its {slots} rows of masks are neither alike up to a shift nor few. Nothing is "
                "written."
            )
        windows = dict([*windows_of(scores.tree), *self.layer.attention.windows])
        for table, size in windows.items():
            self._hold_window(table, size)
        rows = np.array([0, slots - 1]) if alike else np.arange(slots)
        names = [name for name in (MASK, MASK_LOCAL) if name in self.inputs]
        contents = [dict(zip(names, bits, strict=True)) for bits in itertools.product((True, False), repeat=len(names))]
        # Where a window lies is no function of slot less position: of rows that stand for others, a slot is in or not.
        within: list[Mapping[int, bool] | None] = [None]
        if alike and windows:
            either = itertools.product((True, False), repeat=len(windows))
            within = [dict(zip(windows, bits, strict=True)) for bits in either]
        for some in np.array_split(rows, max(1, rows.size * slots * len(contents) // _NUMBERS_AT_ONCE)):
            for state in within:
                self._hold_rows(some, contents, state)
        return len(rows), alike

    def _hold_window(self, table: int, size: int) -> None:
        """A window of slots holds all that the config sees, at every position."""
        at, first = np.arange(self.masks.slots), self.masks.positions.first_slots[table]
        window = self.config.layers[self.index].sliding_window
        needed = np.zeros(at.size, np.int64) if window is None else np.maximum(at - window + 1, 0)
        bad = ~((first >= 0) & (first <= needed) & (first + size > at) & (first + size <= at.size))
        if bad.any():
            row = int(np.argmax(bad))
            self._refuse(row, f"it reads slots {first[row]} to {first[row] + size - 1}, and the config sees others")

    def _hold_rows(
        self,
        positions: npt.NDArray[Any],
        contents: Sequence[Mapping[str, bool]],
        within: Mapping[int, bool] | None,
    ) -> None:
        attention = self.layer.attention
        cases = self.masks.cases(attention, positions, contents, within)
        seen, possible = self._by_config(cases)
        inside = np.ones(seen.shape, bool)
        for own in cases.within.values():
            inside &= own
        # That a window covers what is seen is held by itself.
        possible &= inside | ~seen
        effect = self.masks.effect(attention.scores.tree, cases)
        self._hold_scores(cases.positions, effect, seen & possible, ~seen & possible)

    def _by_config(self, cases: Cases) -> tuple[Bools, Bools]:
        """Which slots the config sees, and which cases there are: runtimes show nothing that is to come, and by a local
        mask nothing beyond its window. ``[samples, slots]``.
        """
        slots, position = np.arange(self.masks.slots), cases.positions[:, None]
        window = self.config.layers[self.index].sliding_window
        local_window = self.config.sliding_window or self.masks.slots
        mask, mask_local = (cases.shown[name][:, None] for name in (MASK, MASK_LOCAL))
        past = slots <= position
        possible = np.ones(past.shape, bool)
        if MASK in self.inputs:
            possible &= past | ~mask
        if MASK_LOCAL in self.inputs:
            possible &= past & (slots > position - local_window) | ~mask_local
        if window is None:
            seen = np.broadcast_to(mask, past.shape) if MASK in self.inputs else past
            return seen, possible
        seen = past & (slots > position - window)
        # Where the runtime tells the range of slots, or hands a local mask in, a sliding layer need not read the mask.
        told = PARAM_TENSOR in self.inputs or MASK_LOCAL in self.inputs
        if MASK in self.inputs and (not told or MASK in self.layer.masks):
            seen = seen & mask
        return seen & mask_local if MASK_LOCAL in self.inputs else seen, possible

    def _hold_scores(self, positions: npt.NDArray[Any], effect: Effect, seen: Bools, hidden: Bools) -> None:
        slope, offset = effect.slope, effect.offset
        some = np.argwhere(seen)
        if not len(some):
            return
        # A softmax does not hear what is added to a whole row.
        factor, base = float(slope[tuple(some[0])]), float(offset[tuple(some[0])])
        self.slope = factor = factor if self.slope is None else self.slope
        with np.errstate(all="ignore"):
            scored = (np.abs(slope - factor) <= _SAME * abs(factor)) & ~effect.lost
            scored &= np.abs(offset - base) <= _SAME_OFFSET * max(1, abs(base))
            lowered = base - abs(factor) * self.largest - (offset + np.abs(slope) * self.largest)
        sound = factor > 0 and math.isfinite(base)
        for wrong, what in (
            (seen & ~(scored & sound), "is hidden, or scored otherwise than by q · K"),
            (hidden & ~(lowered >= _WEIGHS_NOTHING), "is seen, or not lowered below what K can be"),
        ):
            if wrong.any():
                row, slot = (int(i) for i in np.argwhere(wrong)[0])
                self._refuse(int(positions[row]), f"slot {slot} {what} (|q · K| may be {self.largest:.4g})")

    def _refuse(self, position: int, what: str) -> None:
        raise ProofError(
            f"layers.{self.index}.attention: the graph and the checkpoint part here (the mask at position {position}): "
            f"{what}. No checkpoint of this kind computes that; nothing is written. Please report the file."
        )
