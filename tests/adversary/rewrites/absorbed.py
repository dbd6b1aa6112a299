"""Factors that the next norm divides away again."""

from __future__ import annotations

from adversary.edits import Change, each, edge, put, with_number
from adversary.mutations.gelu import activated, gelu

ABSORBED: dict[str, Change] = {
    "result_doubled": edge("0.attended", with_number("MUL", 2.0)),
    "attention_out_halved": edge("0.attention_out", with_number("MUL", 0.5)),
    "gelu_doubled": activated(lambda g, x: g.mul(gelu(g, x), 2.0)),
    "up_scaled": edge("0.up", with_number("MUL", 3.0)),
    "query_doubled": edge("0.query", with_number("MUL", 2.0)),
    "query_input_doubled": edge("0.query_in", with_number("MUL", 2.0)),
    "state_scaled_and_back": each(
        put("state", with_number("MUL", 4.0), lambda g: g.linear("post_projection")),
        edge("projected_activations", with_number("MUL", 0.25)),
    ),
}
