"""The geometry of Gemma 4's small models, as numbers.

E2B's and E4B's are those of their public configurations (``google/gemma-4-E2B-it``, ``google/gemma-4-E4B-it``) and of
what others saw in the published bundles. ``tiny`` has the same parts and nothing of the size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {SLIDING: (1e4, 1.0), FULL: (1e6, 0.25)}
"""The base of the frequencies, and how many of them are not 0."""
PREFIX = "model.language_model."


class Weight(NamedTuple):
    """A tensor of the base."""

    name: str
    """In transformers."""
    shape: tuple[int, ...]
    deviation: float = 0.0
    """Of a matrix's numbers."""
    level: float = 1.0
    """What those of a norm or a scalar lie around."""


@dataclass(frozen=True)
class Shape:
    """A base with per-layer embeddings whose last layers share K and V, and its drafter."""

    name: str
    layers: int
    shared: int
    """So many layers at the end own no K and V."""
    period: int
    """Every so many layers, one has full attention."""
    width: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    full_head_dim: int
    per_layer: int
    """Width of a layer's own embedding."""
    vocab: int
    window: int
    double_wide: bool
    """Whether layers that share K and V have a feed-forward block twice as wide."""
    drafter_width: int
    drafter_ffn: int
    drafter_heads: int
    embedding_bits: int
    shared_ffn_bits: int
    cache: int
    """Slots of the bundle's caches."""
    prefills: tuple[int, ...]
    """Lengths of the bundle's prefill signatures."""
    opaque: int
    """Bytes of each section for images and sound, of which nothing is read."""
    soft_cap: float = 30.0
    positions: int = 131072

    @property
    def types(self) -> list[str]:
        """The kind of each layer's attention."""
        return [SLIDING if (layer + 1) % self.period else FULL for layer in range(self.layers)]

    @property
    def owners(self) -> int:
        """So many layers own K and V."""
        return self.layers - self.shared

    def head(self, layer: int) -> int:
        """Elements of each head of ``layer``."""
        return self.full_head_dim if self.types[layer] == FULL else self.head_dim

    def ffn_of(self, layer: int) -> int:
        """Width of the feed-forward block of ``layer``."""
        return self.ffn * (2 if self.double_wide and layer >= self.owners else 1)

    def cache_of(self, layer: int) -> int:
        """The layer whose K and V ``layer`` reads."""
        if layer < self.owners:
            return layer
        return max(owner for owner in range(self.owners) if self.types[owner] == self.types[layer])

    def with_layers(self, layers: int) -> Shape:
        """The same with fewer layers, of which the same share, in whole periods, has no K and V of its own.

        Raises:
            ValueError: they are no whole periods, or fewer than two.
        """
        if layers % self.period or not 2 * self.period <= layers <= self.layers:
            allowed = f"a multiple of {self.period} from {2 * self.period} to {self.layers}"
            raise ValueError(f"layers: expected {allowed}, found {layers}.")
        shared = max(1, round(layers * self.shared / self.layers / self.period)) * self.period
        return replace(self, layers=layers, shared=shared)

    def tensors(self) -> Iterator[Weight]:
        """Every tensor of the base."""
        packed, width = self.layers * self.per_layer, self.width
        yield Weight(f"{PREFIX}embed_tokens.weight", (self.vocab, width), width**-0.5)
        # A row is as many embeddings as there are layers, and each is scaled by the root of its own width.
        yield Weight(f"{PREFIX}embed_tokens_per_layer.weight", (self.vocab, packed), self.per_layer**-0.5)
        yield Weight(f"{PREFIX}per_layer_model_projection.weight", (packed, width), width**-0.5)
        yield Weight(f"{PREFIX}per_layer_projection_norm.weight", (self.per_layer,))
        yield Weight(f"{PREFIX}norm.weight", (width,))
        for layer in range(self.layers):
            for name, shape in self._of_layer(layer):
                deviation = shape[1] ** -0.5 if len(shape) == 2 else 0.0
                # Queries and keys are multiplied without a root: of length 1 each, every attention would look at one
                # slot alone, and a rounding would be another text.
                level = shape[0] ** -0.5 if name == "self_attn.k_norm" else 1.0
                yield Weight(f"{PREFIX}layers.{layer}.{name}.weight", shape, deviation, level)
            yield Weight(f"{PREFIX}layers.{layer}.layer_scalar", (1,), level=0.65)

    def _of_layer(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        head, ffn, width = self.head(layer), self.ffn_of(layer), self.width
        yield "self_attn.q_proj", (self.heads * head, width)
        yield "self_attn.q_norm", (head,)
        if layer < self.owners:
            yield "self_attn.k_proj", (self.kv_heads * head, width)
            yield "self_attn.v_proj", (self.kv_heads * head, width)
            yield "self_attn.k_norm", (head,)
        yield "self_attn.o_proj", (width, self.heads * head)
        yield "mlp.gate_proj", (ffn, width)
        yield "mlp.up_proj", (ffn, width)
        yield "mlp.down_proj", (width, ffn)
        yield "per_layer_input_gate", (self.per_layer, width)
        yield "per_layer_projection", (width, self.per_layer)
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"{norm}_layernorm", (width,)
        yield "post_per_layer_input_norm", (width,)


_E2B = Shape(
    name="e2b",
    layers=35,
    shared=20,
    period=5,
    width=1536,
    ffn=6144,
    heads=8,
    kv_heads=1,
    head_dim=256,
    full_head_dim=512,
    per_layer=256,
    vocab=262144,
    window=512,
    double_wide=True,
    drafter_width=256,
    drafter_ffn=2048,
    drafter_heads=4,
    embedding_bits=2,
    shared_ffn_bits=2,
    cache=32003,
    prefills=(128, 256, 1024),
    opaque=50_000_000,
)
SHAPES = {
    "e2b": _E2B,
    "e4b": replace(
        _E2B,
        name="e4b",
        layers=42,
        shared=18,
        period=6,
        width=2560,
        ffn=10240,
        kv_heads=2,
        double_wide=False,
        shared_ffn_bits=4,
    ),
    "tiny": Shape(
        name="tiny",
        layers=6,
        shared=3,
        period=3,
        width=64,
        ffn=96,
        heads=4,
        kv_heads=2,
        head_dim=16,
        full_head_dim=32,
        per_layer=16,
        vocab=1024,
        window=16,
        double_wide=True,
        drafter_width=32,
        drafter_ffn=64,
        drafter_heads=4,
        embedding_bits=4,
        shared_ffn_bits=2,
        cache=64,
        prefills=(8, 16),
        opaque=1000,
        positions=1024,
    ),
}
