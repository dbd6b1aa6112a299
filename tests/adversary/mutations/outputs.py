"""The two heads, and the soft cap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, add, at, chain, edge, mul, put, unary, with_number


def head_reads(role: str, place: Callable[[Graph], int]) -> Change:
    def change(g: Graph) -> None:
        op = g.linear(role)
        g.set_input(op, 0, g.reshape(place(g), g.shape(int(op.inputs[0]))))

    return change


def recapped(scale: float, bound: float) -> Change:
    return lambda g: g.rewire(
        g.output("logits"), g.mul(g.tanh(g.mul(at(g, "lm_head"), np.float32(scale))), np.float32(bound))
    )


def capped_by(function: Callable[[Graph, int], int]) -> Change:
    """30 · f(x / 30) with another f."""
    return lambda g: g.rewire(g.output("logits"), g.mul(function(g, g.mul(at(g, "lm_head"), np.float32(1 / 30))), 30.0))


def half_capped(g: Graph) -> None:
    plain = at(g, "lm_head")
    g.insert(g.output("logits"), lambda capped: g.join([g.part(capped, 0, 256), g.part(plain, 256, 256)]))


def logit_at(token: int, value: float) -> np.ndarray:
    return np.where(np.arange(512) == token, value, 0.0).reshape(1, 1, 512)


OUTPUTS: dict[str, Change] = {
    "cap_50": recapped(1 / 50, 50.0),
    "cap_5": recapped(1 / 5, 5.0),
    "cap_with_other_slope": recapped(1 / 15, 30.0),
    "cap_with_other_bound": recapped(1 / 30, 20.0),
    "cap_without_bound": recapped(1 / 30, 1.0),
    "cap_without_slope": recapped(1.0, 30.0),
    "cap_negative": recapped(-1 / 30, 30.0),
    "cap_left_out": lambda g: g.rewire(g.output("logits"), at(g, "lm_head")),
    "cap_slope_only": lambda g: g.rewire(g.output("logits"), g.mul(at(g, "lm_head"), np.float32(1 / 30))),
    "cap_twice": edge("logits", chain(mul(1 / 5), unary("TANH"), mul(5.0))),
    "cap_of_other_function": capped_by(lambda g, x: g.sub(g.logistic(x), 0.5)),
    "cap_by_softsign": capped_by(lambda g, x: g.div(x, g.add(g.abs(x), 1.0))),
    "cap_by_clipping": edge("lm_head", chain(with_number("MINIMUM", 3.0), with_number("MAXIMUM", -3.0))),
    "cap_on_half_of_the_tokens": half_capped,
    "cap_on_projected": edge("projected_activations", chain(unary("TANH"), mul(1.0))),
    "logits_shifted_before_cap": edge("lm_head", add(1.0)),
    "logits_shifted": edge("logits", add(1.0)),
    "logits_doubled": edge("logits", mul(2.0)),
    "logits_halved_before_cap": edge("lm_head", mul(0.5)),
    "logits_by_token_before_cap": edge("lm_head", mul(np.linspace(0.5, 1.5, 512).reshape(1, 1, 512))),
    "logits_with_bias": edge("lm_head", add(np.sin(np.arange(512.0)).reshape(1, 1, 512))),
    "logits_softmax": edge("logits", lambda g, x: g.call("SOFTMAX", x, beta=1.0)),
    "logits_log_softmax": edge("logits", unary("LOG_SOFTMAX")),
    "logits_relu": edge("logits", unary("RELU")),
    "logits_bounded_below": edge("lm_head", with_number("MAXIMUM", -1.0)),
    "logits_bounded_above": edge("logits", with_number("MINIMUM", 1.0)),
    "logits_without_their_mean": edge("logits", lambda g, x: g.sub(x, g.reduce("MEAN", x, 2))),
    "token_forbidden": edge("logits", add(logit_at(7, -1e9))),
    "token_favoured": edge("lm_head", add(logit_at(3, 4.0))),
    "logits_negated": edge("logits", unary("NEG")),
    "logits_of_the_best_only": edge(
        "logits", lambda g, x: g.mul(x, g.cast(g.equal(x, g.reduce("REDUCE_MAX", x, 2)), np.float32))
    ),
    "head_before_final_norm": head_reads("lm_head", lambda g: g.norm("final_norm").x),
    "head_from_layer_0": head_reads("lm_head", lambda g: g.layer(0).out),
    "head_from_last_mlp": head_reads("lm_head", lambda g: g.layer(1).ffw_in),
    "head_state_scaled": put("state", mul(0.5), lambda g: g.linear("lm_head")),
    "post_state_scaled": put("state", mul(0.5), lambda g: g.linear("post_projection")),
    "post_before_final_norm": head_reads("post_projection", lambda g: g.norm("final_norm").x),
    "post_from_layer_0": head_reads("post_projection", lambda g: g.layer(0).out),
    "post_from_the_stream": head_reads("post_projection", lambda g: g.layer(1).ffw_in),
    "projected_plus_hidden": edge(
        "projected_activations", lambda g, x: g.add(x, g.part(g.input("activations"), 64, 64))
    ),
    "projected_plus_state": edge("projected_activations", lambda g, x: g.add(x, g.normed("final_norm"))),
    "projected_scaled": edge("projected_activations", mul(8.0)),
    "projected_tanh": edge("projected_activations", unary("TANH")),
    "projected_by_channel": edge("projected_activations", mul(np.linspace(0.5, 1.5, 64).reshape(1, 1, 64))),
    "projected_is_state": lambda g: g.rewire(g.output("projected_activations"), g.normed("final_norm")),
    "projected_with_logits": edge(
        "projected_activations", lambda g, x: g.add(x, g.reduce("REDUCE_MAX", g.output("logits"), 2))
    ),
    "logits_with_projected": edge(
        "logits", lambda g, x: g.add(x, g.reduce("MEAN", g.output("projected_activations"), 2))
    ),
}
