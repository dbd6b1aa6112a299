"""The directory that ``Gemma4AssistantForCausalLM.from_pretrained`` loads, and vLLM, SGLang and llama.cpp's converter.

``config.json`` is written field by field: transformers' own ``save_pretrained`` (5.22.2) drops ``global_head_dim`` in
favour of a per-layer form that llama.cpp's converter does not read; SGLang recognises the model by
``architectures`` and wants ``tie_word_embeddings`` in ``text_config`` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, OrderedHeadConfig, RopeConfig
from mtp_extract.architecture.roles import GEMMA4_MTP, INDEX, SCALAR, Role, shapes_of
from mtp_extract.checkpoint.checkpoint import INDICES, Checkpoint, Holding
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.lazy import FilledTensor, LazyTensor, read_indices
from mtp_extract.checkpoint.manifest import Keys, Manifest, Said, anything, at, is_number, is_text, is_whole, off, some
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, json_text, plan_array, plan_floats
from mtp_extract.checkpoint.stored import StoredWeight, common_dtype
from mtp_extract.data import load_mapping
from mtp_extract.errors import CheckpointError, DrafterError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.holding import hold_floats

# What a shard does not say. Values of the official assistants' configurations; none changes what is computed.
MAX_POSITIONS = 131072
_NUM_ASSISTANT_TOKENS = 6
_CENTROIDS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}
_UNUSED_WINDOW = 512

_ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# Used by transformers' Gemma4TextConfig when the key is absent.
_DEFAULT_GLOBAL_HEAD_DIM = 512
_ROPE_TYPES = ("default", "proportional")
# What the drafter has not: keys that change what is computed, or which tensors there are, and the values that do not.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "enable_moe_block": (False, None),
    "hidden_size_per_layer_input": (0, None),
    "use_double_wide_mlp": (False, None),
    # In the base "vision" is said of images, of which a drafter sees none.
    "use_bidirectional_attention": (False, None, "vision"),
    "quantization_config": (None,),
    # Embeddings and head are one tensor.
    "tie_word_embeddings": (True, None),
}
_MOST_LAYERS = 1024
_LM_HEAD = "lm_head.weight"
GENERATION_FILE = "generation_config.json"


class TransformersFormat:
    """``config.json``, ``generation_config.json`` and ``model.safetensors``."""

    name = "transformers"
    marker = "config.json"
    weights_file = "model.safetensors"

    def recognizes(self, directory: Path) -> bool:
        return reading.kind_of(directory / self.marker) == ""

    def hold(self, role: Role, tensor: LazyTensor, dtype: str) -> Holding:
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
            OutputFile(GENERATION_FILE, text=json_text(generation_document())),
        ]

    def read_config(self, directory: Path) -> DrafterConfig:
        return parse_config(reading.read_json(directory / self.marker))

    def read(self, directory: Path) -> Checkpoint:
        config = self.read_config(directory)
        stored = reading.read_shards(directory, self.weights_file)
        shapes = shapes_of(config)
        reading.check_tensors(
            {role.names[self.name]: (role.path, shape) for role, shape in shapes.items()},
            {name: tensor.shape for name, (_, tensor) in stored.items()},
            more=(_LM_HEAD,),
        )
        names = {role.name: role.names[self.name] for role in shapes}
        tensors = {role: StoredWeight(*stored[name], name) for role, name in names.items()}
        if _LM_HEAD in stored:
            _check_tied(StoredWeight(*stored[_LM_HEAD]), tensors["lm_head"])
        dtype = common_dtype(tensors[role.name] for role in shapes if role.kind != INDEX)
        return Checkpoint(GEMMA4_MTP, config, MappingProxyType(tensors), dtype)

    def manifest(self, directory: Path) -> Manifest:
        config = self.read_config(directory)
        weights = reading.shards_of(directory, self.weights_file, reading.read_shards(directory, self.weights_file))
        said = said_of(directory, config, config_document(config, ""))
        return Manifest(weights.files | {one.path.name for one in said}, (*weights.said, *said))


FORMAT = TransformersFormat()


def plan_weight(checkpoint: Checkpoint, role: Role, shape: tuple[int, ...], name: str, dtype: str) -> PlannedTensor:
    """The floats or indices of ``role``, called ``name``; a layer scalar that is not there is 1.

    Raises:
        CheckpointError: ``checkpoint`` lacks the weight.
    """
    tensor = checkpoint.tensors.get(role.name)
    if tensor is not None and role.kind == INDEX:
        return replace(plan_array(name, read_indices(tensor)), role=role.name)
    if tensor is None and role.kind == SCALAR:
        # A layer without a factor is one with a factor of 1.
        tensor = FilledTensor(shape)
    if tensor is None:
        raise CheckpointError(f"{role.name}: expected a weight of shape {list(shape)}, found none.")
    return plan_floats(name, role.name, tensor, dtype)


def _check_tied(copy: LazyTensor, original: LazyTensor) -> None:
    same = copy.shape == original.shape and all(
        bool((a == b).all()) for a, b in zip(copy.floats(), original.floats(), strict=True)
    )
    if not same:
        raise reading.mismatch(
            [
                f"{_LM_HEAD}: expected the same values as model.embed_tokens.weight (tied weights), found others",
            ]
        )


def config_document(config: DrafterConfig, dtype: str, tied: bool = True) -> dict[str, Any]:
    """``config.json`` of a drafter whose weights have the transformers dtype ``dtype`` ("bfloat16", …).

    Args:
        tied: whether head and embedding are one tensor.

    Raises:
        UnsupportedError: a shape that the configuration cannot express.
    """
    config.require_uniform()
    kinds = config.kv_layers
    # Where there is no layer of a type, its fields repeat the other's: they are not read.
    sliding = kinds.get(SLIDING) or kinds[FULL]
    full = kinds.get(FULL) or sliding
    if config.layer_types[-1] != FULL:
        raise UnsupportedError(
            "The last layer is a sliding one; transformers' Gemma 4 makes the last layer a full one whatever the "
            "configuration says. The litert layout can express it.",
            remedies=("format=litert",),
        )
    ids = load_mapping("geometries")["vocabularies"].get(str(config.vocab_size), {}).get("token_ids", {})
    text_config = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        # Gates num_global_key_value_heads; the drafter itself has neither K nor V projections.
        "attention_k_eq_v": sliding.num_kv_heads != full.num_kv_heads,
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
        "num_global_key_value_heads": full.num_kv_heads if full.num_kv_heads != sliding.num_kv_heads else None,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": sliding.num_kv_heads,
        "num_kv_shared_layers": config.num_layers,
        "pad_token_id": 0,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope_parameters(config),
        "sliding_window": config.sliding_window or _UNUSED_WINDOW,
        "tie_word_embeddings": tied,
        "use_bidirectional_attention": None,
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": config.vocab_size,
        "vocab_size_per_layer_input": 0,
    }
    centroids = _CENTROIDS
    if config.ordered_head is not None:
        head = config.ordered_head
        centroids = {"num_centroids": head.num_centroids, "centroid_intermediate_top_k": head.top_k}
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": config.backbone_hidden_size,
        "dtype": dtype,
        "tie_word_embeddings": tied,
        "use_ordered_embeddings": config.ordered_head is not None,
        **centroids,
        **ids,
        "text_config": text_config,
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


_FLOATS = some(None, *(dtype.transformers for dtype in DTYPES.values()))
UNCOMPUTED: Keys = MappingProxyType(
    {
        # What it is computed in, how long a text may be, whose it is, and what counts in training alone.
        **dict.fromkeys(("dtype", "torch_dtype"), _FLOATS),
        **dict.fromkeys(("*_token_id", "max_position_embeddings"), is_whole),
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

_BESIDES: Keys = MappingProxyType(
    {
        **at(("", "text_config."), UNCOMPUTED),
        # What engines know it by.
        "architectures": some(None, ["Gemma4AssistantForCausalLM"], ["Gemma4UnifiedAssistantForCausalLM"]),
        "model_type": some(*_ASSISTANT_TYPES),
        # Of an ordered head that is not there, and of experts, where reading refuses any.
        **dict.fromkeys(("num_centroids", "centroid_intermediate_top_k"), is_whole),
        **{f"text_config.{key}": is_whole for key in ("num_experts", "top_k_experts", "moe_intermediate_size")},
        # In other words, all of which are read: by layer, or as what is on or off.
        **at(("", "text_config."), {key: some(*values) for key, values in _FIXED.items()}),
        "text_config.per_layer_config": anything,
        "text_config.attention_k_eq_v": some(True, False, None),
        "text_config.num_kv_shared_layers": some(0, None),
        **{f"text_config.rope_parameters.*.{key}": some(1, None) for key in ("factor", "partial_rotary_factor")},
    }
)
"""What ``config.json`` may say otherwise than it is written here."""

_NEEDED = tuple(f"text_config.{size}_per_layer_input" for size in ("hidden_size", "vocab_size"))
"""Without them transformers takes sizes of embeddings a layer, of which a drafter has none."""

_GENERATION: Keys = MappingProxyType(
    {
        **UNCOMPUTED,
        "_from_model_config": some(True, False, None),
        "is_assistant": some(True, None),
        # How many drafts a round has, and how tokens are drawn: not what is drafted from.
        **dict.fromkeys(("num_assistant_tokens", "assistant_confidence_threshold"), is_number),
        "num_assistant_tokens_schedule": is_text,
        "do_sample": some(True, False, None),
        **dict.fromkeys(("temperature", "top_k", "top_p"), is_number),
    }
)
"""What ``generation_config.json`` may say."""


def said_of(
    directory: Path, config: DrafterConfig, document: Mapping[str, Any], more: Keys = MappingProxyType({})
) -> list[Said]:
    """What both configurations in ``directory`` may say.

    Args:
        config: as it was read.
        document: what would be written of it.
        more: what ``config.json`` may say besides.
    """
    absent = [layer_type for layer_type in (SLIDING, FULL) if layer_type not in config.rope]
    unused: Keys = {f"text_config.rope_parameters.{layer_type}": anything for layer_type in absent}
    if SLIDING in absent:
        unused = {**unused, "text_config.sliding_window": is_whole, "text_config.head_dim": is_whole}
    heads = [None, *(layer.num_kv_heads for kind, layer in config.kv_layers.items() if kind == FULL)]
    besides = {**_BESIDES, "text_config.num_global_key_value_heads": some(*heads), **unused, **more}
    return [
        Said(directory / FORMAT.marker, document, besides, _NEEDED),
        Said(directory / GENERATION_FILE, generation_document(), _GENERATION),
    ]


def generation_document() -> dict[str, Any]:
    """``generation_config.json``: what makes transformers use the checkpoint as an assistant."""
    return {
        "is_assistant": True,
        "num_assistant_tokens": _NUM_ASSISTANT_TOKENS,
        "num_assistant_tokens_schedule": "constant",
    }


def parse_config(config: Mapping[str, Any]) -> DrafterConfig:
    """The parsed ``config.json`` of a ``gemma4_assistant`` (or ``gemma4_unified_assistant``).

    Head dims and KV heads of the full layers are read from ``global_head_dim`` and ``num_global_key_value_heads`` (the
    latter counts only with ``attention_k_eq_v``, as in transformers), or from ``per_layer_config``, the form
    transformers' ``save_pretrained`` writes.

    Raises:
        DrafterError: another model type, a missing key, a value of the wrong type or range, or a feature that this
            drafter does not have.
    """
    model_type = config.get("model_type")
    if model_type not in _ASSISTANT_TYPES:
        raise DrafterError(
            f"expected model_type {' or '.join(_ASSISTANT_TYPES)}, found {escape(model_type)}; "
            "point to the drafter's directory, not the base model's"
        )
    text = reading.table(config, "text_config")
    for place, (key, values) in ((place, item) for place in (config, text) for item in _FIXED.items()):
        found = place.get(key)
        if (type(found), found) not in [(type(value), value) for value in values]:
            what = "to be on" if values[0] is True else "to be off"
            raise DrafterError(f"expected {key} {what} in a drafter, found {escape(found)}; it is not supported")
    layer_types = reading.sequence(text, "layer_types")
    if len(layer_types) > _MOST_LAYERS:
        raise DrafterError(f"expected at most {_MOST_LAYERS} layer_types, found {len(layer_types)}; check the config")
    # A count of 0 is what transformers takes for all, before it is filled in.
    for key, counts in (("num_hidden_layers", {len(layer_types)}), ("num_kv_shared_layers", {len(layer_types), 0})):
        if reading.optional_integer(text, key, least=0) not in {*counts, None}:
            raise DrafterError(
                f"expected {escape(text[key])} layer_types, as {key} says, found {len(layer_types)}; the config "
                "contradicts itself"
            )
    ordered = None
    if reading.flag(config, "use_ordered_embeddings"):
        ordered = OrderedHeadConfig(
            num_centroids=reading.positive_integer(config, "num_centroids"),
            top_k=reading.positive_integer(config, "centroid_intermediate_top_k"),
        )
    return DrafterConfig(
        backbone_hidden_size=reading.positive_integer(config, "backbone_hidden_size"),
        hidden_size=reading.positive_integer(text, "hidden_size"),
        intermediate_size=reading.positive_integer(text, "intermediate_size"),
        vocab_size=reading.positive_integer(text, "vocab_size"),
        num_heads=reading.positive_integer(text, "num_attention_heads"),
        layers=tuple(_layers(text, layer_types)),
        rms_norm_eps=reading.number(text, "rms_norm_eps", default=1e-6),
        final_logit_softcap=reading.optional_number(text, "final_logit_softcapping"),
        hidden_activation=reading.activation(text.get("hidden_activation", "gelu_pytorch_tanh")),
        ordered_head=ordered,
        max_position_embeddings=reading.optional_integer(text, "max_position_embeddings"),
    )


def _layers(text: Mapping[str, Any], layer_types: Sequence[Any]) -> list[LayerConfig]:
    full_kv_heads = text.get("num_global_key_value_heads") if reading.flag(text, "attention_k_eq_v") else None
    by_type: dict[str, dict[str, Any]] = {
        SLIDING: {"head_dim": text.get("head_dim"), "num_key_value_heads": text.get("num_key_value_heads")},
        FULL: {
            "head_dim": text.get("global_head_dim", _DEFAULT_GLOBAL_HEAD_DIM),
            "num_key_value_heads": full_kv_heads or text.get("num_key_value_heads"),
        },
    }
    per_layer: Mapping[str, Any] = {}
    if text.get("per_layer_config") is not None:
        per_layer = reading.table(text, "per_layer_config")
        by_type[FULL] = dict(by_type[SLIDING])
    layers = []
    for index, layer_type in enumerate(layer_types):
        if layer_type not in (SLIDING, FULL):
            raise DrafterError(
                f"layer {index}: expected {SLIDING} or {FULL} in layer_types, found {escape(layer_type)}"
            )
        own = reading.table(per_layer, str(index)) if str(index) in per_layer else {}
        shape = by_type[layer_type] | dict(own)
        layers.append(
            LayerConfig(
                layer_type=layer_type,
                head_dim=reading.positive_integer(shape, "head_dim"),
                num_kv_heads=reading.positive_integer(shape, "num_key_value_heads"),
                sliding_window=reading.positive_integer(text, "sliding_window") if layer_type == SLIDING else None,
                rope=parse_rope(reading.table(text, "rope_parameters"), layer_type),
            )
        )
    return layers


def parse_rope(parameters: Mapping[str, Any], layer_type: str) -> RopeConfig:
    """RoPE of ``layer_type``, from parameters in transformers' terms.

    Raises:
        DrafterError: another kind of RoPE, or a value of the wrong type or range.
    """
    rope = reading.table(parameters, layer_type)
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        raise DrafterError(f"expected rope_type {' or '.join(_ROPE_TYPES)}, found {escape(kind)}; it is not supported")
    proportional = kind == "proportional"
    share = reading.number(rope, "partial_rotary_factor", default=1.0) if proportional else 1.0
    if share > 1:
        raise DrafterError(f"expected partial_rotary_factor to be at most 1, found {share:g}; check the config")
    return RopeConfig(
        theta=reading.number(rope, "rope_theta"),
        partial_rotary_factor=share,
        factor=reading.number(rope, "factor", default=1.0) if proportional else 1.0,
    )
