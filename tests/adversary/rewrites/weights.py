"""Weights stored, typed and multiplied otherwise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, parameters
from adversary.mutations.weights import real_weight, stored_weight


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
    "without_kept_dimensions": without_kept_dimensions("layers.0.up_proj"),
    "zero_bias": every_weight(zero_bias),
    "fp16_cast": every_weight(lambda role: in_half_precision(role, "CAST")),
    "fp16_dequantized": every_weight(lambda role: in_half_precision(role, "DEQUANTIZE")),
    "fp16_norms": half_norms,
    "quantized_scalar": scalar_quantized,
    "shared_by_layers": shared_weights,
}
