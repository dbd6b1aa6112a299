"""What lies outside of attentions: norms, residual sums, gates, outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph, Norm

from adversary import edits as e
from adversary.edits import Change, a_change, cases, edge

NORM_ROLES = ("layers.0.pre_ffw_norm", "layers.0.q_norm", "layers.1.post_ffw_norm", "final_norm")


def normed_by(role: str, edit: e.NormEdit) -> Change:
    return lambda g: edit(g, g.norm(role))


@e.a_norm_edit
def eps(g: Graph, norm: Norm, number: float) -> None:
    constant = next(int(i) for i in norm.add.inputs if g.is_constant(int(i)))
    g.set_input(norm.add, list(norm.add.inputs).index(constant), g.constant(np.full(g.shape(constant), number)))


@a_change
def every_eps(g: Graph, number: float) -> None:
    for role in [role for role in g.roles if role.endswith("_norm")]:
        eps(number)(g, g.norm(role))


@e.a_norm_edit
def power(g: Graph, norm: Norm, number: float) -> None:
    g.rewire(int(norm.root.outputs[0]), g.pow(int(norm.root.inputs[0]), np.float32(number)))


def averaged(edit: Callable[[Graph, int], int]) -> e.NormEdit:
    """``edit`` of the mean (JAX style: the sum) of squares."""
    return lambda g, norm: g.insert(int(norm.average.outputs[0]), lambda x: edit(g, x))


def rooted(edit: Callable[[Graph, int], int]) -> e.NormEdit:
    """``edit`` of one over the root."""
    return lambda g, norm: g.insert(int(norm.root.outputs[0]), lambda x: edit(g, x))


def from_squares(edit: Callable[[Graph, int], int]) -> e.NormEdit:
    """``edit`` of x in place of x·x."""
    return lambda g, norm: g.rewire(int(norm.square.outputs[0]), edit(g, norm.x))


def centred(g: Graph, norm: Norm) -> None:
    """A layer norm: the mean is subtracted first."""
    axis = len(g.shape(norm.x)) - 1
    less = g.sub(norm.x, g.reduce("MEAN", norm.x, axis))
    g.rewire(norm.x, less, [norm.square, norm.scale])


def weighted(edit: Callable[[Graph, int], int]) -> e.NormEdit:
    """``edit`` of the weight."""
    return lambda g, norm: g.insert(norm.weight, lambda w: edit(g, w), [norm.weigh])


@e.a_norm_edit
def weight_of(g: Graph, norm: Norm, role: str) -> None:
    other = g.roles[role]
    g.rewire(norm.weight, g.reshape(other, g.shape(norm.weight)), [norm.weigh])


def over_heads(g: Graph, norm: Norm) -> None:
    """The q norm's mean is that of all heads."""
    axes = [i for i, size in enumerate(g.shape(int(norm.average.outputs[0]))) if size == 4]
    g.insert(int(norm.average.outputs[0]), lambda x: g.add(g.reduce("MEAN", x, axes[0]), g.mul(x, 0.0)))


def in_halves(g: Graph, norm: Norm) -> None:
    """Each half is normed by itself."""
    squares = int(norm.square.outputs[0])
    parts = [g.reduce("MEAN", half, len(g.shape(squares)) - 1) for half in e.halves(g, squares)]
    shape = [*g.shape(squares)[:-1], g.shape(squares)[-1] // 2]
    wide = [g.call("BROADCAST_TO", part, np.array(shape, np.int32), shape=shape) for part in parts]
    inverse = g.rsqrt(g.add(g.join(wide), 1e-6))
    g.set_input(norm.scale, list(norm.scale.inputs).index(int(norm.root.outputs[0])), inverse)


def skipped(g: Graph, norm: Norm) -> None:
    g.rewire(norm.out, g.reshape(norm.x, g.shape(norm.out)))


def unweighted(g: Graph, norm: Norm) -> None:
    g.rewire(norm.out, int(norm.scale.outputs[0]))


def only_weighted(g: Graph, norm: Norm) -> None:
    g.set_input(norm.weigh, list(norm.weigh.inputs).index(int(norm.scale.outputs[0])), norm.x)


def largest(g: Graph, norm: Norm) -> None:
    """Divided by the largest element instead of the root of the mean of squares."""
    top = g.reduce("REDUCE_MAX", g.abs(norm.x), len(g.shape(norm.x)) - 1)
    g.set_input(norm.scale, list(norm.scale.inputs).index(int(norm.root.outputs[0])), g.div(1.0, top))


NORM_EDITS: dict[str, e.NormEdit] = {
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
    "pre_ffw_weight_of_post_ffw": normed_by("layers.0.pre_ffw_norm", weight_of("layers.0.post_ffw_norm")),
    "post_attention_weight_of_final": normed_by("layers.1.post_attention_norm", weight_of("final_norm")),
    "result_shifted": edge("0.ffw_in", e.add(0.1)),
    "twice": edge(
        "0.attention_branch",
        lambda g, x: g.mul(x, g.rsqrt(g.add(g.reduce("MEAN", g.mul(x, x), -1 % len(g.shape(x))), 1e-6))),
    ),
}


@a_change
def operand(
    g: Graph, op_of: Callable[[Any], Any], old_of: Callable[[Any], int], edit: Callable[[Graph, Any, int], int]
) -> None:
    """In layer 0, another value where the operator reads ``old``."""
    layer = g.layer(0)
    op, old = op_of(layer), old_of(layer)
    g.rewire(old, edit(g, layer, old), [op])


def first(old: str, edit: Callable[[Graph, Any, int], int]) -> Change:
    return operand(lambda p: p.first, lambda p: int(getattr(p, old)), edit)


@a_change
def scalar_elsewhere(g: Graph, target: str) -> None:
    """The layer's scalar multiplies only a part of what it should."""
    layer = g.layer(0)
    scalar = g.roles["layers.0.layer_scalar"]
    g.rewire(layer.out, layer.summed)
    g.insert(int(getattr(layer, target)), lambda x: g.mul(x, scalar), [layer.second])


def scalars_swapped(g: Graph) -> None:
    scalars = [g.roles[f"layers.{i}.layer_scalar"] for i in (0, 1)]
    ops = [g.layer(i).scaler for i in (0, 1)]
    g.rewire(scalars[0], scalars[1], [ops[0]])
    g.rewire(scalars[1], scalars[0], [ops[1]])


@a_change
def fused(g: Graph, attribute: str, activation: int) -> None:
    getattr(g.layer(0), attribute).builtinOptions.fusedActivationFunction = activation


RESIDUALS: dict[str, Change] = {
    "first_stream_doubled": first("stream", lambda g, p, x: g.add(x, x)),
    "first_with_relu": fused("first", schema.ActivationFunctionType.RELU),
    "second_with_tanh": edge("0.summed", e.unary("TANH")),
    "scalar_on_stream": scalar_elsewhere("middle"),
    "scalar_left_out": lambda g: g.rewire(g.layer(0).out, g.layer(0).summed),
    "scalar_twice": edge("0.out", lambda g, x: g.mul(x, g.roles["layers.0.layer_scalar"])),
    "scalars_swapped": scalars_swapped,
    "scalar_by_channel": edge("0.out", e.mul(np.linspace(0.5, 1.5, 64).reshape(1, 1, 64))),
}


def recapped(scale: float, bound: float) -> Change:
    return lambda g: g.rewire(
        g.output("logits"), g.mul(g.tanh(g.mul(e.at(g, "lm_head"), np.float32(scale))), np.float32(bound))
    )


def half_capped(g: Graph) -> None:
    plain = e.at(g, "lm_head")
    g.insert(g.output("logits"), lambda capped: g.join([g.part(capped, 0, 256), g.part(plain, 256, 256)]))


OUTPUTS: dict[str, Change] = {
    "cap_50": recapped(1 / 50, 50.0),
    "cap_left_out": lambda g: g.rewire(g.output("logits"), e.at(g, "lm_head")),
    "cap_on_half_of_the_tokens": half_capped,
    "logits_doubled": edge("logits", e.mul(2.0)),
    "logits_softmax": edge("logits", lambda g, x: g.call("SOFTMAX", x, beta=1.0)),
    "logits_without_their_mean": edge("logits", lambda g, x: g.sub(x, g.reduce("MEAN", x, 2))),
    "logits_negated": edge("logits", e.unary("NEG")),
    "cap_twice": edge("logits", e.chain(e.mul(1 / 5), e.unary("TANH"), e.mul(5.0))),
    "projected_tanh": edge("projected_activations", e.unary("TANH")),
    "head_state_scaled": e.put("state", e.mul(0.5), lambda g: g.linear("lm_head")),
    "projected_is_state": lambda g: g.rewire(g.output("projected_activations"), g.normed("final_norm")),
}


@a_change
def activated(g: Graph, function: Callable[[Graph, int], int]) -> None:
    """Another activation of the gate."""
    layer = g.layer(0)
    g.rewire(layer.activated, function(g, layer.gate))


def gelu(g: Graph, x: int, *, approximate: bool = True) -> int:
    return g.call("GELU", x, approximate=approximate)


@a_change
def gated(g: Graph, function: Callable[[Graph, Any], int]) -> None:
    """Another product of gate and up."""
    layer = g.layer(0)
    g.rewire(layer.product, function(g, layer))


GELU: dict[str, Change] = {
    "erf_of_all": lambda g: [
        g.rewire(g.layer(i).activated, gelu(g, g.layer(i).gate, approximate=False)) for i in (0, 1)
    ],
    "erf_of_one": activated(lambda g, x: gelu(g, x, approximate=False)),
    "twice": activated(lambda g, x: gelu(g, gelu(g, x))),
    "of_gate_doubled": activated(lambda g, x: gelu(g, g.mul(x, 2.0))),
    "of_gate_shifted": activated(lambda g, x: gelu(g, g.add(x, 0.5))),
    "on_up": gated(lambda g, p: g.mul(p.gate, gelu(g, p.up))),
    "product_relu": edge("0.product", e.unary("RELU")),
}


CASES = (*cases("norms", NORMS), *cases("residuals", RESIDUALS), *cases("outputs", OUTPUTS), *cases("gelu", GELU))
