"""Number types: shapes that a file declares, codes cast and wrapped, constants on grids, masks cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Change, Edit, Sample, an_edit
from adversary.mutations.attention import summed
from adversary.mutations.blocks import normed_by
from adversary.mutations.positions import position

Array = np.ndarray
Build = Callable[[Graph], int]


# Codes that are cast, and integers that wrap.


@an_edit
def cut_position(g: Graph, x: int, whole: Any, narrow: Any, factor: int) -> int:
    """The position for the angles, times a number in one type of integers and through another."""
    large = g.mul(g.cast(g.input("input_pos"), whole), np.array([factor], whole))
    return g.mul(g.reshape(g.cast(g.cast(large, narrow), np.float32), g.shape(x)), np.float32(1 / factor))


def hidden_twice(g: Graph, m: int) -> int:
    """−2³¹ where a slot is hidden, twice: nothing at all."""
    hidden = g.sub(np.array(1, np.int32), g.cast(m, np.int32))
    once = g.mul(hidden, np.array(-(2**31), np.int32))
    return g.cast(g.add(once, once), np.float32)


WRAPS: dict[str, Change] = {
    "position_uint8_times_3": position(cut_position(np.int32, np.uint8, 3)),
    "hidden_sum_wraps": summed(hidden_twice),
}


# Constants that pass through another type.


def eps_by(build: Build, role: str = "layers.0.post_attention_norm") -> Change:
    def edit(g: Graph, norm: Any) -> None:
        index = next(n for n, i in enumerate(norm.add.inputs) if g.is_constant(int(i)))
        g.set_input(norm.add, index, build(g))

    return normed_by(role, edit)


def constant(number: Any, edit: Edit) -> Build:
    return lambda g: edit(g, g.constant(np.asarray(number)))


def recast(place: Callable[[Graph], int], edit: Edit) -> Change:
    """``edit`` of a constant."""
    return lambda g: g.insert(place(g), lambda x: edit(g, x))


EPSILONS: dict[str, Change] = {
    "eps_cast_fp16": eps_by(constant(1e-6, e.through(np.float16))),
    "eps_stored_fp16": eps_by(lambda g: g.cast(g.constant(np.asarray(1e-6), np.float16), np.float32)),
}
OTHERS: dict[str, Change] = {
    "norm_weight_on_a_grid_off_centre": recast(lambda g: g.norm("layers.0.pre_ffw_norm").weight, e.over_int(0.02, 100)),
    "norm_weight_cast_int32": recast(lambda g: g.norm("layers.0.pre_ffw_norm").weight, e.through(np.int32)),
}

# A grid that ends above what hides a slot, and numbers that half precision loses.


def scaled_fp16(factor: float) -> Edit:
    return e.chain(e.mul(factor), e.through(np.float16), e.mul(1 / factor))


GRIDS: dict[str, Change] = {
    **{
        f"{place}_{name}": e.edge(place, edit)
        for place, edits in {
            "activations": {"fp16_of_1e-6": scaled_fp16(1e-6)},
            "1.query_normed": {"fp16_of_1e-7": scaled_fp16(1e-7)},
            "1.scores": {"fp16_of_1e5": scaled_fp16(1e5)},
            "1.masked": {"hidden_at_-3_int8": e.over_int(6 / 255)},
            "1.probabilities": {"fp16_of_1e-6": scaled_fp16(1e-6)},
            "logits": {"fp16_of_1e-7": scaled_fp16(1e-7)},
        }.items()
        for name, edit in edits.items()
    },
}

CASES = (
    *e.cases("third: integers that wrap", WRAPS, Sample(201, mask="past"), Sample(150, mask="past"), Sample(250)),
    *e.cases("third: epsilons", EPSILONS, Sample(40, values=1e-3), Sample(201, values=1e-4), exact=True),
    *e.cases("third: constants", OTHERS, Sample(250), exact=True),
    *e.cases("third: grids", GRIDS, Sample(40, keys=4.0), rounding=1e-3, exact=True),
)
