"""What may be put into a directory so that an engine loads something else from it, and what a record may say: data."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from helpers.record_document import TUNING

_INDEX = {"metadata": {}, "weight_map": {"model.norm.weight": "a.safetensors"}}
_WEIGHTS = (
    "a.safetensors model-00002-of-00002.safetensors adapter_model.safetensors sub/x.safetensors codes.safetensors "
    "LICENSE.safetensors codes/more.safetensors .hidden.safetensors pytorch_model.bin model.pt "
    "original/consolidated.pth weights.npz other.gguf x.ckpt NOTICE.bin LICENSE-2.gguf model.onnx tf_model.h5 "
    "flax_model.msgpack m.tflite"
)
_TEXTS = (
    "modeling_drafter.py custom_generate/generate.py LICENSE.py NOTICE.md.py Modelfile recipe.yaml requirements.txt "
    "kernel.so notes.txt"
)
_DOCUMENTS = "hf_quant_config.json quantize_config.json params.json configuration.json mtp.json codes/config.json"
FILES: Mapping[str, object] = MappingProxyType(
    {
        **dict.fromkeys(_WEIGHTS.split()),
        **dict.fromkeys(_TEXTS.split(), "import os\n"),
        **{name: {"a": 1} for name in _DOCUMENTS.split()},
        "model.safetensors.index.json": _INDEX,
        "pytorch_model.bin.index.json": _INDEX,
        "adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "."},
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tokenizer.Tokenizer", None]}},
    }
)
"""Name → content: text, JSON, or None for a copy of the weights."""

ENGINES_READ: Mapping[str, object] = MappingProxyType(
    {
        "auto_map": {"AutoModelForCausalLM": "modeling.Drafter"},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "pruned_heads": {"0": [1]},
        "vision_config": {"hidden_size": 4},
        "compression_config": {"quant_method": "bitsandbytes"},
        "quantization_config": {"quant_method": "fp8"},
        "eagle_config": {"use_aux_hidden_state": True},
        "speculators_config": {"algorithm": "other"},
        "per_layer_config": {"0": {"head_dim": 128}},
        "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 256,
        "is_causal": False,
        "attention_chunk_size": 4,
        "embedding_scale": 2.0,
        "logit_scale": 2.0,
        "residual_multiplier": 2.0,
        "custom_generate": "org/repo",
        "cache_implementation": "quantized",
        "suppress_tokens": [1, 2],
    }
)
"""Keys that engines read and none of our configurations has; whoever adds one makes another drafter of it."""

HARMLESS = (
    *("num_centroids", "centroid_intermediate_top_k", "attention_dropout", "attention_k_eq_v", "bos_token_id"),
    *("eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings", "use_cache"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "transformers_version"),
)
"""Keys of ours whose value changes no draft of such a drafter; training, the tokenizer and the engine read them."""

_GONE = "attention.sliding_window_pattern attention.shared_kv_layers rope.dimension_count_swa nextn_predict_layers"
GGUF_KEYS: Mapping[str, object] = MappingProxyType(
    {
        **{
            f"gemma4-assistant.{key}": value
            for key, value in {
                "rope.scale_linear": 4.0,
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 8.0,
                "rope.dimension_sections": [4, 4, 4, 4],
                "attn_logit_softcapping": 50.0,
                "attention.causal": False,
                "attention.scale": 0.5,
                "attention.clamp_kqv": 1.0,
                "attention.key_length": 128,
                "attention.head_count": 8,
                "attention.head_count_kv": 1,
                "attention.sliding_window": 8,
                "logit_scale": 2.0,
                "residual_scale": 2.0,
                "expert_count": 8,
                "pooling_type": 1,
                "tensor_data_layout": "Meta AI original pth",
                "embedding_length_out": 32,
                "embedding_length_per_layer_input": 8,
                "final_logit_softcapping": 25.0,
                "rope.freq_base": 5e5,
                "rope.freq_base_swa": 1e6,
                **dict.fromkeys(_GONE.split()),
            }.items()
        },
        "general.type": "adapter",
        "adapter.lora.alpha": 16.0,
        "split.count": 2,
        "clip.has_vision_encoder": True,
        "llama.rope.scale_linear": 4.0,
        "general.architecture": "gemma4",
    }
)
"""Key of the header of a GGUF → a value that makes another drafter of it; None takes it away."""

_SHA = "0" * 64
LIES: Mapping[str, object] = MappingProxyType(
    {
        "source.size": 1,
        "source.kind": "tflite",
        "source.version": "9.9.9",
        "source.section.sha256": _SHA,
        "source.section.index": 0,
        "source.section.begin": 0,
        "source.section.end": 1,
        "source.section.found_by": "bare model",
        "source.section.signature": "decode",
        "known_as": "Gemma 4 E4B",
        "dtype": "f16",
        "layout": "litert",
        "rounded": [],
        "rule": "int8",
        "geometry.hidden_size": 65,
        "geometry.final_logit_softcap": None,
        "geometry.base": "org/other",
        "files": {},
        "files.config.json": {"size": 1, "sha256": _SHA},
        "files.more.json": {"size": 1, "sha256": _SHA},
        "shared": [["lm_head", "pre_projection"]],
        "activations": {"lm_head": [{"type": "int8", "scale": 1.0, "zero_point": 0}, None]},
        "proof": ["RoPE at all 4096 positions"],
        "tuning": TUNING,
    }
)
"""Key of ``extraction.json`` → what it may say instead; each is refuted where the bundle is at hand."""


def put(document: dict[str, Any], key: str, value: object) -> None:
    """Set ``key``, whose names are parted by dots; those of files have dots themselves."""
    first, _, rest = key.partition(".")
    if rest and first in ("source", "section", "geometry"):
        put(document[first], rest, value)
    elif rest:
        document[first][rest] = value
    else:
        document[first] = value


def altered(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """``document`` with one thing in it changed, and what: each value that is not harmless, and a key more in each
    object."""
    for path, value in [*_places(document)]:
        changed = copy.deepcopy(document)
        holder: Any = changed
        for step in path[:-1]:
            holder = holder[step]
        if isinstance(value, dict):
            (holder[path[-1]] if path else holder)["more"] = 1
        elif path[-1] in HARMLESS:
            continue
        else:
            holder[path[-1]] = _another(value)
        yield ".".join(map(str, path)), changed


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    yield path, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*path, key))


def _another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else [*value, *value[-1:]] if value else 1


def add_file(directory: Path, name: str, content: object, weights: Path) -> None:
    """Put one of :data:`FILES` there."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    if content is None:
        shutil.copy(weights, path)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
