"""GELU, soft cap, residual additions and scalars in other operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, at
from adversary.mutations.gelu import gelu, spelled_gelu


def gelu_everywhere(function: Callable[[Graph, int], int]) -> Change:
    def change(g: Graph) -> None:
        for index in range(2):
            layer = g.layer(index)
            g.rewire(layer.activated, function(g, layer.gate))

    return change


def gelu_by_sigmoid(g: Graph, x: int) -> int:
    """x · σ(2·sqrt(2/π)·(x + 0.044715·x³))."""
    cube = g.call("MUL", g.call("MUL", x, x), x)
    inner = g.call("ADD", x, g.call("MUL", cube, np.float32(0.044715)))
    return g.call("MUL", x, g.call("LOGISTIC", g.call("MUL", inner, np.float32(2 * (2 / np.pi) ** 0.5))))


def gelu_by_power(g: Graph, x: int) -> int:
    inner = g.call("ADD", x, g.call("MUL", g.call("POW", x, np.float32(3)), np.float32(0.044715)))
    tanh = g.call("TANH", g.call("MUL", inner, np.float32((2 / np.pi) ** 0.5)))
    return g.call("MUL", g.call("MUL", g.call("ADD", tanh, np.float32(1)), x), np.float32(0.5))


def capped(build: Callable[[Graph, int], int]) -> Change:
    return lambda g: g.rewire(g.output("logits"), build(g, at(g, "lm_head")))


def scalar_in_both(g: Graph) -> None:
    """h·s + branch·s."""
    layer = g.layer(0)
    scalar = g.roles["layers.0.layer_scalar"]
    g.rewire(layer.out, g.call("ADD", g.call("MUL", layer.middle, scalar), g.call("MUL", layer.ffw_branch, scalar)))


def commuted(kinds: Sequence[str]) -> Change:
    """Operands change sides, in composites too."""

    def change(g: Graph) -> None:
        g.open_all()
        for op in g.ops:
            if g.kind(op) in kinds and len(op.inputs) == 2:
                op.inputs = [int(i) for i in op.inputs][::-1]

    return change


def residual_in_one(g: Graph) -> None:
    """stream + (attention + mlp)."""
    layer = g.layer(0)
    both_ = g.call("ADD", layer.attention_branch, layer.ffw_branch)
    g.rewire(layer.summed, g.call("ADD", layer.stream, both_))


def residual_by_difference(g: Graph) -> None:
    layer = g.layer(0)
    g.rewire(layer.summed, g.call("SUB", layer.middle, g.call("NEG", layer.ffw_branch)))


BLOCKS: dict[str, Change] = {
    "gelu_spelled": gelu_everywhere(spelled_gelu(0.044715)),
    "gelu_builtin": gelu_everywhere(gelu),
    "gelu_by_sigmoid": gelu_everywhere(gelu_by_sigmoid),
    "gelu_by_power": gelu_everywhere(gelu_by_power),
    "gate_and_up_exchanged": lambda g: setattr(
        g.producer(g.layer(0).product), "inputs", list(g.producer(g.layer(0).product).inputs)[::-1]
    ),
    "cap_divides": capped(lambda g, x: g.call("MUL", g.call("TANH", g.call("DIV", x, np.float32(30))), np.float32(30))),
    "cap_multiplies": capped(
        lambda g, x: g.call("MUL", np.float32(30), g.call("TANH", g.call("MUL", np.float32(1 / 30), x)))
    ),
    "cap_divides_twice": capped(
        lambda g, x: g.call("DIV", g.call("TANH", g.call("DIV", x, np.float32(30))), np.float32(1 / 30))
    ),
    "cap_in_steps": capped(
        lambda g, x: g.call(
            "MUL",
            g.call("TANH", g.call("DIV", g.call("DIV", x, np.float32(5)), np.float32(6))),
            np.float32(30),
        )
    ),
    "cap_bound_in_steps": capped(
        lambda g, x: g.call(
            "MUL", g.call("MUL", g.call("TANH", g.call("DIV", x, np.float32(30))), np.float32(5)), np.float32(6)
        )
    ),
    "cap_by_sigmoid": capped(
        lambda g, x: g.call(
            "SUB", g.call("MUL", g.call("LOGISTIC", g.call("DIV", x, np.float32(15))), np.float32(60)), np.float32(30)
        )
    ),
    "scalar_in_both": scalar_in_both,
    "scalar_divides_inverse": lambda g: g.rewire(
        g.layer(0).out,
        g.call("DIV", g.layer(0).summed, (1 / g.value(g.roles["layers.0.layer_scalar"])).astype(np.float32)),
    ),
    "scalar_by_channel": lambda g: g.rewire(
        g.layer(0).out,
        g.call("MUL", g.layer(0).summed, np.full((1, 1, 64), g.value(g.roles["layers.0.layer_scalar"]), np.float32)),
    ),
    "scalar_in_two_factors": lambda g: g.rewire(
        g.layer(0).out,
        g.call(
            "MUL",
            g.call("MUL", g.layer(0).summed, (g.value(g.roles["layers.0.layer_scalar"]) / 2).astype(np.float32)),
            np.float32(2),
        ),
    ),
    "sums_commuted": commuted(["ADD"]),
    "products_commuted": commuted(["MUL"]),
    "ands_commuted": commuted(["LOGICAL_AND", "LOGICAL_OR"]),
    "residual_in_one": residual_in_one,
    "residual_by_difference": residual_by_difference,
}
