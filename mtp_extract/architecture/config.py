"""The config of Gemma 4's multi-token-prediction drafters, the same wherever it is read from, and their architecture.

Every number that the network uses is a field of :class:`DrafterConfig`. An experiment such as "full instead of partial
RoPE" is therefore a changed config (:meth:`DrafterConfig.replace_rope`, :func:`dataclasses.replace`), not a branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.roles import GEMMA4_MTP, Shapes, list_roles, resolve_shapes
from mtp_extract.data import load_mapping
from mtp_extract.errors import DrafterError, UnsupportedError


class Config(Protocol):
    """The part of a config that every architecture has."""

    @property
    def backbone_hidden_size(self) -> int:
        """Width of the base model."""

    @property
    def hidden_size(self) -> int:
        """Width of the drafter."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the base."""

    def as_json(self) -> dict[str, Any]:
        """Return one value per field, for ``extraction.json`` and ``--json``."""


SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer type."""

    theta: float
    """The base θ of the frequencies, ``theta ** (-2i / head_dim)``."""
    partial_rotary_factor: float = 1.0
    """Share of the head that is rotated; the remaining frequencies are zero ("proportional" RoPE)."""
    factor: float = 1.0
    """Divisor of every frequency (context extension)."""

    @property
    def kind(self) -> str:
        """transformers' ``rope_type``."""
        return "default" if self.partial_rotary_factor == self.factor == 1.0 else "proportional"


@dataclass(frozen=True)
class LayerConfig:
    """A layer: attention with its own queries over the base's K and V, then a gated feed-forward block."""

    layer_type: str  # SLIDING or FULL; selects the base's K and V
    head_dim: int  # width of one head of Q, K and V
    num_kv_heads: int  # heads of the base's K and V; each serves equally many query heads
    sliding_window: int | None  # positions that a query attends to, itself included; None for all
    rope: RopeConfig  # applied to Q; K arrives already rotated


@dataclass(frozen=True)
class OrderedHeadConfig:
    """The centroid head: logits only for tokens of the ``top_k`` nearest of ``num_centroids`` clusters."""

    num_centroids: int  # clusters of tokens
    top_k: int  # clusters whose tokens get logits


@dataclass(frozen=True)
class DrafterConfig:
    """The complete config of an MTP drafter."""

    backbone_hidden_size: int  # width of the base model; the input is twice as wide (embedding, then hidden state)
    hidden_size: int  # width of the drafter
    intermediate_size: int  # width of the feed-forward block
    vocab_size: int  # rows of the LM head
    num_heads: int  # query heads, the same in every layer
    layers: tuple[LayerConfig, ...]
    attention_scale: float = 1.0
    """Factor of Q·K. Gemma 4 uses 1.0 because Q and K are normalized."""
    rms_norm_eps: float = 1e-6
    final_logit_softcap: float | None = None
    """c in ``c * tanh(logits / c)``; None for no cap. LiteRT graphs have 30, the official transformers checkpoints
    none: the argmax is the same, the probabilities differ."""
    hidden_activation: str = "gelu_pytorch_tanh"  # transformers' name of the gate's function
    ordered_head: OrderedHeadConfig | None = None  # the centroid head; None for a dense one
    max_position_embeddings: int | None = None  # longest context in tokens; None if not recorded

    def __post_init__(self) -> None:
        if not self.layers:
            raise DrafterError("expected a drafter of at least one layer, found none. Check the config's layer_types.")
        for index, kv in enumerate(self.num_kv_heads):
            if self.num_heads % kv:
                why = f"expected num_kv_heads to divide the {self.num_heads} query heads, found {kv}"
                raise DrafterError(f"layer {index}: {why}. Check num_key_value_heads in the config.")
        head = self.ordered_head
        if head and (self.vocab_size % head.num_centroids or not 0 < head.top_k <= head.num_centroids):
            raise DrafterError(
                f"expected num_centroids to divide the vocabulary of {self.vocab_size} and a top k of at most that "
                f"many centroids, found num_centroids {head.num_centroids}, top k {head.top_k}. Check the config."
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer_types(self) -> tuple[str, ...]:
        return tuple(layer.layer_type for layer in self.layers)

    @property
    def head_dims(self) -> tuple[int, ...]:
        return tuple(layer.head_dim for layer in self.layers)

    @property
    def num_kv_heads(self) -> tuple[int, ...]:
        return tuple(layer.num_kv_heads for layer in self.layers)

    @property
    def sliding_window(self) -> int | None:
        """The window of the sliding layers; None if there are none."""
        return next((layer.sliding_window for layer in self.layers if layer.layer_type == SLIDING), None)

    @property
    def rope(self) -> dict[str, RopeConfig]:
        """Layer type → RoPE."""
        return {layer_type: layer.rope for layer_type, layer in self.kv_layers.items()}

    @property
    def kv_layers(self) -> dict[str, LayerConfig]:
        """Layer type → its first layer; the base must provide K and V for each."""
        by_type: dict[str, LayerConfig] = {}
        for layer in self.layers:
            by_type.setdefault(layer.layer_type, layer)
        return by_type

    @property
    def sliding(self) -> LayerConfig:
        """The first sliding layer, else the first layer: engines' configurations require the fields of both types."""
        return self.kv_layers.get(SLIDING) or self.layers[0]

    @property
    def full(self) -> LayerConfig:
        """The first full layer, else the first layer."""
        return self.kv_layers.get(FULL) or self.layers[0]

    def require_uniform(self) -> None:
        """Raise UnsupportedError if layers of one type differ, which no engine's configuration can express."""
        for index, layer in enumerate(self.layers):
            if layer != (first := self.kv_layers[layer.layer_type]):
                raise UnsupportedError(
                    f"layers.{index}: expected all {layer.layer_type} layers to be alike, found {layer} beside {first}."
                    " No engine's configuration expresses that."
                )

    def replace_rope(self, layer_type: str, **changes: float) -> DrafterConfig:
        """Return a copy with fields of :class:`RopeConfig` replaced in the layers of ``layer_type``."""
        layers = (
            replace(layer, rope=replace(layer.rope, **changes)) if layer.layer_type == layer_type else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def as_json(self) -> dict[str, Any]:
        """Return one value per field, or a list with one entry per layer, for ``extraction.json`` and ``--json``."""
        fields = {name: getattr(self, name) for name in _RECORDED}
        fields["rope"] = {
            layer_type: {"theta": rope.theta, "partial_rotary_factor": rope.partial_rotary_factor}
            for layer_type, rope in self.rope.items()
        }
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


_RECORDED = (
    *("backbone_hidden_size", "hidden_size", "intermediate_size", "vocab_size", "num_layers", "num_heads"),
    *("head_dims", "num_kv_heads", "layer_types", "sliding_window", "rope"),
    *("final_logit_softcap", "rms_norm_eps", "hidden_activation"),
)


def find_known_drafter(config: DrafterConfig) -> dict[str, Any] | None:
    """Return the entry of ``mappings/geometries.json`` that ``config`` matches, or None.

    A field of ``config`` that is None, such as an unknown window, matches any value.
    """
    shape = config.as_json()
    geometries: list[dict[str, Any]] = load_mapping("geometries")["geometries"]
    for geometry in geometries:
        if all(shape[key] in (value, None) for key, value in geometry.items() if key in shape):
            return geometry
    return None


def list_mtp_shapes(config: DrafterConfig) -> Shapes:
    """Return the roles of an MTP drafter, in order, each with the shape of its tensor."""
    head = config.ordered_head
    sizes = {
        "one": 1,
        "hidden": config.hidden_size,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "backbone": config.backbone_hidden_size,
        "input": 2 * config.backbone_hidden_size,
        "centroids": head.num_centroids if head else 0,
    }
    roles = list_roles(config.num_layers, ordered_head=head is not None)
    return resolve_shapes(roles, sizes, config.num_heads, config.head_dims)


def describe_mtp(geometry: Mapping[str, Any]) -> list[str]:
    """Return a line about layers and heads, and one about widths and vocabulary."""
    sliding, full = (geometry["layer_types"].count(f"{kind}_attention") for kind in ("sliding", "full"))
    layers = f"{geometry['num_layers']} layers: {sliding} sliding (window {geometry['sliding_window']}) + {full} full"
    dims, kv = ("/".join(map(str, sorted(set(geometry[key])))) for key in ("head_dims", "num_kv_heads"))
    cap = f"soft cap {geometry['final_logit_softcap']:g}" if geometry["final_logit_softcap"] else "no soft cap"
    return [
        f"{layers}, {geometry['num_heads']} heads of {dims}, {kv} KV {'head' if kv == '1' else 'heads'}",
        f"hidden {geometry['hidden_size']}, feed-forward {geometry['intermediate_size']}, backbone "
        f"{geometry['backbone_hidden_size']}, vocabulary {geometry['vocab_size']}, {cap}",
    ]


def choose_mtp_serving(engines: Sequence[str], geometry: Mapping[str, Any]) -> list[str]:
    """Return a block for each engine that loads the directory, and one for llama.cpp, which loads its own file."""
    return [*(engines or ("none",)), *(() if "llama.cpp" in engines else ("other",))]


MTP = Architecture(
    name=GEMMA4_MTP,
    title="MTP drafter",
    long_title="multi-token prediction (MTP) drafter",
    config=DrafterConfig,
    shapes=list_mtp_shapes,
    network="mtp_extract.drafter.mtp:MtpDrafter",
    describe=describe_mtp,
    tags=("multi-token-prediction", "mtp", "litert-lm"),
    serving=choose_mtp_serving,
    pair_role="mtp_drafter",
    known_as=lambda config: (find_known_drafter(config) or {}).get("name"),
    is_bundled=True,
    faults="mtp_extract.validation.controls:CONTROLS",
)
