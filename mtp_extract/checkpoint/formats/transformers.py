"""The directory that ``Gemma4AssistantForCausalLM.from_pretrained`` loads, and vLLM, SGLang and llama.cpp's converter.

``config.json`` is written field by field: transformers' own ``save_pretrained`` (5.22.2) drops ``global_head_dim`` in
favour of a per-layer form that llama.cpp's converter does not read; SGLang recognises the model by
``architectures`` and wants ``tie_word_embeddings`` in ``text_config`` too.
"""

from __future__ import annotations

from typing import Any

from mtp_extract.data import load_mapping
from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.config import FULL, SLIDING, Geometry

__all__ = ["config", "generation_config"]

# What a shard does not say. Values of the official assistants' configurations; none changes what is computed.
MAX_POSITIONS = 131072
_NUM_ASSISTANT_TOKENS = 6
_CENTROIDS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}
_UNUSED_WINDOW = 512


def config(geometry: Geometry, dtype: str, known: dict[str, Any] | None) -> dict[str, Any]:
    """``config.json`` of a drafter whose weights have the transformers dtype ``dtype`` ("bfloat16", …).

    Raises:
        UnsupportedError: a geometry that the configuration cannot express.
    """
    # Where there is no layer of a type, its fields repeat the other's: they are not read.
    sliding_dim = geometry.per_type(SLIDING, geometry.head_dims) or geometry.head_dims[0]
    full_dim = geometry.per_type(FULL, geometry.head_dims) or sliding_dim
    sliding_kv = geometry.per_type(SLIDING, geometry.num_kv_heads) or geometry.num_kv_heads[0]
    full_kv = geometry.per_type(FULL, geometry.num_kv_heads) or sliding_kv
    if geometry.layer_types[-1] != FULL:
        raise UnsupportedError(
            "The last layer is a sliding one; transformers' Gemma 4 makes the last layer a full one whatever the "
            "configuration says. The litert layout can express it.",
            remedies=("format=litert",),
        )
    positions = known["max_position_embeddings"] if known else MAX_POSITIONS
    ids = load_mapping("geometries")["vocabularies"].get(str(geometry.vocab_size), {}).get("token_ids", {})
    text_config = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        # Gates num_global_key_value_heads; the drafter itself has neither K nor V projections.
        "attention_k_eq_v": sliding_kv != full_kv,
        "bos_token_id": 2,
        "dtype": dtype,
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": geometry.final_logit_softcap,
        "global_head_dim": full_dim,
        "head_dim": sliding_dim,
        "hidden_activation": geometry.hidden_activation,
        "hidden_size": geometry.hidden_size,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": geometry.intermediate_size,
        "layer_types": list(geometry.layer_types),
        "max_position_embeddings": positions,
        "model_type": "gemma4_text",
        "num_attention_heads": geometry.num_heads,
        "num_global_key_value_heads": full_kv if full_kv != sliding_kv else None,
        "num_hidden_layers": geometry.num_layers,
        "num_key_value_heads": sliding_kv,
        "num_kv_shared_layers": geometry.num_layers,
        "pad_token_id": 0,
        "rms_norm_eps": geometry.rms_norm_eps,
        "rope_parameters": rope_parameters(geometry),
        "sliding_window": geometry.sliding_window or _UNUSED_WINDOW,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": geometry.vocab_size,
        "vocab_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": geometry.backbone_hidden_size,
        "dtype": dtype,
        "tie_word_embeddings": True,
        "use_ordered_embeddings": False,
        **_CENTROIDS,
        **ids,
        "text_config": text_config,
    }


def rope_parameters(geometry: Geometry) -> dict[str, dict[str, Any]]:
    """RoPE per layer type, in transformers' terms; both types are always there, because transformers reads both."""
    parameters: dict[str, dict[str, Any]] = {
        SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    }
    for layer_type, rope in geometry.rope.items():
        parameters[layer_type] = {"rope_theta": rope.theta, "rope_type": rope.kind}
        if rope.kind == "proportional":
            parameters[layer_type]["partial_rotary_factor"] = rope.partial_rotary_factor
    return parameters


def generation_config() -> dict[str, Any]:
    """``generation_config.json``: what makes transformers use the checkpoint as an assistant."""
    return {
        "is_assistant": True,
        "num_assistant_tokens": _NUM_ASSISTANT_TOKENS,
        "num_assistant_tokens_schedule": "constant",
    }
