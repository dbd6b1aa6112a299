"""RMSNorm in other operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change
from adversary.mutations.norms import normed_by


def every_norm(edit: Callable[[Graph, Any], object]) -> Change:
    def change(g: Graph) -> None:
        for role in [role for role in g.roles if role.endswith("_norm")]:
            normed_by(role, edit)(g)

    return change


def axis_of(g: Graph, norm: Any) -> int:
    return len(g.shape(norm.x)) - 1


def variance(g: Graph, norm: Any) -> int:
    return g.call("ADD", g.reduce("MEAN", g.call("MUL", norm.x, norm.x), axis_of(g, norm)), np.float32(1e-6))


def rebuilt(build: Callable[[Graph, Any], int]) -> Callable[[Graph, Any], object]:
    """x over its root, written otherwise; the product with the weight stays."""
    return lambda g, norm: g.rewire(int(norm.scale.outputs[0]), build(g, norm))


def by_sum(g: Graph, norm: Any) -> int:
    size = g.shape(norm.x)[-1]
    total = g.reduce("SUM", g.call("MUL", norm.x, norm.x), axis_of(g, norm))
    mean = g.call("ADD", g.call("DIV", total, np.float32(size)), np.float32(1e-6))
    return g.call("MUL", norm.x, g.call("RSQRT", mean))


def by_length(g: Graph, norm: Any) -> int:
    """x · sqrt(N) / sqrt(sum + N·eps)."""
    size = g.shape(norm.x)[-1]
    total = g.reduce("SUM", g.call("MUL", norm.x, norm.x), axis_of(g, norm))
    inverse = g.call("RSQRT", g.call("ADD", total, np.float32(size * 1e-6)))
    return g.call("MUL", g.call("MUL", norm.x, inverse), np.float32(size**0.5))


def squares_by(name: str) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        old = int(norm.square.outputs[0])
        x = norm.x if g.shape(norm.x) == g.shape(old) else g.reshape(norm.x, g.shape(old))
        numbers = {"POW": [np.float32(2)], "SQUARED_DIFFERENCE": [np.float32(0)], "MUL": [g.call("ABS", x)]}
        g.rewire(old, g.call(name, g.call("ABS", x) if name == "MUL" else x, *numbers.get(name, [])))

    return edit


def weight_first(g: Graph, norm: Any) -> None:
    root = int(norm.root.outputs[0])
    g.rewire(norm.out, g.call("MUL", g.call("MUL", norm.x, norm.weight), root, shape=g.shape(norm.out)))


def root_times_weight(g: Graph, norm: Any) -> None:
    root = int(norm.root.outputs[0])
    factor = g.call("MUL", root, norm.weight)
    g.rewire(norm.out, g.call("MUL", norm.x, factor, shape=g.shape(norm.out)))


def mean_without_axis(g: Graph, norm: Any) -> int:
    mean = g.reduce("MEAN", g.call("MUL", norm.x, norm.x), axis_of(g, norm), keep=False)
    wide = g.reshape(mean, [*g.shape(norm.x)[:-1], 1])
    return g.call("MUL", norm.x, g.call("RSQRT", g.call("ADD", wide, np.float32(1e-6))))


NORMS: dict[str, Change] = {
    "square": every_norm(squares_by("SQUARE")),
    "power_2": every_norm(squares_by("POW")),
    "squared_difference": every_norm(squares_by("SQUARED_DIFFERENCE")),
    "absolutes_squared": every_norm(squares_by("MUL")),
    "divided_by_root": every_norm(rebuilt(lambda g, n: g.call("DIV", n.x, g.call("SQRT", variance(g, n))))),
    "inverse_of_root": every_norm(
        rebuilt(lambda g, n: g.call("MUL", n.x, g.call("DIV", np.float32(1), g.call("SQRT", variance(g, n)))))
    ),
    "root_of_inverse": every_norm(
        rebuilt(lambda g, n: g.call("MUL", n.x, g.call("SQRT", g.call("DIV", np.float32(1), variance(g, n)))))
    ),
    "divided_by_power": every_norm(
        rebuilt(lambda g, n: g.call("DIV", n.x, g.call("POW", variance(g, n), np.float32(0.5))))
    ),
    "power": every_norm(rebuilt(lambda g, n: g.call("MUL", n.x, g.call("POW", variance(g, n), np.float32(-0.5))))),
    "sum_over_n": every_norm(rebuilt(by_sum)),
    "length": every_norm(rebuilt(by_length)),
    "mean_without_axis": every_norm(rebuilt(mean_without_axis)),
    "weight_first": every_norm(weight_first),
    "root_times_weight": every_norm(root_times_weight),
    "weight_as_one_minus": every_norm(
        lambda g, n: g.insert(
            n.weight, lambda w: g.call("ADD", g.constant(g.value(w) - np.float32(1)), np.float32(1)), [n.weigh]
        )
    ),
    "eps_on_the_left": every_norm(lambda g, n: setattr(n.add, "inputs", list(n.add.inputs)[::-1])),
    "scaled_before": normed_by(
        "layers.0.post_ffw_norm",
        lambda g, n: g.rewire(n.x, g.call("MUL", n.x, np.float32(2)), [n.square, n.scale]),
    ),
}
