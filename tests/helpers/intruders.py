"""What may be put into a directory so that an engine loads something else from it, and what a record may say: data."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from helpers.record_document import TUNING

__all__ = [
    "CONFIG_KEYS",
    "FILES",
    "GENERATION_KEYS",
    "GGUF_KEYS",
    "HEAD_KEYS",
    "LIES",
    "LITERT_KEYS",
    "add_file",
    "put",
    "resum",
]

_INDEX = {"metadata": {}, "weight_map": {"model.norm.weight": "a.safetensors"}}
FILES: Mapping[str, object] = MappingProxyType(
    {
        # None: the weights once more.
        **dict.fromkeys(
            (
                *(
                    "a.safetensors",
                    "model-00002-of-00002.safetensors",
                    "adapter_model.safetensors",
                    "sub/x.safetensors",
                    "codes.safetensors",
                    "LICENSE.safetensors",
                ),
                *(
                    "consolidated.safetensors",
                    "codes/more.safetensors",
                    ".hidden.safetensors",
                    "model.fp16.safetensors",
                ),
                *("pytorch_model.bin", "model.pt", "original/consolidated.pth", "weights.npz", "other.gguf", "x.ckpt"),
                *(
                    "NOTICE.bin",
                    "LICENSE-2.gguf",
                    "training_args.bin",
                    "optimizer.pt",
                    "model.onnx",
                    "tf_model.h5",
                    "flax_model.msgpack",
                    "m.tflite",
                ),
            )
        ),
        "model.safetensors.index.json": _INDEX,
        "pytorch_model.bin.index.json": _INDEX,
        "adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "."},
        **dict.fromkeys(
            (
                *("modeling_drafter.py", "configuration_drafter.py", "custom_generate/generate.py", "setup.py"),
                *(
                    "LICENSE.py",
                    "NOTICE.md.py",
                    "Modelfile",
                    "recipe.yaml",
                    "requirements.txt",
                    "kernel.so",
                    "script.sh",
                    "notes.txt",
                    "config.yaml",
                ),
            ),
            "import os\n",
        ),
        **{
            name: {"a": 1}
            for name in (
                *("hf_quant_config.json", "quantize_config.json", "quant_config.json", "kv_cache_scales.json"),
                *("params.json", "configuration.json", "dtypes.json", "mtp.json", "codes/config.json"),
            )
        },
        "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tokenizer.Tokenizer", None]}},
    }
)
"""Name → content: text, JSON, or None for a copy of the weights."""

_YARN = {"rope_type": "yarn", "factor": 4.0}
CONFIG_KEYS: Mapping[str, object] = MappingProxyType(
    {
        "auto_map": {"AutoModelForCausalLM": "modeling.Drafter"},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "gemma4",
        "rope_scaling": _YARN,
        "pruned_heads": {"0": [1]},
        "dtype": "float8_e4m3fn",
        "is_encoder_decoder": True,
        "output_hidden_states": True,
        "vision_config": {"hidden_size": 4},
        "compression_config": {"quant_method": "bitsandbytes"},
        "eagle_config": {"use_aux_hidden_state": True},
        "speculators_config": {"algorithm": "eagle3"},
        "speculators_model_type": "eagle3",
        "backbone_hidden_size": 32,
        "use_ordered_embeddings": True,
        "adapters": ["a"],
        "text_config.rope_scaling": _YARN,
        "text_config.rope_theta": 5e5,
        "text_config.rope_parameters.full_attention.factor": 8.0,
        "text_config.rope_parameters.full_attention.attention_factor": 2.0,
        "text_config.rope_parameters.sliding_attention.partial_rotary_factor": 0.5,
        "text_config.rope_parameters.sliding_attention.rope_type": "linear",
        "text_config.rope_parameters.more": {"rope_type": "default", "rope_theta": 1.0},
        "text_config.attn_logit_softcapping": 50.0,
        "text_config.query_pre_attn_scalar": 256,
        "text_config.attention_bias": True,
        "text_config.is_causal": False,
        "text_config.hidden_act": "relu",
        "text_config.hidden_activation": "gelu",
        "text_config.final_logit_softcapping": 25.0,
        "text_config.rms_norm_eps": 1e-5,
        "text_config.sliding_window": 8,
        "text_config.layer_types": ["full_attention"] * 4,
        "text_config.use_bidirectional_attention": "all",
        "text_config.global_head_dim": 128,
        "text_config.head_dim": 16,
        "text_config.per_layer_config": {"0": {"head_dim": 128}},
        "text_config.num_global_key_value_heads": 1,
        "text_config.num_hidden_layers": 2,
        "text_config.num_kv_shared_layers": 2,
        "text_config.num_attention_heads": 8,
        "text_config.vocab_size": 511,
        "text_config.hidden_size_per_layer_input": 256,
        "text_config.vocab_size_per_layer_input": 12,
        "text_config.enable_moe_block": True,
        "text_config.use_double_wide_mlp": True,
        "text_config.attention_chunk_size": 4,
        "text_config.quantization_config": {"quant_method": "fp8"},
        "text_config.auto_map": {"AutoConfig": "x.Y"},
        "text_config.model_type": "llama",
        "text_config.embedding_scale": 2.0,
    }
)
"""Key of ``config.json`` → a value that engines would make another drafter of; None takes it away."""

_GONE = ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_key_value_heads", "rope_parameters")
CONFIG_KEYS = MappingProxyType({**CONFIG_KEYS, **{f"text_config.{key}": None for key in _GONE if key != _GONE[0]}})

GENERATION_KEYS: Mapping[str, object] = MappingProxyType(
    {
        "is_assistant": False,
        "custom_generate": "org/repo",
        "cache_implementation": "quantized",
        "suppress_tokens": [1, 2],
        "sequence_bias": [[[1], -10.0]],
        "watermarking_config": {"bias": 2.0},
        "forced_bos_token_ids": [1],
        "assistant_lookbehind": 3,
    }
)
"""The same of ``generation_config.json``."""

GGUF_KEYS: Mapping[str, object] = MappingProxyType(
    {
        **{
            f"gemma4-assistant.{key}": value
            for key, value in {
                "rope.scale_linear": 4.0,
                "rope.scaling.type": "yarn",
                "rope.scaling.attn_factor": 2.0,
                "rope.scaling.factor": 8.0,
                "rope.scaling.original_context_length": 64,
                "rope.scaling.finetuned": True,
                "rope.scaling.yarn_log_multiplier": 0.5,
                "rope.dimension_sections": [4, 4, 4, 4],
                "attn_logit_softcapping": 50.0,
                "router_logit_softcapping": 5.0,
                "attention.causal": False,
                "attention.scale": 0.5,
                "attention.clamp_kqv": 1.0,
                "attention.max_alibi_bias": 8.0,
                "attention.layer_norm_epsilon": 1e-3,
                "attention.value_scale": 2.0,
                "attention.output_scale": 2.0,
                "attention.temperature_scale": 2.0,
                "attention.temperature_length": 4,
                "attention.key_length": 128,
                "attention.key_length_swa": 16,
                "attention.head_count": 8,
                "attention.head_count_kv": 1,
                "attention.sliding_window": 8,
                "attention.shared_kv_layers": 2,
                "attention.layer_norm_rms_epsilon": 1e-3,
                "logit_scale": 2.0,
                "residual_scale": 2.0,
                "embedding_scale": 2.0,
                "expert_count": 8,
                "expert_used_count": 2,
                "expert_weights_scale": 2.0,
                "pooling_type": 1,
                "use_parallel_residual": True,
                "tensor_data_layout": "Meta AI original pth",
                "block_count": 2,
                "leading_dense_block_count": 1,
                "embedding_length": 32,
                "embedding_length_out": 32,
                "embedding_length_per_layer_input": 8,
                "feed_forward_length": 64,
                "nextn_predict_layers": 1,
                "final_logit_softcapping": 25.0,
                "rope.freq_base": 5e5,
                "rope.freq_base_swa": 1e6,
                "rope.dimension_count": 32,
                "swin_norm": True,
                "decoder_start_token_id": 1,
            }.items()
        },
        **{
            f"gemma4-assistant.{key}": None
            for key in (
                *("attention.sliding_window_pattern", "attention.sliding_window", "attention.shared_kv_layers"),
                *("rope.dimension_count_swa", "rope.freq_base_swa", "embedding_length_out", "nextn_predict_layers"),
                *("attention.value_length_swa", "attention.key_length"),
            )
        },
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 16.0,
        "split.count": 2,
        "split.no": 0,
        "clip.has_vision_encoder": True,
        "llama.rope.scale_linear": 4.0,
        "general.architecture": "gemma4",
    }
)
"""The same of the header of a GGUF."""

LITERT_KEYS: Mapping[str, object] = MappingProxyType(
    {
        "attention_scale": 0.5,
        "rms_norm_eps": 1e-5,
        "final_logit_softcap": 25.0,
        "hidden_activation": "gelu",
        "num_heads": 8,
        "head_dims": [16, 16, 16, 64],
        "num_kv_heads": [1, 1, 1, 1],
        "sliding_windows": [8, 8, 8, None],
        "kv_bank_ids": [0, 0, 0, 0],
        "rope.full_attention.factor": 8.0,
        "rope.full_attention.attention_factor": 2.0,
        "rope.sliding_attention.rope_theta": 1e6,
        "rope_scaling": _YARN,
        "auto_map": {"a": "b.C"},
        "dtype": "float16",
        "vocab_size": 511,
        "format_version": 2,
        "tensors.layers.1.gate_proj": None,
        "quantization_config": {"quant_method": "fp8"},
    }
)
"""The same of ``mtp_drafter_config.json``."""

HEAD_KEYS: Mapping[str, object] = MappingProxyType(
    {
        "auto_map": {"AutoModel": "a.B"},
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": _YARN,
        "quantization_config": {"quant_method": "fp8"},
        "logit_scale": 2.0,
        "attention_multiplier": 2.0,
        "residual_multiplier": 2.0,
        "embedding_multiplier": 2.0,
        "logits_scaling": 2.0,
        "sliding_window": 16,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention"],
        "partial_rotary_factor": 0.5,
        "tie_word_embeddings": True,
        "hidden_act": "gelu",
        "dtype": "float8_e4m3fn",
        "num_experts": 8,
        "attention_bias": True,
        "mlp_bias": True,
        "compression_config": {"quant_method": "fp8"},
        "pretraining_tp": 2,
        "use_qk_norm": True,
    }
)
"""The same of an EAGLE-3 head's ``config.json``."""

_SHA = "0" * 64
LIES: Mapping[str, object] = MappingProxyType(
    {
        "source.size": 1,
        "source.kind": "tflite",
        "source.version": "9.9.9",
        **{
            f"source.section.{key}": value
            for key, value in {
                "sha256": _SHA,
                "index": 0,
                "begin": 0,
                "end": 1,
                "found_by": "bare model",
                "signature": "decode",
            }.items()
        },
        "known_as": "Gemma 4 E4B",
        "dtype": "f16",
        "layout": "litert",
        "rounded": {},
        **{f"geometry.{key}": value for key, value in {"hidden_size": 65, "vocab_size": 1, "num_layers": 3}.items()},
        "geometry.final_logit_softcap": None,
        "geometry.sliding_window": 17,
        "files": {},
        "files.config.json": {"size": 1, "sha256": _SHA},
        "files.more.json": {"size": 1, "sha256": _SHA},
        "shared": [["lm_head", "pre_projection"]],
        "activations": {"lm_head": {"input": {"dtype": "int8", "scale": 1.0, "zero_point": 0}, "output": None}},
        "proof.positions": 1,
        "proof.activations_held_in": {"int8": 3},
        "tuning": TUNING,
    }
)
"""Key of ``extraction.json`` → what it may say instead; each is refuted where the bundle is at hand."""


def put(document: dict[str, Any], key: str, value: object) -> None:
    """Set ``key``, whose names are parted by dots where there is no such key; None takes it away."""
    place, names = document, key.split(".")
    while len(names) > 1:
        known = next((n for n in range(len(names), 0, -1) if ".".join(names[:n]) in place), 1)
        known = min(known, len(names) - 1) if ".".join(names) not in place else len(names)
        if known == len(names):
            break
        place = place.setdefault(".".join(names[:known]), {})
        names = names[known:]
    if value is None and key != "geometry.final_logit_softcap":
        place.pop(".".join(names))
    else:
        place[".".join(names)] = value


def add_file(directory: Path, name: str, content: object, weights: Path) -> None:
    """Put one of :data:`FILES` there."""
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    if content is None:
        shutil.copy(weights, path)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))


Plant = Callable[[Path], None]


def resum(directory: Path) -> None:
    """Make the record list what lies there, as it is: whoever changes a file can change the sums."""
    path = directory / "extraction.json"
    record = json.loads(path.read_text())
    for file in (one for one in sorted(directory.rglob("*")) if one.is_file() and one != path):
        data = file.read_bytes()
        entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        record["files"][file.relative_to(directory).as_posix()] = entry
    path.write_text(json.dumps(record))
