"""What a reader of graphs may trust: a doubt that a type explains, floats that are exact, points that it tries."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Case, Change, Edit, Sample, add, cases, chain, each, edge, mul, over_int, parameters
from adversary.mutations.masks import both, slots, visible
from adversary.mutations.positions import between, is_at, number, when
from adversary.mutations.rope import cos_and_sin, table
from adversary.mutations.second import EVERY, largest_gate, row_of
from adversary.mutations.tables import angles, row
from adversary.mutations.third_files import scaled_norm

Array = np.ndarray


# Tables of the position: how far a grid explains that they are off.


def coarse_one(step: float) -> Callable[[Graph], int]:
    """1, which the position decides formally, on a grid of ``step`` that holds it."""
    return lambda g: over_int(step)(g, g.add(g.mul(number(g), 0.0), 1.0))


def times_coarse_one(step: float) -> Edit:
    return lambda g, x: g.mul(x, g.reshape(coarse_one(step)(g), [1] * len(g.shape(x))))


def plus_coarse_nothing(step: float) -> Edit:
    """Plus 0 on a coarse grid."""

    def edit(g: Graph, x: int) -> int:
        nothing = over_int(step)(g, g.mul(number(g), 0.0))
        return g.add(x, g.reshape(nothing, [1] * len(g.shape(x))))

    return edit


def rows_of_scales(off: Callable[[Array], Array], axis: int) -> Change:
    """cos by an INT8 table with a scale a row or a column, one of them as large as cos can be; ``off`` changes it."""

    def change(g: Graph) -> None:
        place = g.layer(0)
        readers = g.readers(place.cos)
        values = np.cos(angles(g, 0).astype(np.float32))
        scale = np.full(values.shape[axis], 1 / 127, np.float32)
        scale[0] = 1.0
        wide = scale[:, None] if axis == 0 else scale
        changed = off(values)
        if axis == 1:
            # The column of scale 1 is none that is read.
            changed = np.concatenate([np.ones([256, 1]), changed], 1)
            scale = np.concatenate([[1.0], np.full(values.shape[1], 1 / 127)]).astype(np.float32)
            wide = scale
        codes = g.constant(np.clip(np.round(changed / wide), -127, 127), np.int8)
        made = parameters(scale)
        made.quantizedDimension = axis
        g.main.tensors[codes].quantization = made
        floats = g.call("DEQUANTIZE", codes, dtype=np.float32)
        floats = g.part(floats, 1, values.shape[1]) if axis == 1 else floats
        g.rewire(place.cos, g.reshape(row(g, floats), g.shape(place.cos)), readers)

    return change


def two_grids(first: float, second: float) -> Change:
    """cos and sin of layer 0 on one grid where they meet half of the query, on another where the other half."""

    def change(g: Graph) -> bool | None:
        place = g.layer(0)
        if len(g.readers(place.cos)) != 2:
            return False
        for tensor in (place.cos, place.sin):
            for reader, step in zip(g.readers(tensor), (first, second), strict=True):
                g.insert(tensor, lambda x, step=step: over_int(step)(g, x), [reader])
        return None

    return change


ROTATIONS: dict[str, Change] = {
    "cos_plus_0.1_at_37_times_a_coarse_1": edge("0.cos", chain(when(is_at(37), add(0.1)), times_coarse_one(0.25))),
    "sin_less_0.1_from_200_plus_a_coarse_0": edge(
        "0.sin", chain(when(between(200, 254), add(-0.1)), plus_coarse_nothing(0.5))
    ),
    "angle_plus_0.1_from_200_and_cos_times_a_coarse_1": each(
        edge("1.angle", when(between(200, 254), add(0.1))),
        *(edge(f"1.{name}", times_coarse_one(0.5)) for name in ("cos", "sin")),
    ),
    "cos_on_a_grid_of_0.035": edge("0.cos", over_int(0.035)),
    "cos_and_sin_on_a_grid_of_a_quarter": each(*(edge(f"1.{name}", over_int(0.25)) for name in ("cos", "sin"))),
    "cos_by_row_with_one_scale_of_1": rows_of_scales(lambda t: t + np.where(EVERY[:, None] > 190, 0.018, 0.0), 0),
    "cos_by_column_with_one_scale_of_1": rows_of_scales(lambda t: t + np.where(EVERY[:, None] > 190, 0.018, 0.0), 1),
    "halves_on_two_grids": two_grids(1 / 127, 0.5 / 127),
    "frequencies_off_by_7e-5": table(lambda t: t * np.where(np.arange(t.size) % 2, 1 + 7e-5, 1 - 7e-5)),
    "first_frequency_off_by_7e-5": table(lambda t: np.where(np.arange(t.size) == 0, t * (1 + 7e-5), t)),
    "slow_frequencies_off_by_a_hundredth": table(lambda t: np.where(t < 5e-3, t * 1.01, t)),
    "cos_and_sin_by_two_layers_angles": cos_and_sin(lambda g, cos, sin: (cos, g.sin(when_far(g)))),
}


def when_far(g: Graph) -> int:
    return when(between(200, 254), mul(1.001))(g, g.layer(0).angle)


# Masks: a sum of floats is no exact integer.


def rounded_slots(large: float) -> Callable[[Graph], int]:
    """(slot + large) − large in floats, which rounds to multiples of a power of two."""

    def build(g: Graph) -> int:
        plain = g.constant(slots(g), np.float32)
        return g.sub(g.add(plain, np.float32(large)), np.float32(large))

    return build


def rounded_by_position(large: float) -> Callable[[Graph], int]:
    """The same, with ``large`` from the position formally."""

    def build(g: Graph) -> int:
        much = g.add(g.mul(number(g), 0.0), np.float32(large))
        return g.sub(g.add(g.constant(slots(g), np.float32), much), much)

    return build


def from_position(build: Callable[[Graph], int], shift: float) -> Edit:
    """What a layer shows, and of that only slots whose number by ``build`` is at most the position plus ``shift``."""

    def edit(g: Graph, x: int) -> int:
        there = g.add(number(g), np.float32(shift))
        return both(g, x, g.reshape(g.greater_equal(there, build(g)), g.shape(x)))

    return edit


FLOATS: dict[str, Change] = {
    "slots_in_256s": visible(1, from_position(rounded_slots(2.0**31), 1.0)),
    "slots_in_256s_by_position": visible(1, from_position(rounded_by_position(2.0**31), 1.0)),
    "slots_in_256s_in_sliding": visible(0, from_position(rounded_slots(2.0**31), 1.0)),
    "slots_in_8s": visible(1, from_position(rounded_slots(2.0**26), 1.0)),
}


# A gate that is GELU wherever it is tried.


def gate_by(argument: Callable[[Graph, int, int], int]) -> Change:
    """GELU as tanh of ``argument`` of x and of what it is by rights."""

    def change(g: Graph) -> None:
        place = g.layer(0)
        x = place.gate
        cube = g.mul(g.mul(x, x), x)
        plain = g.mul(g.add(x, g.mul(cube, 0.044715)), 0.7978845608)
        bend = g.add(g.tanh(argument(g, x, plain)), 1.0)
        g.rewire(place.activated, g.mul(g.mul(x, bend), 0.5))

    return change


def less_power(power: int, at: float) -> Callable[[Graph, int, int], int]:
    """Less c · xⁿ for an odd n, as large as the rest where x is ``at``."""

    def edit(g: Graph, x: int, plain: int) -> int:
        scaled = g.mul(x, np.float32(1 / at))
        square = g.mul(scaled, scaled)
        made = scaled
        for _ in range(power // 2):
            made = g.mul(made, square)
        return g.sub(plain, g.mul(made, np.float32(0.0357 * at**3)))

    return edit


GATES: dict[str, Change] = {
    "turns_near_its_largest": lambda g: gate_by(less_power(61, largest_gate(5, 0.88)(g)))(g),
    "turns_at_20000_which_a_norm_reaches": each(
        gate_by(less_power(21, 2e4)), scaled_norm("layers.0.pre_ffw_norm", 1e5)
    ),
    "overflows_where_a_norm_reaches": each(gate_by(less_power(9, 3e4)), scaled_norm("layers.0.pre_ffw_norm", 1e6)),
}


_AT = (*(Sample(p, mask="past") for p in (37, 201, 230, 254)), Sample(255), Sample(150, mask="past"))

THIRD_READERS: tuple[Case, ...] = (
    *cases("third: doubts", ROTATIONS, *_AT, rounding=1e-4, exact=True),
    *cases("third: sums of floats", FLOATS, *_AT),
    *cases("third: gates", GATES, Sample(40, change=row_of("layers.0.gate_proj", 5)), rounding=1e-4),
)
