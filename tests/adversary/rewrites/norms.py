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
    return g.add(g.reduce("MEAN", g.mul(norm.x, norm.x), axis_of(g, norm)), 1e-6)


def rebuilt(build: Callable[[Graph, Any], int]) -> Callable[[Graph, Any], object]:
    """x over its root, written otherwise; the product with the weight stays."""
    return lambda g, norm: g.rewire(int(norm.scale.outputs[0]), build(g, norm))


def by_sum(g: Graph, norm: Any) -> int:
    size = g.shape(norm.x)[-1]
    total = g.reduce("SUM", g.mul(norm.x, norm.x), axis_of(g, norm))
    mean = g.add(g.div(total, np.float32(size)), 1e-6)
    return g.mul(norm.x, g.rsqrt(mean))


def squares_by(name: str) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        old = int(norm.square.outputs[0])
        x = norm.x if g.shape(norm.x) == g.shape(old) else g.reshape(norm.x, g.shape(old))
        numbers = {"POW": [2.0], "SQUARED_DIFFERENCE": [0.0], "MUL": [g.abs(x)]}
        g.rewire(old, g.call(name, g.abs(x) if name == "MUL" else x, *numbers.get(name, [])))

    return edit


def weight_first(g: Graph, norm: Any) -> None:
    root = int(norm.root.outputs[0])
    g.rewire(norm.out, g.mul(g.mul(norm.x, norm.weight), root, shape=g.shape(norm.out)))


def root_times_weight(g: Graph, norm: Any) -> None:
    root = int(norm.root.outputs[0])
    factor = g.mul(root, norm.weight)
    g.rewire(norm.out, g.mul(norm.x, factor, shape=g.shape(norm.out)))


def mean_without_axis(g: Graph, norm: Any) -> int:
    mean = g.reduce("MEAN", g.mul(norm.x, norm.x), axis_of(g, norm), keep=False)
    wide = g.reshape(mean, [*g.shape(norm.x)[:-1], 1])
    return g.mul(norm.x, g.rsqrt(g.add(wide, 1e-6)))


NORMS: dict[str, Change] = {
    "square": every_norm(squares_by("SQUARE")),
    "power_2": every_norm(squares_by("POW")),
    "divided_by_root": every_norm(rebuilt(lambda g, n: g.div(n.x, g.sqrt(variance(g, n))))),
    "inverse_of_root": every_norm(rebuilt(lambda g, n: g.mul(n.x, g.div(1.0, g.sqrt(variance(g, n)))))),
    "root_of_inverse": every_norm(rebuilt(lambda g, n: g.mul(n.x, g.sqrt(g.div(1.0, variance(g, n)))))),
    "divided_by_power": every_norm(rebuilt(lambda g, n: g.div(n.x, g.pow(variance(g, n), 0.5)))),
    "power": every_norm(rebuilt(lambda g, n: g.mul(n.x, g.pow(variance(g, n), -0.5)))),
    "sum_over_n": every_norm(rebuilt(by_sum)),
    "mean_without_axis": every_norm(rebuilt(mean_without_axis)),
    "weight_first": every_norm(weight_first),
    "root_times_weight": every_norm(root_times_weight),
    "eps_on_the_left": every_norm(lambda g, n: setattr(n.add, "inputs", list(n.add.inputs)[::-1])),
    "scaled_before": normed_by(
        "layers.0.post_ffw_norm", lambda g, n: g.rewire(n.x, g.mul(n.x, 2.0), [n.square, n.scale])
    ),
}
