"""Weights, types and grids of numbers, codes that are cast and wrap, and operators that no drafter has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Case, Change, Edit, Sample, a_change, an_edit, cases, edge, edges
from adversary.mutations.attention import cache_edit, summed
from adversary.mutations.blocks import epsilon, normed_by, weighted
from adversary.mutations.positions import position


def scaled_fp16(factor: float) -> Edit:
    return e.chain(e.mul(factor), e.through(np.float16), e.mul(1 / factor))


@a_change
def weight(g: Graph, role: str, edit: Callable[[Any], object]) -> None:
    """``edit`` of the weight's tensor, as described in the file."""
    edit(g.main.tensors[g.roles[role]])


@a_change
def real_weight(g: Graph, role: str, edit: Edit) -> None:
    """The weight as numbers, then ``edit``: what an exporter leaves that multiplies weights at run time."""
    g.insert(g.roles[role], lambda w: edit(g, e.dequantized(g, w)))


def bias(g: Graph) -> None:
    op = g.linear(OUT)
    op.inputs = [*map(int, op.inputs[:2]), g.constant(0.2 * np.sin(np.arange(g.shape(int(op.outputs[0]))[-1])))]


def gate_and_up_exchanged(g: Graph) -> None:
    gate, up = g.linear(GATE), g.linear(UP)
    g.set_input(gate, 1, g.roles[UP])
    g.set_input(up, 1, g.roles[GATE])


def low_rank(g: Graph, x: int) -> int:
    """A second path beside a projection."""
    random = np.random.default_rng(3)
    narrow = g.product(g.layer(0).product, g.constant(random.standard_normal([4, 128]) * 0.2))
    return g.add(x, g.product(narrow, g.constant(random.standard_normal([64, 4]) * 0.2)))


@an_edit
def turned(g: Graph, x: int, seed: int) -> int:
    """Multiplied by an orthogonal matrix that nothing undoes."""
    size = g.shape(x)[-1]
    matrix, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal([size, size]))
    return g.product(x, g.constant(matrix))


def scales(edit: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        tensor.quantization.scale = edit(np.asarray(tensor.quantization.scale, np.float32)).astype(np.float32)

    return change


def field(name: str, setting: Any) -> Callable[[Any], None]:
    """A field of a tensor, as described in the file."""
    return lambda tensor: setattr(tensor, name, setting)


def zero_points(tensor: Any) -> None:
    tensor.quantization.zeroPoint = np.full(len(tensor.quantization.scale), 5, np.int64)


def data_and_offset(g: Graph) -> None:
    """A buffer that has bytes, and says that it has others, elsewhere in the file."""
    tensor = g.main.tensors[g.roles[OUT]]
    data = bytes(g.model.buffers[tensor.buffer].data)
    tensor.buffer = g.buffer(data)
    g.model.buffers[tensor.buffer].offset, g.model.buffers[tensor.buffer].size = 4096, len(data)


OUT, UP, POST, GATE = "layers.0.o_proj", "layers.0.up_proj", "post_projection", "layers.0.gate_proj"
_SHUFFLED = schema.FullyConnectedOptionsWeightsFormat.SHUFFLED4x16INT8

WEIGHTS: dict[str, Change] = {
    "transposed_by_an_operator": real_weight(POST, lambda g, w: g.transpose(w, [1, 0])),
    "bias": bias,
    "gate_of_layer_1": lambda g: g.set_input(g.linear(GATE), 1, g.roles["layers.1.gate_proj"]),
    "gate_and_up_exchanged": gate_and_up_exchanged,
    "second_path": edge("0.down", low_rank),
    "state_rotated": edge("state", turned(4)),
    "stream_rotated": edge("1.stream", turned(4)),
    "scales_negative": weight(OUT, scales(lambda s: np.where(np.arange(s.size) % 2 == 0, -s, s))),
    "scales_zero": weight(OUT, scales(lambda s: np.where(np.arange(s.size) < 8, 0.0, s))),
    "scales_too_few": weight(OUT, scales(lambda s: s[:-1])),
    "axis_of_columns": weight(POST, lambda tensor: setattr(tensor.quantization, "quantizedDimension", 1)),
    "zero_points": weight(OUT, zero_points),
    "data_and_offset": data_and_offset,
    "shuffled_format": lambda g: setattr(g.linear(UP).builtinOptions, "weightsFormat", _SHUFFLED),
    "int8_typed_uint8": weight(OUT, field("type", schema.TensorType.UINT8)),
    "int8_typed_bool": weight(OUT, field("type", schema.TensorType.BOOL)),
    "int4_typed_int8": weight(UP, field("type", schema.TensorType.INT8)),
    "scales_nan": weight(OUT, scales(lambda s: np.where(np.arange(s.size) == 3, np.nan, s))),
}

NOT_SEEN = {
    "axis_of_columns": "the file says that scales are by column; LiteRT's kernels take them by row",
    "zero_points": "LiteRT's kernels ignore zero points of weights; the file says that they count",
    "data_and_offset": "LiteRT takes the bytes of the buffer, not those at its offset",
    "shuffled_format": "the order of elements is another",
    "int8_typed_bool": "BOOL holds no weights",
    "int8_typed_uint8": "the codes mean other numbers",
    "int4_typed_int8": "half of the bytes are missing",
    "scales_too_few": "a row has no scale",
    "scales_nan": "not a number",
}


def rescaled(g: Graph, x: int) -> int:
    """QUANTIZE to INT8; a RESHAPE hands the codes on as if their scale were another; DEQUANTIZE."""
    shifted = g.reshape(e.quantized(g, x, 0.05), g.shape(x))
    g.main.tensors[shifted].quantization = e.parameters(0.1)
    return e.dequantized(g, shifted)


GRIDS = edges(
    {
        "activations": {"int32": e.through(np.int32), "floor": e.unary("FLOOR"), "quarters": e.grid(0.25)},
        "pre_projection": {"int8": e.through(np.int8)},
        "0.query": {"ceil": e.unary("CEIL"), "int16": e.through(np.int16)},
        "0.angle": {"fp16": e.through(np.float16)},
        "0.query_normed": {"sign": e.unary("SIGN")},
        "0.scores": {"int32": e.through(np.int32), "halves": e.grid(0.5)},
        "0.probabilities": {"round": e.unary("ROUND")},
        "0.product": {"uint8": e.through(np.uint8)},
        "1.stream": {"bool": e.through(np.bool_)},
        "logits": {"halves": e.grid(0.5)},
    }
) | {"stream_quantized_with_two_scales": edge("1.stream", rescaled)}

POSITION: dict[str, Change] = {
    "position_int8": position(e.over_int(1.0)),
    "position_cast_int8": edge("input_pos", lambda g, x: g.cast(g.cast(x, np.int8), np.int32)),
    "sin_cast_int8": edge("0.sin", e.through(np.int8)),
}

OVERFLOW: dict[str, Change] = {
    "values_fp16_of_thousands": cache_edit("value", scaled_fp16(1000.0)),
}


def custom(g: Graph, x: int) -> int:
    result = g.tensor(g.shape(x))
    op = g.emit("CUSTOM", [x], [result])
    g.model.operatorCodes[op.opcodeIndex].customCode = b"Identity"
    return result


OPERATORS: dict[str, Change] = {
    "reversed": edge("1.stream", lambda g, x: g.call("REVERSE_V2", x, np.array([2], np.int32), shape=g.shape(x))),
    "length_of_1": edge("0.queries", e.unary("L2_NORMALIZATION")),
    "cosine_of_scores": edge("0.scores", e.unary("COS")),
    "sine_of_the_result": edge("0.attended", e.unary("SIN")),
}

CUSTOM: dict[str, Change] = {
    "custom": edge("1.stream", custom),
    "custom_in_attention": edge("0.queries", custom),
}


# Integers that wrap.


def position_uint8_times_3(g: Graph, x: int) -> int:
    """The position for the angles, times 3 in one type of integers and through another."""
    large = g.mul(g.cast(g.input("input_pos"), np.int32), np.array([3], np.int32))
    return g.mul(g.reshape(e.through(np.uint8)(g, large), g.shape(x)), 1 / 3)


def hidden_twice(g: Graph, m: int) -> int:
    """−2³¹ where a slot is hidden, twice: nothing at all."""
    hidden = g.sub(np.array(1, np.int32), g.cast(m, np.int32))
    once = g.mul(hidden, np.array(-(2**31), np.int32))
    return g.cast(g.add(once, once), np.float32)


WRAPS: dict[str, Change] = {
    "position_uint8_times_3": position(position_uint8_times_3),
    "hidden_sum_wraps": summed(hidden_twice),
}


# Constants that pass through another type.

EPSILONS: dict[str, Change] = {
    "eps_cast_fp16": normed_by(
        "layers.0.post_attention_norm", epsilon(lambda g, _: e.through(np.float16)(g, g.constant(1e-6)))
    ),
    "eps_stored_fp16": normed_by(
        "layers.0.post_attention_norm", epsilon(lambda g, _: g.cast(g.constant(1e-6, np.float16), np.float32))
    ),
}

OTHERS: dict[str, Change] = {
    "norm_weight_on_a_grid_off_centre": normed_by("layers.0.pre_ffw_norm", weighted(e.over_int(0.02, 100))),
    "norm_weight_cast_int32": normed_by("layers.0.pre_ffw_norm", weighted(e.through(np.int32))),
}

# A grid that ends above what hides a slot, and numbers that half precision loses.
GRIDS_OF_HALVES = edges(
    {
        "activations": {"fp16_of_1e-6": scaled_fp16(1e-6)},
        "1.query_normed": {"fp16_of_1e-7": scaled_fp16(1e-7)},
        "1.scores": {"fp16_of_1e5": scaled_fp16(1e5)},
        "1.masked": {"hidden_at_-3_int8": e.over_int(6 / 255)},
        "1.probabilities": {"fp16_of_1e-6": scaled_fp16(1e-6)},
        "logits": {"fp16_of_1e-7": scaled_fp16(1e-7)},
    }
)


CASES = (
    *cases("casts and grids", GRIDS),
    *(Case("weights", name, change, why=NOT_SEEN.get(name, "")) for name, change in WEIGHTS.items()),
    *cases("operators", OPERATORS),
    *cases("operators", CUSTOM, why="nobody knows what it computes"),
    *cases("number types", POSITION, Sample(37), Sample(230), exact=True),
    *cases("number types", OVERFLOW, Sample(40, activations=1e3, values=1e3), exact=True, rounding=0.02),
    *cases("third: integers that wrap", WRAPS, Sample(201, mask="past"), Sample(150, mask="past"), Sample(250)),
    *cases("third: epsilons", EPSILONS, Sample(40, values=1e-3), Sample(201, values=1e-4), exact=True),
    *cases("third: constants", OTHERS, Sample(250), exact=True),
    *cases("third: grids", GRIDS_OF_HALVES, Sample(40, keys=4.0), rounding=1e-3, exact=True),
)
