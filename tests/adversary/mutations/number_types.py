"""Number types that are more than a rounding: grids that saturate or are off centre, casts that cut."""

from __future__ import annotations

import numpy as np
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Case, Change, Edit, Sample
from adversary.mutations.heads import cache_edit
from adversary.mutations.masks import hidden_sum, summed
from adversary.mutations.rope import angle, position
from adversary.mutations.weights import stored_weight

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
    g.main.tensors[codes].quantization = e.parameters(scale)
    other = g.reshape(codes, g.shape(codes))
    g.main.tensors[other].quantization = e.parameters([2 * scale])
    # Half of the rows only: a norm would divide a common factor away.
    halves_ = [g.part(t, begin, 64, 0) for t, begin in ((codes, 0), (other, 64))]
    for half, factor in zip(halves_, (1, 2), strict=True):
        g.main.tensors[half].quantization = e.parameters(factor * scale)
    g.set_input(op, 1, g.join([g.call("DEQUANTIZE", half, dtype=np.float32) for half in halves_], 0))


def requantized(first: tuple[float, int], second: tuple[float, int]) -> Edit:
    """From one INT8 grid to a narrower one."""

    def edit(g: Graph, x: int) -> int:
        codes = g.call("QUANTIZE", x, dtype=np.int8)
        narrow = g.call("QUANTIZE", codes, dtype=np.int8)
        for tensor, grid in ((codes, first), (narrow, second)):
            g.main.tensors[tensor].quantization = e.parameters(*grid)
        return g.call("DEQUANTIZE", narrow, dtype=np.float32)

    return edit


POSITION: dict[str, Change] = {
    "position_int8": position(e.over_int(1.0)),
    "position_int8_in_twos": position(e.over_int(2.0, -128)),
    "position_int8_off_centre": position(e.over_int(1.0, 100)),
    "position_int16_in_halves_of_3": position(e.over_int(1.5, 0, int16)),
    "position_cast_int8": e.edge("input_pos", lambda g, x: g.cast(g.cast(x, np.int8), np.int32)),
    "position_cast_bool": e.edge("input_pos", lambda g, x: g.cast(g.cast(x, np.bool_), np.int32)),
    "position_fp16_of_thousands": position(e.chain(e.mul(1000.0), e.through(np.float16), e.mul(0.001))),
    "angle_int8": angle(e.over_int(1.0)),
    "angle_int8_of_128": angle(e.over_int(2.0, -128)),
    "angle_int16_of_100": angle(e.over_int(0.003, 0, int16)),
    "angle_bf16": angle(e.over_bfloat),
    "angle_bf16_in_full": angle(e.over_bfloat, 1),
    "angle_cast_int32": angle(e.through(np.int32)),
    "cos_int8_from_0": e.edge("0.cos", e.over_int(1 / 127, -128)),
    "sin_int8_to_0": e.edge("0.sin", e.over_int(1 / 127, 127)),
    "cos_int8_within_a_half": e.edge("1.cos", e.over_int(0.5 / 127)),
    "sin_int16_within_0.9": e.edge("1.sin", e.over_int(0.9 / 32767, 0, int16)),
    "cos_uint8": e.edge("0.cos", e.over_int(1 / 255, 0, np.uint8)),
    "sin_cast_int8": e.edge("0.sin", e.through(np.int8)),
}
MASK: dict[str, Change] = {
    "mask_int8_of_12.8": hidden_on(e.over_int(0.1)),
    "mask_int8_of_6": hidden_on(e.over_int(0.05)),
    "mask_int16_of_8": hidden_on(e.over_int(8 / 32767, 0, int16)),
    "mask_int8_without_negatives": hidden_on(e.over_int(1.0, -128)),
    "mask_requantized": hidden_on(requantized((1.0, 0), (0.05, 0))),
}
STATES: dict[str, Change] = {
    "query_int8_within_a_half": e.edge("0.queries", e.over_int(0.5 / 127)),
    "query_int8_from_0": e.edge("1.rotated", e.over_int(2 / 127, -128)),
    "keys_int8_within_a_half": cache_edit("key", e.over_int(0.5 / 127)),
    "keys_int8_from_0": cache_edit("key", e.over_int(1 / 127, -128), 1),
    "values_int8_within_1": cache_edit("value", e.over_int(1 / 127)),
    "values_int16_to_0": cache_edit(
        "value", e.chain(e.with_number("SUB", 3.0), e.over_int(3 / 32767, 0, int16), e.with_number("ADD", 3.0))
    ),
    "scores_int8_within_1": e.edge("0.scores", e.over_int(1 / 127)),
    "scores_int8_from_0": e.edge("1.scores", e.over_int(0.1, -128)),
    "probabilities_int8_within_a_tenth": e.edge("0.probabilities", e.over_int(0.1 / 127)),
    "activations_int8_within_1": e.edge("activations", e.over_int(1 / 127)),
    "activations_int8_from_0": e.edge("activations", e.over_int(4 / 255, -128)),
    "activations_int16_within_1": e.edge("activations", e.over_int(1 / 32767, 0, int16)),
    "stream_int8_within_1": e.edge("1.stream", e.over_int(1 / 127)),
    "stream_int16_within_1": e.edge("1.stream", e.over_int(1 / 32767, 0, int16)),
    "stream_requantized": e.edge("1.stream", requantized((0.1, 0), (0.005, 0))),
    "gate_int8_to_0": e.edge("0.gate", e.over_int(0.05, 127)),
    "product_int8_within_a_tenth": e.edge("0.product", e.over_int(0.1 / 127)),
    "merged_int8_from_0": e.edge("1.merged", e.over_int(0.01, -128)),
    "state_int8_to_0": e.edge("state", e.over_int(0.05, 127)),
    "logits_int8_within_3": e.edge("logits", e.over_int(3 / 127)),
    "logits_before_cap_int8_from_0": e.edge("lm_head", e.over_int(0.2, -128)),
    "projected_int8_within_1": e.edge("projected_activations", e.over_int(1 / 127)),
}
CASTS: dict[str, Change] = {
    "activations_cast_uint8": e.edge("activations", lambda g, x: e.through(np.uint8)(g, g.abs(x))),
    "stream_cast_int16_by_4": e.edge("1.stream", e.chain(e.mul(4.0), e.through(np.int16), e.mul(0.25))),
    "mlp_cast_bool": e.edge("0.activated", e.through(np.bool_)),
    "lm_head_cast_int8": stored_weight("lm_head", e.chain(e.mul(20.0), e.through(np.int8), e.mul(0.05))),
    "lm_head_bf16": stored_weight("lm_head", e.over_bfloat),
    "down_bf16": stored_weight("layers.0.down_proj", e.over_bfloat),
    "query_cast_int32": e.edge("1.query_normed", e.through(np.int32)),
    "codes_read_twice_as_large": codes_read_twice_as_large,
    "weight_int8_saturated": stored_weight("layers.0.gate_proj", e.over_int(0.0005)),
    "weight_int8_off_centre": stored_weight("layers.0.o_proj", e.over_int(0.002, 127)),
}
OVERFLOW: dict[str, Change] = {
    "stream_fp16_of_thousands": e.edge("1.stream", e.chain(e.mul(1000.0), e.through(np.float16), e.mul(0.001))),
    "values_fp16_of_thousands": cache_edit("value", e.chain(e.mul(1000.0), e.through(np.float16), e.mul(0.001))),
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
