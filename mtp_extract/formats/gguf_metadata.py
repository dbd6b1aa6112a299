"""A drafter's shape as keys of GGUF: those of llama.cpp's ``gemma4-assistant``, and our own where it has none.

The keys are those that llama.cpp's converter writes and its loader reads. FP32 keys hold numbers that users know in
decimal; one that does not come back as the same number stands in float64 under ``mtp_extract.`` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, RopeConfig
from mtp_extract.checkpoint.gguf_file import ARCHITECTURE
from mtp_extract.checkpoint.manifest import Keys, anything, is_number, is_text, is_whole, some
from mtp_extract.errors import DrafterError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.transformers import MAX_POSITIONS

ARCH = "gemma4-assistant"
"""What llama.cpp calls the architecture."""

OWN = "mtp_extract."
"""What keys of ours begin with."""

_UNUSED_WINDOW = 512
_NEVER_TURNED = 1e30
"""A frequency divided by this does not turn; llama.cpp's converter writes the same."""

_ACTIVATION = f"{OWN}hidden_activation"
_SHARE = f"{OWN}rope.partial_rotary_factor"
_TANH = "gelu_pytorch_tanh"
_FIXED: Mapping[str, tuple[object, ...]] = {
    "attention.scale": (None, 1.0),
    "embedding_length_per_layer_input": (None, 0),
    "expert_count": (None, 0),
    "rope.scaling.factor": (None, 1.0),
}
"""Keys that change what is computed, and the values that do not."""

BESIDES: Keys = MappingProxyType(
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
        # In other words, which are read.
        **{f"{ARCH}.{key}": some(*values) for key, values in _FIXED.items()},
        f"{ARCH}.attention.head_count_kv": anything,
        f"{ARCH}.expert_used_count": some(0),
        f"{ARCH}.context_length": is_whole,
        f"{OWN}version": is_text,
        **dict.fromkeys((f"{OWN}source.*", f"{OWN}section.*"), is_text),
        **dict.fromkeys((f"{OWN}rope.*", f"{OWN}attention.*", f"{OWN}final_logit_softcapping"), is_number),
    }
)
"""What a file may say beside what it is written here; by whom, of what, and for which tokens."""

_IMPLIED = ("vocab_size", "context_length", "final_logit_softcapping")
"""Keys of the architecture that llama.cpp does without: its converter writes all others."""


def needed_of(made: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of :func:`config_metadata` without which llama.cpp takes something else."""
    return tuple(key for key in made if key.startswith(f"{ARCH}.") and not key.endswith(_IMPLIED))


Floats = npt.NDArray[np.float32]


def config_metadata(config: DrafterConfig) -> dict[str, Any]:
    """Every key that says what ``config`` says; RoPE's rotated share is in :func:`rope_frequency_factors` too.

    Raises:
        UnsupportedError: llama.cpp would compute something else.
    """
    config.require_uniform()
    kinds = config.kv_layers
    sliding = kinds.get(SLIDING) or kinds[FULL]
    full = kinds.get(FULL) or sliding
    if SLIDING in kinds and sliding.rope.kind != "default":
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
    count = config.num_layers
    kv_heads = sorted(set(config.num_kv_heads))
    numbers = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": full.rope.theta,
        "rope.freq_base_swa": sliding.rope.theta,
        **({"final_logit_softcapping": config.final_logit_softcap} if config.final_logit_softcap else {}),
    }
    made = {
        "block_count": count,
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings or MAX_POSITIONS,
        "embedding_length": config.hidden_size,
        "embedding_length_out": config.backbone_hidden_size,
        "embedding_length_per_layer_input": 0,
        "feed_forward_length": config.intermediate_size,
        "nextn_predict_layers": count,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": kv_heads[0] if len(kv_heads) == 1 else list(config.num_kv_heads),
        "attention.key_length": full.head_dim,
        "attention.value_length": full.head_dim,
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.shared_kv_layers": count,
        "attention.sliding_window": config.sliding_window or _UNUSED_WINDOW,
        "attention.sliding_window_pattern": [kind == SLIDING for kind in config.layer_types],
        "rope.dimension_count": full.head_dim,
        "rope.dimension_count_swa": sliding.head_dim,
        **numbers,
    }
    own: dict[str, Any] = {_ACTIVATION: config.hidden_activation}
    if FULL in kinds:
        own[_SHARE] = np.float64(full.rope.partial_rotary_factor)
        numbers = {**numbers, "rope.factor": full.rope.factor}
    own |= {OWN + key: np.float64(number) for key, number in numbers.items() if _decimal(number) != number}
    return {**{f"{ARCH}.{key}": value for key, value in made.items()}, **own}


def _decimal(number: float | np.float32) -> float:
    """The shortest decimal that is ``number`` in FP32."""
    return float(str(np.float32(number)))


def rope_frequency_factors(config: DrafterConfig) -> Floats | None:
    """By what the frequencies of full layers are divided, ``[head_dim / 2]``; None where there are no such layers."""
    full = config.kv_layers.get(FULL)
    if full is None:
        return None
    factors = np.full(full.head_dim // 2, _NEVER_TURNED, np.float32)
    factors[: _turned(full.rope.partial_rotary_factor, full.head_dim)] = full.rope.factor
    return factors


def _turned(share: float, head_dim: int) -> int:
    """Pairs of dimensions that turn; as :func:`mtp_extract.graph.rope.frequencies` has it."""
    return int(share * head_dim // 2)


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


def config_of(metadata: Mapping[str, Any], vocabulary: int, factors: Floats | None) -> DrafterConfig:
    """The shape that ``metadata`` says; the inverse of :func:`config_metadata`.

    Args:
        vocabulary: rows of the head.
        factors: as :func:`rope_frequency_factors` makes them; None where the file has none.

    Raises:
        DrafterError: another architecture, a key missing or of another type or range, keys that contradict each other,
            or a feature that this drafter does not have.
    """
    if metadata.get(ARCHITECTURE) != ARCH:
        raise DrafterError(
            f"expected {ARCHITECTURE} {ARCH}, found {escape(metadata.get(ARCHITECTURE))}; point to the drafter, not "
            "the base model"
        )
    keys = {
        key.removeprefix(f"{ARCH}."): _plain(value) for key, value in metadata.items() if key.startswith(f"{ARCH}.")
    }
    for key, values in _FIXED.items():
        if keys.get(key) not in values:
            raise DrafterError(f"expected no {key} in a drafter, found {escape(keys[key])}; it is not supported")
    count = reading.positive_integer(keys, "block_count")
    layers = _layers(metadata, keys, count, factors)
    for key, value in (
        ("nextn_predict_layers", count),
        ("attention.shared_kv_layers", count),
        ("vocab_size", vocabulary),
        ("attention.value_length", keys.get("attention.key_length")),
        ("attention.value_length_swa", keys.get("attention.key_length_swa")),
        ("rope.dimension_count", keys.get("attention.key_length")),
        ("rope.dimension_count_swa", keys.get("attention.key_length_swa")),
    ):
        if keys.get(key, value) != value:
            raise DrafterError(f"expected {key} {value}, found {escape(keys[key])}; the file contradicts itself")
    return DrafterConfig(
        backbone_hidden_size=reading.positive_integer(keys, "embedding_length_out"),
        hidden_size=reading.positive_integer(keys, "embedding_length"),
        intermediate_size=reading.positive_integer(keys, "feed_forward_length"),
        vocab_size=vocabulary,
        num_heads=reading.positive_integer(keys, "attention.head_count"),
        layers=layers,
        rms_norm_eps=_number(metadata, keys, "attention.layer_norm_rms_epsilon"),
        final_logit_softcap=None
        if keys.get("final_logit_softcapping") is None
        else _number(metadata, keys, "final_logit_softcapping"),
        hidden_activation=reading.activation(metadata.get(_ACTIVATION, _TANH)),
        max_position_embeddings=reading.optional_integer(keys, "context_length"),
    )


def _plain(value: Any) -> Any:
    """``value`` with numbers of FP32 as the decimals they are known by."""
    return _decimal(value) if isinstance(value, np.float32) else value


def _number(metadata: Mapping[str, Any], keys: Mapping[str, Any], key: str) -> float:
    """The number under ``key``, as exact as the file has it."""
    found, own = reading.number(keys, key), metadata.get(OWN + key)
    if own is None:
        return found
    exact = reading.number({key: own}, key)
    if np.float32(exact) != np.float32(found):
        raise DrafterError(
            f"expected {OWN}{key} {found:g}, as {key} says, found {exact:g}; the file contradicts itself"
        )
    return exact


def _layers(
    metadata: Mapping[str, Any], keys: Mapping[str, Any], count: int, factors: Floats | None
) -> tuple[LayerConfig, ...]:
    pattern = reading.require(keys, "attention.sliding_window_pattern")
    if not isinstance(pattern, tuple) or len(pattern) != count or not all(isinstance(n, bool) for n in pattern):
        raise DrafterError(
            f"expected attention.sliding_window_pattern to be {count} truth values, found {escape(pattern)}; check "
            "the file"
        )
    kv_heads = reading.require(keys, "attention.head_count_kv")
    if not isinstance(kv_heads, tuple):
        kv_heads = (kv_heads,) * count
    if len(kv_heads) != count:
        raise DrafterError(
            f"expected attention.head_count_kv to be one number or {count}, found {len(kv_heads)}; check the file"
        )
    if (factors is None) != all(pattern):
        raise DrafterError(
            "expected rope_freqs.weight in a file with full layers and in no other, found "
            f"{'none' if factors is None else 'one'}; check the file"
        )
    sliding_rope = RopeConfig(_number(metadata, keys, "rope.freq_base_swa")) if any(pattern) else None
    full_rope = None if factors is None else _full_rope(metadata, keys, factors)
    layers = []
    for slides, heads in zip(pattern, kv_heads, strict=True):
        rope = sliding_rope if slides else full_rope
        assert rope is not None
        layers.append(
            LayerConfig(
                layer_type=SLIDING if slides else FULL,
                head_dim=reading.positive_integer(keys, f"attention.key_length{'_swa' if slides else ''}"),
                num_kv_heads=reading.positive_integer({"head_count_kv": heads}, "head_count_kv"),
                sliding_window=reading.positive_integer(keys, "attention.sliding_window") if slides else None,
                rope=rope,
            )
        )
    return tuple(layers)


def _full_rope(metadata: Mapping[str, Any], keys: Mapping[str, Any], factors: Floats) -> RopeConfig:
    """RoPE of the full layers, which llama.cpp keeps as factors of the frequencies."""
    width = reading.positive_integer(keys, "attention.key_length")
    turned = int(np.count_nonzero(factors < np.float32(_NEVER_TURNED)))
    expected = np.full(width // 2, _NEVER_TURNED, np.float32)
    expected[:turned] = factors[0] if factors.size else 1
    if not turned or not np.array_equal(factors, expected):
        raise DrafterError(
            f"expected rope_freqs.weight to be {width // 2} numbers, one factor and then {_NEVER_TURNED:g}, found "
            "others; it is not supported"
        )
    factor = _number(metadata, {"rope.factor": _decimal(factors[0])}, "rope.factor")
    share = 2 * turned / width
    if _SHARE in metadata:
        said = reading.number(metadata, _SHARE)
        if said > 1 or _turned(said, width) != turned:
            raise DrafterError(
                f"expected {_SHARE} {share:g}, as rope_freqs.weight says, found {said:g}; the file contradicts itself"
            )
        share = said
    return RopeConfig(_number(metadata, keys, "rope.freq_base"), share, factor)
