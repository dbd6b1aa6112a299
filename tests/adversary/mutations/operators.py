"""Operators that no drafter has, where one could be overlooked."""

from __future__ import annotations

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, Edit, chain, edge, unary


def on_axis(name: str) -> Edit:
    """An operator that takes the axis it works along."""
    return lambda g, x: g.call(name, x, np.array([len(g.shape(x)) - 1], np.int32), shape=g.shape(x))


def summed_up(g: Graph, x: int) -> int:
    return g.call("CUMSUM", x, np.array(len(g.shape(x)) - 1, np.int32), shape=g.shape(x))


def custom(g: Graph, x: int) -> int:
    made = g.tensor(g.shape(x))
    op = g.emit("CUSTOM", [x], [made])
    code = g.model.operatorCodes[op.opcodeIndex]
    code.customCode = b"Identity"
    return made


OPERATORS: dict[str, Change] = {
    "reversed": edge("1.stream", on_axis("REVERSE_V2")),
    "reversed_probabilities": edge("1.probabilities", on_axis("REVERSE_V2")),
    "reversed_result": edge("0.attended", on_axis("REVERSE_V2")),
    "summed_up": edge("0.queries", summed_up),
    "summed_up_probabilities": edge("0.probabilities", summed_up),
    "length_of_1": edge("0.queries", unary("L2_NORMALIZATION")),
    "sine_of_queries": edge("0.rotated", unary("SIN")),
    "cosine_of_scores": edge("0.scores", unary("COS")),
    "sine_of_the_result": edge("0.attended", unary("SIN")),
    "exponential_of_scores": edge("0.scores", chain(unary("NEG"), unary("EXP"))),
    "custom": edge("1.stream", custom),
    "custom_in_attention": edge("0.queries", custom),
}

UNKNOWN = dict.fromkeys(("custom", "custom_in_attention"), "nobody knows what it computes")
