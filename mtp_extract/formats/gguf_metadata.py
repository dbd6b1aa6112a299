"""A drafter's shape as keys of GGUF: those of llama.cpp's ``gemma4-assistant``, and our own where it has none.

The keys are those that llama.cpp's converter writes and its loader reads. FP32 keys hold numbers that users know in
decimal; one that does not come back as the same number stands in float64 under ``mtp_extract.`` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import Struct

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, RopeConfig
from mtp_extract.checkpoint.gguf_file import ARCHITECTURE, as_stored
from mtp_extract.checkpoint.keys import AllowedKeys, anything, is_number, is_text, is_whole, require_keys, some
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

_ACTIVATION = f"{OWN}hidden_activation"
_SHARE = f"{OWN}rope.partial_rotary_factor"
_TANH = "gelu_pytorch_tanh"
_EPSILON, _CAP, _FACTOR = "attention.layer_norm_rms_epsilon", "final_logit_softcapping", "rope.factor"
_THETA, _THETA_SLIDING = "rope.freq_base", "rope.freq_base_swa"
_NUMBERS = (_EPSILON, _THETA, _THETA_SLIDING, _CAP, _FACTOR)
"""Keys in FP32; the last is a factor of frequencies, which have a tensor."""

_TOLERATED: AllowedKeys = MappingProxyType(
    {
        # What it is called, who made it, and how one samples from a model that is no drafter.
        **{
            f"general.{key}": anything
            for key in (
                *("name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by"),
                *("size_label", "license*", "url", "doi", "uuid", "repo_url", "source.*", "base_model.*", "dataset.*"),
                *("tags", "languages", "sampling.*", "file_type", "alignment", "quantization_version"),
            )
        },
        ARCHITECTURE: some(ARCH),
        "general.type": some("model"),
        # Drafts are tokens of the base, whatever this file calls them; that they are as many is read.
        "tokenizer.*": anything,
        "quantize.imatrix.*": anything,
        f"{ARCH}.context_length": is_whole,
        f"{ARCH}.attention.head_count_kv": anything,  # which is read in full
        # Implied where they are missing.
        **dict.fromkeys((f"{ARCH}.vocab_size", _ACTIVATION), some(None)),
        **dict.fromkeys((f"{ARCH}.attention.scale", f"{ARCH}.rope.scaling.factor"), some(1)),
        **dict.fromkeys((f"{ARCH}.expert_count", f"{ARCH}.expert_used_count"), some(0)),
        f"{OWN}version": is_text,
        **dict.fromkeys((f"{OWN}source.*", f"{OWN}section.*"), is_text),
        **dict.fromkeys((f"{OWN}rope.*", f"{OWN}attention.*", f"{OWN}{_CAP}"), is_number),
    }
)
"""What a file may say beside what it is written here; by whom, of what, and for which tokens."""


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
        _EPSILON: config.rms_norm_eps,
        _THETA: full.rope.theta,
        _THETA_SLIDING: sliding.rope.theta,
        **({} if config.final_logit_softcap is None else {_CAP: config.final_logit_softcap}),
    }
    own: dict[str, Any] = {_ACTIVATION: config.hidden_activation}
    numbers = keys
    if FULL in config.layer_types:
        own[_SHARE] = np.float64(full.rope.partial_rotary_factor)
        numbers = {**keys, _FACTOR: full.rope.factor}
    exact = {key: numbers[key] for key in _NUMBERS if key in numbers and _decimal(numbers[key]) != numbers[key]}
    own |= {OWN + key: np.float64(number) for key, number in exact.items()}
    return {**{f"{ARCH}.{key}": value for key, value in keys.items()}, **own}


def _decimal(number: float | np.float32) -> float:
    """The shortest decimal that is ``number`` in FP32."""
    return float(str(np.float32(number)))


def rope_frequency_factors(config: DrafterConfig) -> Floats | None:
    """By what the frequencies of full layers are divided, ``[head_dim / 2]``; None where there are no such layers."""
    full = config.kv_layers.get(FULL)
    if full is None:
        return None
    factors = np.full(full.head_dim // 2, _NEVER_TURNED, np.float32)
    # As many pairs of dimensions turn as mtp_extract.graph.rope.frequencies has it.
    factors[: int(full.rope.partial_rotary_factor * full.head_dim // 2)] = full.rope.factor
    return factors


def notes_of_config(config: DrafterConfig) -> tuple[str, ...]:
    """Where llama.cpp does not do what the file says."""
    notes = []
    if config.backbone_hidden_size == config.hidden_size:
        notes.append(
            f"llama.cpp does not load this drafter: it is as wide as its base ({config.hidden_size}), which llama.cpp "
            "takes for a file without the base's width."
        )
    if SLIDING not in config.layer_types:
        notes.append("llama.cpp does not load this drafter: it has no sliding layer.")
    if config.hidden_activation != _TANH:
        notes.append("The gate is an exact GELU, of which llama.cpp computes the tanh approximation.")
    return tuple(notes)


_RENAMED = {
    "layers": "block_count",
    "context": "context_length",
    "hidden": "embedding_length",
    "backbone": "embedding_length_out",
    "intermediate": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "head_dim_swa": "attention.key_length_swa",
    "window": "attention.sliding_window",
    "slides": "attention.sliding_window_pattern",
    "epsilon": _EPSILON,
    "theta": _THETA,
    "theta_swa": _THETA_SLIDING,
    "cap": _CAP,
    "factor": _FACTOR,
}


class _Keys(Struct, rename=_RENAMED):
    """The architecture's keys that count."""

    layers: Size
    hidden: Size
    backbone: Size
    intermediate: Size
    heads: Size
    kv_heads: Size | list[Size]
    head_dim: Size
    head_dim_swa: Size
    window: Size
    slides: list[bool]
    epsilon: Number
    theta: Number
    theta_swa: Number
    factor: Number = 1.0
    cap: Number | None = None
    context: Size | None = None


class _Own(Struct, rename={"activation": _ACTIVATION, "share": _SHARE}):
    """Keys of ours that llama.cpp has none for."""

    activation: Activation = "gelu_pytorch_tanh"
    share: Share | None = None


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
        made, turns = config_metadata(config), rope_frequency_factors(config)
        if turns is not factors and (turns is None or factors is None or not np.array_equal(turns, factors)):
            raise CheckpointError(
                "expected rope_freqs.weight as the full layers' RoPE has it, one factor and then "
                f"{_NEVER_TURNED:g}, found others; it is not supported"
            )
    require_keys(path, metadata, as_stored(made), _TOLERATED)
    return config


def _config(metadata: Mapping[str, Any], vocabulary: int, factors: Floats | None) -> DrafterConfig:
    plain = {key: float(value) if isinstance(value, float) else value for key, value in metadata.items()}
    plain |= {key: _decimal(value) for key, value in metadata.items() if isinstance(value, np.float32)}
    own = reading.fields(plain, _Own)
    keys = {key.removeprefix(f"{ARCH}."): value for key, value in plain.items() if key.startswith(f"{ARCH}.")}
    turned = 0 if factors is None else int(np.count_nonzero(factors < np.float32(_NEVER_TURNED)))
    if factors is not None and turned:
        keys[_FACTOR] = _decimal(factors[0])
    keys |= {key: plain[OWN + key] for key in _NUMBERS if key in keys and OWN + key in plain}
    found = reading.fields(keys, _Keys)
    kv_heads = found.kv_heads if isinstance(found.kv_heads, list) else [found.kv_heads] * found.layers
    if not found.layers == len(found.slides) == len(kv_heads):
        raise CheckpointError(
            f"expected attention.sliding_window_pattern and head_count_kv of {found.layers} layers, found "
            f"{len(found.slides)} and {len(kv_heads)}; check the file"
        )
    full = RopeConfig(found.theta, own.share or 2 * turned / found.head_dim or 1.0, found.factor)
    layers = tuple(
        LayerConfig(SLIDING, found.head_dim_swa, heads, found.window, RopeConfig(found.theta_swa))
        if slides
        else LayerConfig(FULL, found.head_dim, heads, None, full)
        for slides, heads in zip(found.slides, kv_heads, strict=True)
    )
    return DrafterConfig(
        backbone_hidden_size=found.backbone,
        hidden_size=found.hidden,
        intermediate_size=found.intermediate,
        vocab_size=vocabulary,
        num_heads=found.heads,
        layers=layers,
        rms_norm_eps=found.epsilon,
        final_logit_softcap=found.cap,
        hidden_activation=own.activation,
        max_position_embeddings=found.context,
    )
