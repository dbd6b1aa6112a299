"""The order of elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, edge, put


def permuted(place: str, order: Callable[[int], Sequence[int]]) -> Change:
    return edge(place, lambda g, x: g.gather(x, order(g.shape(x)[-1]), -1))


def turned(place: str, rows: int) -> Change:
    """The elements of the last axis as a matrix, transposed."""

    def edit(g: Graph, x: int) -> int:
        shape = g.shape(x)
        matrix = g.reshape(x, [rows, shape[-1] // rows])
        return g.reshape(g.transpose(matrix, [1, 0]), shape)

    return edge(place, edit)


def rolled(place: str) -> Change:
    return edge(place, lambda g, x: g.join([g.part(x, 1, g.shape(x)[-1] - 1), g.part(x, 0, 1)]))


def slice_moved(g: Graph) -> bool | None:
    """The second half of the head begins one element early."""
    layer = g.layer(0)
    for op in g.before(layer.rotated, layer.query_normed):
        if g.kind(op) == "SLICE" and g.value(int(op.inputs[1]))[-1] == 16:
            g.set_input(op, 1, g.constant(np.array([0, 0, 0, 15]), np.int32))
            return None
    return False


reverse = lambda size: range(size - 1, -1, -1)  # noqa: E731
swap_halves = lambda size: [*range(size // 2, size), *range(size // 2)]  # noqa: E731

ORDER: dict[str, Change] = {
    "hidden_before_embedding": permuted("activations", swap_halves),
    "activations_reversed": permuted("activations", reverse),
    "activations_interleaved": permuted("activations", lambda n: [i // 2 + i % 2 * (n // 2) for i in range(n)]),
    "embedding_rolled": edge(
        "activations", lambda g, x: g.join([g.part(x, 1, 63), g.part(x, 0, 1), g.part(x, 64, 64)])
    ),
    "activations_transposed": turned("activations", 8),
    "stream_transposed": turned("1.stream", 8),
    "stream_reversed": permuted("pre_projection", reverse),
    "query_transposed": turned("0.query", 4),
    "query_reversed_within_heads": permuted("0.query_normed", reverse),
    "rotated_rolled": rolled("0.rotated"),
    "merged_reversed": permuted("0.merged", reverse),
    "merged_transposed": turned("0.merged", 32),
    "attention_out_rolled": rolled("0.attention_out"),
    "gate_reversed": permuted("0.gate", reverse),
    "up_halves_swapped": permuted("0.up", swap_halves),
    "product_transposed": turned("0.product", 16),
    "down_rolled": rolled("0.down"),
    "state_reversed": permuted("state", reverse),
    "state_for_head_rolled": put(
        "state", lambda g, x: g.join([g.part(x, 1, 63), g.part(x, 0, 1)]), lambda g: g.linear("lm_head")
    ),
    "logits_reversed": permuted("logits", reverse),
    "logits_rolled": rolled("logits"),
    "logits_transposed": turned("logits", 16),
    "projected_halves_swapped": permuted("projected_activations", swap_halves),
    "projected_transposed": turned("projected_activations", 8),
    "second_half_begins_early": slice_moved,
}
