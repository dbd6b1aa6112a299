"""The sections of a base: embedders, and a decoder whose signatures are several prefills, decode and verify.

Weights are random codes in the types of the published bundles. What the graphs compute is Gemma 4's text model with
plain attention in floats; published ones have INT8 caches, attention in composites, and static INT8 activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from helpers.make_graph import Graph, Model, fed_forward, rotated

from .shapes import ROPE, Shape

VERIFY = 5
"""Tokens of the signature that verifies drafts."""


def build_embedder(shape: Shape) -> Model:
    """Build the embedder: tokens → embeddings, times the root of their width."""
    model = Model()
    graph = model.graph("embedder")
    rows = _look_up(graph, _add_tokens_input(graph), "embed_tokens", shape.vocab, shape.width, shape.embedding_bits)
    graph.outputs["embeddings"] = graph.mul(rows, shape.width**0.5)
    graph.sign("embedder")
    return model


def build_per_layer_embedder(shape: Shape) -> Model:
    """Build the per-layer embedder: tokens → embeddings of every layer, from one table per layer."""
    model = Model()
    graph = model.graph("per_layer_embedder")
    tokens = _add_tokens_input(graph)
    rows = []
    for layer in range(shape.layers):
        row = _look_up(graph, tokens, f"per_layer.{layer}", shape.vocab, shape.per_layer, 4)
        rows.append(graph.mul(graph.reshape(row, [1, 1, 1, shape.per_layer]), shape.per_layer**0.5))
    graph.outputs["embeddings"] = graph.join(rows, 2)
    graph.sign("per_layer_embedder")
    return model


def _add_tokens_input(graph: Graph) -> int:
    flat = graph.reshape(graph.input("token_ids", [1, 1], np.int32), [1])
    return graph.call("MAXIMUM", flat, np.array([0], np.int32))


def _look_up(graph: Graph, tokens: int, key: str, rows: int, width: int, bits: int) -> int:
    table = graph.matrix(key, rows, width, bits)
    row = graph.call("EMBEDDING_LOOKUP", tokens, table, shape=[1, width], dtype=np.float32)
    return graph.reshape(row, [1, 1, width])


def build_decoder(shape: Shape) -> Model:
    """Build the decoder, with its constants in a section of weights."""
    model = Model(external=True)
    for length in shape.prefills:
        _Signature(shape, model.graph(f"prefill_{length}"), length).prefill()
    for name, length in (("decode", 1), ("verify", VERIFY)):
        _Signature(shape, model.graph(name), length).decode(name)
    return model


def attend(graph: Graph, query: int, key: int, value: int, mask: int) -> int:
    """Add attention of ``query [1, T, heads, D]`` over caches ``[1, kv, C, D]``; returns ``[1, T, heads · D]``."""
    _, tokens, heads, head = graph.shape(query)
    _, kv_heads, slots, _ = graph.shape(key)
    grouped = [1, kv_heads, heads // kv_heads * tokens, head]
    query = graph.reshape(graph.transpose(query, [0, 2, 1, 3]), grouped)
    scores = graph.call("BATCH_MATMUL", query, key, shape=[*grouped[:-1], slots], adjY=True)
    scores = graph.reshape(scores, [1, heads, tokens, slots])
    weights = graph.call("SOFTMAX", graph.call("SELECT_V2", mask, scores, -1e9), beta=1.0)
    weights = graph.reshape(weights, [*grouped[:-1], slots])
    mixed = graph.call("BATCH_MATMUL", weights, value, shape=grouped)
    mixed = graph.transpose(graph.reshape(mixed, [1, heads, tokens, head]), [0, 2, 1, 3])
    return graph.reshape(mixed, [1, tokens, heads * head])


@dataclass
class _Signature:
    shape: Shape
    graph: Graph
    tokens: int

    def prefill(self) -> None:
        """Fill the caches: it ends with K and V of the last layer that owns any."""
        stream = self._inputs()
        for layer in range(self.shape.owners - 1):
            stream = self._layer(layer, stream)
        last = self.shape.owners - 1
        self._own_cache(last, self.graph.norm(stream, f"{last}.input"))
        self._finish(f"prefill_{self.tokens}")

    def decode(self, name: str) -> None:
        """Up to the logits."""
        graph, shape = self.graph, self.shape
        stream = self._inputs()
        for layer in range(shape.layers):
            stream = self._layer(layer, stream)
        graph.outputs["activations"] = graph.norm(stream, "norm")
        logits = graph.linear(graph.outputs["activations"], "lm_head", shape.vocab, shape.embedding_bits)
        graph.outputs["logits"] = graph.bounded(logits, shape.soft_cap)
        self._finish(name)

    def _finish(self, name: str) -> None:
        for layer, pair in self.caches.items():
            for which, value in zip("kv", pair, strict=True):
                self.graph.outputs[f"kv_cache_{which}_{layer}"] = value
        self.graph.sign(name)

    def _inputs(self) -> int:
        graph, shape, tokens = self.graph, self.shape, self.tokens
        embeddings = graph.input("embeddings", [1, tokens, shape.width])
        per_layer = graph.input("per_layer_embeddings", [1, tokens, shape.layers, shape.per_layer])
        self.position = graph.input("input_pos", [tokens], np.int32)
        self.mask = graph.input("mask", [1, 1, tokens, shape.cache], np.bool_)
        self.caches: dict[int, tuple[int, int]] = {}
        zero = graph.constant([0], np.int32)
        self.start = graph.join([zero, zero, graph.part(self.position, 0, 1), zero])
        projected = graph.linear(embeddings, "model_projection", shape.layers * shape.per_layer, 8)
        projected = graph.reshape(graph.mul(projected, shape.width**-0.5), graph.shape(per_layer))
        both = graph.add(graph.norm(projected, "projection_norm"), per_layer)
        self.per_layer = graph.mul(both, 2**-0.5)
        return embeddings

    def _layer(self, layer: int, stream: int) -> int:
        graph, shape = self.graph, self.shape
        normed = graph.norm(stream, f"{layer}.input")
        if layer < shape.owners:
            self._own_cache(layer, normed)
        kind = shape.types[layer]
        query = graph.norm(self._heads(layer, normed, f"{layer}.q", shape.heads), f"{layer}.qn")
        query = rotated(graph, query, self.position, *ROPE[kind])
        mixed = attend(graph, query, *self.caches[shape.cache_of(layer)], self.mask)
        mixed = graph.linear(mixed, f"{layer}.o", shape.width, 4)
        stream = graph.add(stream, graph.norm(mixed, f"{layer}.post_attention"))
        bits = shape.shared_ffn_bits if layer >= shape.owners else 4
        stream = fed_forward(graph, stream, f"{layer}.", shape.ffn_of(layer), bits)
        return graph.mul(self._own_embedding(layer, stream), 0.5 + layer / 100)

    def _own_embedding(self, layer: int, stream: int) -> int:
        graph, shape = self.graph, self.shape
        gate = graph.call("GELU", graph.linear(stream, f"{layer}.per_layer_gate", shape.per_layer, 8), approximate=True)
        embedding = graph.part(self.per_layer, layer, 1, axis=2)
        product = graph.mul(gate, graph.reshape(embedding, graph.shape(gate)))
        projected = graph.linear(product, f"{layer}.per_layer_projection", shape.width, 8)
        return graph.add(stream, graph.norm(projected, f"{layer}.post_per_layer"))

    def _heads(self, layer: int, normed: int, key: str, heads: int) -> int:
        product = self.graph.linear(normed, key, heads * self.shape.head(layer), 4)
        return self.graph.reshape(product, [1, self.tokens, heads, self.shape.head(layer)])

    def _own_cache(self, layer: int, normed: int) -> None:
        graph, shape = self.graph, self.shape
        slots = [1, shape.kv_heads, shape.cache, shape.head(layer)]
        key = graph.norm(self._heads(layer, normed, f"{layer}.k", shape.kv_heads), f"{layer}.kn")
        key = rotated(graph, key, self.position, *ROPE[shape.types[layer]])
        value = graph.norm(self._heads(layer, normed, f"{layer}.v", shape.kv_heads))
        written = []
        for which, new in zip("kv", (key, value), strict=True):
            cache = graph.input(f"kv_cache_{which}_{layer}", slots)
            moved = graph.transpose(new, [0, 2, 1, 3])
            written.append(graph.call("DYNAMIC_UPDATE_SLICE", cache, moved, self.start, shape=slots))
        self.caches[layer] = written[0], written[1]
