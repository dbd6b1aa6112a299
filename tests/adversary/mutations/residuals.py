"""Residual additions and layer scalars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph

from adversary.edits import Change, Edit, add, chain, edge, mul, unary, with_number


def operand(
    op_of: Callable[[Any], Any], old_of: Callable[[Any], int], edit: Callable[[Graph, Any, int], int]
) -> Change:
    """In layer 0, another value where the operator reads ``old``."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        op, old = op_of(layer), old_of(layer)
        g.rewire(old, edit(g, layer, old), [op])

    return change


def first(old: str, edit: Callable[[Graph, Any, int], int]) -> Change:
    return operand(lambda p: p.first, lambda p: int(getattr(p, old)), edit)


def second(old: str, edit: Callable[[Graph, Any, int], int]) -> Change:
    return operand(lambda p: p.second, lambda p: int(getattr(p, old)), edit)


def bypass(attribute: str, keep: str) -> Change:
    """An addition is left out; ``keep`` of its operands goes on."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        g.rewire(int(getattr(layer, attribute).outputs[0]), int(getattr(layer, keep)))

    return change


def scalar_elsewhere(target: str) -> Change:
    """The layer's scalar multiplies only a part of what it should."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        scalar = g.roles["layers.0.layer_scalar"]
        g.rewire(layer.out, layer.summed)
        g.insert(int(getattr(layer, target)), lambda x: g.mul(x, scalar), [layer.second])

    return change


def scalars_swapped(g: Graph) -> None:
    scalars = [g.roles[f"layers.{i}.layer_scalar"] for i in (0, 1)]
    ops = [g.layer(i).scaler for i in (0, 1)]
    g.rewire(scalars[0], scalars[1], [ops[0]])
    g.rewire(scalars[1], scalars[0], [ops[1]])


def scalar_by(edit: Edit) -> Change:
    def change(g: Graph) -> None:
        scalar = g.roles["layers.0.layer_scalar"]
        g.insert(scalar, lambda x: edit(g, x), [g.layer(0).scaler])

    return change


def fused(attribute: str, activation: int) -> Change:
    def change(g: Graph) -> None:
        getattr(g.layer(0), attribute).builtinOptions.fusedActivationFunction = activation

    return change


def recoded(attribute: str, name: str) -> Change:
    return lambda g: g.recode(getattr(g.layer(0), attribute), name)


def parallel(g: Graph) -> None:
    """The MLP reads what the attention reads."""
    layer = g.layer(0)
    norm = g.norm("layers.0.pre_ffw_norm")
    g.rewire(layer.middle, layer.stream, [norm.square, norm.scale])


def layers_exchanged(g: Graph) -> None:
    """The MLP's result of layer 0 is added in layer 1, and the other way round."""
    one, two = g.layer(0), g.layer(1)
    g.rewire(one.attention_branch, g.mul(one.attention_branch, 0.0), [one.first])
    g.rewire(two.attention_branch, g.add(two.attention_branch, one.attention_branch), [two.first])


RESIDUALS: dict[str, Change] = {
    "first_left_out": bypass("first", "attention_branch"),
    "second_left_out": bypass("second", "ffw_branch"),
    "attention_left_out": bypass("first", "stream"),
    "mlp_left_out": bypass("second", "middle"),
    "first_stream_doubled": first("stream", lambda g, p, x: g.add(x, x)),
    "first_stream_halved": first("stream", lambda g, p, x: g.mul(x, 0.5)),
    "first_branch_halved": first("attention_branch", lambda g, p, x: g.mul(x, 0.5)),
    "second_branch_doubled": second("ffw_branch", lambda g, p, x: g.add(x, x)),
    "second_branch_negated": second("ffw_branch", lambda g, p, x: g.neg(x)),
    "first_from_normed": first("stream", lambda g, p, x: p.query_in),
    "second_from_stream": second("middle", lambda g, p, x: p.stream),
    "second_from_normed": second("middle", lambda g, p, x: p.ffw_in),
    "second_branch_before_its_norm": second("ffw_branch", lambda g, p, x: p.down),
    "first_branch_before_its_norm": first("attention_branch", lambda g, p, x: g.reshape(p.attention_out, g.shape(x))),
    "first_subtracted": recoded("first", "SUB"),
    "second_subtracted": recoded("second", "SUB"),
    "second_multiplied": recoded("second", "MUL"),
    "first_the_larger": recoded("first", "MAXIMUM"),
    "first_with_relu": fused("first", schema.ActivationFunctionType.RELU),
    "second_with_relu6": fused("second", schema.ActivationFunctionType.RELU6),
    "second_with_tanh": edge("0.summed", unary("TANH")),
    "first_with_tanh": edge("0.middle", unary("TANH")),
    "scaler_with_relu": fused("scaler", schema.ActivationFunctionType.RELU_N1_TO_1),
    "scalar_on_branch": scalar_elsewhere("ffw_branch"),
    "scalar_on_stream": scalar_elsewhere("middle"),
    "scalar_left_out": lambda g: g.rewire(g.layer(0).out, g.layer(0).summed),
    "scalar_twice": edge("0.out", lambda g, x: g.mul(x, g.roles["layers.0.layer_scalar"])),
    "scalar_divides": recoded("scaler", "DIV"),
    "scalar_added": recoded("scaler", "ADD"),
    "scalar_squared": scalar_by(lambda g, x: g.mul(x, x)),
    "scalar_negated": scalar_by(lambda g, x: g.neg(x)),
    "scalars_swapped": scalars_swapped,
    "scalar_by_channel": edge("0.out", mul(np.linspace(0.5, 1.5, 64).reshape(1, 1, 64))),
    "constant_added": edge("0.out", add(0.05)),
    "constant_by_channel_added": edge("0.middle", add(0.1 * np.sin(np.arange(64.0)).reshape(1, 1, 64))),
    "first_input_added_again": edge("1.stream", lambda g, x: g.add(x, g.layer(0).stream)),
    "input_subtracted_at_the_end": edge("1.out", lambda g, x: g.sub(x, g.layer(0).stream)),
    "activations_added": edge("1.stream", lambda g, x: g.add(x, g.part(g.input("activations"), 0, 64))),
    "parallel_mlp": parallel,
    "attention_a_layer_late": layers_exchanged,
    "stream_bounded": edge("1.stream", chain(with_number("MINIMUM", 1.0), with_number("MAXIMUM", -1.0))),
    "stream_centred": edge("1.stream", lambda g, x: g.sub(x, g.reduce("MEAN", x, 2))),
}
