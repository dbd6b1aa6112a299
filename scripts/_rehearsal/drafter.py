"""The drafter's section: four layers that read the base's caches; matrices in INT8, feed-forward and head in INT4.

Caches are INT8 and dequantized whole, as in the published files: what that costs an interpreter is part of what is
rehearsed. Their steps are E2B's.
"""

from __future__ import annotations

import numpy as np
from helpers.make_graph import Model, fed_forward, rotated, windowed

from .decoder import attend
from .shapes import FULL, ROPE, SLIDING, Shape

TYPES = (SLIDING, SLIDING, SLIDING, FULL)
STEPS = {(SLIDING, "k"): 0.005955, (SLIDING, "v"): 0.047244, (FULL, "k"): 0.001091, (FULL, "v"): 0.017857}
"""What a code of a cache is worth."""


def build_drafter(shape: Shape) -> Model:
    """Build the model of the section ``mtp_drafter``, with its constants behind the flatbuffer."""
    model = Model()
    graph = model.graph("mtp_drafter")
    activations = graph.input("activations", [1, 1, 2 * shape.width])
    position = graph.input("input_pos", [1], np.int32)
    mask = graph.input("mask", [1, 1, 1, shape.cache], np.bool_)
    owner = {kind: max(i for i in range(shape.owners) if shape.types[i] == kind) for kind in (SLIDING, FULL)}
    caches = {
        kind: tuple(
            graph.codes(
                f"kv_cache_{part}_{index}", [1, shape.kv_heads, shape.cache, shape.head(index)], STEPS[kind, part]
            )
            for part in "kv"
        )
        for kind, index in owner.items()
    }
    near = windowed(graph, position, mask, shape.window)
    stream = graph.linear(activations, "pre_projection", shape.drafter_width, 8)
    for layer, kind in enumerate(TYPES):
        head = shape.head(owner[kind])
        normed = graph.norm(stream, f"{layer}.pre_attention")
        query = graph.linear(normed, f"{layer}.q", shape.drafter_heads * head, 8)
        query = graph.norm(graph.reshape(query, [1, 1, shape.drafter_heads, head]), f"{layer}.qn")
        query = rotated(graph, query, position, *ROPE[kind])
        key, value = (graph.call("DEQUANTIZE", cache, dtype=np.float32) for cache in caches[kind])
        mixed = attend(graph, query, key, value, mask if kind == FULL else near)
        mixed = graph.linear(mixed, f"{layer}.o", shape.drafter_width, 8)
        stream = graph.add(stream, graph.norm(mixed, f"{layer}.post_attention"))
        stream = graph.mul(fed_forward(graph, stream, f"{layer}.", shape.drafter_ffn, 4), 0.4 + 0.1 * layer)
    state = graph.norm(stream, "final")
    logits = graph.linear(state, "lm_head", shape.vocab, 4)
    graph.outputs["logits"] = graph.bounded(logits, shape.soft_cap)
    graph.outputs["projected_activations"] = graph.linear(state, "post_projection", shape.width, 8)
    graph.sign("mtp_drafter")
    return model
