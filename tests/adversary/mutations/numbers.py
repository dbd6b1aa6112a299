"""Weights, types and grids of numbers, codes that are cast and wrap, and operators that no drafter has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary import edits as e
from adversary.edits import Case, Change, Edit, Sample, a_change, an_edit, cases, edge
from adversary.mutations.attention import cache_edit, summed
from adversary.mutations.blocks import normed_by
from adversary.mutations.positions import position


@a_change
def weight(g: Graph, role: str, edit: Callable[[Any], object]) -> None:
    """``edit`` of the weight's tensor, as described in the file."""
    edit(g.main.tensors[g.roles[role]])


@a_change
def real_weight(g: Graph, role: str, edit: Edit) -> None:
    """The weight as numbers, then ``edit``: what an exporter leaves that multiplies weights at run time."""
    op, tensor = g.linear(role), g.roles[role]
    real = g.tensor(g.shape(tensor))
    g.emit("DEQUANTIZE", [tensor], [real])
    g.set_input(op, 1, edit(g, real))


@a_change
def stored_weight(g: Graph, role: str, edit: Edit) -> None:
    """``edit`` of the weight's numbers stored as floats, without a DEQUANTIZE."""
    op, tensor = g.linear(role), g.roles[role]
    g.set_input(op, 1, edit(g, g.constant(g.floats(tensor))))


@a_change
def bias(g: Graph, role: str, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    op = g.linear(role)
    op.inputs = [*(int(i) for i in op.inputs[:2]), g.constant(edit(np.arange(g.shape(int(op.outputs[0]))[-1])))]


def option(role: str, name: str, setting: Any) -> Change:
    return lambda g: setattr(g.linear(role).builtinOptions, name, setting)


def shared(role: str, other: str) -> Change:
    return lambda g: g.set_input(g.linear(role), 1, g.roles[other])


@a_change
def exchanged(g: Graph, role: str, other: str) -> None:
    one, two = g.linear(role), g.linear(other)
    g.set_input(one, 1, g.roles[other])
    g.set_input(two, 1, g.roles[role])


def low_rank(g: Graph) -> None:
    """A second path beside a projection."""
    op = g.linear("layers.0.down_proj")
    random = np.random.default_rng(3)
    x, out = int(op.inputs[0]), int(op.outputs[0])
    narrow = g.product(x, g.constant(random.standard_normal([4, 128]) * 0.2))
    wide = g.product(narrow, g.constant(random.standard_normal([64, 4]) * 0.2))
    g.insert(out, lambda y: g.add(y, wide), list(g.readers(out)))


def rotation(place: str) -> Change:
    """Multiplied by an orthogonal matrix that nothing undoes."""

    def edit(g: Graph, x: int) -> int:
        size = g.shape(x)[-1]
        matrix, _ = np.linalg.qr(np.random.default_rng(4).standard_normal([size, size]))
        return g.product(x, g.constant(matrix))

    return edge(place, edit)


def scales(edit: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        tensor.quantization.scale = edit(np.asarray(tensor.quantization.scale, np.float32)).astype(np.float32)

    return change


def zero_points(value: int) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        tensor.quantization.zeroPoint = np.full(len(tensor.quantization.scale), value, np.int64)

    return change


def typed(name: str) -> Callable[[Any], None]:
    return lambda tensor: setattr(tensor, "type", getattr(schema.TensorType, name))


def dimension(axis: int) -> Callable[[Any], None]:
    return lambda tensor: setattr(tensor.quantization, "quantizedDimension", axis)


@a_change
def data_and_offset(g: Graph, role: str) -> None:
    """A buffer that has bytes, and says that it has others, elsewhere in the file."""
    tensor = g.main.tensors[g.roles[role]]
    data = bytes(g.model.buffers[tensor.buffer].data)
    tensor.buffer = g.buffer(data)
    g.model.buffers[tensor.buffer].offset, g.model.buffers[tensor.buffer].size = 4096, len(data)


OUT, UP, POST = "layers.0.o_proj", "layers.0.up_proj", "post_projection"

WEIGHTS: dict[str, Change] = {
    "transposed_by_an_operator": real_weight(POST, lambda g, w: g.transpose(w, [1, 0])),
    "bias": bias(OUT, lambda i: 0.2 * np.sin(i)),
    "gate_of_layer_1": shared("layers.0.gate_proj", "layers.1.gate_proj"),
    "gate_and_up_exchanged": exchanged("layers.0.gate_proj", UP),
    "second_path": low_rank,
    "state_rotated": rotation("state"),
    "stream_rotated": rotation("1.stream"),
    "scales_negative": weight(OUT, scales(lambda s: np.where(np.arange(s.size) % 2 == 0, -s, s))),
    "scales_zero": weight(OUT, scales(lambda s: np.where(np.arange(s.size) < 8, 0.0, s))),
    "scales_too_few": weight(OUT, scales(lambda s: s[:-1])),
    "axis_of_columns": weight(POST, dimension(1)),
    "zero_points": weight(OUT, zero_points(5)),
    "data_and_offset": data_and_offset(OUT),
    "shuffled_format": option(UP, "weightsFormat", schema.FullyConnectedOptionsWeightsFormat.SHUFFLED4x16INT8),
    "int8_typed_uint8": weight(OUT, typed("UINT8")),
    "int8_typed_bool": weight(OUT, typed("BOOL")),
    "int4_typed_int8": weight(UP, typed("INT8")),
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


@an_edit
def rescaled(g: Graph, x: int, scale: float, back: float) -> int:
    """QUANTIZE to INT8 with ``scale``; a RESHAPE hands the codes on as if their scale were ``back``; DEQUANTIZE."""
    codes = e.quantized(g, x, scale)
    shifted = g.call("RESHAPE", codes, np.array(g.shape(x), np.int32), shape=g.shape(x))
    g.main.tensors[shifted].quantization = e.parameters(back)
    return g.call("DEQUANTIZE", shifted, dtype=np.float32)


GRIDS: dict[str, Change] = {
    **{
        f"{place}_{name}": edge(place, edit)
        for place, edits in {
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
        }.items()
        for name, edit in edits.items()
    },
    "stream_quantized_with_two_scales": edge("1.stream", rescaled(0.05, 0.1)),
}

POSITION: dict[str, Change] = {
    "position_int8": position(e.over_int(1.0)),
    "position_cast_int8": e.edge("input_pos", lambda g, x: g.cast(g.cast(x, np.int8), np.int32)),
    "sin_cast_int8": e.edge("0.sin", e.through(np.int8)),
}

OVERFLOW: dict[str, Change] = {
    "values_fp16_of_thousands": cache_edit("value", e.chain(e.mul(1000.0), e.through(np.float16), e.mul(0.001))),
}


def on_axis(name: str) -> Edit:
    """An operator that takes the axis it works along."""
    return lambda g, x: g.call(name, x, np.array([len(g.shape(x)) - 1], np.int32), shape=g.shape(x))


def custom(g: Graph, x: int) -> int:
    made = g.tensor(g.shape(x))
    op = g.emit("CUSTOM", [x], [made])
    code = g.model.operatorCodes[op.opcodeIndex]
    code.customCode = b"Identity"
    return made


OPERATORS: dict[str, Change] = {
    "reversed": edge("1.stream", on_axis("REVERSE_V2")),
    "length_of_1": edge("0.queries", e.unary("L2_NORMALIZATION")),
    "cosine_of_scores": edge("0.scores", e.unary("COS")),
    "sine_of_the_result": edge("0.attended", e.unary("SIN")),
}

CUSTOM: dict[str, Change] = {
    "custom": edge("1.stream", custom),
    "custom_in_attention": edge("0.queries", custom),
}

_EXACT = {"rounding": 0.02, "exact": True}

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


GRIDS_OF_HALVES: dict[str, Change] = {
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
    *cases("casts and grids", GRIDS),
    *(Case("weights", name, change, why=NOT_SEEN.get(name, "")) for name, change in WEIGHTS.items()),
    *cases("operators", OPERATORS),
    *cases("operators", CUSTOM, why="nobody knows what it computes"),
    *cases("number types", POSITION, Sample(37), Sample(230), exact=True),
    *cases("number types", OVERFLOW, Sample(40, activations=1e3, values=1e3), **_EXACT),
    *e.cases("third: integers that wrap", WRAPS, Sample(201, mask="past"), Sample(150, mask="past"), Sample(250)),
    *e.cases("third: epsilons", EPSILONS, Sample(40, values=1e-3), Sample(201, values=1e-4), exact=True),
    *e.cases("third: constants", OTHERS, Sample(250), exact=True),
    *e.cases("third: grids", GRIDS_OF_HALVES, Sample(40, keys=4.0), rounding=1e-3, exact=True),
)
