"""A base's checkpoint as transformers writes it: its configuration, and the text model's weights by role.

In one or several files, in BF16, F16 or F32. Towers for images and sound are counted and left alone. Shapes are not
checked here: whoever compares knows what they are to be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from mtp_extract.architecture.roles import GEMMA4, roles_of
from mtp_extract.checkpoint.documents import read_object
from mtp_extract.checkpoint.files import read_safetensors
from mtp_extract.checkpoint.stored import Stored, StoredTensor
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import CheckpointError, UnsupportedError, escape, few
from mtp_extract.formats import reading

_CONFIG = "config.json"
_MODEL_TYPES = ("gemma4", "gemma4_text")
# Of the whole model, of the text model alone.
_PREFIXES = ("model.language_model.", "model.")
# Under the prefix of a text model alone.
_TOWERS = ("model.vision", "model.audio", "model.embed_vision", "model.embed_audio")
_HEAD = "lm_head.weight"
_AS_WRITTEN = "Expected a checkpoint as transformers writes it."
_GIVE_FLOATS = "Give the checkpoint in BF16, F16 or F32."
_SHARED = ("self_attn.k_proj.weight", "self_attn.k_norm.weight", "self_attn.v_proj.weight")


@dataclass(frozen=True)
class BaseCheckpoint:
    """The text model of a base.

    Attributes:
        text: its configuration, ``text_config``.
        weights: role → weight, for every role that the directory has a tensor for; no ``lm_head`` where that is tied.
        unknown: tensors of the text model that play no role.
        others: how many tensors there are of other parts, by name: towers, and what no model loads.
    """

    directory: Path
    text: Mapping[str, Any]
    weights: Mapping[str, Weight]
    unknown: tuple[str, ...]
    others: Mapping[str, int]


def holds_base(directory: Path) -> bool:
    """Whether ``directory`` has the checkpoint of a Gemma 4 base, as transformers writes it.

    Raises:
        CheckpointError: its configuration cannot be read.
    """
    config = directory / _CONFIG
    return config.is_file() and read_object(config, _AS_WRITTEN).get("model_type") in _MODEL_TYPES


def read_base(directory: Path) -> BaseCheckpoint:
    """The base in ``directory``; headers are read, weights are not.

    Raises:
        CheckpointError: it is no checkpoint of Gemma 4's text model, is incomplete, or contradicts itself.
        UnsupportedError: it stores integers.
    """
    text = _text_config(directory)
    with reading.naming(directory / _CONFIG):
        sizes = reading.fields_of(text, _Layers)
    layers, shared = sizes.num_hidden_layers, sizes.num_kv_shared_layers or 0
    stored = dict[str, tuple[Path, StoredTensor]]()
    for path in sorted(directory.glob("*.safetensors")):
        own = read_safetensors(path)[0]
        if twice := few(sorted(stored.keys() & own.keys())):
            raise CheckpointError(
                f"{escape(path)}: expected tensors in one file each, found {twice} in two. Leave one."
            )
        stored |= {name: (path, tensor) for name, tensor in own.items()}
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in stored), None)
    if prefix is None:
        raise CheckpointError(f"{escape(directory)}: expected a tensor {_PREFIXES[0]}embed_tokens.weight, found none.")
    unused = {f"{prefix}layers.{i}.{part}" for i in range(layers - shared, layers) for part in _SHARED} & stored.keys()
    named = {role.name: prefix + role.names["transformers"] for role in roles_of(layers, architecture=GEMMA4)}
    names = {role: name for role, name in (named | {"lm_head": _HEAD}).items() if name in stored.keys() - unused}
    for name in names.values():
        if (kind := stored[name][1].dtype) not in reading.FLOATS:
            raise UnsupportedError(f"{escape(name)}: expected weights in floats, found {escape(kind)}. {_GIVE_FLOATS}")
    weights = {role: Stored(*stored[name], name) for role, name in names.items()}
    rest = [name for name in stored if name not in unused.union(names.values())]
    unknown = [name for name in rest if name.startswith(prefix) and not name.startswith(_TOWERS)]
    others = Counter(name.removeprefix("model.").split(".")[0] for name in rest if name not in unknown)
    others |= Counter({"K and V that layers share": len(unused)} if unused else {})
    return BaseCheckpoint(directory, text, weights, tuple(unknown), others)


class _Layers(Struct):
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)]
    num_kv_shared_layers: Annotated[int, Meta(ge=0)] | None = None


def _text_config(directory: Path) -> dict[str, Any]:
    """The configuration of the text model."""
    config = read_object(directory / _CONFIG, _AS_WRITTEN)
    if (model_type := config.get("model_type")) not in _MODEL_TYPES:
        raise CheckpointError(
            f"{escape(directory)}: expected model_type {' or '.join(_MODEL_TYPES)}, found {escape(model_type)}. Give "
            "the checkpoint of a Gemma 4 base."
        )
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{escape(directory / _CONFIG)}: expected text_config to be an object.")
    return text
