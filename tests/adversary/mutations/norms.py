"""RMSNorms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, add, edge, halves, unary, with_number

NORM_ROLES = ("layers.0.pre_ffw_norm", "layers.0.q_norm", "layers.1.post_ffw_norm", "final_norm")


def normed_by(role: str, edit: Callable[[Graph, Any], object]) -> Change:
    return lambda g: edit(g, g.norm(role))


def eps(number: float) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        constant = next(int(i) for i in norm.add.inputs if g.is_constant(int(i)))
        g.set_input(norm.add, list(norm.add.inputs).index(constant), g.constant(np.full(g.shape(constant), number)))

    return edit


def every_eps(number: float) -> Change:
    def change(g: Graph) -> None:
        for role in [role for role in g.roles if role.endswith("_norm")]:
            eps(number)(g, g.norm(role))

    return change


def power(number: float) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        g.rewire(int(norm.root.outputs[0]), g.pow(int(norm.root.inputs[0]), np.float32(number)))

    return edit


def averaged(edit: Callable[[Graph, int], int]) -> Callable[[Graph, Any], object]:
    """``edit`` of the mean (JAX style: the sum) of squares."""
    return lambda g, norm: g.insert(int(norm.average.outputs[0]), lambda x: edit(g, x))


def rooted(edit: Callable[[Graph, int], int]) -> Callable[[Graph, Any], object]:
    """``edit`` of one over the root."""
    return lambda g, norm: g.insert(int(norm.root.outputs[0]), lambda x: edit(g, x))


def from_squares(edit: Callable[[Graph, int], int]) -> Callable[[Graph, Any], object]:
    """``edit`` of x in place of x·x."""
    return lambda g, norm: g.rewire(int(norm.square.outputs[0]), edit(g, norm.x))


def centred(g: Graph, norm: Any) -> None:
    """A layer norm: the mean is subtracted first."""
    axis = len(g.shape(norm.x)) - 1
    less = g.sub(norm.x, g.reduce("MEAN", norm.x, axis))
    g.rewire(norm.x, less, [norm.square, norm.scale])


def weighted(edit: Callable[[Graph, int], int]) -> Callable[[Graph, Any], object]:
    """``edit`` of the weight."""
    return lambda g, norm: g.insert(norm.weight, lambda w: edit(g, w), [norm.weigh])


def weight_of(role: str) -> Callable[[Graph, Any], object]:
    def edit(g: Graph, norm: Any) -> None:
        other = g.roles[role]
        g.rewire(norm.weight, g.reshape(other, g.shape(norm.weight)), [norm.weigh])

    return edit


def over_heads(g: Graph, norm: Any) -> None:
    """The q norm's mean is that of all heads."""
    axes = [i for i, size in enumerate(g.shape(int(norm.average.outputs[0]))) if size == 4]
    g.insert(int(norm.average.outputs[0]), lambda x: g.add(g.reduce("MEAN", x, axes[0]), g.mul(x, 0.0)))


def in_halves(g: Graph, norm: Any) -> None:
    """Each half is normed by itself."""
    squares = int(norm.square.outputs[0])
    parts = [g.reduce("MEAN", half, len(g.shape(squares)) - 1) for half in halves(g, squares)]
    shape = [*g.shape(squares)[:-1], g.shape(squares)[-1] // 2]
    wide = [g.call("BROADCAST_TO", part, np.array(shape, np.int32), shape=shape) for part in parts]
    inverse = g.rsqrt(g.add(g.join(wide), 1e-6))
    g.set_input(norm.scale, list(norm.scale.inputs).index(int(norm.root.outputs[0])), inverse)


def skipped(g: Graph, norm: Any) -> None:
    g.rewire(norm.out, g.reshape(norm.x, g.shape(norm.out)))


def unweighted(g: Graph, norm: Any) -> None:
    g.rewire(norm.out, int(norm.scale.outputs[0]))


def only_weighted(g: Graph, norm: Any) -> None:
    g.set_input(norm.weigh, list(norm.weigh.inputs).index(int(norm.scale.outputs[0])), norm.x)


def root_of_another(role: str) -> Callable[[Graph, Any], object]:
    """Divided by the root that another norm of the same width computes."""

    def edit(g: Graph, norm: Any) -> None:
        other = g.norm(role)
        g.set_input(norm.scale, list(norm.scale.inputs).index(int(norm.root.outputs[0])), int(other.root.outputs[0]))

    return edit


def largest(g: Graph, norm: Any) -> None:
    """Divided by the largest element instead of the root of the mean of squares."""
    top = g.reduce("REDUCE_MAX", g.abs(norm.x), len(g.shape(norm.x)) - 1)
    g.set_input(norm.scale, list(norm.scale.inputs).index(int(norm.root.outputs[0])), g.div(1.0, top))


NORM_EDITS: dict[str, Callable[[Graph, Any], object]] = {
    "eps_0.01": eps(1e-2),
    "eps_1": eps(1.0),
    "power_0.4": power(-0.4),
    "power_1": power(-1.0),
    "sum_for_mean": averaged(lambda g, x: g.mul(x, 64.0)),
    "mean_halved": averaged(lambda g, x: g.mul(x, 0.5)),
    "mean_bounded": averaged(lambda g, x: g.maximum(x, 1e4)),
    "eps_after_root": rooted(lambda g, x: g.add(x, 0.05)),
    "root_bounded": rooted(lambda g, x: g.minimum(x, 0.6)),
    "mean_of_absolutes": from_squares(lambda g, x: g.abs(x)),
    "mean_of_cubes": from_squares(lambda g, x: g.abs(g.mul(g.mul(x, x), x))),
    "squares_shifted": from_squares(lambda g, x: g.square(g.add(x, 0.5))),
    "centred": centred,
    "weight_plus_1": weighted(lambda g, w: g.add(w, 1.0)),
    "weight_squared": weighted(lambda g, w: g.mul(w, w)),
    "weight_reversed": weighted(lambda g, w: g.gather(w, range(g.shape(w)[-1] - 1, -1, -1), -1)),
    "weight_doubled": weighted(lambda g, w: g.add(w, w)),
    "weight_inverted": weighted(lambda g, w: g.div(1.0, w)),
    "in_halves": in_halves,
    "skipped": skipped,
    "unweighted": unweighted,
    "only_weighted": only_weighted,
    "by_the_largest": largest,
}
SPREAD = {name: NORM_ROLES[index % len(NORM_ROLES)] for index, name in enumerate(NORM_EDITS)}
"""Every way of changing a norm, at one of the norms."""

NORMS: dict[str, Change] = {
    **{f"{name}_{SPREAD[name].split('.')[-1]}": normed_by(SPREAD[name], edit) for name, edit in NORM_EDITS.items()},
    "every_eps_0.01": every_eps(1e-2),
    "q_norm_over_heads": normed_by("layers.0.q_norm", over_heads),
    "q_norm_skipped": normed_by("layers.0.q_norm", skipped),
    "q_norm_unweighted": normed_by("layers.1.q_norm", unweighted),
    "q_norm_centred": normed_by("layers.0.q_norm", centred),
    "q_norm_power_0.45": normed_by("layers.0.q_norm", power(-0.45)),
    "final_norm_centred": normed_by("final_norm", centred),
    "pre_ffw_weight_of_post_ffw": normed_by("layers.0.pre_ffw_norm", weight_of("layers.0.post_ffw_norm")),
    "pre_attention_weight_of_layer_1": normed_by(
        "layers.0.pre_attention_norm", weight_of("layers.1.pre_attention_norm")
    ),
    "post_attention_weight_of_final": normed_by("layers.1.post_attention_norm", weight_of("final_norm")),
    "pre_ffw_root_of_pre_attention": normed_by("layers.0.pre_ffw_norm", root_of_another("layers.0.pre_attention_norm")),
    "post_attention_skipped": normed_by("layers.0.post_attention_norm", skipped),
    "post_ffw_only_weighted": normed_by("layers.0.post_ffw_norm", only_weighted),
    "pre_ffw_sum_for_mean": normed_by("layers.1.pre_ffw_norm", averaged(lambda g, x: g.mul(x, 64.0))),
    "result_bounded": edge("state", with_number("MINIMUM", 1.0)),
    "result_absolute": edge("0.query_in", unary("ABS")),
    "result_shifted": edge("0.ffw_in", add(0.1)),
    "twice": edge(
        "0.attention_branch",
        lambda g, x: g.mul(x, g.rsqrt(g.add(g.reduce("MEAN", g.mul(x, x), -1 % len(g.shape(x))), 1e-6))),
    ),
}
