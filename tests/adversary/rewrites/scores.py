"""Softmax, scale and RoPE in other operators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, each, edge, halves, turn, with_number


def softmax(build: Callable[[Graph, int], int]) -> Change:
    def change(g: Graph) -> None:
        for index in range(2):
            layer = g.layer(index)
            g.rewire(layer.probabilities, build(g, layer.masked))

    return change


def spelled(g: Graph, x: int) -> int:
    powers = g.exp(g.sub(x, g.reduce("REDUCE_MAX", x, 3)))
    return g.div(powers, g.reduce("SUM", powers, 3))


def rotated(build: Callable[[Graph, int, int, int], int]) -> Change:
    """RoPE written otherwise, in every layer."""

    def change(g: Graph) -> None:
        for index in range(2):
            layer = g.layer(index)
            half = g.shape(layer.query_normed)[-1] // 2
            cos, sin = (g.part(t, 0, half) for t in (layer.cos, layer.sin))
            g.rewire(layer.rotated, build(g, layer.query_normed, cos, sin))

    return change


def wide_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    """q · [cos, cos] + [−b, a] · [sin, sin]."""
    a, b = halves(g, q)
    turned = g.join([g.neg(b), a])
    return g.add(g.mul(q, g.join([cos, cos])), g.mul(turned, g.join([sin, sin])))


def signed_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    """q · [cos, cos] + [b, a] · [−sin, sin]."""
    a, b = halves(g, q)
    signed = g.join([g.neg(sin), sin])
    return g.add(g.mul(q, g.join([cos, cos])), g.mul(g.join([b, a]), signed))


def gathered_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    width = g.shape(q)[-1]
    a, b = (g.gather(q, range(start, start + width // 2), -1) for start in (0, width // 2))
    return g.join(turn(g, a, b, cos, sin))


def strided_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    shape, half = g.shape(q), g.shape(q)[-1] // 2
    parts = []
    for start in (0, half):
        begin, end = np.array([0, 0, 0, start], np.int32), np.array([*shape[:3], start + half], np.int32)
        parts.append(g.call("STRIDED_SLICE", q, begin, end, np.ones(4, np.int32), shape=[*shape[:3], half]))
    return g.join(turn(g, *parts, cos, sin))


def split_rotation(g: Graph, q: int, cos: int, sin: int) -> int:
    shape = [*g.shape(q)[:-1], g.shape(q)[-1] // 2]
    parts = [g.tensor(shape), g.tensor(shape)]
    g.emit("SPLIT", [g.constant(np.array(3), np.int32), q], parts, numSplits=2)
    return g.join(turn(g, *parts, cos, sin))


SCORES: dict[str, Change] = {
    "softmax_spelled": softmax(spelled),
    "scale_and_back": each(edge("0.queries", with_number("MUL", 0.25)), edge("0.scores", with_number("MUL", 4.0))),
    "key_scaled_and_back": each(edge("0.queries", with_number("DIV", 8.0)), edge("0.scores", with_number("MUL", 8.0))),
    "constant_added": edge("0.scores", with_number("ADD", 1.5)),
    "rope_wide": rotated(wide_rotation),
    "rope_signed": rotated(signed_rotation),
    "rope_halves": rotated(lambda g, q, cos, sin: g.join(turn(g, *halves(g, q), cos, sin))),
    "rope_gathered": rotated(gathered_rotation),
    "rope_strided": rotated(strided_rotation),
    "rope_split": rotated(split_rotation),
    "rope_negated_twice": rotated(lambda g, q, cos, sin: g.join(turn(g, *halves(g, q), cos, g.neg(sin), -1))),
}
