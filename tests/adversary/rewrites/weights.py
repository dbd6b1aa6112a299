"""Weights stored, typed and multiplied otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, halves, parameters, with_number
from adversary.mutations.weights import real_weight, stored_weight
from adversary.rewrites.detours import there_and_back, turned_twice


def transposed_storage(role: str) -> Change:
    def change(g: Graph) -> None:
        stored = g.constant(np.ascontiguousarray(g.floats(g.roles[role]).T))
        g.set_input(g.linear(role), 1, g.transpose(stored, [1, 0]))

    return change


def as_batch_product(role: str, *, transposed: bool) -> Change:
    """BATCH_MATMUL with a constant, in place of FULLY_CONNECTED."""

    def change(g: Graph) -> None:
        op = g.linear(role)
        values = g.floats(g.roles[role])
        weight = g.constant(values if transposed else np.ascontiguousarray(values.T))
        x, out = int(op.inputs[0]), int(op.outputs[0])
        g.rewire(out, g.call("BATCH_MATMUL", x, weight, shape=g.shape(out), adjY=transposed))

    return change


def in_two_parts(role: str, axis: int) -> Change:
    """Rows (0) or columns (1) of a weight in two constants, and two products."""

    def change(g: Graph) -> None:
        op = g.linear(role)
        x, out = int(op.inputs[0]), int(op.outputs[0])
        values = np.split(g.floats(g.roles[role]), 2, axis)
        constants = [g.constant(np.ascontiguousarray(part)) for part in values]
        if axis == 0:
            g.rewire(out, g.join([g.product(x, part) for part in constants]))
        else:
            g.rewire(out, g.call("ADD", *(g.product(a, b) for a, b in zip(halves(g, x), constants, strict=True))))

    return change


def gate_and_up_in_one(g: Graph) -> None:
    layer = g.layer(0)
    weight = np.concatenate([g.floats(g.roles[f"layers.0.{name}_proj"]) for name in ("gate", "up")])
    wide = g.product(layer.ffw_in, g.constant(weight))
    parts = halves(g, wide)
    g.rewire(layer.gate, parts[0])
    g.rewire(layer.up, parts[1])


def joined_weight(role: str) -> Change:
    def change(g: Graph) -> None:
        parts = [g.constant(np.ascontiguousarray(part)) for part in np.split(g.floats(g.roles[role]), 2)]
        g.set_input(g.linear(role), 1, g.join(parts, 0))

    return change


def in_half_precision(role: str, how: str) -> Change:
    """The weight's own numbers at FP16 precision."""

    def change(g: Graph) -> None:
        values = g.floats(g.roles[role]).astype(np.float16)
        stored = g.constant(values, np.float16)
        real = g.tensor(list(values.shape))
        g.emit(how, [stored], [real])
        g.set_input(g.linear(role), 1, real)

    return change


def without_kept_dimensions(role: str) -> Change:
    """The op leaves [1, out], and a RESHAPE brings the axes back."""

    def change(g: Graph) -> None:
        op = g.linear(role)
        out = int(op.outputs[0])
        shape = g.shape(out)
        flat = g.tensor([1, shape[-1]])
        op.outputs = [flat]
        op.builtinOptions.keepNumDims = False
        g.rewire(out, g.reshape(flat, shape))

    return change


def zero_bias(role: str) -> Change:
    def change(g: Graph) -> None:
        op = g.linear(role)
        op.inputs = [*(int(i) for i in op.inputs[:2]), g.constant(np.zeros(g.shape(int(op.outputs[0]))[-1]))]

    return change


def every_weight(make: Callable[[str], Change]) -> Change:
    def change(g: Graph) -> None:
        for role in [role for role in g.roles if role.endswith(("_proj", "_projection", "lm_head"))]:
            make(role)(g)

    return change


def half_norms(g: Graph) -> None:
    """Norm weights at FP16 precision, behind a CAST or DEQUANTIZE."""
    for index, role in enumerate([role for role in g.roles if role.endswith("_norm")]):
        weight = g.roles[role]
        stored = g.constant(g.value(weight).astype(np.float16), np.float16)
        real = g.tensor(g.shape(weight))
        g.emit(("CAST", "DEQUANTIZE")[index % 2], [stored], [real])
        g.rewire(weight, real)


def scalar_quantized(g: Graph) -> None:
    """A layer's scalar as an INT8 code and its scale."""
    scalar = g.roles["layers.0.layer_scalar"]
    value = float(g.value(scalar).reshape(-1)[0])
    stored = g.constant(np.full(g.shape(scalar), 127), np.int8)
    g.main.tensors[stored].quantization = parameters(value / 127)
    real = g.tensor(g.shape(scalar))
    g.emit("DEQUANTIZE", [stored], [real])
    g.rewire(scalar, real)


def shared_weights(g: Graph) -> None:
    """Layer 1 has the norm weights and projections of layer 0, wherever they have the same shape."""
    for name in ("gate_proj", "up_proj", "down_proj", "pre_ffw_norm", "post_ffw_norm", "post_attention_norm"):
        mine, theirs = g.roles[f"layers.0.{name}"], g.roles[f"layers.1.{name}"]
        g.rewire(theirs, mine)


def layer_twice(g: Graph) -> None:
    """Layer 1 of these three is layer 0 again, with the same constants."""
    for role, tensor in g.roles.items():
        if role.startswith("layers.1."):
            g.rewire(tensor, g.roles[role.replace("layers.1.", "layers.0.")])


def exact(role: str) -> Change:
    return stored_weight(role, lambda g, w: w)


WEIGHTS: dict[str, Change] = {
    "dequantized_by_an_operator": every_weight(lambda role: real_weight(role, lambda g, w: w)),
    "floats": every_weight(exact),
    "floats_of_one": exact("layers.0.o_proj"),
    "transposed_floats": every_weight(transposed_storage),
    "transposed_floats_of_one": transposed_storage("layers.0.down_proj"),
    "batch_product": every_weight(lambda role: as_batch_product(role, transposed=False)),
    "batch_product_transposed": every_weight(lambda role: as_batch_product(role, transposed=True)),
    "batch_product_of_one": as_batch_product("layers.0.o_proj", transposed=False),
    "rows_in_two_products": in_two_parts("post_projection", 0),
    "embedding_and_hidden_apart": in_two_parts("pre_projection", 1),
    "gate_and_up_in_one": gate_and_up_in_one,
    "joined": joined_weight("layers.0.up_proj"),
    "reshaped": stored_weight("layers.0.o_proj", there_and_back),
    "turned_twice": stored_weight("layers.0.o_proj", turned_twice),
    "times_1": stored_weight("layers.0.o_proj", with_number("MUL", 1.0)),
    "without_kept_dimensions": without_kept_dimensions("layers.0.up_proj"),
    "zero_bias": every_weight(zero_bias),
    "fp16_cast": every_weight(lambda role: in_half_precision(role, "CAST")),
    "fp16_dequantized": every_weight(lambda role: in_half_precision(role, "DEQUANTIZE")),
    "fp16_norms": half_norms,
    "quantized_scalar": scalar_quantized,
    "shared_by_layers": shared_weights,
}
