"""Compare attentions with the config: rotation of queries, visible slots, and that scores are q · K.

Rotations are compared with the config's RoPE at every position, masks with every content of the mask inputs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.errors import ProofError, UnsupportedError
from mtp_extract.graph.call import CONVERSIONS
from mtp_extract.graph.drafter import DrafterStructure, Layer
from mtp_extract.graph.evaluate import uses_rounded_results
from mtp_extract.graph.expressions import Doubles
from mtp_extract.graph.flat import MASK, MASK_LOCAL, PARAM_TENSOR, FlatGraph, Value, walk_ancestors
from mtp_extract.graph.forms import OutputGuard
from mtp_extract.graph.kernels import LAYOUT
from mtp_extract.graph.mask_trees import Bools, Cases, Effect, SlotWindow
from mtp_extract.graph.masks import Masks
from mtp_extract.graph.rotation import compute_frequencies
from mtp_extract.litertlm.tflite import TensorType

_COSINE_TOLERANCE, _ANGLE_TOLERANCE = 2e-6, 3.5e-8
"""Absolute error of a cosine, and relative error of an angle, computed in float32."""
_LAST_BIT_FACTOR = 16
"""How many times larger these errors may be if last bits of powers, sines and exponentials are moved."""
_FREQUENCY_TOLERANCE = 2e-7
"""Relative error of a frequency computed in float32; the largest one in exporters' files is 8.2e-8."""
_LAST_ANGLE_TOLERANCE = 0.02
"""Error of the angle at the last position, in radians."""
_ROUNDING_OF_TYPE: dict[TensorType | None, float] = {
    TensorType.FLOAT16: 2.0**-12 * 1.001,
    TensorType.BFLOAT16: 2.0**-9 * 1.001,
}
"""Largest rounding error of a number below 1, by type."""
_LARGEST_TABLE = 1 << 20
_OFFSET_TOLERANCE = 1e-6
_WEIGHTLESS_BELOW = 104.0
"""Scores that are lower by this much have a weight of 0 in a float32 softmax."""
_MOST_ROWS = 1 << 11
_MOST_MASK_NUMBERS = 16


# Rotations.


def check_rotations(graph: FlatGraph, structure: DrafterStructure, config: DrafterConfig) -> list[dict[str, Any]]:
    """Check that every layer rotates its queries by the config's RoPE; raise ProofError if one does not.

    Returns:
        an entry ``{"layer", "held_in"}`` for each layer whose cosines and sines the file stores in half precision, with
        the names of these types. The checkpoint has the exact theta instead.
    """
    types_by_rotation: dict[tuple[object, ...], str] = {}
    coarse_tables = []
    for index, layer in enumerate(structure.layers):
        rope = config.layers[index].rope
        key = *layer.rotation.key, rope
        if key not in types_by_rotation:
            types_by_rotation[key] = _check_rotation(graph, index, layer, compute_frequencies(rope, layer.head_dim))
        if types_by_rotation[key]:
            coarse_tables.append({"layer": index, "held_in": types_by_rotation[key]})
    return coarse_tables


def _check_rotation(graph: FlatGraph, index: int, layer: Layer, exact: Doubles) -> str:
    """Check the rotation of a layer; return the half-precision types that it is stored in, "" for none."""
    slots = layer.rotation.positions.slots
    coefficient_rounding, held_in = _find_rounding(graph, layer.rotation.values)
    rounding = layer.frequency_rounding if held_in else 0.0
    error = np.abs(layer.inverse_frequencies - exact)
    allowed = exact * _FREQUENCY_TOLERANCE + rounding + _COSINE_TOLERANCE / slots
    wrong = (error > allowed) | (error * slots > _LAST_ANGLE_TOLERANCE)
    if wrong.any():
        worst = int(wrong.argmax())
        raise ProofError(
            f"layers.{index}.attention: a query is turned by {layer.inverse_frequencies[worst]:.8g} from position to "
            f"position; the config's RoPE has {exact[worst]:.8g}."
        )

    frequencies_in_use = (exact if coefficient_rounding else layer.inverse_frequencies).astype(np.float32)
    # Hardware rounds the last bit of powers and exponentials differently; the result must not depend on it.
    for last_bits in (0, 1, -1) if uses_rounded_results(graph, layer.rotation.values) else (0,):
        difference = _find_difference(layer, frequencies_in_use, coefficient_rounding, last_bits)
        # Exporters that store a table compute it in float64.
        if difference and _find_difference(layer, exact, coefficient_rounding, last_bits):
            hardware = ", on hardware that rounds powers and sines otherwise" if last_bits else ""
            raise ProofError(f"layers.{index}.attention: {difference}{hardware}.")
    return held_in


def _find_difference(
    layer: Layer, frequencies_in_use: npt.NDArray[np.floating], coefficient_rounding: float, last_bits: int
) -> str:
    """Describe where cosines or sines differ from those of ``frequencies_in_use``; "" if nowhere.

    Angles are computed in the type of ``frequencies_in_use``.
    """
    for positions, computed in layer.rotation.at(last_bits=last_bits):
        # [frequencies, positions], the memory order of the graph's own numbers.
        angle = frequencies_in_use[:, None] * positions.astype(frequencies_in_use.dtype)
        allowed = (
            np.float32(_COSINE_TOLERANCE + coefficient_rounding)
            + np.float32(_ANGLE_TOLERANCE * (positions[-1] + 1)) * frequencies_in_use
        )
        if last_bits:
            allowed = allowed * np.float32(_LAST_BIT_FACTOR)
        for function, coefficients in ((np.cos, computed[:2]), (np.sin, computed[2:])):
            expected = function(angle).astype(np.float32)
            for coefficient in {id(c): c for c in coefficients}.values():
                error = np.abs(coefficient.T - expected)
                wrong = ~(error.max(1) <= allowed)
                if wrong.any():
                    entry = int(wrong.argmax())
                    row = int((~(error[entry] <= allowed[entry])).argmax())
                    return (
                        f"at position {positions[row]} its query's rotation has a cosine or sine that is "
                        f"{error[entry, row]:.3g} off the config's RoPE (frequency {entry})"
                    )
    return ""


def _find_rounding(graph: FlatGraph, values: Sequence[Value]) -> tuple[float, str]:
    """Return the rounding error of cosines and sines, and the half-precision types that they are stored in."""
    sources = [source for value in values for source in walk_ancestors(value) if source.tensor.elements > 1]
    tables = _list_tables(values, sources)
    # A FLOAT32 table whose numbers are all exact in FLOAT16 was half precision before a converter widened it.
    roundings = [_ROUNDING_OF_TYPE[TensorType.FLOAT16] for table in tables if table.constant and _is_half(graph, table)]
    # A CAST may also round computed cosines to half precision before they multiply a query.
    roundings += [_ROUNDING_OF_TYPE.get(table.tensor.type, 0.0) for table in tables]
    coefficient_rounding = max(roundings, default=0.0)
    types = {source.tensor.type_name for source in sources if source.tensor.type in _ROUNDING_OF_TYPE}
    return coefficient_rounding, " and ".join(sorted(types)) or ("half precision" if coefficient_rounding else "")


def _list_tables(values: Sequence[Value], sources: Sequence[Value]) -> list[Value]:
    """List the ``sources`` that ``values`` are copied or converted from, without any arithmetic."""
    kinds = {id(source): source.producer.kind for source in sources if source.producer is not None}
    computed = frozenset(key for key, kind in kinds.items() if kind not in LAYOUT and kind not in CONVERSIONS)
    return [table for value in values for table in walk_ancestors(value, computed) if table.tensor.elements > 1]


def _is_half(graph: FlatGraph, table: Value) -> bool:
    if table.tensor.type is not TensorType.FLOAT32 or table.tensor.elements > _LARGEST_TABLE:
        return False
    numbers = graph.read_small_floats(table)
    return bool(np.array_equal(numbers, numbers.astype(np.float16).astype(np.float32)))


# Slots.


class SlotCheck:
    """Compares the masks of one layer with the config; |q · K| is at most ``largest``."""

    def __init__(self, index: int, layer: Layer, config: DrafterConfig, masks: Masks, largest: float) -> None:
        self.index = index
        self.layer = layer
        self.masks = masks
        self.largest = largest
        # All of the signature: what a runtime fills in does not depend on whether this layer reads it.
        self.inputs = masks.graph.inputs
        self.window = config.layers[index].sliding_window
        self.local_window = config.sliding_window or masks.slots

    def check(self) -> tuple[int, bool]:
        """Check every row of the masks.

        Returns:
            how many rows were computed, and whether they stand for all others, which are equal up to a shift.

        Raises:
            ProofError: a slot is visible that should be hidden or the reverse, or its score is not q · K.
            UnsupportedError: rows are neither equal up to a shift nor few.
        """
        slots = self.masks.slots
        attention = self.layer.attention
        alike = self.masks.are_rows_alike(attention.mask_values)
        if not alike and slots > _MOST_ROWS:
            raise UnsupportedError(
                f"layers.{self.index}: its {slots} rows of masks are neither equal up to a shift nor few."
            )
        for window in attention.all_windows:
            self._check_window(window)
        rows = np.array([0, slots - 1]) if alike else np.arange(slots)
        either: list[str | SlotWindow] = [name for name in (MASK, MASK_LOCAL) if name in self.inputs]
        # A window is not placed by slot − position alone: in rows that stand for others, a slot may be in it or not.
        either += attention.all_windows if alike else ()
        self._check_cases(self.masks.enumerate_cases(attention, rows, either))
        return len(rows), alike

    def _check_cases(self, each_case: Iterable[Cases]) -> None:
        attention = self.layer.attention
        visible_numbers, hidden_numbers = set[float](), set[float]()
        for cases in each_case:
            visible, possible = self._find_visible_slots(cases), self._find_possible_slots(cases)
            # _check_window has checked that a window covers all visible slots.
            for inside in cases.within.values():
                possible &= inside | ~visible
            self._check_scores(
                cases, attention.scores.tree.compute_effect(cases), visible & possible, ~visible & possible
            )
            if attention.guard is not None:
                numbers = attention.guard.mask.read_numbers(cases)
                visible_numbers.update(np.unique(numbers[visible & possible]).tolist())
                hidden_numbers.update(np.unique(numbers[~visible & possible]).tolist())
        if attention.guard is not None:
            self._check_guard(attention.guard, visible_numbers, hidden_numbers)

    def _check_window(self, window: SlotWindow) -> None:
        """Check that a window covers all slots that the config sees, at every position."""
        at = np.arange(self.masks.slots)
        first = self.masks.positions.first_slots[window.table]
        size = window.size
        needed = np.zeros(at.size, np.int64) if self.window is None else np.maximum(at - self.window + 1, 0)
        bad = ~((first >= 0) & (first <= needed) & (first + size > at) & (first + size <= at.size))
        if bad.any():
            row = int(np.argmax(bad))
            self._refuse(row, f"it reads slots {first[row]} to {first[row] + size - 1}; the config sees others")

    def _find_possible_slots(self, cases: Cases) -> Bools:
        """Return which cases can occur, bool ``[samples, slots]``: the masks of runtimes never show a later slot, and
        local masks none beyond the window. A mask that is no input shows all.
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

    def _find_visible_slots(self, cases: Cases) -> Bools:
        """Return which slots the config sees, bool ``[samples, slots]``."""
        slots = np.arange(self.masks.slots)
        position = cases.positions[:, None]
        past = slots <= position
        if self.window is None:
            return np.broadcast_to(cases.shown[MASK], cases.shape) if MASK in self.inputs else past
        visible = past & (slots > position - self.window) & cases.shown[MASK_LOCAL]
        # A sliding layer need not read the mask if the runtime passes the range of slots, or a local mask.
        range_is_given = PARAM_TENSOR in self.inputs or MASK_LOCAL in self.inputs
        return visible if range_is_given and MASK not in self.layer.masks else visible & cases.shown[MASK]

    def _check_scores(self, cases: Cases, effect: Effect, visible: Bools, hidden: Bools) -> None:
        if not visible.any():
            return
        # Softmax ignores a constant added to a row.
        base = float(effect.offset.flat[np.argmax(visible)])
        with np.errstate(invalid="ignore"):
            sound = (
                effect.scored & ~effect.lost & (np.abs(effect.offset - base) <= _OFFSET_TOLERANCE * max(1, abs(base)))
            )
            lowered = base - self.largest - (effect.offset + effect.scored * self.largest)
        for wrong, fault in (
            (visible & ~(sound & math.isfinite(base)), "is hidden, or scored otherwise than by q · K"),
            (hidden & ~(lowered >= _WEIGHTLESS_BELOW), "should be hidden, and is not lowered below every score"),
        ):
            if wrong.any():
                row, slot = (int(i) for i in np.argwhere(wrong)[0])
                self._refuse(int(cases.positions[row]), f"slot {slot} {fault} (|q · K| may be {self.largest:.4g})")

    def _check_guard(self, guard: OutputGuard, visible: Collection[float], hidden: Collection[float]) -> None:
        """Check that the output guard keeps the attention's output if the layer sees a slot, and only then.

        Runtimes show at least the query's own slot, so a guard is open. ``visible`` and ``hidden`` are the numbers that
        the guard's mask has at visible and at hidden slots.
        """
        lowest, highest = min(visible, default=math.nan), max(hidden, default=-math.inf)
        if len(visible) + len(hidden) > _MOST_MASK_NUMBERS or not lowest > highest:
            fault = "looks at other slots than the layer sees"
        elif not all(self.masks.guard_keeps(guard, number).all() for number in visible):
            fault = "replaces the attention's output by 0 where a slot is seen"
        elif any(self.masks.guard_keeps(guard, number).any() for number in hidden):
            fault = "keeps the attention's output where the layer sees no slot"
        else:
            return
        raise ProofError(
            f"layers.{self.index}.attention: its output guard, by {guard.condition.label}, {fault}; a checkpoint's "
            "attention has no such guard."
        )

    def _refuse(self, position: int, fault: str) -> None:
        raise ProofError(
            f"layers.{self.index}.attention: the graph and the checkpoint differ at position {position}: {fault}."
        )
