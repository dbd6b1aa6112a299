"""What lies outside of attentions: norms, residual sums, gates, outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from helpers.surgery import Graph, Norm

from adversary import edits as e
from adversary.edits import Change, Edit, a_change, cases, edge

NORM_ROLES = ("layers.0.pre_ffw_norm", "layers.0.q_norm", "layers.1.post_ffw_norm", "final_norm")


def normed_by(role: str, edit: e.NormEdit) -> Change:
    return lambda g: edit(g, g.norm(role))


@a_change
def every_norm(g: Graph, edit: e.NormEdit) -> None:
    for role in [role for role in g.roles if role.endswith("_norm")]:
        edit(g, g.norm(role))


@e.an_edit
def epsilon(g: Graph, norm: Norm, edit: Edit) -> None:
    """``edit`` of the epsilon."""
    constant = next(int(i) for i in norm.add.inputs if g.is_constant(int(i)))
    g.rewire(constant, edit(g, constant), [norm.add])


def eps(number: float) -> e.NormEdit:
    return epsilon(lambda g, x: g.constant(np.full(g.shape(x), number)))


@e.an_edit
def power(g: Graph, norm: Norm, number: float) -> None:
    g.rewire(int(norm.root.outputs[0]), g.pow(int(norm.root.inputs[0]), np.float32(number)))


@e.an_edit
def result_of(g: Graph, norm: Norm, operator: str, edit: Edit) -> None:
    """``edit`` of what an operator of the norm computes: square, average (in JAX style a sum) or one over the root."""
    g.insert(int(getattr(norm, operator).outputs[0]), lambda x: edit(g, x))


def from_squares(edit: Edit) -> e.NormEdit:
    """``edit`` of x in place of x·x."""
    return lambda g, norm: g.rewire(int(norm.square.outputs[0]), edit(g, norm.x))


def centred(g: Graph, norm: Norm) -> None:
    """A layer norm: the mean is subtracted first."""
    less = g.sub(norm.x, g.reduce("MEAN", norm.x, -1))
    g.rewire(norm.x, less, [norm.square, norm.scale])


def weighted(edit: Edit) -> e.NormEdit:
    """``edit`` of the weight."""
    return lambda g, norm: g.insert(norm.weight, lambda w: edit(g, w), [norm.weigh])


def weight_of(role: str) -> e.NormEdit:
    return weighted(lambda g, w: g.reshape(g.roles[role], g.shape(w)))


def over_heads(g: Graph, norm: Norm) -> None:
    """The q norm's mean is that of all heads."""
    axes = [i for i, size in enumerate(g.shape(int(norm.average.outputs[0]))) if size == 4]
    g.insert(int(norm.average.outputs[0]), lambda x: g.add(g.reduce("MEAN", x, axes[0]), g.mul(x, 0.0)))


def in_halves(g: Graph, norm: Norm) -> None:
    """Each half is normed by itself."""
    squares = int(norm.square.outputs[0])
    parts = [g.reduce("MEAN", half, -1) for half in e.halves(g, squares)]
    shape = [*g.shape(squares)[:-1], g.shape(squares)[-1] // 2]
    wide = [g.call("BROADCAST_TO", part, np.array(shape, np.int32), shape=shape) for part in parts]
    g.rewire(int(norm.root.outputs[0]), g.rsqrt(g.add(g.join(wide), 1e-6)), [norm.scale])


def skipped(g: Graph, norm: Norm) -> None:
    g.rewire(norm.out, g.reshape(norm.x, g.shape(norm.out)))


def unweighted(g: Graph, norm: Norm) -> None:
    g.rewire(norm.out, int(norm.scale.outputs[0]))


def by_the_largest(g: Graph, norm: Norm) -> None:
    """Divided by the largest element instead of the root of the mean of squares."""
    top = g.reduce("REDUCE_MAX", g.abs(norm.x), -1)
    g.rewire(int(norm.root.outputs[0]), g.div(1.0, top), [norm.scale])


NORM_EDITS: dict[str, e.NormEdit] = {
    "eps_0.01": eps(1e-2),
    "eps_1": eps(1.0),
    "power_0.4": power(-0.4),
    "power_1": power(-1.0),
    "sum_for_mean": result_of("average", e.mul(64.0)),
    "mean_halved": result_of("average", e.mul(0.5)),
    "mean_bounded": result_of("average", e.with_number("MAXIMUM", 1e4)),
    "eps_after_root": result_of("root", e.add(0.05)),
    "root_bounded": result_of("root", e.with_number("MINIMUM", 0.6)),
    "mean_of_absolutes": from_squares(e.unary("ABS")),
    "mean_of_cubes": from_squares(lambda g, x: g.abs(g.mul(g.mul(x, x), x))),
    "squares_shifted": from_squares(lambda g, x: g.square(g.add(x, 0.5))),
    "centred": centred,
    "weight_plus_1": weighted(e.add(1.0)),
    "weight_squared": weighted(lambda g, w: g.mul(w, w)),
    "weight_reversed": weighted(lambda g, w: g.gather(w, range(g.shape(w)[-1] - 1, -1, -1), -1)),
    "weight_doubled": weighted(lambda g, w: g.add(w, w)),
    "weight_inverted": weighted(lambda g, w: g.div(1.0, w)),
    "in_halves": in_halves,
    "skipped": skipped,
    "unweighted": unweighted,
    "only_weighted": lambda g, norm: g.rewire(int(norm.scale.outputs[0]), norm.x, [norm.weigh]),
    "by_the_largest": by_the_largest,
}

SPREAD = {name: NORM_ROLES[index % len(NORM_ROLES)] for index, name in enumerate(NORM_EDITS)}
"""Every way of changing a norm, at one of the norms."""

NORMS: dict[str, Change] = {
    **{f"{name}_{SPREAD[name].split('.')[-1]}": normed_by(SPREAD[name], edit) for name, edit in NORM_EDITS.items()},
    "every_eps_0.01": every_norm(eps(1e-2)),
    "q_norm_over_heads": normed_by("layers.0.q_norm", over_heads),
    "q_norm_skipped": normed_by("layers.0.q_norm", skipped),
    "q_norm_unweighted": normed_by("layers.1.q_norm", unweighted),
    "q_norm_centred": normed_by("layers.0.q_norm", centred),
    "pre_ffw_weight_of_post_ffw": normed_by("layers.0.pre_ffw_norm", weight_of("layers.0.post_ffw_norm")),
    "post_attention_weight_of_final": normed_by("layers.1.post_attention_norm", weight_of("final_norm")),
    "result_shifted": edge("0.ffw_in", e.add(0.1)),
    "twice": edge("0.attention_branch", lambda g, x: g.mul(x, g.rsqrt(g.add(g.reduce("MEAN", g.mul(x, x), -1), 1e-6)))),
}


def scalar_on_stream(g: Graph) -> None:
    """The layer's scalar multiplies only a part of what it should."""
    layer = g.layer(0)
    g.rewire(layer.out, layer.summed)
    g.insert(layer.middle, lambda x: g.mul(x, g.roles["layers.0.layer_scalar"]), [layer.second])


def scalars_swapped(g: Graph) -> None:
    scalars = [g.roles[f"layers.{i}.layer_scalar"] for i in (0, 1)]
    ops = [g.layer(i).scaler for i in (0, 1)]
    g.rewire(scalars[0], scalars[1], [ops[0]])
    g.rewire(scalars[1], scalars[0], [ops[1]])


@a_change
def fused(g: Graph, place: Callable[[Graph], Any], activation: str) -> bool | None:
    op = place(g)
    if g.kind(op) == "CONCATENATION" or not hasattr(op.builtinOptions, "fusedActivationFunction"):
        return False
    op.builtinOptions.fusedActivationFunction = getattr(schema.ActivationFunctionType, activation)
    return None


RESIDUALS: dict[str, Change] = {
    "first_stream_doubled": e.put("0.stream", lambda g, x: g.add(x, x), lambda g: g.layer(0).first),
    "first_with_relu": fused(lambda g: g.layer(0).first, "RELU"),
    "second_with_tanh": edge("0.summed", e.unary("TANH")),
    "scalar_on_stream": scalar_on_stream,
    "scalar_left_out": lambda g: g.rewire(g.layer(0).out, g.layer(0).summed),
    "scalar_twice": edge("0.out", lambda g, x: g.mul(x, g.roles["layers.0.layer_scalar"])),
    "scalars_swapped": scalars_swapped,
    "scalar_by_channel": edge("0.out", e.mul(np.linspace(0.5, 1.5, 64).reshape(1, 1, 64))),
}


def capped(edit: Edit) -> Change:
    """``edit`` of the head's result in place of the capped logits."""
    return edge("logits", lambda g, _: edit(g, e.at(g, "lm_head")))


def recapped(scale: float, bound: float) -> Change:
    return capped(e.chain(e.mul(scale), e.unary("TANH"), e.mul(bound)))


OUTPUTS: dict[str, Change] = {
    "cap_50": recapped(1 / 50, 50.0),
    "cap_left_out": capped(lambda g, x: x),
    "cap_on_half_of_the_tokens": edge(
        "logits", lambda g, x: g.join([g.part(x, 0, 256), g.part(e.at(g, "lm_head"), 256, 256)])
    ),
    "logits_doubled": edge("logits", e.mul(2.0)),
    "logits_softmax": edge("logits", lambda g, x: g.call("SOFTMAX", x, beta=1.0)),
    "logits_without_their_mean": edge("logits", lambda g, x: g.sub(x, g.reduce("MEAN", x, 2))),
    "logits_negated": edge("logits", e.unary("NEG")),
    "cap_twice": edge("logits", e.chain(e.mul(1 / 5), e.unary("TANH"), e.mul(5.0))),
    "projected_tanh": edge("projected_activations", e.unary("TANH")),
    "head_state_scaled": e.put("state", e.mul(0.5), lambda g: g.linear("lm_head")),
    "projected_is_state": lambda g: g.rewire(g.output("projected_activations"), g.normed("final_norm")),
}


def activated(edit: Edit, layer: int = 0) -> Change:
    """Another activation of the gate."""
    return edge(f"{layer}.activated", lambda g, _: edit(g, g.layer(layer).gate))


def gelu(g: Graph, x: int, *, approximate: bool = True) -> int:
    return g.call("GELU", x, approximate=approximate)


def by_erf(g: Graph, x: int) -> int:
    return gelu(g, x, approximate=False)


GELU: dict[str, Change] = {
    "erf_of_all": e.each(activated(by_erf), activated(by_erf, 1)),
    "erf_of_one": activated(by_erf),
    "twice": activated(e.chain(gelu, gelu)),
    "of_gate_doubled": activated(e.chain(e.mul(2.0), gelu)),
    "of_gate_shifted": activated(e.chain(e.add(0.5), gelu)),
    "on_up": edge("0.product", lambda g, _: g.mul(g.layer(0).gate, gelu(g, g.layer(0).up))),
    "product_relu": edge("0.product", e.unary("RELU")),
}

CASES = (*cases("norms", NORMS), *cases("residuals", RESIDUALS), *cases("outputs", OUTPUTS), *cases("gelu", GELU))
