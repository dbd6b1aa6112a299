"""Number types: shapes that a file declares, codes cast and wrapped, constants on grids, grids of few codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph, sound

from adversary import edits as e
from adversary.edits import Case, Change, Edit, Sample
from adversary.mutations.attention import both, cache_edit, compare, slots, summed, visible
from adversary.mutations.blocks import normed_by, recapped
from adversary.mutations.numbers import requantized
from adversary.mutations.positions import frequencies, position, tabled

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


def by_flattening(g: Graph, q: int, signs: Array) -> int:
    """A FULLY_CONNECTED over 128, of an operand whose last axis has one element."""
    made = g.tensor([1, 1])
    weight = g.constant(signs.reshape(1, 128))
    g.emit("FULLY_CONNECTED", [g.reshape(q, [1, 1, 128, 1]), weight, -1], [made], keepNumDims=False)
    return g.reshape(made, [1, 1, 1, 1])


def by_lying_sum(g: Graph, q: int, signs: Array) -> int:
    """A sum over all, declared as large as what it adds up."""
    signed = g.reshape(g.mul(q, signs.reshape(1, 1, 4, 32).astype(np.float32)), [1, 1, 1, 128])
    made = g.call("SUM", signed, np.array([3], np.int32), shape=[1, 1, 1, 128], keepDims=True)
    return g.call("RESHAPE", made, np.array([1, 1, 1, 1], np.int32), shape=[1, 1, 1, 1])


def by_lying_reshape(g: Graph, q: int, signs: Array) -> int:
    """A sum of what is declared as one number."""
    signed = g.mul(q, signs.reshape(1, 1, 4, 32).astype(np.float32))
    flat = g.call("RESHAPE", signed, np.array([1, 1, 1, 128], np.int32), shape=[1, 1, 1, 1])
    return g.call("SUM", flat, np.array([3], np.int32), shape=[1, 1, 1, 1], keepDims=True)


SHAPES: dict[str, Change] = {
    "product_by_adj_x": cut_sum(by_adj_x),
    "product_by_adj_x_left": cut_sum(by_adj_x_left),
    "product_that_flattens": cut_sum(by_flattening),
    "sum_declared_wide": cut_sum(by_lying_sum),
    "sum_of_what_is_declared_narrow": cut_sum(by_lying_reshape),
}


# Codes that are cast, and integers that wrap.


def coded(which: str, dtype: Any, scale: float, back: Edit, zero_point: int = 0) -> Change:
    """The full layer's cache as codes, brought back by ``back``, which makes floats of codes."""

    def change(g: Graph) -> None:
        name = f"kv_cache_{which}_3"
        tensor = g.input(name)
        readers = g.readers(tensor)
        described = g.main.tensors[tensor]
        described.type = {np.int8: schema.TensorType.INT8, np.int16: schema.TensorType.INT16}[dtype]
        described.quantization = e.parameters(scale, zero_point)
        g.rewire(tensor, g.mul(back(g, tensor), np.float32(scale)), readers)
        ends = np.iinfo(dtype)
        g.adapt[name] = lambda a: np.clip(np.round(a / scale) + zero_point, ends.min, ends.max).astype(dtype)

    return change


def over_types(*types: Any) -> Edit:
    return e.chain(*((lambda g, x, t=t: g.cast(x, t)) for t in types))


def wrapped(bits: int, whole: Any = np.int32) -> Edit:
    """Codes times 2ⁿ and back: the integers wrap."""
    return e.chain(
        lambda g, x: g.cast(x, whole),
        lambda g, x: g.mul(x, np.array(2**bits, whole)),
        lambda g, x: g.cast(x, np.float32),
        e.mul(2.0**-bits),
    )


CODES: dict[str, Change] = {
    "keys_int16_cast_int8": coded("k", np.int16, 0.02, over_types(np.int8, np.float32)),
    "values_int16_cast_int8": coded("v", np.int16, 0.04, over_types(np.int8, np.float32)),
    "keys_int8_cast_uint8": coded("k", np.int8, 0.02, over_types(np.uint8, np.float32)),
    "keys_int8_wrap_at_64": coded("k", np.int8, 0.04, wrapped(25)),
    "values_int16_wrap_at_128": coded("v", np.int16, 0.04, wrapped(24)),
    "keys_int8_less_another_zero_point": coded(
        "k", np.int8, 0.02, e.chain(over_types(np.float32), e.with_number("SUB", 3.0)), zero_point=5
    ),
    "keys_int8_dequantized_and_scaled_again": coded(
        "k", np.int8, 0.02, lambda g, x: g.call("DEQUANTIZE", x, dtype=np.float32)
    ),
}


def wrapped_distance(bits: int) -> Build:
    """Whether slot less position, times 2ⁿ in INT32, is within the window."""

    def build(g: Graph) -> int:
        far = g.sub(g.input("input_pos"), slots(g))
        large = g.mul(far, np.array(2**bits, np.int32))
        end = np.array(e.WINDOW * 2**bits, np.int32)
        return both(g, g.less(large, end), g.greater_equal(large, np.array(0, np.int32)))

    return build


def far_by_int8(g: Graph) -> int:
    """Position less slot, the slots as INT8."""
    return g.sub(g.input("input_pos"), g.cast(g.cast(g.constant(slots(g), np.int32), np.int8), np.int32))


def in_window(build: Callable[[Graph], int]) -> Change:
    return visible(0, lambda g, _: both(g, g.input("mask"), g.reshape(build(g), [1, 1, 1, 256])))


def cut_position(whole: Any, narrow: Any, factor: int) -> Edit:
    """The position for the angles, times a number in one type of integers and through another."""

    def edit(g: Graph, x: int) -> int:
        large = g.mul(g.cast(g.input("input_pos"), whole), np.array([factor], whole))
        return g.mul(g.reshape(g.cast(g.cast(large, narrow), np.float32), g.shape(x)), np.float32(1 / factor))

    return edit


def hidden_twice(g: Graph, m: int) -> int:
    """−2³¹ where a slot is hidden, twice: nothing at all."""
    hidden = g.sub(np.array(1, np.int32), g.cast(m, np.int32))
    once = g.mul(hidden, np.array(-(2**31), np.int32))
    return g.cast(g.add(once, once), np.float32)


WRAPS: dict[str, Change] = {
    "window_by_distance_times_2^26": in_window(wrapped_distance(26)),
    "window_by_distance_times_2^25": in_window(wrapped_distance(25)),
    "window_by_int8_slots": in_window(
        lambda g: both(g, compare("GREATER_EQUAL", 0)(g), g.less(far_by_int8(g), np.array([e.WINDOW], np.int32)))
    ),
    "position_times_2^24": position(cut_position(np.int32, np.int32, 2**24)),
    "position_int64_times_2^30_cut": position(cut_position(np.int64, np.int32, 2**30)),
    "position_int16_times_200": position(cut_position(np.int32, np.int16, 200)),
    "position_uint8_times_3": position(cut_position(np.int32, np.uint8, 3)),
    "hidden_sum_wraps": summed(hidden_twice),
    "mask_code_times_256_int8": visible(
        1, lambda g, x: g.cast(g.cast(g.mul(g.cast(x, np.int32), np.array(256, np.int32)), np.int8), np.bool_)
    ),
}


# Constants that pass through another type.


def eps_by(build: Build, role: str = "layers.0.post_attention_norm") -> Change:
    def edit(g: Graph, norm: Any) -> None:
        index = next(n for n, i in enumerate(norm.add.inputs) if g.is_constant(int(i)))
        g.set_input(norm.add, index, build(g))

    return normed_by(role, edit)


def constant(number: Any, edit: Edit) -> Build:
    return lambda g: edit(g, g.constant(np.asarray(number)))


def stored(code: Any, dtype: Any, scale: float, zero_point: int = 0) -> Build:
    """A constant of codes, dequantized."""

    def build(g: Graph) -> int:
        made = g.constant(np.asarray(code), dtype)
        g.main.tensors[made].quantization = e.parameters(scale, zero_point)
        return g.call("DEQUANTIZE", made, dtype=np.float32)

    return build


def recast(place: Callable[[Graph], int], edit: Edit) -> Change:
    """``edit`` of a constant."""
    return lambda g: g.insert(place(g), lambda x: edit(g, x))


EPSILONS: dict[str, Change] = {
    "eps_cast_fp16": eps_by(constant(1e-6, e.through(np.float16))),
    "eps_stored_fp16": eps_by(lambda g: g.cast(g.constant(np.asarray(1e-6), np.float16), np.float32)),
    "eps_cast_bf16": eps_by(constant(1e-6, e.over_bfloat)),
    "eps_cast_int32": eps_by(constant(1e-6, e.through(np.int32))),
    "eps_times_1e-3_fp16": eps_by(constant(1e-6, e.chain(e.mul(0.01), e.through(np.float16), e.mul(100.0)))),
    "eps_on_a_grid_of_8e-7": eps_by(constant(1e-6, e.over_int(8e-7))),
    "eps_on_a_grid_of_1e-4": eps_by(constant(1e-6, e.over_int(1e-4))),
    "eps_of_a_code_and_zero_point": eps_by(stored(3, np.int8, 1e-6, 1)),
    "eps_of_a_code_of_1.05e-6": eps_by(stored(1, np.int8, 1.05e-6)),
    "eps_by_an_overflow": eps_by(constant(1e-6, e.chain(e.mul(1e-30), e.mul(1e-15), e.mul(1e30), e.mul(1e15)))),
}
OTHERS: dict[str, Change] = {
    "cap_on_a_grid": e.each(
        recapped(1 / 30, 1.0), e.edge("logits", lambda g, x: g.mul(x, constant(30.0, e.over_int(0.41))(g)))
    ),
    "layer_scalar_cast_fp16": recast(
        lambda g: g.roles["layers.0.layer_scalar"], e.chain(e.mul(1.003), e.through(np.float16))
    ),
    "layer_scalar_on_a_grid": recast(lambda g: g.roles["layers.0.layer_scalar"], e.over_int(0.013)),
    "norm_weight_on_a_grid_off_centre": recast(lambda g: g.norm("layers.0.pre_ffw_norm").weight, e.over_int(0.02, 100)),
    "norm_weight_cast_int32": recast(lambda g: g.norm("layers.0.pre_ffw_norm").weight, e.through(np.int32)),
    "frequencies_on_a_grid_of_int16": recast(lambda g: frequencies(g, 0), e.over_int(1 / 32767, 0, np.int16)),
    "frequencies_cast_fp16": recast(lambda g: frequencies(g, 0), e.through(np.float16)),
    "frequencies_requantized": recast(lambda g: frequencies(g, 0), requantized((1 / 127, 0), (1 / 60, 0))),
}
LOWEST_ON_GRIDS: dict[str, Change] = {
    name: summed(lambda g, m, build=build: g.mul(g.cast(g.logical_not(m), np.float32), build(g)))
    for name, build in {
        "lowest_on_a_grid_of_1": constant(e.LOWEST, e.over_int(1.0)),
        "lowest_by_a_code_of_-128": stored(-128, np.int8, 1.0),
    }.items()
}


# Grids of few codes, and numbers that half precision loses.


def scaled_fp16(factor: float) -> Edit:
    return e.chain(e.mul(factor), e.through(np.float16), e.mul(1 / factor))


GRIDS: dict[str, Change] = {
    **{
        f"{place}_{name}": e.edge(place, edit)
        for place, edits in {
            "activations": {"in_halves_int8": e.over_int(0.5), "fp16_of_1e-6": scaled_fp16(1e-6)},
            "0.query": {"in_ones_int8": e.over_int(1.0)},
            "1.query_normed": {"of_2_int8": e.over_int(2 / 127), "fp16_of_1e-7": scaled_fp16(1e-7)},
            "1.rotated": {"in_quarters_int16": e.over_int(0.25, 0, np.int16)},
            "1.scores": {
                "in_halves_int8": e.over_int(0.5),
                "of_5_int8": e.over_int(5 / 127),
                "fp16_of_1e5": scaled_fp16(1e5),
            },
            "1.masked": {
                "in_ones_int8": e.over_int(1.0),
                "in_ones_int16": e.over_int(1.0, 0, np.int16),
                "fp16_of_1e5": scaled_fp16(1e5),
                "fp16_of_1e-7": scaled_fp16(1e-7),
            },
            "1.probabilities": {"in_32nds_int8": e.over_int(1 / 32), "fp16_of_1e-6": scaled_fp16(1e-6)},
            "1.attended": {"in_tenths_int8": e.over_int(0.1)},
            "0.product": {"in_quarters_int16": e.over_int(0.25, 0, np.int16)},
            "state": {"in_halves_int8": e.over_int(0.5), "fp16_of_1e-7": scaled_fp16(1e-7)},
            "logits": {"in_halves_int16": e.over_int(0.5, 0, np.int16), "fp16_of_1e-7": scaled_fp16(1e-7)},
            "projected_activations": {"fp16_of_1e-7": scaled_fp16(1e-7)},
        }.items()
        for name, edit in edits.items()
    },
    "keys_in_quarters_int8": cache_edit("key", e.over_int(0.25), 1),
    "keys_onto_a_narrower_grid": cache_edit("key", requantized((0.02, 0), (0.005, 0)), 1),
    "keys_onto_a_coarser_grid": cache_edit("key", requantized((0.02, 0), (0.3, 0)), 1),
    "keys_fp16_of_1e-6": cache_edit("key", scaled_fp16(1e-6), 1),
    "values_fp16_of_1e5": cache_edit("value", scaled_fp16(1e5), 1),
    "values_onto_a_grid_off_centre": cache_edit("value", requantized((0.04, 0), (0.04, 90)), 1),
    "cos_in_16ths_int8": tabled(cos=lambda t: np.round(t * 16) / 16, layers=(0,), kind="int8"),
}

THIRD_NUMBERS: tuple[Case, ...] = (
    *e.cases("third: declared shapes", SHAPES, Sample(40, change=rare_activations)),
    *e.cases(
        "third: codes", CODES, Sample(40, keys=10.0, values=5.0), Sample(201, keys=6.0, values=3.0), rounding=0.05
    ),
    *e.cases("third: integers that wrap", WRAPS, Sample(201, mask="past"), Sample(150, mask="past"), Sample(250)),
    *e.cases("third: epsilons", EPSILONS, Sample(40, values=1e-3), Sample(201, values=1e-4), exact=True),
    *e.cases("third: constants", OTHERS, Sample(250), exact=True),
    *e.cases(
        "third: constants",
        LOWEST_ON_GRIDS,
        *(Sample(40, keys=loud) for loud in (40.0, 400.0)),
        *(Sample(p, keys=400.0, mask="one") for p in (40, 41, 42)),
        rounding=0.01,
        exact=True,
    ),
    *e.cases("third: grids", GRIDS, Sample(40, keys=4.0), rounding=1e-3, exact=True),
)
