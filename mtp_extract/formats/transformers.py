"""The configuration that transformers, vLLM, SGLang and llama.cpp's converter read.

``config.json`` is written field by field: transformers' own ``save_pretrained`` (5.22.2) replaces ``global_head_dim``
by a per-layer form that llama.cpp's converter does not read; SGLang recognises the model by ``architectures`` and needs
``tie_word_embeddings`` in ``text_config`` too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, OrderedHeadConfig, RopeConfig
from mtp_extract.checkpoint.documents import compare_document, read_object
from mtp_extract.data import load_mapping
from mtp_extract.errors import CheckpointError, UnsupportedError, escape, format_choice
from mtp_extract.formats.reading import GateFunction, PositiveNumber, PositiveShare, Size, parse_fields

GENERATION_FILE = "generation_config.json"
MAX_POSITIONS = 131072
"""Written if a drafter does not state its context length; the official assistants have it."""

UNUSED_WINDOW = 512
"""Written if a drafter has no sliding layers."""

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
"""Model types of ``text_config``; Google's assistant for the 12B has the second."""

_PER_LAYER = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
_TEXT_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        **{key: key for key in ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "hidden_activation")},
        "max_position_embeddings": "max_position_embeddings",
        "num_attention_heads": "num_heads",
        "final_logit_softcapping": "final_logit_softcap",
    }
)
"""Key of ``text_config`` → field of a DrafterConfig, written and read."""


def build_assistant_config(config: DrafterConfig, dtype: str, tied: bool = True) -> dict[str, Any]:
    """Build ``config.json``; ``dtype`` is transformers' name, such as "bfloat16".

    Args:
        tied: head and embedding are one tensor.

    Raises:
        UnsupportedError: the configuration cannot express the drafter's shape.
    """
    config.require_uniform()
    if config.layer_types[-1] != FULL:
        raise UnsupportedError(
            "The last layer is a sliding one; transformers' Gemma 4 makes the last layer a full one whatever the "
            "configuration says. The litert layout can express it.",
            remedies=("format=litert",),
        )
    sliding = config.sliding
    full = config.full
    head = config.ordered_head
    two_kv_heads = sliding.num_kv_heads != full.num_kv_heads
    text = {
        **{key: getattr(config, field) for key, field in _TEXT_FIELDS.items()},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": two_kv_heads,  # gates num_global_key_value_heads; there are no K and V projections
        "bos_token_id": 2,
        "dtype": dtype,
        "enable_moe_block": False,
        "eos_token_id": 1,
        "global_head_dim": full.head_dim,
        "head_dim": sliding.head_dim,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings or MAX_POSITIONS,
        "model_type": _TEXT_TYPES[0],
        "num_global_key_value_heads": full.num_kv_heads if two_kv_heads else None,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": sliding.num_kv_heads,
        "num_kv_shared_layers": config.num_layers,
        "pad_token_id": 0,
        "rope_parameters": build_rope_parameters(config),
        "sliding_window": config.sliding_window or UNUSED_WINDOW,
        "tie_word_embeddings": tied,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": _TYPES[0],
        "backbone_hidden_size": config.backbone_hidden_size,
        "dtype": dtype,
        "tie_word_embeddings": tied,
        "use_ordered_embeddings": head is not None,
        # Unused without an ordered head; the official assistants have these values.
        "num_centroids": head.num_centroids if head else 2048,
        "centroid_intermediate_top_k": head.top_k if head else 32,
        **load_mapping("geometries")["vocabularies"].get(str(config.vocab_size), {}).get("token_ids", {}),
        "text_config": dict(sorted(text.items())),
    }


def build_rope_parameters(config: DrafterConfig) -> dict[str, dict[str, Any]]:
    """Build the RoPE parameters of both layer types; transformers reads both even if a drafter has only one."""
    parameters: dict[str, dict[str, Any]] = {
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    }
    for layer_type, rope in config.rope.items():
        parameters[layer_type] = {"rope_theta": rope.theta, "rope_type": rope.kind}
        if rope.kind == "proportional":
            parameters[layer_type]["partial_rotary_factor"] = rope.partial_rotary_factor
        if rope.factor != 1.0:
            parameters[layer_type]["factor"] = rope.factor
    return parameters


GENERATION: Mapping[str, Any] = {
    "is_assistant": True,
    "num_assistant_tokens": 6,
    "num_assistant_tokens_schedule": "constant",
}
"""``generation_config.json``, as in the official assistants: transformers then uses the checkpoint as an assistant."""

_HARMLESS = (
    # Sampling and the number of drafts, which do not change the logits.
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "do_sample"),
    *("temperature", "top_k", "top_p"),
    # An ordered head or experts that the drafter does not have, and keys that are read per layer.
    *("num_centroids", "centroid_intermediate_top_k", "num_experts", "top_k_experts", "moe_intermediate_size"),
    *("text_config.per_layer_config", "text_config.attention_k_eq_v"),
    # How compressed-tensors chose the codes.
    *("quantization_config.version", "quantization_config.global_compression_ratio", "weights.observer*"),
)
_MEANS_THE_SAME: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        # What transformers takes where they are missing is what is read.
        **dict.fromkeys(("hidden_activation", "rms_norm_eps", "global_head_dim", "rope_type"), (None,)),
        **dict.fromkeys(("use_ordered_embeddings", "is_assistant", "tie_word_embeddings"), (None,)),
        "rope_parameters.*.factor": (1, None),
        "config_groups.*.format": ("pack-quantized",),
        # 0 is what transformers takes for all, before it is filled in.
        "num_kv_shared_layers": (0, None),
        "architectures": (None, ["Gemma4UnifiedAssistantForCausalLM"]),
        "text_config.model_type": (None, *_TEXT_TYPES),
        "model_type": _TYPES,
    }
)
"""Key of ``config.json`` or ``generation_config.json`` → other values that mean the same as ours."""


def compare_documents(
    directory: Path, document: Mapping[str, Any], config: DrafterConfig, expected: Mapping[str, Any]
) -> tuple[str, ...]:
    """Compare both configuration files in ``directory`` with ours; return unread keys as :func:`compare_document` does.

    Args:
        document: the stored ``config.json``.
        config: the shape that was parsed from it.
        expected: ``config.json`` as we would write it for ``config``.
    """
    same: dict[str, tuple[Any, ...]] = {"num_global_key_value_heads": (None, config.full.num_kv_heads)}
    harmless = list(_HARMLESS)
    if SLIDING not in config.rope:  # keys of sliding layers are then not read
        harmless += [f"text_config.{key}" for key in (f"rope_parameters.{SLIDING}*", "sliding_window", "head_dim")]
    if not expected["tie_word_embeddings"]:  # engines tie the head if the key is missing
        same["tie_word_embeddings"] = ()
    if document["text_config"].get("model_type") == _TEXT_TYPES[1]:  # it has no per-layer embeddings
        text = {key: value for key, value in expected["text_config"].items() if key not in _PER_LAYER}
        expected = {**expected, "text_config": text}
    unread = compare_document(
        directory / "config.json", document, expected, harmless=harmless, means_the_same={**_MEANS_THE_SAME, **same}
    )
    path = directory / GENERATION_FILE
    if not path.is_file():
        return unread
    generation = read_object(path)
    return unread + compare_document(
        path, generation, GENERATION, harmless=harmless, means_the_same=_MEANS_THE_SAME, computes=False
    )


LayerTypes = Annotated[list[Literal["sliding_attention", "full_attention"]], Meta(min_length=1, max_length=1024)]


class Rope(Struct):
    """RoPE parameters of a layer type, in transformers' terms."""

    rope_theta: PositiveNumber
    rope_type: Literal["default", "proportional"] = "default"
    partial_rotary_factor: PositiveShare | None = None
    factor: PositiveNumber | None = None


def parse_rope(parameters: Mapping[str, Rope], layer_type: str) -> RopeConfig:
    """Return the RoPE of ``layer_type``; CheckpointError if ``parameters`` have none."""
    if layer_type not in parameters:
        raise CheckpointError(f"expected RoPE parameters of {layer_type}, found none. Check the config.")
    rope = parameters[layer_type]
    if rope.rope_type == "default":
        return RopeConfig(rope.rope_theta)
    return RopeConfig(rope.rope_theta, rope.partial_rotary_factor or 1.0, rope.factor or 1.0)


class _LayerFields(Struct, forbid_unknown_fields=True):
    head_dim: Size | None = None
    num_key_value_heads: Size | None = None


class _TextFields(Struct):
    """The fields of ``text_config`` that are read, with transformers' defaults."""

    hidden_size: Size
    intermediate_size: Size
    vocab_size: Size
    num_attention_heads: Size
    layer_types: LayerTypes
    head_dim: Size
    num_key_value_heads: Size
    rope_parameters: dict[str, Rope]
    rms_norm_eps: PositiveNumber = 1e-6
    hidden_activation: GateFunction = "gelu_pytorch_tanh"
    final_logit_softcapping: PositiveNumber | None = None
    max_position_embeddings: Size | None = None
    sliding_window: Size | None = None
    global_head_dim: Size = 512
    attention_k_eq_v: bool | None = None
    num_global_key_value_heads: Size | None = None  # counts only with attention_k_eq_v
    per_layer_config: dict[str, _LayerFields] | None = None  # written by transformers' save_pretrained

    def build_layer(self, index: int, layer_type: str) -> LayerConfig:
        head_dim, kv_heads = self.head_dim, self.num_key_value_heads
        if self.per_layer_config is not None:
            entry = self.per_layer_config.get(str(index), _LayerFields())
            head_dim, kv_heads = entry.head_dim or head_dim, entry.num_key_value_heads or kv_heads
        elif layer_type == FULL:
            head_dim = self.global_head_dim
            if self.attention_k_eq_v:
                kv_heads = self.num_global_key_value_heads or kv_heads
        window = self.sliding_window if layer_type == SLIDING else None
        if layer_type == SLIDING and window is None:
            raise CheckpointError("expected sliding_window for sliding layers, found none. Check the config.")
        return LayerConfig(layer_type, head_dim, kv_heads, window, parse_rope(self.rope_parameters, layer_type))


class _AssistantFields(Struct):
    backbone_hidden_size: Size
    text_config: _TextFields
    use_ordered_embeddings: bool | None = None


class _OrderedHeadFields(Struct):
    num_centroids: Size
    centroid_intermediate_top_k: Size


def parse_config(document: Mapping[str, Any]) -> DrafterConfig:
    """Parse ``config.json`` of a ``gemma4_assistant`` (or ``gemma4_unified_assistant``).

    Raises:
        CheckpointError: another model type, a missing key, or a value of the wrong type or range.
        DrafterError: no drafter can have this shape.
    """
    if document.get("model_type") not in _TYPES:
        raise CheckpointError(
            f"expected model_type {format_choice(_TYPES)}, found {escape(document.get('model_type'))}. Give the "
            "drafter's directory, not the base model's."
        )
    fields = parse_fields(document, _AssistantFields)
    text = fields.text_config
    head = None
    if fields.use_ordered_embeddings:
        ordered = parse_fields(document, _OrderedHeadFields)
        head = OrderedHeadConfig(ordered.num_centroids, ordered.centroid_intermediate_top_k)
    return DrafterConfig(
        backbone_hidden_size=fields.backbone_hidden_size,
        layers=tuple(text.build_layer(index, kind) for index, kind in enumerate(text.layer_types)),
        ordered_head=head,
        **{field: getattr(text, key) for key, field in _TEXT_FIELDS.items()},
    )
