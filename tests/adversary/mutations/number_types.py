"""Number types that are more than a rounding: grids that saturate or are off centre, casts that cut."""

from __future__ import annotations

import numpy as np
from helpers.surgery import Graph

from adversary.edits import (
    Case,
    Change,
    Edit,
    Sample,
    chain,
    edge,
    mul,
    over_bfloat,
    over_int,
    parameters,
    through,
    with_number,
)
from adversary.mutations.heads import cache_edit
from adversary.mutations.masks import hidden_sum, summed
from adversary.mutations.rope import angle, position
from adversary.mutations.weights import real_weight, stored_weight

int16 = np.int16


def hidden_on(edit: Edit) -> Change:
    """The mask that is added to the scores, 0 and −1e9, on a grid."""
    return summed(lambda g, m: edit(g, hidden_sum(g, m)))


def codes_read_twice_as_large(g: Graph) -> None:
    """A weight's codes, which another tensor describes with twice the scale."""
    op = g.linear("layers.0.up_proj")
    weight = g.constant(g.floats(int(op.inputs[1])))
    scale = float(np.abs(g.value(weight)).max() / 127)
    codes = g.call("QUANTIZE", weight, dtype=np.int8)
    g.main.tensors[codes].quantization = parameters(scale)
    other = g.reshape(codes, g.shape(codes))
    g.main.tensors[other].quantization = parameters([2 * scale])
    # Half of the rows only: a norm would divide a common factor away.
    halves_ = [g.part(t, begin, 64, 0) for t, begin in ((codes, 0), (other, 64))]
    for half, factor in zip(halves_, (1, 2), strict=True):
        g.main.tensors[half].quantization = parameters(factor * scale)
    g.set_input(op, 1, g.join([g.call("DEQUANTIZE", half, dtype=np.float32) for half in halves_], 0))


def requantized(first: tuple[float, int], second: tuple[float, int]) -> Edit:
    """From one INT8 grid to a narrower one."""

    def edit(g: Graph, x: int) -> int:
        codes = g.call("QUANTIZE", x, dtype=np.int8)
        narrow = g.call("QUANTIZE", codes, dtype=np.int8)
        for tensor, grid in ((codes, first), (narrow, second)):
            g.main.tensors[tensor].quantization = parameters(*grid)
        return g.call("DEQUANTIZE", narrow, dtype=np.float32)

    return edit


POSITION: dict[str, Change] = {
    "position_int8": position(over_int(1.0)),
    "position_int8_in_twos": position(over_int(2.0, -128)),
    "position_int8_off_centre": position(over_int(1.0, 100)),
    "position_int16_in_halves_of_3": position(over_int(1.5, 0, int16)),
    "position_cast_int8": edge("input_pos", lambda g, x: g.cast(g.cast(x, np.int8), np.int32)),
    "position_cast_bool": edge("input_pos", lambda g, x: g.cast(g.cast(x, np.bool_), np.int32)),
    "position_fp16_of_thousands": position(chain(mul(1000.0), through(np.float16), mul(0.001))),
    "angle_int8": angle(over_int(1.0)),
    "angle_int8_of_128": angle(over_int(2.0, -128)),
    "angle_int16_of_100": angle(over_int(0.003, 0, int16)),
    "angle_bf16": angle(over_bfloat),
    "angle_bf16_in_full": angle(over_bfloat, 1),
    "angle_cast_int32": angle(through(np.int32)),
    "cos_int8_from_0": edge("0.cos", over_int(1 / 127, -128)),
    "sin_int8_to_0": edge("0.sin", over_int(1 / 127, 127)),
    "cos_int8_within_a_half": edge("1.cos", over_int(0.5 / 127)),
    "sin_int16_within_0.9": edge("1.sin", over_int(0.9 / 32767, 0, int16)),
    "cos_uint8": edge("0.cos", over_int(1 / 255, 0, np.uint8)),
    "sin_cast_int8": edge("0.sin", through(np.int8)),
}
MASK: dict[str, Change] = {
    "mask_int8_of_12.8": hidden_on(over_int(0.1)),
    "mask_int8_of_6": hidden_on(over_int(0.05)),
    "mask_int16_of_8": hidden_on(over_int(8 / 32767, 0, int16)),
    "mask_int8_without_negatives": hidden_on(over_int(1.0, -128)),
    "mask_requantized": hidden_on(requantized((1.0, 0), (0.05, 0))),
}
STATES: dict[str, Change] = {
    "query_int8_within_a_half": edge("0.queries", over_int(0.5 / 127)),
    "query_int8_from_0": edge("1.rotated", over_int(2 / 127, -128)),
    "keys_int8_within_a_half": cache_edit("key", over_int(0.5 / 127)),
    "keys_int8_from_0": cache_edit("key", over_int(1 / 127, -128), 1),
    "values_int8_within_1": cache_edit("value", over_int(1 / 127)),
    "values_int16_to_0": cache_edit(
        "value", chain(with_number("SUB", 3.0), over_int(3 / 32767, 0, int16), with_number("ADD", 3.0))
    ),
    "scores_int8_within_1": edge("0.scores", over_int(1 / 127)),
    "scores_int8_from_0": edge("1.scores", over_int(0.1, -128)),
    "probabilities_int8_within_a_tenth": edge("0.probabilities", over_int(0.1 / 127)),
    "activations_int8_within_1": edge("activations", over_int(1 / 127)),
    "activations_int8_from_0": edge("activations", over_int(4 / 255, -128)),
    "activations_int16_within_1": edge("activations", over_int(1 / 32767, 0, int16)),
    "stream_int8_within_1": edge("1.stream", over_int(1 / 127)),
    "stream_int16_within_1": edge("1.stream", over_int(1 / 32767, 0, int16)),
    "stream_requantized": edge("1.stream", requantized((0.1, 0), (0.005, 0))),
    "gate_int8_to_0": edge("0.gate", over_int(0.05, 127)),
    "product_int8_within_a_tenth": edge("0.product", over_int(0.1 / 127)),
    "merged_int8_from_0": edge("1.merged", over_int(0.01, -128)),
    "state_int8_to_0": edge("state", over_int(0.05, 127)),
    "logits_int8_within_3": edge("logits", over_int(3 / 127)),
    "logits_before_cap_int8_from_0": edge("lm_head", over_int(0.2, -128)),
    "projected_int8_within_1": edge("projected_activations", over_int(1 / 127)),
}
CASTS: dict[str, Change] = {
    "activations_cast_uint8": edge("activations", lambda g, x: through(np.uint8)(g, g.call("ABS", x))),
    "stream_cast_int16_by_4": edge("1.stream", chain(mul(4.0), through(np.int16), mul(0.25))),
    "mlp_cast_bool": edge("0.activated", through(np.bool_)),
    "lm_head_cast_int8": stored_weight("lm_head", chain(mul(20.0), through(np.int8), mul(0.05))),
    "lm_head_real_cast_int32": real_weight("lm_head", chain(mul(20.0), through(np.int32), mul(0.05))),
    "lm_head_bf16": stored_weight("lm_head", over_bfloat),
    "down_bf16": stored_weight("layers.0.down_proj", over_bfloat),
    "query_cast_int32": edge("1.query_normed", through(np.int32)),
    "codes_read_twice_as_large": codes_read_twice_as_large,
    "weight_int8_saturated": stored_weight("layers.0.gate_proj", over_int(0.0005)),
    "weight_int8_off_centre": stored_weight("layers.0.o_proj", over_int(0.002, 127)),
}
OVERFLOW: dict[str, Change] = {
    "stream_fp16_of_thousands": edge("1.stream", chain(mul(1000.0), through(np.float16), mul(0.001))),
    "values_fp16_of_thousands": cache_edit("value", chain(mul(1000.0), through(np.float16), mul(0.001))),
}

NUMBER_TYPES = tuple(
    Case("number types", name, change, shows=shows, rounding=rounding, exact=True)
    for changes, shows, rounding in (
        (POSITION, (Sample(37), Sample(230)), 0.0),
        (MASK, (), 0.0),
        (STATES, (), 0.02),
        (CASTS, (), 0.0),
        (OVERFLOW, (Sample(40, activations=1e3, values=1e3),), 0.02),
    )
    for name, change in changes.items()
)
