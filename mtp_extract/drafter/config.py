"""The geometry of a drafter, read from either layout's config file.

Nothing here needs torch. Every number the model uses is a field of :class:`DrafterConfig`; an experiment
such as "full instead of partial RoPE" is therefore a changed config (:meth:`DrafterConfig.with_rope`,
:func:`dataclasses.replace`), not a branch in the model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_extract.errors import DrafterError, escape

__all__ = [
    "LITERT_CONFIG",
    "TRANSFORMERS_CONFIG",
    "DrafterConfig",
    "LayerConfig",
    "OrderedHeadConfig",
    "RopeConfig",
]

TRANSFORMERS_CONFIG = "config.json"
LITERT_CONFIG = "mtp_drafter_config.json"

_ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_LITERT_VERSION = 1
_KV_BANKS = {"sliding_attention": 0, "full_attention": 1}
# Used by transformers' Gemma4TextConfig when the key is absent.
_DEFAULT_GLOBAL_HEAD_DIM = 512
_ROPE_TYPES = ("default", "proportional")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one layer type.

    Attributes:
        theta: base of the geometric series of wavelengths.
        rotary_fraction: share of the head that is rotated. Frequencies are always ``theta ** (-2i /
            head_dim)``; those past the share are zero, so the head keeps its width ("proportional" RoPE).
            1.0 is plain RoPE.
        factor: every frequency is divided by it (context extension); 1.0 leaves them alone.
    """

    theta: float
    rotary_fraction: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """One layer: Q-only attention over the base's K and V of ``layer_type``, then a GeGLU feed-forward block.

    Attributes:
        layer_type: ``sliding_attention`` or ``full_attention``; the key under which the base's K and V are
            looked up.
        head_dim: width of one head, of Q, K and V alike.
        num_kv_heads: heads of the base's K and V; query heads are divided evenly among them.
        sliding_window: number of positions a query sees, or None for all.
        rope: rotary embedding applied to Q. K arrives already rotated.
    """

    layer_type: str
    head_dim: int
    num_kv_heads: int
    sliding_window: int | None
    rope: RopeConfig


@dataclass(frozen=True)
class OrderedHeadConfig:
    """The centroid head: logits only for tokens of the ``top_k`` nearest of ``num_centroids`` clusters."""

    num_centroids: int
    top_k: int


@dataclass(frozen=True)
class DrafterConfig:
    """Everything the reference drafter needs to know about its shape.

    Attributes:
        backbone_hidden_size: width of the base model; the input is twice as wide (embedding, then hidden
            state).
        hidden_size: width of the drafter.
        intermediate_size: width of the feed-forward block.
        vocab_size: rows of the LM head.
        num_heads: query heads, the same in every layer.
        layers: one entry a layer.
        attention_scale: factor on Q·K. Gemma 4 uses 1.0, because Q and K are normalized.
        rms_norm_eps: epsilon under the root of every RMSNorm.
        final_logit_softcap: c in ``c * tanh(logits / c)``, or None for no cap. LiteRT graphs hold 30; the
            official transformers checkpoints say none (same argmax, other probabilities).
        ordered_head: the centroid head, or None for a dense one.
        max_position_embeddings: longest context the drafter was made for, in tokens; None when not recorded.
    """

    backbone_hidden_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    layers: tuple[LayerConfig, ...]
    attention_scale: float = 1.0
    rms_norm_eps: float = 1e-6
    final_logit_softcap: float | None = None
    ordered_head: OrderedHeadConfig | None = None
    max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise DrafterError("expected a drafter of at least one layer, found none; check the config's layer_types")
        for index, layer in enumerate(self.layers):
            if self.num_heads % layer.num_kv_heads:
                raise DrafterError(
                    f"layer {index}: expected num_kv_heads to divide the {self.num_heads} query heads, found "
                    f"{layer.num_kv_heads}; check num_key_value_heads in the config"
                )
        head = self.ordered_head
        if head and (self.vocab_size % head.num_centroids or not 0 < head.top_k <= head.num_centroids):
            raise DrafterError(
                f"expected num_centroids to divide the vocabulary of {self.vocab_size} and a top k of at "
                "most that many "
                f"centroids, found num_centroids {head.num_centroids}, top k {head.top_k}; check the config"
            )

    @property
    def kv_layers(self) -> dict[str, LayerConfig]:
        """The K and V the base must provide: layer type → the first layer that reads it."""
        found: dict[str, LayerConfig] = {}
        for layer in self.layers:
            found.setdefault(layer.layer_type, layer)
        return found

    def with_rope(self, layer_type: str, **changes: float) -> DrafterConfig:
        """A copy whose layers of ``layer_type`` have the given :class:`RopeConfig` fields replaced."""
        layers = tuple(
            dataclasses.replace(layer, rope=dataclasses.replace(layer.rope, **changes))
            if layer.layer_type == layer_type
            else layer
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=layers)

    @classmethod
    def from_transformers(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """From the parsed ``config.json`` of a ``gemma4_assistant`` (or ``gemma4_unified_assistant``).

        Head dims and KV heads of the full layers are read from ``global_head_dim`` and
        ``num_global_key_value_heads`` (the latter counts only with ``attention_k_eq_v``, as in
        transformers), or from ``per_layer_config``, the form transformers' ``save_pretrained`` writes.

        Raises:
            DrafterError: another model type, a missing key, or a feature this drafter does not have.
        """
        model_type = config.get("model_type")
        if model_type not in _ASSISTANT_TYPES:
            raise DrafterError(
                f"expected model_type {' or '.join(_ASSISTANT_TYPES)}, found {escape(model_type)}; "
                "point to the drafter's directory, not the base model's"
            )
        text = _get(config, "text_config")
        refused = ("attention_bias", "enable_moe_block", "hidden_size_per_layer_input")
        for key in refused:
            if text.get(key):
                raise DrafterError(
                    f"expected {key} to be off in a drafter, found {escape(text[key])}; it is not supported"
                )
        _check_activation(text.get("hidden_activation", "gelu_pytorch_tanh"))

        layer_types = _get(text, "layer_types")
        if "num_hidden_layers" in text and len(layer_types) != text["num_hidden_layers"]:
            raise DrafterError(
                f"expected {text['num_hidden_layers']} layer_types, found {len(layer_types)}; the config "
                "contradicts itself"
            )
        full_kv_heads = text.get("num_global_key_value_heads") if text.get("attention_k_eq_v") else None
        by_type: dict[str, dict[str, Any]] = {
            "sliding_attention": {
                "head_dim": text.get("head_dim"),
                "num_key_value_heads": text.get("num_key_value_heads"),
            },
            "full_attention": {
                "head_dim": text.get("global_head_dim", _DEFAULT_GLOBAL_HEAD_DIM),
                "num_key_value_heads": full_kv_heads or text.get("num_key_value_heads"),
            },
        }
        per_layer = text.get("per_layer_config")
        if per_layer is not None:
            by_type["full_attention"] = dict(by_type["sliding_attention"])
        layers = []
        for index, layer_type in enumerate(layer_types):
            if layer_type not in by_type:
                raise DrafterError(f"layer {index}: expected {' or '.join(by_type)}, found {escape(layer_type)}")
            shape = by_type[layer_type] | dict((per_layer or {}).get(str(index), {}))
            layers.append(
                LayerConfig(
                    layer_type=layer_type,
                    head_dim=_positive(shape, "head_dim"),
                    num_kv_heads=_positive(shape, "num_key_value_heads"),
                    sliding_window=_positive(text, "sliding_window") if layer_type == "sliding_attention" else None,
                    rope=_rope(_get(_get(text, "rope_parameters"), layer_type)),
                )
            )
        ordered = None
        if config.get("use_ordered_embeddings"):
            ordered = OrderedHeadConfig(
                _positive(config, "num_centroids"), _positive(config, "centroid_intermediate_top_k")
            )
        return cls(
            backbone_hidden_size=_positive(config, "backbone_hidden_size"),
            hidden_size=_positive(text, "hidden_size"),
            intermediate_size=_positive(text, "intermediate_size"),
            vocab_size=_positive(text, "vocab_size"),
            num_heads=_positive(text, "num_attention_heads"),
            layers=tuple(layers),
            rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            final_logit_softcap=text.get("final_logit_softcapping"),
            ordered_head=ordered,
            max_position_embeddings=text.get("max_position_embeddings"),
        )

    @classmethod
    def from_litert(cls, config: Mapping[str, Any]) -> DrafterConfig:
        """From the parsed ``mtp_drafter_config.json`` of the ``litert`` layout.

        Raises:
            DrafterError: another format version, a missing key, per-layer lists of unequal length, or a
                feature this drafter does not have.
        """
        version = config.get("format_version")
        if version != _LITERT_VERSION:
            raise DrafterError(
                f"expected format_version {_LITERT_VERSION} in {LITERT_CONFIG}, found {escape(version)}; "
                "extract the drafter anew"
            )
        _check_activation(_get(config, "hidden_activation"))
        count = _positive(config, "num_layers")
        columns = ("layer_types", "head_dims", "num_kv_heads", "sliding_windows", "kv_bank_ids")
        for column in columns:
            if len(_get(config, column)) != count:
                raise DrafterError(
                    f"expected {count} entries in {column}, found {len(config[column])}; extract the drafter anew"
                )
        layers = []
        for index, (layer_type, head_dim, kv_heads, window, bank) in enumerate(
            zip(*(config[column] for column in columns), strict=True)
        ):
            if _KV_BANKS.get(layer_type) != bank:
                raise DrafterError(
                    f"layer {index}: expected layer type and KV bank to be one of {_KV_BANKS}, found "
                    f"{escape(layer_type)} with bank {escape(bank)}; extract the drafter anew"
                )
            layers.append(
                LayerConfig(layer_type, head_dim, kv_heads, window, _rope(_get(_get(config, "rope"), layer_type)))
            )
        return cls(
            backbone_hidden_size=_positive(config, "backbone_hidden_size"),
            hidden_size=_positive(config, "hidden_size"),
            intermediate_size=_positive(config, "intermediate_size"),
            vocab_size=_positive(config, "vocab_size"),
            num_heads=_positive(config, "num_heads"),
            layers=tuple(layers),
            attention_scale=float(_get(config, "attention_scale")),
            rms_norm_eps=float(_get(config, "rms_norm_eps")),
            final_logit_softcap=config.get("final_logit_softcap"),
            max_position_embeddings=config.get("max_position_embeddings"),
        )

    @classmethod
    def read(cls, directory: Path | str) -> DrafterConfig:
        """From a checkpoint directory of either layout.

        Raises:
            DrafterError: no config file, or one that is not a drafter's.
        """
        parsed, name = read_json_config(Path(directory))
        return cls.from_litert(parsed) if name == LITERT_CONFIG else cls.from_transformers(parsed)


def read_json_config(directory: Path) -> tuple[dict[str, Any], str]:
    """The parsed config file of ``directory`` and its name, which tells the layout.

    Raises:
        DrafterError: there is none, or it is not a JSON object.
    """
    for name in (LITERT_CONFIG, TRANSFORMERS_CONFIG):
        path = directory / name
        if not path.is_file():
            continue
        try:
            parsed = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DrafterError(
                f"expected JSON in {escape(path)}, found: {escape(error)}; extract the drafter anew"
            ) from error
        if not isinstance(parsed, dict):
            raise DrafterError(f"expected a JSON object in {escape(path)}, found a {type(parsed).__name__}")
        return parsed, name
    raise DrafterError(
        f"expected {TRANSFORMERS_CONFIG} or {LITERT_CONFIG} in {escape(directory)}, found neither; "
        "give the directory an extraction wrote"
    )


def _get(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise DrafterError(f"expected {key} in the drafter's config, found no such key; the config is incomplete")
    return config[key]


def _positive(config: Mapping[str, Any], key: str) -> int:
    value = _get(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise DrafterError(f"expected {key} to be a positive integer, found {escape(value)}; check the config")
    return value


def _check_activation(name: object) -> None:
    if name != "gelu_pytorch_tanh":
        raise DrafterError(f"expected hidden_activation gelu_pytorch_tanh, found {escape(name)}; it is not supported")


def _rope(parameters: Mapping[str, Any]) -> RopeConfig:
    kind = parameters.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise DrafterError(f"expected rope_type {' or '.join(_ROPE_TYPES)}, found {escape(kind)}; it is not supported")
    proportional = kind == "proportional"
    return RopeConfig(
        theta=float(_get(parameters, "rope_theta")),
        rotary_fraction=float(parameters.get("partial_rotary_factor", 1.0)) if proportional else 1.0,
        factor=float(parameters.get("factor", 1.0)) if proportional else 1.0,
    )
