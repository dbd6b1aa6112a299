"""A drafter's shape as keys of GGUF: those of llama.cpp's ``gemma4-assistant``, and our own where it has none.

The keys are those that llama.cpp's converter writes and its loader reads. FP32 keys hold numbers that users know in
decimal; one that does not come back as the same number stands in float64 under ``mtp_extract.`` as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, RopeConfig
from mtp_extract.checkpoint.gguf_file import ARCHITECTURE
from mtp_extract.checkpoint.manifest import Keys, anything, is_number, is_text, some
from mtp_extract.errors import CheckpointError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.keys import Table, fixed, held, made, positions, unwritten
from mtp_extract.litertlm.storage import Floats

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
_EPSILON, _CAP, _FACTOR = "attention.layer_norm_rms_epsilon", "final_logit_softcapping", "rope.factor"
_THETA, _THETA_SLIDING = "rope.freq_base", "rope.freq_base_swa"
_NUMBERS = (_EPSILON, _THETA, _THETA_SLIDING, _CAP, _FACTOR)
"""Keys in FP32; the last is a factor of frequencies, which have a tensor."""


_ONE = (None, 1.0, 1)


def _kv_heads(config: DrafterConfig) -> int | list[int]:
    heads = config.num_kv_heads
    return heads[0] if len(set(heads)) == 1 else list(heads)


_TABLE = Table(
    made("block_count", "num_layers"),
    made("vocab_size", "vocab_size", repeats=True),
    positions("context_length"),
    held(
        reading.positive_integer, ("embedding_length", "hidden_size"), ("embedding_length_out", "backbone_hidden_size")
    ),
    fixed(embedding_length_per_layer_input=(0, None)),
    held(reading.positive_integer, ("feed_forward_length", "intermediate_size")),
    made("nextn_predict_layers", "num_layers", repeats=True),
    held(reading.positive_integer, ("attention.head_count", "num_heads")),
    made("attention.head_count_kv", _kv_heads, tolerated=anything),
    made("attention.key_length", "full.head_dim"),
    made("attention.value_length", "full.head_dim"),
    made("attention.key_length_swa", "sliding.head_dim"),
    made("attention.value_length_swa", "sliding.head_dim"),
    made("attention.shared_kv_layers", "num_layers", repeats=True),
    made("attention.sliding_window", lambda config: config.sliding_window or _UNUSED_WINDOW),
    made("attention.sliding_window_pattern", lambda config: [kind == SLIDING for kind in config.layer_types]),
    made("rope.dimension_count", "full.head_dim"),
    made("rope.dimension_count_swa", "sliding.head_dim"),
    held(reading.number, (_EPSILON, "rms_norm_eps")),
    made(_THETA, "full.rope.theta"),
    made(_THETA_SLIDING, "sliding.rope.theta"),
    held(reading.optional_number, (_CAP, "final_logit_softcap")),
    unwritten(fixed(**{"attention.scale": _ONE, "expert_count": (None, 0), "rope.scaling.factor": _ONE})),
)
"""The keys of the architecture; of a type of layer that a drafter has not, they repeat the other's."""

TOLERATED: Keys = MappingProxyType(
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
        **_TABLE.allowed(f"{ARCH}."),
        f"{ARCH}.expert_used_count": some(0),
        f"{OWN}version": is_text,
        **dict.fromkeys((f"{OWN}source.*", f"{OWN}section.*"), is_text),
        **dict.fromkeys((f"{OWN}rope.*", f"{OWN}attention.*", f"{OWN}{_CAP}"), is_number),
    }
)
"""What a file may say beside what it is written here; by whom, of what, and for which tokens."""

_IMPLIED = ("vocab_size", "context_length", _CAP)
"""Keys of the architecture that llama.cpp does without: its converter writes all others."""


def needed_of(made: Mapping[str, Any]) -> tuple[str, ...]:
    """Those of :func:`config_metadata` without which llama.cpp takes something else."""
    return tuple(key for key in made if key.startswith(f"{ARCH}.") and not key.endswith(_IMPLIED))


def config_metadata(config: DrafterConfig) -> dict[str, Any]:
    """Every key that says what ``config`` says; RoPE's rotated share is in :func:`rope_frequency_factors` too.

    Raises:
        UnsupportedError: llama.cpp would compute something else.
    """
    config.require_uniform()
    rope = config.sliding.rope
    if SLIDING in config.layer_types and rope.kind != "default":
        raise UnsupportedError(
            f"The sliding layers turn {rope.partial_rotary_factor:g} of a head, by frequencies divided by "
            f"{rope.factor:g}; llama.cpp turns all of it, by the frequencies themselves. Choose the "
            "transformers format.",
            remedies=("format=transformers",),
        )
    if config.attention_scale != 1.0:
        raise UnsupportedError(
            f"The attention's scale is {config.attention_scale:g}; llama.cpp's is 1 whatever the file says. Choose the "
            "litert format.",
            remedies=("format=litert",),
        )
    keys = {key: value for key, value in _TABLE.write(config).items() if value is not None}
    own: dict[str, Any] = {_ACTIVATION: config.hidden_activation}
    numbers = keys
    if FULL in config.layer_types:
        own[_SHARE] = np.float64(config.full.rope.partial_rotary_factor)
        numbers = {**keys, _FACTOR: config.full.rope.factor}
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
        CheckpointError: another architecture, a key missing or of another type or range, keys that contradict each
            other, or a feature that this drafter does not have.
        DrafterError: a shape that no drafter has.
    """
    if metadata.get(ARCHITECTURE) != ARCH:
        raise CheckpointError(
            f"expected {ARCHITECTURE} {ARCH}, found {escape(metadata.get(ARCHITECTURE))}; point to the drafter, not "
            "the base model"
        )
    keys = _exact(metadata, factors)
    found = DrafterConfig(
        **_TABLE.read(keys),
        vocab_size=vocabulary,
        layers=_layers(metadata, keys, factors),
        hidden_activation=reading.activation(metadata, _ACTIVATION, default=_TANH),
    )
    _TABLE.require_agreement(keys, found)
    return found


def _exact(metadata: Mapping[str, Any], factors: Floats | None) -> dict[str, Any]:
    """The architecture's keys, without its name; numbers as exact as the file has them."""
    keys = {key.removeprefix(f"{ARCH}."): value for key, value in metadata.items() if key.startswith(f"{ARCH}.")}
    if factors is not None and factors.size:
        keys[_FACTOR] = factors[0]
    keys = {key: _decimal(value) if isinstance(value, np.float32) else value for key, value in keys.items()}
    for key in _NUMBERS:
        if OWN + key in metadata and key in keys:
            found, exact = reading.number(keys, key), reading.number(metadata, OWN + key)
            if np.float32(exact) != np.float32(found):
                raise CheckpointError(
                    f"expected {OWN}{key} {found:g}, as {key} says, found {exact:g}; the file contradicts itself"
                )
            keys[key] = exact
    return keys


def _layers(metadata: Mapping[str, Any], keys: Mapping[str, Any], factors: Floats | None) -> tuple[LayerConfig, ...]:
    count = reading.positive_integer(keys, "block_count")
    pattern = reading.require(keys, "attention.sliding_window_pattern")
    if not isinstance(pattern, tuple) or len(pattern) != count or not all(isinstance(n, bool) for n in pattern):
        raise CheckpointError(
            f"expected attention.sliding_window_pattern to be {count} truth values, found {escape(pattern)}; check "
            "the file"
        )
    kv_heads = reading.require(keys, "attention.head_count_kv")
    if not isinstance(kv_heads, tuple):
        kv_heads = (kv_heads,) * count
    if len(kv_heads) != count:
        raise CheckpointError(
            f"expected attention.head_count_kv to be one number or {count}, found {len(kv_heads)}; check the file"
        )
    for kind, key in product(("", "_swa"), ("attention.value_length", "rope.dimension_count")):
        width = keys.get(f"attention.key_length{kind}")
        if (found := keys.get(key + kind, width)) != width:
            raise CheckpointError(f"expected {key}{kind} {width}, found {escape(found)}; the file contradicts itself")
    if (factors is None) != all(pattern):
        raise CheckpointError(
            "expected rope_freqs.weight in a file with full layers and in no other, found "
            f"{'none' if factors is None else 'one'}; check the file"
        )
    sliding_rope = RopeConfig(reading.number(keys, _THETA_SLIDING)) if any(pattern) else None
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
        raise CheckpointError(
            f"expected rope_freqs.weight to be {width // 2} numbers, one factor and then {_NEVER_TURNED:g}, found "
            "others; it is not supported"
        )
    share = 2 * turned / width
    if _SHARE in metadata:
        said = reading.number(metadata, _SHARE)
        if said > 1 or _turned(said, width) != turned:
            raise CheckpointError(
                f"expected {_SHARE} {share:g}, as rope_freqs.weight says, found {said:g}; the file contradicts itself"
            )
        share = said
    return RopeConfig(reading.number(keys, _THETA), share, reading.number(keys, _FACTOR))
