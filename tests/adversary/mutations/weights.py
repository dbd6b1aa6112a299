"""Weights, and how the file says they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Change, Edit, add, chain, edge, grid, mul, put, through, unary, with_number


def weight(role: str, edit: Callable[[Any], object]) -> Change:
    """``edit`` of the weight's tensor, as described in the file."""

    def change(g: Graph) -> None:
        edit(g.main.tensors[g.roles[role]])

    return change


def real_weight(role: str, edit: Edit) -> Change:
    """The weight as numbers, then ``edit``: what an exporter leaves that multiplies weights at run time."""

    def change(g: Graph) -> None:
        op, tensor = g.linear(role), g.roles[role]
        real = g.tensor(g.shape(tensor))
        g.emit("DEQUANTIZE", [tensor], [real])
        g.set_input(op, 1, edit(g, real))

    return change


def stored_weight(role: str, edit: Edit) -> Change:
    """``edit`` of the weight's numbers stored as floats, without a DEQUANTIZE."""

    def change(g: Graph) -> None:
        op, tensor = g.linear(role), g.roles[role]
        g.set_input(op, 1, edit(g, g.constant(g.floats(tensor))))

    return change


def bias(role: str, edit: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(g: Graph) -> None:
        op = g.linear(role)
        op.inputs = [*(int(i) for i in op.inputs[:2]), g.constant(edit(np.arange(g.shape(int(op.outputs[0]))[-1])))]

    return change


def option(role: str, name: str, setting: Any) -> Change:
    return lambda g: setattr(g.linear(role).builtinOptions, name, setting)


def shared(role: str, other: str) -> Change:
    return lambda g: g.set_input(g.linear(role), 1, g.roles[other])


def exchanged(role: str, other: str) -> Change:
    def change(g: Graph) -> None:
        one, two = g.linear(role), g.linear(other)
        g.set_input(one, 1, g.roles[other])
        g.set_input(two, 1, g.roles[role])

    return change


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


def data_and_offset(role: str) -> Change:
    """A buffer that has bytes, and says that it has others, elsewhere in the file."""

    def change(g: Graph) -> None:
        tensor = g.main.tensors[g.roles[role]]
        data = bytes(g.model.buffers[tensor.buffer].data)
        tensor.buffer = g.buffer(data)
        g.model.buffers[tensor.buffer].offset, g.model.buffers[tensor.buffer].size = 4096, len(data)

    return change


OUT, UP, POST = "layers.0.o_proj", "layers.0.up_proj", "post_projection"
reversed_rows: Edit = lambda g, w: g.gather(w, range(g.shape(w)[0] - 1, -1, -1), 0)  # noqa: E731

WEIGHTS: dict[str, Change] = {
    "transposed_by_an_operator": real_weight(POST, lambda g, w: g.transpose(w, [1, 0])),
    "stored_and_transposed": stored_weight(POST, lambda g, w: g.transpose(w, [1, 0])),
    "scaled_by_row": real_weight(POST, mul(np.linspace(0.5, 1.5, 64).reshape(64, 1))),
    "scaled_by_column": real_weight(POST, mul(np.linspace(0.5, 1.5, 64).reshape(1, 64))),
    "shifted": real_weight(OUT, add(0.01)),
    "absolute": real_weight(POST, unary("ABS")),
    "negated": real_weight(POST, unary("NEG")),
    "rounded": real_weight("pre_projection", grid(0.05)),
    "bounded": stored_weight("pre_projection", with_number("MINIMUM", 0.05)),
    "rows_reversed": real_weight(POST, reversed_rows),
    "columns_reversed": real_weight(POST, lambda g, w: g.gather(w, range(63, -1, -1), 1)),
    "rows_rolled": real_weight(OUT, lambda g, w: g.join([g.part(w, 1, 63, 0), g.part(w, 0, 1, 0)], 0)),
    "reshaped_from_transposed": real_weight(OUT, lambda g, w: g.reshape(g.transpose(w, [1, 0]), g.shape(w))),
    "plus_another": real_weight(UP, lambda g, w: g.add(w, g.constant(g.floats(g.roles["layers.0.gate_proj"])))),
    "int32_and_back": real_weight("lm_head", chain(mul(20.0), through(np.int32), mul(0.05))),
    "embedding_columns_scaled": stored_weight("pre_projection", mul(np.repeat([1.0, 0.5], 64).reshape(1, 128))),
    "bias": bias(OUT, lambda i: 0.2 * np.sin(i)),
    "bias_of_head": bias("lm_head", np.cos),
    "bias_of_pre_projection": bias("pre_projection", lambda i: 0.5 + 0 * i),
    "bias_of_one_channel": bias(POST, lambda i: np.where(i == 5, 3.0, 0.0)),
    "fused_relu": option(UP, "fusedActivationFunction", schema.ActivationFunctionType.RELU),
    "fused_relu6_on_head": option("lm_head", "fusedActivationFunction", schema.ActivationFunctionType.RELU6),
    "fused_relu_on_query": option("layers.0.q_proj", "fusedActivationFunction", schema.ActivationFunctionType.RELU),
    "up_reads_gate": shared(UP, "layers.0.gate_proj"),
    "gate_of_layer_1": shared("layers.0.gate_proj", "layers.1.gate_proj"),
    "gate_and_up_exchanged": exchanged("layers.0.gate_proj", UP),
    "down_projections_exchanged": exchanged("layers.0.down_proj", "layers.1.down_proj"),
    "second_path": low_rank,
    "state_rotated": rotation("state"),
    "stream_rotated": rotation("1.stream"),
    "mlp_rotated": rotation("0.product"),
    "projected_rotated": rotation("projected_activations"),
    "input_scaled_by_channel": put("state", mul(np.linspace(0.5, 1.5, 64).reshape(1, 1, 64)), lambda g: g.linear(POST)),
    "int4_typed_int8": weight(UP, typed("INT8")),
    "int8_typed_int4": weight(OUT, typed("INT4")),
    "int8_typed_uint8": weight(OUT, typed("UINT8")),
    "int8_typed_bool": weight(OUT, typed("BOOL")),
    "scales_nan": weight(OUT, scales(lambda s: np.where(np.arange(s.size) == 3, np.nan, s))),
    "scales_infinite": weight(POST, scales(lambda s: np.where(np.arange(s.size) == 3, np.inf, s))),
    "scales_negative": weight(OUT, scales(lambda s: np.where(np.arange(s.size) % 2 == 0, -s, s))),
    "scales_zero": weight(OUT, scales(lambda s: np.where(np.arange(s.size) < 8, 0.0, s))),
    "scales_too_few": weight(OUT, scales(lambda s: s[:-1])),
    "scales_too_many": weight(OUT, scales(lambda s: np.append(s, s[:1]))),
    "axis_of_columns": weight(POST, dimension(1)),
    "axis_out_of_range": weight(POST, dimension(5)),
    "axis_negative": weight(POST, dimension(-1)),
    "zero_points": weight(OUT, zero_points(5)),
    "zero_points_of_int4": weight(UP, zero_points(-2)),
    "zero_points_of_head": weight("lm_head", zero_points(1)),
    "data_and_offset": data_and_offset(OUT),
    "shuffled_format": option(UP, "weightsFormat", schema.FullyConnectedOptionsWeightsFormat.SHUFFLED4x16INT8),
}

NOT_SEEN = {
    "axis_of_columns": "the file says that scales are by column; LiteRT's kernels take them by row",
    "axis_out_of_range": "no such axis",
    "axis_negative": "no such axis",
    "zero_points": "LiteRT's kernels ignore zero points of weights; the file says that they count",
    "zero_points_of_int4": "as above",
    "zero_points_of_head": "as above",
    "data_and_offset": "LiteRT takes the bytes of the buffer, not those at its offset",
    "shuffled_format": "the order of elements is another",
    "int8_typed_bool": "BOOL holds no weights",
    "int8_typed_uint8": "the codes mean other numbers",
    "int4_typed_int8": "half of the bytes are missing",
    "int8_typed_int4": "half of the bytes are left over",
    "scales_negative": weight(OUT, scales(lambda s: np.where(np.arange(s.size) % 2 == 0, -s, s))),
    "scales_zero": weight(OUT, scales(lambda s: np.where(np.arange(s.size) < 8, 0.0, s))),
    "scales_too_few": "a row has no scale",
    "scales_too_many": "a scale has no row",
    "scales_nan": "not a number",
    "scales_infinite": "not a number",
}
