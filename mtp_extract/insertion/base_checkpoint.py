"""A base's checkpoint as transformers writes it: its configuration, and the text model's weights by role.

Sharded or not, in BF16, F16 or F32. Towers for images and sound are counted and left alone. Shapes are not checked
here: whoever compares knows what they are to be.
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
from mtp_extract.errors import CheckpointError, UnsupportedError, escape
from mtp_extract.formats import reading

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
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
        unused: tensors that transformers does not load: K and V of layers that share another layer's.
        others: tensors of other parts of the model, counted by the part's name.
    """

    directory: Path
    text: Mapping[str, Any]
    weights: Mapping[str, Weight]
    unknown: tuple[str, ...]
    unused: tuple[str, ...]
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
        UnsupportedError: it stores integers, or has parts that no bundle is known to have.
    """
    text = _text_config(directory)
    with reading.naming(directory / _CONFIG):
        sizes = reading.fields_of(text, _Layers)
    layers, shared = sizes.num_hidden_layers, sizes.num_kv_shared_layers or 0
    stored = _tensors(directory)
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in stored), None)
    if prefix is None:
        expected = " or ".join(f"{p}embed_tokens.weight" for p in _PREFIXES)
        raise CheckpointError(f"{escape(directory)}: expected a tensor {expected}, found none.")
    unused = {f"{prefix}layers.{i}.{part}" for i in range(layers - shared, layers) for part in _SHARED} & stored.keys()
    named = {role.name: prefix + role.names["transformers"] for role in roles_of(layers, architecture=GEMMA4)}
    names = {role: name for role, name in (named | {"lm_head": _HEAD}).items() if name in stored.keys() - unused}
    for name in names.values():
        if (kind := stored[name][1].dtype) not in reading.FLOATS:
            raise UnsupportedError(f"{escape(name)}: expected weights in floats, found {escape(kind)}. {_GIVE_FLOATS}")
    weights = {role: Stored(*stored[name], name) for role, name in names.items()}
    rest = [name for name in stored if name not in unused.union(names.values())]
    own = [name for name in rest if name.startswith(prefix) and not name.startswith(_TOWERS)]
    others = Counter(name.removeprefix("model.").split(".")[0] for name in rest if name not in own)
    return BaseCheckpoint(directory, text, weights, tuple(own), tuple(n for n in stored if n in unused), others)


class _Layers(Struct):
    num_hidden_layers: Annotated[int, Meta(ge=1, le=1024)]
    num_kv_shared_layers: Annotated[int, Meta(ge=0)] | None = None


def _text_config(directory: Path) -> dict[str, Any]:
    """The configuration of the text model, whose weights are floats."""
    config = read_object(directory / _CONFIG, _AS_WRITTEN)
    if (model_type := config.get("model_type")) not in _MODEL_TYPES:
        raise CheckpointError(
            f"{escape(directory)}: expected model_type {' or '.join(_MODEL_TYPES)}, found {escape(model_type)}. Give "
            "the checkpoint of a Gemma 4 base."
        )
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{escape(directory / _CONFIG)}: expected text_config to be an object.")
    if any(part.get("quantization_config") is not None for part in (config, text)):
        why = f"expected weights in floats, found a quantization_config. {_GIVE_FLOATS}"
        raise UnsupportedError(f"{escape(directory)}: {why}")
    if text.get("enable_moe_block"):
        raise UnsupportedError(f"{escape(directory)}: a mixture of experts, which no bundle is known to hold.")
    return text


class _Index(Struct):
    weight_map: dict[str, str]


def _tensors(directory: Path) -> reading.Tensors:
    """The tensors of ``model.safetensors``, or of the files that its index lists instead.

    Raises:
        CheckpointError: a file is missing or damaged, or has not what the index says.
    """
    index, found = directory / f"{_WEIGHTS}.index.json", dict[str, tuple[Path, StoredTensor]]()
    sharded = index.is_file() and not (directory / _WEIGHTS).is_file()
    with reading.naming(index if sharded else directory):
        places = reading.fields_of(read_object(index, _AS_WRITTEN), _Index).weight_map if sharded else {}
        for file in dict.fromkeys(places.values()) if sharded else (_WEIGHTS,):
            if Path(file).name != file:
                raise CheckpointError(f"expected files beside it, found {escape(file)}. Check the index.")
            if not (path := directory / file).is_file():
                raise CheckpointError(f"expected {file} there, found none. Fetch the checkpoint again.")
            own = read_safetensors(path)[0].items()
            found |= {name: (path, stored) for name, stored in own if not sharded or places.get(name) == file}
        if missing := sorted(places.keys() - found.keys()):
            raise CheckpointError(f"expected {escape(missing[0])} where the index says it is, found it nowhere")
    return found
