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


def gelu_by_power(g: Graph, x: int) -> int:
    inner = g.add(x, g.mul(g.pow(x, 3.0), 0.044715))
    tanh = g.tanh(g.mul(inner, np.float32((2 / np.pi) ** 0.5)))
    return g.mul(g.mul(g.add(tanh, 1.0), x), 0.5)


def capped(build: Callable[[Graph, int], int]) -> Change:
    return lambda g: g.rewire(g.output("logits"), build(g, at(g, "lm_head")))


def commuted(kinds: Sequence[str]) -> Change:
    """Operands change sides, in composites too."""

    def change(g: Graph) -> None:
        g.open_all()
        for op in g.ops:
            if g.kind(op) in kinds and len(op.inputs) == 2:
                op.inputs = [int(i) for i in op.inputs][::-1]

    return change


def residual_by_difference(g: Graph) -> None:
    layer = g.layer(0)
    g.rewire(layer.summed, g.sub(layer.middle, g.neg(layer.ffw_branch)))


BLOCKS: dict[str, Change] = {
    "gelu_spelled": gelu_everywhere(spelled_gelu(0.044715)),
    "gelu_builtin": gelu_everywhere(gelu),
    "gelu_by_power": gelu_everywhere(gelu_by_power),
    "gate_and_up_exchanged": lambda g: setattr(
        g.producer(g.layer(0).product), "inputs", list(g.producer(g.layer(0).product).inputs)[::-1]
    ),
    "cap_divides": capped(lambda g, x: g.mul(g.tanh(g.div(x, 30.0)), 30.0)),
    "cap_multiplies": capped(lambda g, x: g.mul(30.0, g.tanh(g.mul(np.float32(1 / 30), x)))),
    "cap_divides_twice": capped(lambda g, x: g.div(g.tanh(g.div(x, 30.0)), np.float32(1 / 30))),
    "cap_in_steps": capped(lambda g, x: g.mul(g.tanh(g.div(g.div(x, 5.0), 6.0)), 30.0)),
    "cap_bound_in_steps": capped(lambda g, x: g.mul(g.mul(g.tanh(g.div(x, 30.0)), 5.0), 6.0)),
    "sums_commuted": commuted(["ADD"]),
    "products_commuted": commuted(["MUL"]),
    "ands_commuted": commuted(["LOGICAL_AND", "LOGICAL_OR"]),
    "residual_by_difference": residual_by_difference,
}
