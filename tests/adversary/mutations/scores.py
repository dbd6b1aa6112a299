"""Scores, their scale, and the softmax."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, add, chain, edge, grid, mul, unary, with_number


def beta(number: float) -> Change:
    def change(g: Graph) -> None:
        g.layer(0).softmax.builtinOptions.beta = number

    return change


def softmax_over_heads(g: Graph) -> None:
    layer = g.layer(0)
    turned = g.transpose(layer.masked, [0, 1, 3, 2])
    g.set_input(layer.softmax, 0, turned)
    result = g.tensor(g.shape(turned))
    layer.softmax.outputs = [result]
    g.rewire(layer.probabilities, g.transpose(result, [0, 1, 3, 2]))


def softmax_spelled(power: Callable[[Graph, int], int]) -> Change:
    def change(g: Graph) -> None:
        layer = g.layer(0)
        over = g.sub(layer.masked, g.reduce("REDUCE_MAX", layer.masked, 3))
        powers = power(g, over)
        g.rewire(layer.probabilities, g.div(powers, g.reduce("SUM", powers, 3)))

    return change


scores = lambda edit, layer=0: edge(f"{layer}.scores", edit)  # noqa: E731
probabilities = lambda edit, layer=0: edge(f"{layer}.probabilities", edit)  # noqa: E731

SCORES: dict[str, Change] = {
    "by_root_of_width": scores(mul(32**-0.5)),
    "by_root_of_width_in_full": scores(mul(64**-0.5), 1),
    "doubled": scores(lambda g, x: g.add(x, x)),
    "divided_by_2": scores(with_number("DIV", 2.0)),
    "query_scaled": edge("0.queries", mul(0.25)),
    "key_scaled": edge("0.key", mul(0.5)),
    "minus": scores(unary("NEG")),
    "absolute": scores(unary("ABS")),
    "squared": scores(lambda g, x: g.mul(x, x)),
    "soft_cap": scores(chain(mul(0.5), unary("TANH"), mul(2.0))),
    "clipped_above": scores(with_number("MINIMUM", 2.0)),
    "clipped_below": scores(with_number("MAXIMUM", -1.0)),
    "relu": scores(unary("RELU")),
    "leaky": scores(lambda g, x: g.maximum(x, g.mul(x, 0.1))),
    "bias_by_slot": scores(add(np.linspace(-2, 2, 256).reshape(1, 1, 1, 256)), 1),
    "scale_by_slot": scores(mul(np.linspace(0.5, 2, 256).reshape(1, 1, 1, 256)), 1),
    "scale_by_kv_head": scores(mul(np.array([1.0, 0.5]).reshape(1, 2, 1, 1))),
    "scale_by_query": scores(mul(np.array([1.0, 0.5]).reshape(1, 1, 2, 1))),
    "beta_an_eighth": beta(0.125),
    "beta_2": beta(2.0),
    "beta_nearly_1": beta(1.05),
    "minus_mean": scores(lambda g, x: g.sub(x, g.mul(g.reduce("MEAN", x, 2), 0.5))),
    "mean_of_heads": scores(lambda g, x: g.add(g.reduce("MEAN", x, 1), g.mul(x, 0.0))),
    "times_position": scores(lambda g, x: g.mul(x, g.mul(g.cast(g.input("input_pos"), np.float32), 0.01))),
    "softmax_over_queries": softmax_over_heads,
    "softmax_base_2": softmax_spelled(lambda g, x: g.pow(2.0, x)),
    "softmax_plus_1": softmax_spelled(lambda g, x: g.add(g.exp(x), 1e-3)),
    "softmax_of_squares": softmax_spelled(lambda g, x: g.pow(g.exp(x), 2.0)),
    "sigmoid": lambda g: g.recode(g.layer(0).softmax, "LOGISTIC"),
    "log_softmax": lambda g: g.recode(g.layer(0).softmax, "LOG_SOFTMAX"),
    "softmax_twice": probabilities(lambda g, x: g.call("SOFTMAX", x, beta=1.0)),
    "probabilities_squared": probabilities(lambda g, x: g.mul(x, x)),
    "probabilities_root": probabilities(unary("SQRT")),
    "probabilities_cut": probabilities(chain(add(-0.05), unary("RELU"))),
    "probabilities_bounded": probabilities(with_number("MINIMUM", 0.25)),
    "probabilities_in_sixteenths": probabilities(grid(1 / 16)),
    "probabilities_plus": probabilities(add(1 / 256), 1),
    "probabilities_by_slot": probabilities(mul(np.tile([1.0, 0.0], 128).reshape(1, 1, 1, 256)), 1),
    "probabilities_of_other_head": probabilities(lambda g, x: g.gather(x, [1, 0], 1)),
    "probabilities_of_other_query": probabilities(lambda g, x: g.gather(x, [1, 0], 2)),
    "one_minus": probabilities(with_number("SUB", 1.0, left=True)),
}
