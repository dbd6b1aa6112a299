"""A base's checkpoint as transformers writes it: its configuration, and the text model's weights by role.

Weights lie in one or several files, in BF16, F16 or F32, or as codes: Google's public mobile checkpoints
(``quant_method: gemma``) hold the codes of the bundles. Image and audio towers are only counted. Shapes are checked by
whoever compares the weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from mtp_extract.architecture.roles import GEMMA4, list_roles
from mtp_extract.checkpoint.documents import read_object
from mtp_extract.checkpoint.safetensors_file import read_safetensors
from mtp_extract.checkpoint.stored import FileCodes, FileWeight, TensorPlace
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import CheckpointError, UnsupportedError, escape, list_few
from mtp_extract.formats import reading
from mtp_extract.io.opening import ADAPTER, MERGE_FIRST

CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_MODEL_TYPES = ("gemma4", "gemma4_text")
# Names of tensors begin with the first in the whole model, with the second in a text model alone.
_PREFIXES = ("model.language_model.", "model.")
# Tensors of other parts, which the prefix of a text model alone would include.
_TOWERS = ("model.vision", "model.audio", "model.embed_vision", "model.embed_audio")
_EXPECTED = "Expected a checkpoint as transformers writes it."
_INPUT_ROLES = {
    "o_proj": "q_proj",
    "down_proj": "gate_proj",
    "per_layer_projection": "per_layer_gate",
    "embed_tokens_per_layer": "per_layer_model_projection",
}
"""Matrices that do not read the residual stream → a matrix with as many rows as these have columns."""
_LORA_PART = ".lora_A."
_FileTensor = tuple[Path, TensorPlace]
_KV_PARTS = ("self_attn.k_proj.weight", "self_attn.k_norm.weight", "self_attn.v_proj.weight")


@dataclass(frozen=True)
class BaseCheckpoint:
    """The text model of a base."""

    directory: Path
    text: Mapping[str, Any]  # its configuration, ``text_config``
    weights: Mapping[str, Weight]  # by role; no ``lm_head`` if it is tied
    unknown: tuple[str, ...]  # tensors of the text model that play no role
    others: Mapping[str, int]  # number of tensors of other parts: towers, and tensors that no model loads


def holds_base(directory: Path) -> bool:
    """Whether ``directory`` has a Gemma 4 base as transformers writes it; CheckpointError if config.json is damaged."""
    config = directory / CONFIG
    return config.is_file() and read_object(config, _EXPECTED).get("model_type") in _MODEL_TYPES


def check_merged(directory: Path) -> None:
    """Raise CheckpointError if ``directory`` has a LoRA adapter, because its change is not in the weights beside it."""
    if (directory / ADAPTER).exists():
        hint = f" If the weights beside it are merged already, move {ADAPTER} away." if holds_base(directory) else ""
        raise CheckpointError(f"{escape(directory)}: {MERGE_FIRST}{hint}")


def read_base(directory: Path) -> BaseCheckpoint:
    """Read configuration and headers of the base in ``directory``; weights are read later.

    Raises:
        CheckpointError: it is no Gemma 4 text model, is incomplete or inconsistent, or a LoRA adapter lies beside it.
        UnsupportedError: it stores integers in another way than Google's mobile checkpoints.
    """
    check_merged(directory)
    config = read_object(directory / CONFIG, _EXPECTED)
    text, sizes = _read_text_config(directory, config)
    stored = _list_tensors(directory)
    if any(_LORA_PART in name for name in stored):
        raise CheckpointError(f"{escape(directory)}: expected merged weights, found tensors of {MERGE_FIRST}")
    scales = _take_scales(stored) if _is_mobile(config) else {}
    prefix = _find_prefix(directory, stored)
    unread = sizes.list_unread_names(prefix) & stored.keys()
    names = sizes.find_names(prefix, stored.keys() - unread)
    if "lm_head" not in names and not any(part.get("tie_word_embeddings", True) for part in (config, text)):
        raise CheckpointError(
            f"{escape(directory)}: expected a tensor lm_head.weight, as tie_word_embeddings is false, found none. "
            "Fetch it again."
        )

    rest = [name for name in stored if name not in unread.union(names.values())]
    unknown = tuple(name for name in rest if name.startswith(prefix) and not name.startswith(_TOWERS))
    others = Counter(name.removeprefix("model.").split(".")[0] for name in rest if name not in unknown)
    if unread:
        others["K and V that layers share"] = len(unread)
    return BaseCheckpoint(
        directory, text, _build_weights(names, stored, scales, sizes.hidden_size), unknown, dict(others)
    )


class _LayerCounts(Struct):
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)]
    num_kv_shared_layers: Annotated[int, Meta(ge=0)] | None = None
    hidden_size: Annotated[int, Meta(ge=0)] = 0

    def find_names(self, prefix: str, names: Set[str]) -> dict[str, str]:
        """Map each role to its tensor's name, if that is in ``names``."""
        roles = list_roles(self.num_hidden_layers, architecture=GEMMA4)
        expected = {role.name: prefix + role.names["transformers"] for role in roles} | {"lm_head": "lm_head.weight"}
        return {role: name for role, name in expected.items() if name in names}

    def list_unread_names(self, prefix: str) -> set[str]:
        """List tensors that layers which share the K and V of others may have, but that no model loads."""
        first_sharing = max(self.num_hidden_layers - (self.num_kv_shared_layers or 0), 0)
        sharing = range(first_sharing, self.num_hidden_layers)
        return {f"{prefix}layers.{layer}.{part}" for layer in sharing for part in _KV_PARTS}


def _read_text_config(directory: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], _LayerCounts]:
    """Return the text model's part of ``config``, and its sizes."""
    if (model_type := config.get("model_type")) not in _MODEL_TYPES:
        raise CheckpointError(
            f"{escape(directory)}: expected model_type {' or '.join(_MODEL_TYPES)}, found {escape(model_type)}. Give "
            "the checkpoint of a Gemma 4 base."
        )
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{escape(directory / CONFIG)}: expected text_config to be an object.")
    with reading.attribute_errors_to(directory / CONFIG):
        return text, reading.parse_fields(text, _LayerCounts)


def _is_mobile(config: Mapping[str, Any]) -> bool:
    """Whether matrices are stored as codes, as in Google's public mobile checkpoints."""
    quantization = config.get("quantization_config")
    return isinstance(quantization, dict) and quantization.get("quant_method") == "gemma"


def _find_prefix(directory: Path, names: Container[str]) -> str:
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in names:
            return prefix
    raise CheckpointError(f"{escape(directory)}: expected a tensor {_PREFIXES[0]}embed_tokens.weight, found none.")


def _list_tensors(directory: Path) -> dict[str, _FileTensor]:
    stored = dict[str, _FileTensor]()
    for path in sorted(directory.glob("*.safetensors")):
        tensors = read_safetensors(path)[0]
        if twice := list_few(sorted(stored.keys() & tensors.keys())):
            raise CheckpointError(
                f"{escape(path)}: expected tensors in one file each, found {twice} in two. Leave one."
            )
        stored |= {name: (path, tensor) for name, tensor in tensors.items()}
    _check_index(directory, stored.keys())
    return stored


def _check_index(directory: Path, names: Set[str]) -> None:
    """Raise CheckpointError, with the file that is missing, if the index lists a tensor that is not among ``names``.

    An index that was left behind by files of other names does no harm while every tensor is there.
    """
    index = directory / f"{_WEIGHTS}{reading.INDEX_ENDING}"
    if (directory / _WEIGHTS).is_file() or not index.is_file():
        return
    listed = read_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed.keys() <= names:
        reading.find_weight_files(directory, _WEIGHTS)


def _take_scales(stored: dict[str, _FileTensor]) -> dict[str, _FileTensor]:
    """Remove all scales from ``stored``; return those of weights, by the weight's name. Tables become ``….weight``.

    A bundle has its own scales of activations and caches.
    """
    scales = dict[str, _FileTensor]()
    for name in list(stored):
        module, _, last = name.rpartition(".")
        if last in ("weight_scale", "embedding_scale"):
            scales[f"{module}.weight"] = stored.pop(name)
        elif last == "embedding_quantized":
            stored[f"{module}.weight"] = stored.pop(name)
        elif last.endswith(("_activation_scale", "_cache_scale")):
            del stored[name]
    return scales


def _build_weights(
    names: Mapping[str, str], stored: Mapping[str, _FileTensor], scales: Mapping[str, _FileTensor], width: int
) -> dict[str, Weight]:
    """Build the weight of each role: floats, or codes with ``scales``; ``width``: of the residual stream."""
    rows = {role: stored[name][1].shape[0] for role, name in names.items() if stored[name][1].shape}
    weights = dict[str, Weight]()
    for role, name in names.items():
        path, tensor = stored[name]
        if name in scales:
            columns = rows.get(_find_input_role(role), width)
            weights[role] = FileCodes(path, tensor, name, columns, FileWeight(*scales[name]).array())
        elif tensor.dtype in reading.FLOAT_DTYPES:
            weights[role] = FileWeight(path, tensor, name)
        else:
            raise UnsupportedError(
                f"{escape(name)}: expected weights in floats, found {escape(tensor.dtype)}. Give the checkpoint in "
                "BF16, F16 or F32, or Google's public mobile checkpoint."
            )
    return weights


def _find_input_role(role: str) -> str:
    """Return the role with as many rows as ``role`` has columns; "" if ``role`` reads the residual stream."""
    layer, _, last = role.rpartition(".")
    source = _INPUT_ROLES.get(last, "")
    return f"{layer}.{source}" if layer and source else source
