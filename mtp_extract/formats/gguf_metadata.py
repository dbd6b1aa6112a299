"""A drafter's shape as keys of GGUF: those of llama.cpp's ``gemma4-assistant``, and our own where it has none.

The keys are those that llama.cpp's converter writes and its loader reads. FP32 keys hold numbers that users know in
decimal; one that does not come back as the same number stands in float64 under ``mtp_extract.`` as well. Reading takes
the few keys of which the others follow, makes all of them again and compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import Struct, field

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, RopeConfig
from mtp_extract.checkpoint.gguf_file import ARCHITECTURE
from mtp_extract.checkpoint.keys import ANYTHING, NUMBER, TEXT, WHOLE, AllowedKeys, allow, at, require_keys
from mtp_extract.errors import CheckpointError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.reading import Activation, Number, Share, Size
from mtp_extract.formats.transformers import MAX_POSITIONS, UNUSED_WINDOW
from mtp_extract.litertlm.storage import Floats

ARCH = "gemma4-assistant"
"""What llama.cpp calls the architecture."""

OWN = "mtp_extract."
"""What keys of ours begin with."""

_NEVER_TURNED = 1e30
"""A frequency divided by this does not turn; llama.cpp's converter writes the same."""

_FACTOR = "rope.factor"
"""By what frequencies are divided: no key of llama.cpp's, which has a tensor for it."""

_NUMBERS = (
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa", "final_logit_softcapping"),
    _FACTOR,
)
"""What is stored in FP32."""

_TOLERATED: AllowedKeys = MappingProxyType(
    {
        ARCHITECTURE: (ARCH,),
        "general.type": ("model",),
        # What it is called, who made it, and how one samples from a model that is no drafter.
        **at(
            ["general."],
            allow(
                ANYTHING,
                "name author version organization finetune basename description quantized_by size_label license* url",
                "doi uuid repo_url source.* base_model.* dataset.* tags languages sampling.* file_type alignment",
                "quantization_version",
            ),
        ),
        # Drafts are tokens of the base, whatever a file calls them; that they are as many is read.
        **allow(ANYTHING, "tokenizer.* quantize.imatrix.*"),
        f"{ARCH}.context_length": WHOLE,
        f"{ARCH}.attention.head_count_kv": ANYTHING,  # which is read in full
        # Implied where they are missing.
        **allow((None,), f"{ARCH}.vocab_size", f"{OWN}hidden_activation"),
        **at([f"{ARCH}."], allow((1,), "attention.scale rope.scaling.factor")),
        **at([f"{ARCH}."], allow((0,), "expert_count expert_used_count")),
        **at([OWN], allow(TEXT, "version source.* section.*")),
        **at([OWN], allow(NUMBER, "rope.* attention.* final_logit_softcapping")),
    }
)
"""What a file may say otherwise than it is written here: by whom, of what, and for which tokens."""


def config_metadata(config: DrafterConfig) -> dict[str, Any]:
    """Every key that says what ``config`` says; RoPE's rotated share is in :func:`rope_frequency_factors` too.

    Raises:
        UnsupportedError: llama.cpp would compute something else.
    """
    config.require_uniform()
    sliding, full = config.sliding, config.full  # each stands for the other where there is none
    if SLIDING in config.layer_types and sliding.rope.kind != "default":
        raise UnsupportedError(
            f"The sliding layers turn {sliding.rope.partial_rotary_factor:g} of a head, by frequencies divided by "
            f"{sliding.rope.factor:g}; llama.cpp turns all of it, by the frequencies themselves. Choose the "
            "transformers format.",
            remedies=("format=transformers",),
        )
    if config.attention_scale != 1.0:
        raise UnsupportedError(
            f"The attention's scale is {config.attention_scale:g}; llama.cpp's is 1 whatever the file says. Choose the "
            "litert format.",
            remedies=("format=litert",),
        )
    heads = config.num_kv_heads
    keys: dict[str, Any] = {
        "block_count": config.num_layers,
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings or MAX_POSITIONS,
        "embedding_length": config.hidden_size,
        "embedding_length_out": config.backbone_hidden_size,
        "embedding_length_per_layer_input": 0,
        "feed_forward_length": config.intermediate_size,
        "nextn_predict_layers": config.num_layers,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": heads[0] if len(set(heads)) == 1 else list(heads),
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.shared_kv_layers": config.num_layers,
        "attention.sliding_window": config.sliding_window or UNUSED_WINDOW,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_types],
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": full.rope.theta,
        "rope.freq_base_swa": sliding.rope.theta,
        **({} if config.final_logit_softcap is None else {"final_logit_softcapping": config.final_logit_softcap}),
    }
    own: dict[str, Any] = {"hidden_activation": config.hidden_activation}
    numbers = dict(keys)
    if FULL in config.layer_types:
        own["rope.partial_rotary_factor"] = np.float64(full.rope.partial_rotary_factor)
        numbers[_FACTOR] = full.rope.factor
    inexact = [key for key in _NUMBERS if key in numbers and _plain(np.float32(numbers[key])) != numbers[key]]
    own |= {key: np.float64(numbers[key]) for key in inexact}
    return {**{f"{ARCH}.{key}": value for key, value in keys.items()}, **{OWN + key: own[key] for key in own}}


def rope_frequency_factors(config: DrafterConfig) -> Floats | None:
    """By what the frequencies of full layers are divided, ``[head_dim / 2]``; None where there are no such layers."""
    full = config.kv_layers.get(FULL)
    if full is None:
        return None
    factors = np.full(full.head_dim // 2, _NEVER_TURNED, np.float32)
    # As many pairs of dimensions turn as mtp_extract.graph.rotation.frequencies has it.
    factors[: int(full.rope.partial_rotary_factor * full.head_dim // 2)] = full.rope.factor
    return factors


class _Read(Struct, kw_only=True):
    """Of a file's keys those that are read, under their own names or llama.cpp's after the architecture's."""

    layers: Size = field(name="block_count")
    hidden_size: Size = field(name="embedding_length")
    backbone_hidden_size: Size = field(name="embedding_length_out")
    intermediate_size: Size = field(name="feed_forward_length")
    num_heads: Size = field(name="attention.head_count")
    num_kv_heads: Size | list[Size] = field(name="attention.head_count_kv")
    head_dim: Size = field(name="attention.key_length")
    sliding_head_dim: Size = field(name="attention.key_length_swa")
    sliding_window: Size = field(name="attention.sliding_window")
    slides: list[bool] = field(name="attention.sliding_window_pattern")
    theta: Number = field(name="rope.freq_base")
    sliding_theta: Number = field(name="rope.freq_base_swa")
    factor: Number = field(name=_FACTOR, default=1.0)
    share: Share | None = field(name=f"{OWN}rope.partial_rotary_factor", default=None)
    rms_norm_eps: Number = field(name="attention.layer_norm_rms_epsilon", default=1e-6)
    final_logit_softcap: Number | None = field(name="final_logit_softcapping", default=None)
    hidden_activation: Activation = field(name=f"{OWN}hidden_activation", default="gelu_pytorch_tanh")
    max_position_embeddings: Size | None = field(name="context_length", default=None)


_SAME = (
    *("hidden_size", "backbone_hidden_size", "intermediate_size", "num_heads", "rms_norm_eps"),
    *("final_logit_softcap", "hidden_activation", "max_position_embeddings"),
)
"""Fields of both that and a DrafterConfig."""


def config_of(path: Path, metadata: Mapping[str, Any], vocabulary: int, factors: Floats | None) -> DrafterConfig:
    """The shape that the file at ``path`` says; the inverse of :func:`config_metadata`.

    Args:
        metadata: as :func:`~mtp_extract.checkpoint.gguf_file.read_gguf` finds it.
        vocabulary: rows of the head.
        factors: as :func:`rope_frequency_factors` makes them; None where the file has none.

    Raises:
        CheckpointError: another architecture, a key missing or of another type or range, or the file says something
            else than would be written of what was read from it.
    """
    with reading.naming(path):
        if metadata.get(ARCHITECTURE) != ARCH:
            raise CheckpointError(
                f"expected {ARCHITECTURE} {ARCH}, found {escape(metadata.get(ARCHITECTURE))}; point to the drafter, "
                "not the base model"
            )
        config = _config(metadata, vocabulary, factors)
        made = config_metadata(config)
        if not np.array_equal(_flat(rope_frequency_factors(config)), _flat(factors)):
            raise CheckpointError(
                "expected rope_freqs.weight as the full layers' RoPE has it, one factor and then "
                f"{_NEVER_TURNED:g}, found others; it is not supported"
            )
    stored = {key: np.float32(value) if type(value) is float else value for key, value in made.items()}
    require_keys(path, metadata, stored, _TOLERATED)
    return config


def _flat(factors: Floats | None) -> Floats:
    return np.empty(0, np.float32) if factors is None else factors


def _plain(value: Any) -> Any:
    """``value`` as Python's own; of a number in FP32 or FP64 the shortest decimal that is the same there."""
    return float(str(value)) if isinstance(value, np.floating) else value


def _config(metadata: Mapping[str, Any], vocabulary: int, factors: Floats | None) -> DrafterConfig:
    keys = {key.removeprefix(f"{ARCH}."): _plain(value) for key, value in metadata.items()}
    turned = 0 if factors is None else int(np.count_nonzero(factors < np.float32(_NEVER_TURNED)))
    if factors is not None and turned:
        keys[_FACTOR] = _plain(factors[0])
    keys |= {key: keys[OWN + key] for key in _NUMBERS if key in keys and OWN + key in keys}
    found = reading.fields_of(keys, _Read)
    heads = found.num_kv_heads if isinstance(found.num_kv_heads, list) else [found.num_kv_heads] * found.layers
    if not found.layers == len(found.slides) == len(heads):
        raise CheckpointError(
            f"expected sliding_window_pattern and head_count_kv of {found.layers} layers, found others; check the file"
        )
    share = found.share or 2 * turned / found.head_dim or 1.0
    full, sliding = RopeConfig(found.theta, share, found.factor), RopeConfig(found.sliding_theta)
    layers = tuple(
        LayerConfig(SLIDING, found.sliding_head_dim, of_base, found.sliding_window, sliding)
        if slides
        else LayerConfig(FULL, found.head_dim, of_base, None, full)
        for slides, of_base in zip(found.slides, heads, strict=True)
    )
    return DrafterConfig(vocab_size=vocabulary, layers=layers, **{name: getattr(found, name) for name in _SAME})
