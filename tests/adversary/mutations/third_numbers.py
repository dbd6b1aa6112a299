"""Number types: shapes that a file declares, codes cast and wrapped, constants on grids, grids of few codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.surgery import Graph, sound

from adversary import edits as e
from adversary.edits import Change, Edit, Sample, a_change, an_edit
from adversary.mutations.attention import both, slots, summed, visible
from adversary.mutations.blocks import normed_by
from adversary.mutations.positions import position

Array = np.ndarray
Build = Callable[[Graph], int]


# Intervals by declared shapes: a sum is bounded where the shapes say that it cannot be that large.


def rare_query(g: Graph) -> tuple[Array, Array]:
    """Activations, and the first layer's normalized query that they give, [128]: what no draw comes near."""
    arrays = np.random.default_rng(6).standard_normal(128)
    stream = g.floats(g.roles["pre_projection"]) @ arrays
    weights = g.value(g.roles["layers.0.pre_attention_norm"]).reshape(-1)
    heads = (g.floats(g.roles["layers.0.q_proj"]) @ (stream / np.sqrt(np.mean(stream**2)) * weights)).reshape(4, 32)
    normed = heads / np.sqrt(np.mean(heads**2, 1, keepdims=True)) * g.value(g.roles["layers.0.q_norm"]).reshape(-1)
    return arrays, normed.reshape(-1)


def rare_activations(arrays: dict[str, Any]) -> None:
    style = "torch" if arrays["kv_cache_k_3"].shape[1] == 2 else "jax"
    arrays["activations"] = rare_query(sound(style))[0].reshape(1, 1, 128).astype(np.float32)


def cut_sum(summed_by: Callable[[Graph, int, Array], int]) -> Change:
    """The query plus a tenth of what a sum of it has above 6 standard deviations.

    By the declared shapes the sum has few terms, so that its interval ends below.
    """

    def edit(g: Graph, q: int) -> int:
        sharp = rare_query(g)[1]
        whole = summed_by(g, q, np.sign(sharp))
        bound = np.float32(6 * np.sqrt(np.sum(sharp**2)))
        above = g.sub(whole, g.minimum(whole, bound))
        return g.add(q, g.mul(above, 0.1))

    return e.edge("0.query_normed", edit)


def by_adj_x(g: Graph, q: int, signs: Array) -> int:
    """A sum over 128, of operands whose last axes have one element."""
    column = g.constant(signs.reshape(1, 1, 128, 1))
    return g.call("BATCH_MATMUL", g.reshape(q, [1, 1, 128, 1]), column, shape=[1, 1, 1, 1], adjX=True)


def by_adj_x_left(g: Graph, q: int, signs: Array) -> int:
    column = g.constant(signs.reshape(1, 1, 128, 1))
    return g.call("BATCH_MATMUL", column, g.reshape(q, [1, 1, 128, 1]), shape=[1, 1, 1, 1], adjX=True)


SHAPES: dict[str, Change] = {
    "product_by_adj_x": cut_sum(by_adj_x),
    "product_by_adj_x_left": cut_sum(by_adj_x_left),
}


# Codes that are cast, and integers that wrap.


@a_change
def coded(g: Graph, which: str, dtype: Any, scale: float, back: Edit) -> None:
    """The full layer's cache as codes, brought back by ``back``, which makes floats of codes."""
    e.as_codes(g, f"kv_cache_{which}_3", dtype, scale, back=e.chain(back, e.mul(scale)))


def over_types(*types: Any) -> Edit:
    return e.chain(*((lambda g, x, t=t: g.cast(x, t)) for t in types))


CODES: dict[str, Change] = {
    "keys_int16_cast_int8": coded("k", np.int16, 0.02, over_types(np.int8, np.float32)),
    "keys_int8_cast_uint8": coded("k", np.int8, 0.02, over_types(np.uint8, np.float32)),
}


@a_change
def wrapped_distance(g: Graph, bits: int) -> int:
    """Whether slot less position, times 2ⁿ in INT32, is within the window."""
    far = g.sub(g.input("input_pos"), slots(g))
    large = g.mul(far, np.array(2**bits, np.int32))
    end = np.array(e.WINDOW * 2**bits, np.int32)
    return both(g, g.less(large, end), g.greater_equal(large, np.array(0, np.int32)))


def in_window(build: Callable[[Graph], int]) -> Change:
    return visible(0, lambda g, _: both(g, g.input("mask"), g.reshape(build(g), [1, 1, 1, 256])))


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
    "window_by_distance_times_2^26": in_window(wrapped_distance(26)),
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

# Grids of few codes, and numbers that half precision loses.


def scaled_fp16(factor: float) -> Edit:
    return e.chain(e.mul(factor), e.through(np.float16), e.mul(1 / factor))


GRIDS: dict[str, Change] = {
    **{
        f"{place}_{name}": e.edge(place, edit)
        for place, edits in {
            "activations": {"in_halves_int8": e.over_int(0.5), "fp16_of_1e-6": scaled_fp16(1e-6)},
            "1.query_normed": {"of_2_int8": e.over_int(2 / 127), "fp16_of_1e-7": scaled_fp16(1e-7)},
            "1.rotated": {"in_quarters_int16": e.over_int(0.25, 0, np.int16)},
            "1.scores": {"in_halves_int8": e.over_int(0.5), "fp16_of_1e5": scaled_fp16(1e5)},
            "1.masked": {"in_ones_int8": e.over_int(1.0), "in_ones_int16": e.over_int(1.0, 0, np.int16)},
            "1.probabilities": {"in_32nds_int8": e.over_int(1 / 32), "fp16_of_1e-6": scaled_fp16(1e-6)},
            "0.product": {"in_quarters_int16": e.over_int(0.25, 0, np.int16)},
            "logits": {"in_halves_int16": e.over_int(0.5, 0, np.int16), "fp16_of_1e-7": scaled_fp16(1e-7)},
        }.items()
        for name, edit in edits.items()
    },
}

CASES = (
    *e.cases("third: declared shapes", SHAPES, Sample(40, change=rare_activations)),
    *e.cases(
        "third: codes", CODES, Sample(40, keys=10.0, values=5.0), Sample(201, keys=6.0, values=3.0), rounding=0.05
    ),
    *e.cases("third: integers that wrap", WRAPS, Sample(201, mask="past"), Sample(150, mask="past"), Sample(250)),
    *e.cases("third: epsilons", EPSILONS, Sample(40, values=1e-3), Sample(201, values=1e-4), exact=True),
    *e.cases("third: constants", OTHERS, Sample(250), exact=True),
    *e.cases("third: grids", GRIDS, Sample(40, keys=4.0), rounding=1e-3, exact=True),
)
