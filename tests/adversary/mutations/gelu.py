"""GELU and the gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, edge, mul, unary, with_number


def activated(function: Callable[[Graph, int], int]) -> Change:
    """Another activation of the gate."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        g.rewire(layer.activated, function(g, layer.gate))

    return change


def spelled_gelu(cubic: float, slope: float = (2 / np.pi) ** 0.5) -> Callable[[Graph, int], int]:
    def function(g: Graph, x: int) -> int:
        cube = g.mul(g.mul(x, x), x)
        inner = g.mul(g.add(x, g.mul(cube, np.float32(cubic))), np.float32(slope))
        return g.mul(g.mul(x, 0.5), g.add(g.tanh(inner), 1.0))

    return function


def gelu(g: Graph, x: int, *, approximate: bool = True) -> int:
    return g.call("GELU", x, approximate=approximate)


def gated(function: Callable[[Graph, Any], int]) -> Change:
    """Another product of gate and up."""

    def change(g: Graph) -> None:
        layer = g.layer(0)
        g.rewire(layer.product, function(g, layer))

    return change


GELU: dict[str, Change] = {
    "erf_of_all": lambda g: [
        g.rewire(g.layer(i).activated, gelu(g, g.layer(i).gate, approximate=False)) for i in (0, 1)
    ],
    "erf_of_one": activated(lambda g, x: gelu(g, x, approximate=False)),
    "relu": activated(lambda g, x: g.relu(x)),
    "relu_squared": activated(lambda g, x: g.square(g.relu(x))),
    "silu": activated(lambda g, x: g.mul(x, g.logistic(x))),
    "sigmoid": activated(lambda g, x: g.logistic(x)),
    "quick": activated(lambda g, x: g.mul(x, g.logistic(g.mul(x, 1.702)))),
    "identity": activated(lambda g, x: g.mul(x, 1.0)),
    "none": lambda g: g.rewire(g.layer(0).activated, g.layer(0).gate),
    "tanh": activated(lambda g, x: g.tanh(x)),
    "elu": activated(lambda g, x: g.call("ELU", x)),
    "hard_swish": activated(lambda g, x: g.call("HARD_SWISH", x)),
    "absolute": activated(lambda g, x: g.abs(gelu(g, x))),
    "cubic_0.1": activated(spelled_gelu(0.1)),
    "cubic_0": activated(spelled_gelu(0.0)),
    "slope_1": activated(spelled_gelu(0.044715, 1.0)),
    "shifted": activated(lambda g, x: g.add(gelu(g, x), 0.1)),
    "of_gate_doubled": activated(lambda g, x: gelu(g, g.mul(x, 2.0))),
    "of_gate_shifted": activated(lambda g, x: gelu(g, g.add(x, 0.5))),
    "twice": activated(lambda g, x: gelu(g, gelu(g, x))),
    "bounded": activated(lambda g, x: g.minimum(gelu(g, x), 0.5)),
    "on_up": gated(lambda g, p: g.mul(p.gate, gelu(g, p.up))),
    "on_both": gated(lambda g, p: g.mul(p.activated, gelu(g, p.up))),
    "on_product": gated(lambda g, p: gelu(g, g.mul(p.gate, p.up))),
    "gate_squared": gated(lambda g, p: g.mul(p.activated, p.activated)),
    "gate_and_up_added": gated(lambda g, p: g.add(p.activated, p.up)),
    "up_plus_1": gated(lambda g, p: g.mul(p.activated, g.add(p.up, 1.0))),
    "up_alone": gated(lambda g, p: g.mul(p.activated, g.mul(p.up, p.up))),
    "gate_times_up_without_gelu": gated(lambda g, p: g.mul(p.gate, p.up)),
    "product_bounded": edge("0.product", with_number("MINIMUM", 1.0)),
    "product_relu": edge("0.product", unary("RELU")),
    "product_scaled_by_channel": edge("0.product", mul(np.linspace(0.2, 2, 128).reshape(1, 1, 128))),
    "product_plus_gate": gated(lambda g, p: g.add(g.mul(p.activated, p.up), p.gate)),
}
