"""What shows at some inputs alone: small changes, loud numbers, single rows, slots and dimensions.

Whoever knows how the proof goes lets things depend on a position by other ways than angles and masks, uses the mask as
data, reaches slots and numbers that no ordinary input reaches, or stays below what a tolerance sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Change, Edit, Sample, add, cases, edge, mul
from adversary.mutations.attention import cache_edit, constant_mask, floats, largest_score, softmax_spelled, visible
from adversary.mutations.blocks import eps, fused, normed_by, recapped, result_of
from adversary.mutations.numbers import OUT, field, turned, weight
from adversary.mutations.positions import (
    EVERY,
    Array,
    from_row,
    is_at,
    position,
    row,
    rows,
    table,
    tabled,
    when,
)


def one(size: int, index: int, value: float, axes: int = 3, axis: int = -1, other: float = 1.0) -> np.ndarray:
    """``other`` along ``axis``, but ``value`` at ``index``."""
    shape = [1] * axes
    shape[axis] = size
    return np.where(np.arange(size) == index, value, other).reshape(shape)


def without_last(g: Graph, x: int) -> int:
    """Squares, of which the last channel is left out."""
    shape = g.shape(x)
    return g.mul(x, one(shape[-1], shape[-1] - 1, 0.0, len(shape)).astype(np.float32))


SUBTLE: dict[str, Change] = {
    "scores_by_slot": edge("1.scores", add(1e-3 * np.arange(256).reshape(1, 1, 1, 256))),
    "key_of_one_slot": cache_edit("key", mul(one(256, 2, 2.0, 4, 2)), 1),
    "slot_2_hidden": visible(1, constant_mask(lambda s: s != 2)),
    "one_channel_of_the_embedding": edge("activations", mul(one(128, 5, 1.05))),
    "one_channel_of_the_projected": edge("projected_activations", add(one(64, 0, 0.01, other=0.0))),
    "one_token_before_cap": edge("lm_head", mul(one(512, 11, 1.1))),
    "cap_of_30.05": recapped(1 / 30, 30.05),
    "mean_without_last_channel": normed_by("layers.0.pre_ffw_norm", result_of("square", without_last)),
    "theta_10100": table(lambda t: 10100 ** (-np.arange(t.size) / t.size)),
}

PLAIN: dict[str, Change] = {
    "powers_of_at_least_-9": softmax_spelled(0, e.chain(e.with_number("MAXIMUM", -9.0), e.unary("EXP"))),
    "largest_score_favoured": edge("1.scores", e.chosen(lambda g, x: g.equal(x, largest_score(g, x)), add(0.5))),
}

KEYS: dict[str, Change] = {
    "keys_within_30": cache_edit("key", e.clamped(30.0)),
    "scores_within_100": edge("1.scores", e.clamped(100.0)),
}


def counted(g: Graph) -> int:
    """How many slots the mask shows, [1, 1, 1, 1]."""
    return g.reduce("SUM", floats(g), 3)


def slot(g: Graph, at: int) -> int:
    """Whether the mask shows the slot ``at``."""
    return g.slice(g.input("mask"), [0, 0, 0, at], [1, 1, 1, 1])


def plus(*edits: Edit) -> Edit:
    """x plus the chained ``edits`` of it."""
    return lambda g, x: g.add(x, e.chain(*edits)(g, x))


def times(*edits: Edit) -> Edit:
    return lambda g, x: g.mul(x, e.chain(*edits)(g, x))


def row_and_hole(g: Graph, x: int) -> int:
    """Slot 5 is hidden at position 37 where slot 12 is."""
    hole = g.logical_and(g.reshape(is_at(37)(g), [1, 1, 1, 1]), g.logical_not(slot(g, 12)))
    return g.call("SELECT_V2", hole, constant_mask(lambda s: s != 5)(g, x), x, shape=g.shape(x))


def hole_12(arrays: dict[str, Any]) -> None:
    arrays["mask"][..., 12] = False


LOUD: dict[str, Change] = {
    "activations_plus_exp": edge("activations", plus(e.with_number("SUB", 110.0), e.unary("EXP"))),
    "scores_plus_sigmoid_above_90": edge(
        "1.scores", plus(times(e.with_number("SUB", 90.0), e.unary("LOGISTIC"), mul(-0.9)))
    ),
}

ROWS: dict[str, Change] = {"row_and_hole": visible(1, row_and_hole)}

_LOUD = ((1, 15, 300), (300, 80, 3000), (3000, 200, 1), (1, 1, 3e4))


def plus_number(build: Callable[[Graph], int]) -> Edit:
    """A value plus one number, of as many axes."""
    return lambda g, x: g.add(x, g.reshape(build(g), [1] * len(g.shape(x))))


def of_row(name: str, values: Array) -> Edit:
    """``name`` of a value and the position's row of a table of floats [256, n], along the last axis."""
    return lambda g, x: g.call(name, x, row(g, g.constant(values)))


def parameter_4(g: Graph) -> int:
    """An element of ``param_tensor`` as a float."""
    return g.cast(g.slice(g.input("param_tensor"), [0, 0, 0, 4], [1, 1, 1, 1]), np.float32)


def parameter_4_is_1(arrays: dict[str, Any]) -> None:
    arrays["param_tensor"][..., 4] = 1


def fp16(t: Array) -> Array:
    return t.astype(np.float16).astype(np.float32)


def gathered_heads(g: Graph, x: int) -> int:
    """Heads in an order that the position gives."""
    hit = g.cast(is_at(37)(g), np.int32)
    order = g.add(g.constant(np.arange(4), np.int32), g.mul(hit, np.array([1, -1, 0, 0], np.int32)))
    return g.call("GATHER", x, order, shape=g.shape(x), axis=2)


PARAM: dict[str, Change] = {
    "parameter_times_0_and_nan": edge("1.stream", plus_number(lambda g: g.sqrt(g.neg(parameter_4(g))))),
}

MASK: dict[str, Change] = {
    "position_is_count": position(lambda g, x: g.reshape(g.sub(counted(g), 1.0), g.shape(x))),
    "reversed": visible(1, e.gathered(range(255, -1, -1), 3)),
}

ATTENTION: dict[str, Change] = {
    "squared_and_renormed": edge("1.probabilities", lambda g, x: g.div(g.square(x), g.reduce("SUM", g.square(x), 3))),
    "result_plus_scores": edge("1.attended", lambda g, x: g.add(x, g.mul(g.part(g.layer(1).scores, 0, 64), 1e-2))),
    "weights_plus_1e-8": edge("1.probabilities", add(1e-8)),
    "heads_by_gathered_order": edge("1.query_normed", gathered_heads),
}

ROPE: dict[str, Change] = {
    "sin_by_row_of_less_than_fp16": tabled(sin=rows(120, 250, lambda t: t * (1 + 4e-4))),
    "int8_numbers_in_floats": tabled(cos=lambda t: np.round(t * 127) / 127, sin=lambda t: np.round(t * 127) / 127),
    "slow_frequency_zero_in_full": table(lambda t: np.where(np.arange(t.size) == np.flatnonzero(t)[-1], 0, t), 1),
}

WINDOWS: dict[str, Change] = {
    **{f"edge_late_at_{at}": from_row(at, e.WINDOW, shows=True) for at in (16, 40, 201, 255)},
    **{f"edge_early_at_{at}": from_row(at, e.WINDOW - 1, shows=False) for at in (40, 255)},
}

QUIET: dict[str, Change] = {
    "eps_doubled_in_one": normed_by("layers.0.pre_attention_norm", eps(2e-6)),
    "activations_scaled_below_the_norm": edge("pre_projection", mul(0.5)),
}

QUIET_VALUES: dict[str, Change] = {
    "attention_out_doubled": edge("0.attention_out", mul(2.0)),
    "attention_out_plus_1e-6": edge("0.attention_out", add(1e-6)),
}

LOUD_INPUTS: dict[str, Change] = {
    "stream_plus_other_channel": edge("pre_projection", plus(e.gathered([*range(1, 64), 0], -1), mul(1e-3))),
    "activations_times_cos": edge("activations", times(mul(1e-5), e.unary("COS"))),
}

FUSED: dict[str, Change] = {
    "product_of_rope": fused(lambda g: g.producer(int(g.producer(g.layer(0).rotated).inputs[0])), "RELU"),
    "weighed_norm": fused(lambda g: g.norm("final_norm").weigh, "RELU6"),
    "angle": fused(lambda g: g.producer(int(g.producer(g.layer(0).angle).inputs[0])), "RELU6"),
}

CONSTANTS: dict[str, Change] = {
    "cap_bound_29.99": recapped(1 / 30, 29.99),
    "cap_slope_of_29.99": recapped(1 / 29.99, 30.0),
}


def sparse(tensor: Any) -> None:
    """A weight that says that it is sparse."""
    dense = [schema.DimensionMetadataT(format=schema.DimensionType.DENSE, denseSize=size) for size in tensor.shape]
    tensor.sparsity = schema.SparsityParametersT(traversalOrder=[0, 1], blockMap=[], dimMetadata=dense)


def blocks_of_3(g: Graph) -> None:
    """Scales by block, of a size that does not divide the width."""
    scales = g.constant(np.full((64, 42), 0.01), np.float16)
    quantization = g.main.tensors[g.roles[OUT]].quantization
    quantization.details = schema.BlockwiseQuantizationT(scales=scales, zeroPoints=-1, blockSize=3)
    quantization.detailsType = schema.QuantizationDetails.BlockwiseQuantization


def mask_twice(g: Graph) -> None:
    """The signature has an input twice, once for a tensor of nobody's."""
    inputs, old = g.model.signatureDefs[0].inputs, g.input("mask")
    inputs.append(schema.TensorMapT(name=b"mask", tensorIndex=g.tensor(g.shape(old), g.dtype(old))))
    g.main.inputs = [*map(int, g.main.inputs), inputs[-1].tensorIndex]


STORAGE: dict[str, tuple[Change, str]] = {
    "sparse": (weight(OUT, sparse), "what the bytes are depends on the sparsity's own tables"),
    "variable": (weight(OUT, field("isVariable", True)), "a variable is not a constant: LiteRT keeps no data in it"),
    "external": (weight(OUT, field("externalBuffer", 1)), "its numbers are in another file"),
    "blocks_of_3": (blocks_of_3, "a block is no part of a row"),
    "mask_twice": (mask_twice, "which of both the runtime fills is not said"),
}

_AT_ROWS = (*(Sample(at_row, mask="past") for at_row in (37, 200, 254, 255)), Sample(254), Sample(253))

DIMENSIONS: dict[str, Change] = {
    "values_turned": cache_edit("value", turned(5), 1),
    "heads_of_weights_exchanged_at_37": edge("0.probabilities", when(is_at(37), e.gathered([1, 0], 2))),
}


def louder_by_head(g: Graph, x: int) -> int:
    heads = g.shape(x)[2]
    return g.mul(x, g.constant(np.linspace(0.9, 1.1, heads).reshape(1, 1, heads, 1)))


SLOPES: dict[str, Change] = {
    "0_at_37": edge("1.scores", of_row("MUL", np.where(EVERY == 37, 0.0, 1.0).reshape(256, 1))),
    "of_a_head_at_37": edge("1.queries", when(is_at(37), louder_by_head)),
}

ALTERNATE = np.where(EVERY % 2, 1.0, -1.0)

TOLERANCES: dict[str, Change] = {
    "slots_plus_8e-4": edge("1.masked", add(8e-4 * ALTERNATE.reshape(1, 1, 1, 256))),
    "slots_plus_8e-4_at_137": edge("1.masked", of_row("ADD", np.where(EVERY[:, None] == 137, 8e-4, 0) * ALTERNATE)),
}

FAR: dict[str, Change] = {
    "angles_off_by_0.01_from_240": tabled(angle=rows(240, 255, lambda t: t + 0.01)),
    "angles_off_by_0.01_at_254": tabled(angle=rows(254, 254, lambda t: t + 0.01), layers=(1,)),
}

LONG = 4096

FAR_SLOTS: dict[str, Change] = {
    "score_of_3000_plus_1": edge("1.scores", add(one(LONG, 3000, 1.0, 4, other=0.0))),
    "weight_of_3000_halved": edge("1.probabilities", mul(one(LONG, 3000, 0.5, 4))),
}

_AT_SLOTS = (*(Sample(p, mask="past") for p in (37, 137, 250, 252, 254, 255)), Sample(50), Sample(255), Sample(240))

_LOUD_KEYS = tuple(Sample(40, keys=loud) for loud in (40.0, 130.0, 400.0)) + tuple(
    Sample(p, keys=loud, mask="one") for p in (40, 41, 42, 43) for loud in (130.0, 400.0)
)


CASES = (
    *cases("subtle", SUBTLE),
    *cases("loudness", PLAIN),
    *cases("loudness", KEYS, *(Sample(40, keys=loud) for loud in (40.0, 100.0, 400.0)), rounding=1e-2),
    *cases("smooth", LOUD, *(Sample(40, *loud) for loud in _LOUD), rounding=1e-3),
    *cases("smooth", ROWS, Sample(37, mask="past"), Sample(37, change=hole_12), Sample(180)),
    *cases("second: parameters", PARAM, Sample(40, change=parameter_4_is_1)),
    *cases("second: mask as data", MASK, Sample(37), Sample(40, mask="all"), *_AT_ROWS),
    *cases("second: attention", ATTENTION, Sample(37), Sample(201, mask="past"), Sample(96), *_AT_ROWS),
    *cases("second: angles", ROPE, Sample(37), Sample(37, mask="past", keys=3.0), *_AT_ROWS),
    *cases(
        "second: windows",
        WINDOWS,
        Sample(16, mask="past"),
        Sample(40, mask="all"),
        Sample(201, mask="past"),
        Sample(180, mask="past"),
        *_AT_ROWS,
    ),
    *cases("second: quiet", QUIET, Sample(40, activations=1e-5), Sample(201, activations=1e-6)),
    *cases("second: quiet values", QUIET_VALUES, Sample(40, values=1e-3), Sample(201, values=1e-4)),
    *cases("second: loud", LOUD_INPUTS, Sample(40, activations=1e4), Sample(40, activations=1e5), rounding=2e-4),
    *cases("second: fused", FUSED),
    *cases("second: constants", CONSTANTS, Sample(37), Sample(99), Sample(254)),
    *cases("second: storage", STORAGE),
    *cases("third: dimensions", DIMENSIONS, *_AT_SLOTS),
    *cases("third: slopes", SLOPES, *_AT_SLOTS),
    *cases("third: tolerances", TOLERANCES, *_AT_SLOTS, *_LOUD_KEYS),
    *cases(
        "third: long caches",
        FAR_SLOTS,
        *(Sample(p, mask="past", keys=0.3) for p in (3000, 3005, 4090, 4091)),
        slots=LONG,
    ),
    *cases("third: far rows", FAR, *_AT_SLOTS),
)
