"""One F32 tensor per constant of the bundle, named by role, with ``mtp_drafter_config.json``.

This is the layout of the first public extraction of such a drafter ("the seed"): 42 tensors where roles share
constants. No engine loads it; it shows what the bundle stores, and can express what transformers' config cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import Struct

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig
from mtp_extract.architecture.roles import Role
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.documents import compare_document, read_object
from mtp_extract.checkpoint.files import OutputFile, format_json
from mtp_extract.checkpoint.format import Plan, StoredAs, store_all, store_floats
from mtp_extract.checkpoint.stored import FileWeight
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import CheckpointError, UnsupportedError
from mtp_extract.formats import reading
from mtp_extract.formats.reading import GateFunction, PositiveNumber, Size
from mtp_extract.formats.transformers import MAX_POSITIONS, LayerTypes, Rope, build_rope_parameters, parse_rope

_KV_BANKS = {SLIDING: 0, FULL: 1}
_SIZES = ("backbone_hidden_size", "hidden_size", "intermediate_size", "vocab_size")
_NUMBERS = ("attention_scale", "rms_norm_eps", "hidden_activation", "final_logit_softcap")
_OWN_NAMES = (*_SIZES, "num_heads", *_NUMBERS, "max_position_embeddings")
"""Keys that are fields of a DrafterConfig under their own names."""


class LitertFormat:
    """``mtp_drafter_config.json`` and ``mtp_drafter.safetensors``."""

    name = "litert"
    marker = "mtp_drafter_config.json"
    weights_file = "mtp_drafter.safetensors"
    further_files: tuple[str, ...] = ()

    def store(self, role: Role, weight: Weight, dtype: str) -> StoredAs:
        return store_floats(weight, dtype)

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Plan:
        stored = store_all(self.store, checkpoint, dtype)
        config = checkpoint.mtp
        if config.ordered_head is not None:
            raise UnsupportedError("The litert layout has no ordered head: no LiteRT file holds one.")
        names = _name_tensors(checkpoint.tensors, config)
        # Roles that share a constant share a tensor: it is listed under the first role, in the last one's place.
        first_roles = {name: role for role, name in reversed(names.items())}
        roles = dict(reversed(first_roles.items()))
        tensors = tuple(stored[role].tensor(name) for name, role in roles.items())
        files = (
            OutputFile(self.weights_file, tensors),
            OutputFile(self.marker, text=format_json(_build_config(config, names))),
        )
        return Plan(self.name, checkpoint, dtype, stored, roles, files)

    def read(self, directory: Path) -> Checkpoint:
        path = directory / self.marker
        document = read_object(path)
        with reading.attribute_errors_to(path):
            fields = reading.parse_fields(document, _LitertFields)
            config = fields.build_config()
        shapes = list_shapes(config)
        names = {
            role.name: fields.tensors.get(role.name, role.names[self.name])
            for role in shapes
            if role.name in fields.tensors or not role.optional
        }
        unread = compare_document(path, document, _build_config(config, names))
        stored = reading.read_weights(directory, self.weights_file)
        expected = {names[role.name]: (shape, ("F32",)) for role, shape in shapes.items() if role.name in names}
        reading.check_tensors(directory / self.weights_file, expected, stored)
        tensors = {role: FileWeight(*stored[name], name) for role, name in names.items()}
        # A layer without a scalar has the scalar 1.
        return Checkpoint(config, MappingProxyType(tensors), "f32", unread=unread).complete()


LITERT_LAYOUT = LitertFormat()


def _name_tensors(tensors: Mapping[str, Weight], config: DrafterConfig) -> dict[str, str]:
    """Role → tensor name. Roles that share a constant share the name of the first of them."""
    names: dict[str, str] = {}
    name_of_origin: dict[object, str] = {}
    for role in list_shapes(config):
        tensor = tensors.get(role.name)
        if tensor is not None:
            name = role.names[LITERT_LAYOUT.name]
            names[role.name] = name if tensor.origin is None else name_of_origin.setdefault(tensor.origin, name)
    return names


def _build_config(config: DrafterConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """``mtp_drafter_config.json``; ``tensors`` maps every role to the tensor that holds it."""
    return {
        "format_version": 1,
        **{name: getattr(config, name) for name in _SIZES},
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        # A value per layer.
        "head_dims": list(config.head_dims),
        "num_kv_heads": list(config.num_kv_heads),
        "layer_types": list(config.layer_types),
        "kv_bank_ids": [_KV_BANKS[layer_type] for layer_type in config.layer_types],
        "sliding_windows": [layer.sliding_window for layer in config.layers],
        **{name: getattr(config, name) for name in _NUMBERS},
        "max_position_embeddings": config.max_position_embeddings or MAX_POSITIONS,
        "rope": {
            layer_type: rope for layer_type, rope in build_rope_parameters(config).items() if layer_type in config.rope
        },
        "tensors": dict(names),
    }


class _LitertFields(Struct):
    """The fields of ``mtp_drafter_config.json`` that are read."""

    backbone_hidden_size: Size
    hidden_size: Size
    intermediate_size: Size
    vocab_size: Size
    num_heads: Size
    layer_types: LayerTypes
    head_dims: list[Size]
    num_kv_heads: list[Size]
    sliding_windows: list[Size | None]
    rope: dict[str, Rope]
    tensors: dict[str, str]
    attention_scale: PositiveNumber = 1.0
    rms_norm_eps: PositiveNumber = 1e-6
    hidden_activation: GateFunction = "gelu_pytorch_tanh"
    final_logit_softcap: PositiveNumber | None = None
    max_position_embeddings: Size | None = None

    def build_config(self) -> DrafterConfig:
        """Raise CheckpointError if the lists differ in length, or a layer lacks RoPE or has a wrong window."""
        columns = (self.layer_types, self.head_dims, self.num_kv_heads, self.sliding_windows)
        is_even = len({len(column) for column in columns}) == 1
        if not is_even or any((window is None) == (kind == SLIDING) for kind, *_, window in zip(*columns, strict=True)):
            expected = "head_dims, num_kv_heads and sliding_windows of each layer, and windows of sliding layers alone"
            raise CheckpointError(f"expected {expected}, found others")
        layers = (LayerConfig(*layer, parse_rope(self.rope, layer[0])) for layer in zip(*columns, strict=True))
        return DrafterConfig(layers=tuple(layers), **{name: getattr(self, name) for name in _OWN_NAMES})
