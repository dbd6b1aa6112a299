"""What happens to loud numbers alone, or to very quiet ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Case, Change, Edit, Sample, chain, chosen, clamped, edge, mul, unary, with_number
from adversary.mutations.heads import cache_edit
from adversary.mutations.norms import averaged, normed_by
from adversary.mutations.scores import softmax_spelled


def above(bound: float) -> Edit:
    return with_number("GREATER", bound)


def largest(g: Graph, x: int) -> int:
    return g.reduce("REDUCE_MAX", g.abs(x), len(g.shape(x)) - 1)


def shrunk(bound: float) -> Edit:
    """x · bound / max(largest, bound)."""
    return lambda g, x: g.mul(x, g.div(np.float32(bound), g.maximum(largest(g, x), np.float32(bound))))


def in_steps(step: float, height: float) -> Edit:
    """Plus ``height`` for every ``step``."""
    return lambda g, x: g.add(x, g.mul(g.round(g.mul(x, np.float32(1 / step))), np.float32(height)))


def pieces(name: str, scale: float, shift: float) -> Edit:
    """A bounded activation, stretched."""
    return chain(mul(1 / scale), with_number("ADD", shift), unary(name), with_number("SUB", shift), mul(scale))


def exploding(g: Graph) -> None:
    """Powers of the scores, without their maximum."""
    layer = g.layer(1)
    powers = g.exp(layer.masked)
    g.rewire(layer.probabilities, g.div(powers, g.reduce("SUM", powers, 3)))


def bounded_powers(g: Graph) -> None:
    layer = g.layer(1)
    powers = g.exp(g.minimum(layer.masked, 60.0))
    g.rewire(layer.probabilities, g.div(powers, g.reduce("SUM", powers, 3)))


def led(g: Graph, x: int) -> int:
    """A logit is favoured where one channel of the activations is the largest."""
    best = g.call("ARG_MAX", g.input("activations"), np.array(2, np.int32), shape=[1, 1], dtype=np.int32, outputType=2)
    row = g.call("GATHER", g.constant(np.eye(1, 128, 77).reshape(128)), best, shape=[1, 1], axis=0)
    return g.add(x, g.reshape(row, [1, 1, 1]))


def channel_77(arrays: dict[str, Any]) -> None:
    arrays["activations"][..., 77] = 9.0


def when_loudest(bound: float, then: Edit) -> Edit:
    """``then`` where the largest score is above ``bound``."""
    return chosen(lambda g, x: above(bound)(g, g.reduce("REDUCE_MAX", x, 3)), then)


def cut(bound: float, then: Edit) -> Edit:
    return chosen(above(bound), then)


STREAM: dict[str, Change] = {
    "activations_within_100": edge("activations", clamped(100.0)),
    "activations_within_1e4": edge("activations", clamped(1e4)),
    "activations_above_150_doubled": edge("activations", cut(150.0, mul(2.0))),
    "activations_in_steps_of_400": edge("activations", in_steps(400.0, 100.0)),
    "activations_by_relu6": edge("activations", pieces("RELU6", 60.0, 3.0)),
    "activations_by_relu_1": edge("activations", pieces("RELU_N1_TO_1", 1000.0, 0.0)),
    "activations_by_tanh": edge("activations", pieces("TANH", 1000.0, 0.0)),
    "activations_of_at_most_100": edge("activations", shrunk(100.0)),
    "activations_of_at_most_1e4": edge("activations", shrunk(1e4)),
    "activations_folded_at_-1000": edge(
        "activations", chain(with_number("ADD", 1024.0), unary("ABS"), with_number("SUB", 1024.0))
    ),
    "activations_relu_at_-1024": edge(
        "activations", chain(with_number("ADD", 1024.0), unary("RELU"), with_number("SUB", 1024.0))
    ),
    "activations_leaky_below": edge("activations", lambda g, x: g.maximum(x, g.sub(g.mul(x, 0.5), 500.0))),
    "stream_within_1000": edge("1.stream", clamped(1000.0)),
    "stream_in_steps_of_2000": edge("1.stream", in_steps(2000.0, 700.0)),
    "stream_other_scale_above_2000": edge("1.stream", cut(2000.0, mul(0.5))),
    "stream_sign_above_2000": edge("1.stream", lambda g, x: g.add(x, g.mul(g.relu(g.sub(g.abs(x), 2000.0)), 0.5))),
    "variance_of_last_at_most_1e7": normed_by("final_norm", averaged(with_number("MINIMUM", 1e7))),
    "stream_as_minimum_of_two": edge("1.stream", lambda g, x: g.minimum(x, g.add(g.mul(x, 2.0), 3000.0))),
}
PLAIN: dict[str, Change] = {
    "largest_channel_favours_a_token": edge("lm_head", led),
    "powers_of_at_least_-9": softmax_spelled(lambda g, x: g.exp(g.maximum(x, -9.0))),
    "largest_score_favoured": edge(
        "1.scores", chosen(lambda g, x: g.equal(x, g.reduce("REDUCE_MAX", x, 3)), with_number("ADD", 0.5))
    ),
}
KEYS: dict[str, Change] = {
    "keys_within_30": cache_edit("key", clamped(30.0)),
    "keys_within_100": cache_edit("key", clamped(100.0), 1),
    "keys_above_60_cleared": cache_edit("key", cut(60.0, mul(0.0))),
    "keys_by_tanh": cache_edit("key", pieces("TANH", 100.0, 0.0)),
    "keys_in_steps": cache_edit("key", in_steps(100.0, -150.0)),
    "scores_within_100": edge("1.scores", clamped(100.0)),
    "scores_within_1000": edge("1.scores", clamped(1000.0)),
    "scores_soft_capped_at_500": edge("1.scores", pieces("TANH", 500.0, 0.0)),
    "scores_above_60_cleared": edge("0.scores", cut(60.0, mul(0.0))),
    "largest_score_above_80": edge("1.scores", when_loudest(80.0, mul(0.25))),
    "scores_by_relu6": edge("1.scores", pieces("RELU6", 40.0, 3.0)),
    "powers_without_maximum": exploding,
    "powers_of_at_most_60": bounded_powers,
}
VALUES: dict[str, Change] = {
    "values_within_1e4": cache_edit("value", clamped(1e4)),
    "values_within_300": cache_edit("value", clamped(300.0), 1),
    "values_above_500_halved": cache_edit("value", cut(500.0, mul(0.5))),
    "values_by_tanh": cache_edit("value", pieces("TANH", 1000.0, 0.0)),
    "values_of_at_most_300": cache_edit("value", shrunk(300.0)),
    "variance_at_most_1e5": normed_by("layers.0.post_attention_norm", averaged(with_number("MINIMUM", 1e5))),
    "attended_within_1e3": edge("0.attended", clamped(1e3)),
    "attention_out_within_1e3": edge("0.attention_out", clamped(1e3)),
    "attention_out_in_steps": edge("0.attention_out", in_steps(3000.0, 1000.0)),
    "attention_out_of_at_most_1e3": edge("1.attention_out", cut(1e3, mul(0.5))),
    "attended_absolute_below": edge(
        "0.attended", chain(with_number("ADD", 1024.0), unary("ABS"), with_number("SUB", 1024.0))
    ),
}
QUIET: dict[str, Change] = {
    "values_below_1e-5_cleared": cache_edit("value", chosen(lambda g, x: g.less(g.abs(x), 1e-5), mul(0.0))),
    "attended_shrunk_by_1e-5": edge("1.attended", lambda g, x: g.sub(x, g.mul(g.sign(x), g.minimum(g.abs(x), 1e-5)))),
}

LOUDNESS = tuple(
    Case("loudness", name, change, shows=shows, rounding=rounding)
    for changes, shows, rounding in (
        (STREAM, (Sample(40, activations=1e3), Sample(40, activations=1e5)), 2e-4),
        (PLAIN, (Sample(40, change=channel_77),), 0.0),
        (KEYS, tuple(Sample(40, keys=loud) for loud in (40.0, 100.0, 400.0)), 1e-2),
        (VALUES, (Sample(40, values=1e3), Sample(40, values=1e5)), 2e-4),
        (QUIET, (Sample(40, values=1e-5),), 0.0),
    )
    for name, change in changes.items()
)
