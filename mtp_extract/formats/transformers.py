"""The directory that ``Gemma4AssistantForCausalLM.from_pretrained`` loads, and vLLM, SGLang and llama.cpp's converter.

``config.json`` is written field by field: transformers' own ``save_pretrained`` (5.22.2) drops ``global_head_dim`` in
favour of a per-layer form that llama.cpp's converter does not read; SGLang recognises the model by
``architectures`` and wants ``tie_word_embeddings`` in ``text_config`` too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, OrderedHeadConfig, RopeConfig
from mtp_extract.architecture.roles import GEMMA4_MTP, INDEX, Role, shapes_of
from mtp_extract.checkpoint.checkpoint import INDICES, Checkpoint, Holding
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.lazy import LazyTensor
from mtp_extract.checkpoint.manifest import Keys, Said, anything, at, is_number, is_text, is_whole, off, some
from mtp_extract.checkpoint.planned import OutputFile, json_text
from mtp_extract.checkpoint.stored import StoredWeight, common_dtype
from mtp_extract.data import load_mapping
from mtp_extract.errors import CheckpointError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.holding import hold_floats, plan_weight
from mtp_extract.formats.keys import Table, constant, fixed, held, made, positions, unwritten

GENERATION_FILE = "generation_config.json"

_UNUSED_WINDOW = 512
_ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
# Used by transformers' Gemma4TextConfig when the key is absent.
_DEFAULT_GLOBAL_HEAD_DIM = 512
_MOST_LAYERS = 1024
_LM_HEAD = "lm_head.weight"


def _head(field: str, default: int) -> Callable[[DrafterConfig], int]:
    """A number of the ordered head; where there is none, that of the official assistants, which nothing reads."""
    return lambda config: getattr(config.ordered_head, field, default)


def _two_kv_heads(config: DrafterConfig) -> bool:
    return config.sliding.num_kv_heads != config.full.num_kv_heads


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


_BOTH = (
    *fixed(
        attention_bias=(False, None),
        enable_moe_block=(False, None),
        hidden_size_per_layer_input=(0, None),
        use_double_wide_mlp=(False, None),
        # In the base "vision" is said of images, of which a drafter sees none.
        use_bidirectional_attention=(None, False, "vision"),
        # Embeddings and head are one tensor.
        tie_word_embeddings=(True, None),
    ),
    *unwritten(fixed(quantization_config=(None,))),
)
"""What a drafter has not, wherever ``config.json`` says it."""

_TOP = Table(
    constant(architectures=["Gemma4AssistantForCausalLM"], model_type=_ASSISTANT_TYPES[0]),
    held(reading.positive_integer, "backbone_hidden_size"),
    constant(dtype="", tie_word_embeddings=True),
    made("use_ordered_embeddings", lambda config: config.ordered_head is not None),
    made("num_centroids", _head("num_centroids", 2048), tolerated=is_whole),
    made("centroid_intermediate_top_k", _head("top_k", 32), tolerated=is_whole),
    unwritten(_BOTH),
)
"""``config.json``, but for tokens and ``text_config``."""

_TEXT = Table(
    _BOTH,
    constant(attention_dropout=0.0, dtype="", initializer_range=0.02, use_cache=True),
    constant(bos_token_id=2, eos_token_id=1, pad_token_id=0, model_type="gemma4_text", vocab_size_per_layer_input=0),
    held(
        reading.positive_integer, "hidden_size", "intermediate_size", "vocab_size", ("num_attention_heads", "num_heads")
    ),
    held(reading.optional_number, ("final_logit_softcapping", "final_logit_softcap")),
    held(partial(reading.activation, default="gelu_pytorch_tanh"), "hidden_activation"),
    held(partial(reading.number, default=1e-6), "rms_norm_eps"),
    positions("max_position_embeddings"),
    made("num_hidden_layers", "num_layers", repeats=True),
    # 0 is what transformers takes for all, before it is filled in.
    made("num_kv_shared_layers", "num_layers", repeats=True, tolerated=some(0, None)),
    # Of each layer, by its type.
    made("layer_types", lambda config: list(config.layer_types)),
    made("head_dim", "sliding.head_dim"),
    made("global_head_dim", "full.head_dim"),
    made("num_key_value_heads", "sliding.num_kv_heads"),
    made("num_global_key_value_heads", lambda config: config.full.num_kv_heads if _two_kv_heads(config) else None),
    # Gates num_global_key_value_heads; the drafter itself has neither K nor V projections.
    made("attention_k_eq_v", _two_kv_heads, tolerated=some(True, False, None)),
    made("rope_parameters", rope_parameters),
    made("sliding_window", lambda config: config.sliding_window or _UNUSED_WINDOW),
)
"""``text_config``, which is written in the order of the alphabet."""


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
            OutputFile(GENERATION_FILE, text=json_text(GENERATION)),
        ]

    def read_config(self, directory: Path) -> DrafterConfig:
        path = directory / self.marker
        document = read_object(path)
        with reading.naming(path):
            return parse_config(document)

    def read(self, directory: Path) -> Checkpoint:
        config = self.read_config(directory)
        stored = reading.read_shards(directory, self.weights_file)
        shapes = shapes_of(config)
        tensors = reading.weights_of(shapes, {role: role.names[self.name] for role in shapes}, stored, (_LM_HEAD,))
        if _LM_HEAD in stored:
            _check_tied(StoredWeight(*stored[_LM_HEAD]), tensors["lm_head"])
        dtype = common_dtype(tensors[role.name] for role in shapes if role.kind != INDEX)
        return Checkpoint(GEMMA4_MTP, config, MappingProxyType(tensors), dtype)

    def manifest(self, directory: Path) -> Sequence[Said]:
        config = self.read_config(directory)
        stored = reading.read_shards(directory, self.weights_file)
        weights = reading.said_by_shards(directory, self.weights_file, stored)
        return *weights, *said_of(directory, config, config_document(config, ""))


FORMAT = TransformersFormat()


def _check_tied(copy: LazyTensor, original: LazyTensor) -> None:
    same = copy.shape == original.shape and all(
        bool((a == b).all()) for a, b in zip(copy.floats(), original.floats(), strict=True)
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
    tokens = load_mapping("geometries")["vocabularies"].get(str(config.vocab_size), {}).get("token_ids", {})
    weights = {"dtype": dtype, "tie_word_embeddings": tied}
    text = dict(sorted({**_TEXT.write(config), **weights}.items()))
    return {**_TOP.write(config), **weights, **tokens, "text_config": text}


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

_TOLERATED: Keys = MappingProxyType(
    {
        **at(("", "text_config."), UNCOMPUTED),
        **_TOP.allowed(),
        "architectures": some(None, ["Gemma4UnifiedAssistantForCausalLM"]),
        "model_type": some(*_ASSISTANT_TYPES),
        **_TEXT.allowed("text_config."),
        # Of experts, where reading refuses any.
        **{f"text_config.{key}": is_whole for key in ("num_experts", "top_k_experts", "moe_intermediate_size")},
        # In other words, all of which are read: by layer, or as what is on or off.
        "text_config.per_layer_config": anything,
        **{f"text_config.rope_parameters.*.{key}": some(1, None) for key in ("factor", "partial_rotary_factor")},
    }
)
"""What ``config.json`` may say otherwise than it is written here."""

_NEEDED = tuple(f"text_config.{size}_per_layer_input" for size in ("hidden_size", "vocab_size"))
"""Without them transformers takes sizes of embeddings a layer, of which a drafter has none."""

GENERATION: Mapping[str, Any] = {
    "is_assistant": True,
    "num_assistant_tokens": 6,
    "num_assistant_tokens_schedule": "constant",
}
"""``generation_config.json``: what makes transformers use the checkpoint as an assistant, as in the official ones."""

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
    # What is said of layers of a type that there is none of is not read.
    tolerated = {**_TOLERATED, "text_config.num_global_key_value_heads": some(None, config.full.num_kv_heads), **more}
    if SLIDING not in config.rope:
        tolerated |= {f"text_config.rope_parameters.{SLIDING}": anything}
        tolerated |= dict.fromkeys(("text_config.sliding_window", "text_config.head_dim"), is_whole)
    return [
        Said(directory / FORMAT.marker, document, tolerated, _NEEDED),
        Said(directory / GENERATION_FILE, GENERATION, _GENERATION),
    ]


def parse_config(config: Mapping[str, Any]) -> DrafterConfig:
    """The parsed ``config.json`` of a ``gemma4_assistant`` (or ``gemma4_unified_assistant``).

    Head dims and KV heads of the full layers are read from ``global_head_dim`` and ``num_global_key_value_heads`` (the
    latter counts only with ``attention_k_eq_v``, as in transformers), or from ``per_layer_config``, the form
    transformers' ``save_pretrained`` writes.

    Raises:
        CheckpointError: another model type, a missing key, a value of the wrong type or range, or a feature that this
            drafter does not have.
        DrafterError: a shape that no drafter has.
    """
    model_type = config.get("model_type")
    if model_type not in _ASSISTANT_TYPES:
        raise CheckpointError(
            f"expected model_type {' or '.join(_ASSISTANT_TYPES)}, found {escape(model_type)}; "
            "point to the drafter's directory, not the base model's"
        )
    text = reading.table(config, "text_config")
    fields = {**_TOP.read(config), **_TEXT.read(text)}
    if reading.flag(config, "use_ordered_embeddings"):
        fields["ordered_head"] = OrderedHeadConfig(
            num_centroids=reading.positive_integer(config, "num_centroids"),
            top_k=reading.positive_integer(config, "centroid_intermediate_top_k"),
        )
    found = DrafterConfig(**fields, layers=tuple(_layers(text)))
    _TEXT.require_agreement(text, found)
    return found


def _layers(text: Mapping[str, Any]) -> list[LayerConfig]:
    layer_types = reading.sequence(text, "layer_types")
    if len(layer_types) > _MOST_LAYERS:
        raise CheckpointError(
            f"expected at most {_MOST_LAYERS} layer_types, found {len(layer_types)}; check the config"
        )
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
            raise CheckpointError(
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
        CheckpointError: another kind of RoPE, or a value of the wrong type or range.
    """
    rope = reading.table(parameters, layer_type)
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "proportional"):
        raise CheckpointError(f"expected rope_type default or proportional, found {escape(kind)}; it is not supported")
    proportional = kind == "proportional"
    share = reading.number(rope, "partial_rotary_factor", default=1.0) if proportional else 1.0
    if share > 1:
        raise CheckpointError(f"expected partial_rotary_factor to be at most 1, found {share:g}; check the config")
    return RopeConfig(
        theta=reading.number(rope, "rope_theta"),
        partial_rotary_factor=share,
        factor=reading.number(rope, "factor", default=1.0) if proportional else 1.0,
    )
