"""The directory that ``Gemma4AssistantForCausalLM.from_pretrained`` loads, and vLLM, SGLang and llama.cpp's converter.

``config.json`` is written field by field: transformers' own ``save_pretrained`` (5.22.2) drops ``global_head_dim`` in
favour of a per-layer form that llama.cpp's converter does not read; SGLang recognises the model by
``architectures`` and wants ``tie_word_embeddings`` in ``text_config`` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, OrderedHeadConfig, RopeConfig
from mtp_extract.architecture.roles import GEMMA4_MTP, INDEX, Role, shapes_of
from mtp_extract.checkpoint.checkpoint import INDICES, Checkpoint, Holding
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.keys import (
    AllowedKeys,
    anything,
    at,
    is_number,
    is_text,
    is_whole,
    off,
    require_keys,
    some,
)
from mtp_extract.checkpoint.planned import OutputFile, json_text
from mtp_extract.checkpoint.stored import common_dtype, stored_weight
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.data import load_mapping
from mtp_extract.errors import CheckpointError, UnsupportedError, either, escape
from mtp_extract.formats import reading
from mtp_extract.formats.holding import hold_floats, plan_weight
from mtp_extract.formats.reading import Activation, Number, Share, Size

GENERATION_FILE = "generation_config.json"
MAX_POSITIONS = 131072
"""Written of a drafter that does not say for how many positions it was made: the official assistants'."""

UNUSED_WINDOW = 512
"""Written of a drafter without sliding layers."""

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
_LM_HEAD = "lm_head.weight"
_OWN_NAMES = (
    *("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "hidden_activation"),
    "max_position_embeddings",
)
"""Keys of ``text_config`` that are fields of a DrafterConfig under their own names."""


class TransformersFormat:
    """``config.json``, ``generation_config.json`` and ``model.safetensors``."""

    name = "transformers"
    marker = "config.json"
    weights_file = "model.safetensors"
    further_files = (GENERATION_FILE,)

    def recognizes(self, directory: Path) -> bool:
        return reading.kind_of(directory / self.marker) == ""

    def hold(self, role: Role, tensor: Weight, dtype: str) -> Holding:
        return Holding(INDICES) if role.kind == INDEX else hold_floats(tensor, dtype)

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Sequence[OutputFile]:
        config = checkpoint.mtp
        tensors = tuple(
            plan_weight(checkpoint, role, shape, role.names[self.name], dtype)
            for role, shape in shapes_of(config).items()
        )
        return [
            OutputFile(self.weights_file, tensors=tensors),
            OutputFile(self.marker, text=json_text(config_document(config, DTYPES[dtype].transformers))),
            OutputFile(GENERATION_FILE, text=json_text(GENERATION)),
        ]

    def read_config(self, directory: Path) -> DrafterConfig:
        path = directory / self.marker
        document = read_object(path)
        with reading.naming(path):
            config = parse_config(document)
            made = config_document(config, "")
        require_documents(directory, document, config, made)
        return config

    def read(self, directory: Path) -> Checkpoint:
        config = self.read_config(directory)
        stored = reading.read_shards(directory, self.weights_file)
        shapes = shapes_of(config)
        tensors = reading.weights_of(shapes, {role: role.names[self.name] for role in shapes}, stored, (_LM_HEAD,))
        if _LM_HEAD in stored:
            _check_tied(stored_weight(*stored[_LM_HEAD]), tensors["lm_head"])
        dtype = common_dtype(tensors[role.name] for role in shapes if role.kind != INDEX)
        return Checkpoint(GEMMA4_MTP, config, MappingProxyType(tensors), dtype)


FORMAT = TransformersFormat()


def _check_tied(copy: Weight, original: Weight) -> None:
    same = copy.shape == original.shape and all(
        bool((a == b).all()) for a, b in zip(copy.chunks(), original.chunks(), strict=True)
    )
    if not same:
        raise reading.mismatch([f"{_LM_HEAD}: expected the same values as model.embed_tokens.weight, found others"])


def config_document(config: DrafterConfig, dtype: str, tied: bool = True) -> dict[str, Any]:
    """``config.json`` of a drafter whose weights have the transformers dtype ``dtype`` ("bfloat16", …).

    Args:
        tied: whether head and embedding are one tensor.

    Raises:
        UnsupportedError: a shape that the configuration cannot express.
    """
    config.require_uniform()
    if config.layer_types[-1] != FULL:
        raise UnsupportedError(
            "The last layer is a sliding one; transformers' Gemma 4 makes the last layer a full one whatever the "
            "configuration says. The litert layout can express it.",
            remedies=("format=litert",),
        )
    sliding, full, head = config.sliding, config.full, config.ordered_head
    two_kv_heads = sliding.num_kv_heads != full.num_kv_heads
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": two_kv_heads,  # gates num_global_key_value_heads; there are no K and V projections
        "bos_token_id": 2,
        "dtype": dtype,
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": config.final_logit_softcap,
        "global_head_dim": full.head_dim,
        "head_dim": sliding.head_dim,
        "hidden_activation": config.hidden_activation,
        "hidden_size": config.hidden_size,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "layer_types": list(config.layer_types),
        "max_position_embeddings": config.max_position_embeddings or MAX_POSITIONS,
        "model_type": "gemma4_text",
        "num_attention_heads": config.num_heads,
        "num_global_key_value_heads": full.num_kv_heads if two_kv_heads else None,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": sliding.num_kv_heads,
        "num_kv_shared_layers": config.num_layers,
        "pad_token_id": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_parameters(config),
        "sliding_window": config.sliding_window or UNUSED_WINDOW,
        "tie_word_embeddings": tied,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": config.vocab_size,
        "vocab_size_per_layer_input": 0,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": _TYPES[0],
        "backbone_hidden_size": config.backbone_hidden_size,
        "dtype": dtype,
        "tie_word_embeddings": tied,
        "use_ordered_embeddings": head is not None,
        # Without an ordered head nothing reads these: they are the official assistants'.
        "num_centroids": head.num_centroids if head else 2048,
        "centroid_intermediate_top_k": head.top_k if head else 32,
        **load_mapping("geometries")["vocabularies"].get(str(config.vocab_size), {}).get("token_ids", {}),
        "text_config": text,
    }


def rope_parameters(config: DrafterConfig) -> dict[str, dict[str, Any]]:
    """RoPE per layer type, in transformers' terms; both types are always there, because transformers reads both."""
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
"""``generation_config.json``: what makes transformers use the checkpoint as an assistant, as in the official ones."""

UNCOMPUTED: AllowedKeys = MappingProxyType(
    {
        # What it is computed in, how long a text may be, whose it is, and what counts in training alone.
        **dict.fromkeys(("dtype", "torch_dtype"), some(None, *(dtype.transformers for dtype in DTYPES.values()))),
        **dict.fromkeys(("*_token_id", "*_token_index", "max_position_embeddings"), is_whole),
        **dict.fromkeys(("initializer_range", "attention_dropout"), is_number),
        **dict.fromkeys(("transformers_version", "_name_or_path", "problem_type"), is_text),
        # What a model gives beside its result, of which a drafter has none.
        **dict.fromkeys(("output_attentions", "output_hidden_states", "chunk_size_feed_forward"), off),
        "is_encoder_decoder": off,
        **dict.fromkeys(("id2label", "label2id"), anything),
        **dict.fromkeys(("use_cache", "return_dict"), some(True, False, None)),
    }
)
"""Keys of transformers' configurations from which nothing is computed."""

_TOLERATED: AllowedKeys = MappingProxyType(
    {
        **at(("", "text_config."), UNCOMPUTED),
        # What a drafter has not, in other words.
        **at(
            ("", "text_config."),
            {
                **dict.fromkeys(("attention_bias", "enable_moe_block", "use_double_wide_mlp"), some(False, None)),
                # In the base "vision" is said of images, of which a drafter sees none.
                "use_bidirectional_attention": some(False, "vision"),
            },
        ),
        "hidden_size_per_layer_input": some(0),
        "architectures": some(None, ["Gemma4UnifiedAssistantForCausalLM"]),
        "model_type": some(*_TYPES),
        **dict.fromkeys(("num_centroids", "centroid_intermediate_top_k"), is_whole),
        # Read as what transformers takes where they are missing.
        "use_ordered_embeddings": some(None),
        **{f"text_config.{key}": some(None) for key in ("hidden_activation", "rms_norm_eps", "global_head_dim")},
        **{f"text_config.{key}": some(None) for key in ("model_type", "rope_parameters.*.rope_type")},
        # Of experts, of which there is no block.
        **{f"text_config.{key}": is_whole for key in ("num_experts", "top_k_experts", "moe_intermediate_size")},
        # 0 is what transformers takes for all, before it is filled in.
        "text_config.num_kv_shared_layers": some(0, None),
        "text_config.attention_k_eq_v": some(True, False, None),
        # In other words, all of which are read: by layer, or as what is on or off.
        "text_config.per_layer_config": anything,
        **{f"text_config.rope_parameters.*.{key}": some(1, None) for key in ("factor", "partial_rotary_factor")},
    }
)
"""What ``config.json`` may say otherwise than it is written here."""

_GENERATION: AllowedKeys = MappingProxyType(
    {
        **UNCOMPUTED,
        "_from_model_config": some(True, False, None),
        "is_assistant": some(None),
        # How many drafts a round has, and how tokens are drawn: not what is drafted from.
        **dict.fromkeys(("num_assistant_tokens", "assistant_confidence_threshold"), is_number),
        "num_assistant_tokens_schedule": is_text,
        "do_sample": some(True, False, None),
        **dict.fromkeys(("temperature", "top_k", "top_p"), is_number),
    }
)
"""What ``generation_config.json`` may say otherwise."""


def require_documents(
    directory: Path,
    document: Mapping[str, Any],
    config: DrafterConfig,
    made: Mapping[str, Any],
    more: AllowedKeys = MappingProxyType({}),
) -> None:
    """Check that both configurations in ``directory`` say what would be written there, or what changes nothing.

    Args:
        document: ``config.json`` as it lies there.
        config: as it was read from that.
        made: what would be written of it.
        more: what ``config.json`` may say besides.

    Raises:
        CheckpointError: one of them says something else.
    """
    tolerated = {**_TOLERATED, "text_config.num_global_key_value_heads": some(None, config.full.num_kv_heads), **more}
    if SLIDING not in config.rope:  # what is said of them is not read
        tolerated |= {f"text_config.rope_parameters.{SLIDING}": anything}
        tolerated |= dict.fromkeys(("text_config.sliding_window", "text_config.head_dim"), is_whole)
    if made["tie_word_embeddings"]:  # which is what engines take where nothing is said
        tolerated |= dict.fromkeys(("tie_word_embeddings", "text_config.tie_word_embeddings"), some(None))
    require_keys(directory / FORMAT.marker, document, made, tolerated)
    path = directory / GENERATION_FILE
    if path.is_file():
        require_keys(path, read_object(path), GENERATION, _GENERATION)


LayerTypes = Annotated[list[Literal["sliding_attention", "full_attention"]], Meta(min_length=1, max_length=1024)]


class _Layer(Struct, forbid_unknown_fields=True):
    head_dim: Size | None = None
    num_key_value_heads: Size | None = None


class _Text(Struct):
    hidden_size: Size
    intermediate_size: Size
    vocab_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    layer_types: LayerTypes
    rope_parameters: dict[str, Any]
    sliding_window: Size | None = None
    global_head_dim: Size = 512  # as in transformers' Gemma4TextConfig
    num_global_key_value_heads: Size | None = None
    attention_k_eq_v: bool | None = None
    per_layer_config: dict[str, _Layer] | None = None
    final_logit_softcapping: Number | None = None
    hidden_activation: Activation = "gelu_pytorch_tanh"
    rms_norm_eps: Number = 1e-6
    max_position_embeddings: Size | None = None


class _Config(Struct):
    model_type: str
    backbone_hidden_size: Size
    text_config: _Text
    use_ordered_embeddings: bool | None = None


class _OrderedHead(Struct):
    num_centroids: Size
    centroid_intermediate_top_k: Size


def parse_config(document: Mapping[str, Any]) -> DrafterConfig:
    """The parsed ``config.json`` of a ``gemma4_assistant`` (or ``gemma4_unified_assistant``).

    Head dims and KV heads of the full layers are read from ``global_head_dim`` and ``num_global_key_value_heads`` (the
    latter counts only with ``attention_k_eq_v``, as in transformers), or from ``per_layer_config``, the form
    transformers' ``save_pretrained`` writes.

    Raises:
        CheckpointError: another model type, a missing key, or a value of the wrong type or range.
        DrafterError: a shape that no drafter has.
    """
    if document.get("model_type") not in _TYPES:
        raise CheckpointError(
            f"expected model_type {either(_TYPES)}, found {escape(document.get('model_type'))}; point to the "
            "drafter's directory, not the base model's"
        )
    top = reading.fields(document, _Config)
    text, head = top.text_config, None
    if top.use_ordered_embeddings:
        ordered = reading.fields(document, _OrderedHead)
        head = OrderedHeadConfig(ordered.num_centroids, ordered.centroid_intermediate_top_k)
    return DrafterConfig(
        backbone_hidden_size=top.backbone_hidden_size,
        num_heads=text.num_attention_heads,
        layers=tuple(_layer(text, index, layer_type) for index, layer_type in enumerate(text.layer_types)),
        final_logit_softcap=text.final_logit_softcapping,
        ordered_head=head,
        **{name: getattr(text, name) for name in _OWN_NAMES},
    )


def _layer(text: _Text, index: int, layer_type: str) -> LayerConfig:
    head_dim, kv_heads = text.head_dim, text.num_key_value_heads
    if text.per_layer_config is not None:
        own = text.per_layer_config.get(str(index), _Layer())
        head_dim, kv_heads = own.head_dim or head_dim, own.num_key_value_heads or kv_heads
    elif layer_type == FULL:
        head_dim = text.global_head_dim
        kv_heads = (text.num_global_key_value_heads if text.attention_k_eq_v else None) or kv_heads
    if layer_type == SLIDING and text.sliding_window is None:
        raise CheckpointError("expected sliding_window for sliding layers, found none; check the config")
    window = text.sliding_window if layer_type == SLIDING else None
    return LayerConfig(layer_type, head_dim, kv_heads, window, parse_rope(text.rope_parameters, layer_type))


class _Rope(Struct):
    rope_theta: Number
    rope_type: Literal["default", "proportional"] = "default"
    partial_rotary_factor: Share | None = None
    factor: Number | None = None


def parse_rope(parameters: Mapping[str, Any], layer_type: str) -> RopeConfig:
    """RoPE of ``layer_type``, from parameters in transformers' terms.

    Raises:
        CheckpointError: another kind of RoPE, or a value of the wrong type or range.
    """
    if layer_type not in parameters:
        raise CheckpointError(f"expected RoPE of {layer_type}, found none; check the config")
    rope = reading.fields(parameters[layer_type], _Rope)
    if rope.rope_type == "default":
        return RopeConfig(rope.rope_theta)
    return RopeConfig(rope.rope_theta, rope.partial_rotary_factor or 1.0, rope.factor or 1.0)
