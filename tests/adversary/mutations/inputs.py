"""What is done to the inputs."""

from __future__ import annotations

import numpy as np
from helpers.surgery import Graph

from adversary.edits import Change, Edit, add, edge, mul, unary, with_number
from adversary.mutations.masks import both, end_param, slots, visible


def half(which: int, edit: Edit) -> Change:
    """``edit`` of the embedding (0) or the hidden state (1)."""

    def change(g: Graph, x: int) -> int:
        parts = [g.part(x, 0, 64), g.part(x, 64, 64)]
        parts[which] = edit(g, parts[which])
        return g.join(parts)

    return edge("activations", change)


def position_everywhere(edit: Edit) -> Change:
    return edge("input_pos", edit)


INPUTS: dict[str, Change] = {
    "activations_doubled": edge("activations", mul(2.0)),
    "activations_bounded": edge("activations", with_number("MINIMUM", 1.0)),
    "activations_tanh": edge("activations", unary("TANH")),
    "activations_normed": edge("activations", lambda g, x: g.mul(x, g.rsqrt(g.reduce("MEAN", g.mul(x, x), 2)))),
    "activations_shifted": edge("activations", add(0.1)),
    "activations_plus_position": edge(
        "activations", lambda g, x: g.add(x, g.mul(g.cast(g.input("input_pos"), np.float32), 0.01))
    ),
    "activations_times_mask": edge(
        "activations", lambda g, x: g.mul(x, g.cast(g.slice(g.input("mask"), [0] * 4, [1, 1, 1, 1]), np.float32))
    ),
    "embedding_halved": half(0, mul(0.5)),
    "embedding_times_root_of_width": half(0, mul(8.0)),
    "embedding_cleared": half(0, mul(0.0)),
    "embedding_negated": half(0, unary("NEG")),
    "hidden_cleared": half(1, mul(0.0)),
    "hidden_halved": half(1, mul(0.5)),
    "hidden_tanh": half(1, unary("TANH")),
    "hidden_by_channel": half(1, mul(np.linspace(0.5, 1.5, 64).reshape(1, 1, 64))),
    "hidden_normed": half(1, lambda g, x: g.mul(x, g.rsqrt(g.reduce("MEAN", g.mul(x, x), 2)))),
    "hidden_is_embedding": edge("activations", lambda g, x: g.join([g.part(x, 0, 64), g.part(x, 0, 64)])),
    "embedding_plus_hidden": half(0, lambda g, x: g.add(x, g.part(g.input("activations"), 64, 64))),
    "position_plus_1": position_everywhere(lambda g, x: g.add(x, np.array([1], np.int32))),
    "position_minus_1": position_everywhere(lambda g, x: g.sub(x, np.array([1], np.int32))),
    "position_modulo_64": position_everywhere(lambda g, x: g.call("FLOOR_MOD", x, np.array([64], np.int32))),
    "position_bounded": position_everywhere(lambda g, x: g.minimum(x, np.array([100], np.int32))),
    "position_doubled": position_everywhere(lambda g, x: g.add(x, x)),
    "position_is_param_tensor": position_everywhere(lambda g, x: end_param(g)),
    "position_plus_param_tensor": position_everywhere(lambda g, x: g.add(x, end_param(g))),
    "position_is_constant": position_everywhere(lambda g, x: g.constant([7], np.int32)),
    "stream_plus_position": edge(
        "1.stream", lambda g, x: g.add(x, g.mul(g.cast(g.input("input_pos"), np.float32), 0.01))
    ),
    "logits_plus_param_tensor": edge("logits", lambda g, x: g.add(x, g.cast(end_param(g), np.float32))),
    "stream_plus_key": edge(
        "1.stream",
        lambda g, x: g.add(x, g.reshape(g.slice(g.input("kv_cache_k_3"), [0] * 4, [1, 1, 1, 64]), [1, 1, 64])),
    ),
    "mask_of_param_tensor": visible(1, lambda g, x: both(g, x, g.greater(end_param(g), slots(g) + np.int32(8)))),
}
