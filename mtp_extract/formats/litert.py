"""One F32 tensor for each stored constant, named by role, with ``mtp_drafter_config.json``.

This is the layout of the first public extraction of such a drafter ("the seed"): 42 tensors where roles share
constants. No engine loads it; it shows what the file stores, and can express what transformers' config cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig
from mtp_extract.architecture.roles import GEMMA4_MTP, Role, roles_of, shapes_of
from mtp_extract.checkpoint.checkpoint import Checkpoint, Holding
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.lazy import FilledTensor, LazyTensor
from mtp_extract.checkpoint.manifest import Manifest, Said, said_by_header
from mtp_extract.checkpoint.planned import OutputFile, json_text, plan_floats
from mtp_extract.checkpoint.stored import StoredWeight
from mtp_extract.errors import DrafterError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.holding import hold_floats
from mtp_extract.formats.transformers import MAX_POSITIONS, parse_rope, rope_parameters

_VERSION = 1
_KV_BANKS = {SLIDING: 0, FULL: 1}
_COLUMNS = ("layer_types", "head_dims", "num_kv_heads", "sliding_windows", "kv_bank_ids")


class LitertFormat:
    """``mtp_drafter_config.json`` and ``mtp_drafter.safetensors``."""

    name = "litert"
    marker = "mtp_drafter_config.json"
    weights_file = "mtp_drafter.safetensors"

    def recognizes(self, directory: Path) -> bool:
        return (directory / self.marker).is_file()

    def hold(self, role: Role, tensor: LazyTensor, dtype: str) -> Holding:
        return hold_floats(tensor, dtype)

    def plan(self, checkpoint: Checkpoint, dtype: str) -> Sequence[OutputFile]:
        if checkpoint.mtp.ordered_head is not None:
            raise UnsupportedError("The litert layout has no ordered head: no LiteRT file holds one.")
        names = _tensor_names(checkpoint.tensors, checkpoint.mtp.num_layers)
        first = {name: role for role, name in reversed(names.items())}
        tensors = tuple(
            plan_floats(name, role, checkpoint.tensors[role], dtype) for name, role in reversed(first.items())
        )
        return [
            OutputFile(self.weights_file, tensors=tensors),
            OutputFile(self.marker, text=json_text(_config(checkpoint.mtp, names))),
        ]

    def read_config(self, directory: Path) -> DrafterConfig:
        return _parse_config(reading.read_json(directory / self.marker))

    def read(self, directory: Path) -> Checkpoint:
        parsed = reading.read_json(directory / self.marker)
        config = _parse_config(parsed)
        path = directory / self.weights_file
        stored = reading.read_tensors(path)
        shapes = shapes_of(config)
        names = _read_names(parsed, shapes)
        reading.check_tensors(
            {names[role.name]: (role.path, shape) for role, shape in shapes.items() if role.name in names},
            {name: tensor.shape for name, tensor in stored.items()},
        )
        # The graph of a layer without a scalar multiplies by nothing, which is 1.
        tensors: dict[str, LazyTensor] = {
            role.name: StoredWeight(path, stored[names[role.name]], names[role.name])
            if role.name in names
            else FilledTensor(shape)
            for role, shape in shapes.items()
        }
        types = {stored[name].dtype for name in names.values()}
        dtype = next((name for name, dtype in DTYPES.items() if {dtype.safetensors} == types), "")
        if dtype != "f32":
            raise DrafterError(f"{escape(path)}: expected tensors in F32, found {', '.join(sorted(types))}")
        return Checkpoint(GEMMA4_MTP, config, MappingProxyType(tensors), dtype)

    def manifest(self, directory: Path) -> Manifest:
        path = directory / self.marker
        parsed = reading.read_json(path)
        config = _parse_config(parsed)
        made = Said(path, _config(config, _read_names(parsed, shapes_of(config))), {})
        return Manifest(
            frozenset({self.marker, self.weights_file}), (made, said_by_header(directory / self.weights_file))
        )


FORMAT = LitertFormat()


def _tensor_names(tensors: Mapping[str, LazyTensor], num_layers: int) -> dict[str, str]:
    """Role → tensor name. Roles that share a constant share the name of the first of them."""
    names: dict[str, str] = {}
    first: dict[object, str] = {}
    for role in roles_of(num_layers):
        tensor = tensors.get(role.name)
        if tensor is not None:
            own = role.names[FORMAT.name]
            names[role.name] = own if tensor.origin is None else first.setdefault(tensor.origin, own)
    return names


def _config(config: DrafterConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """``mtp_drafter_config.json``; ``tensors`` maps every role to the tensor that holds it."""
    return {
        "format_version": _VERSION,
        "backbone_hidden_size": config.backbone_hidden_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "head_dims": list(config.head_dims),
        "num_kv_heads": list(config.num_kv_heads),
        "layer_types": list(config.layer_types),
        "kv_bank_ids": [_KV_BANKS[t] for t in config.layer_types],
        "sliding_windows": [layer.sliding_window for layer in config.layers],
        "attention_scale": config.attention_scale,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_activation": config.hidden_activation,
        "final_logit_softcap": config.final_logit_softcap,
        "max_position_embeddings": config.max_position_embeddings or MAX_POSITIONS,
        "rope": {t: p for t, p in rope_parameters(config).items() if t in config.layer_types},
        "tensors": dict(names),
    }


def _parse_config(config: Mapping[str, Any]) -> DrafterConfig:
    """The parsed ``mtp_drafter_config.json``.

    Raises:
        DrafterError: another format version, a missing key, per-layer lists of unequal length, or a feature that
            this drafter does not have.
    """
    version = config.get("format_version")
    if version != _VERSION:
        raise DrafterError(
            f"expected format_version {_VERSION} in {FORMAT.marker}, found {escape(version)}; extract the drafter anew"
        )
    count = reading.positive_integer(config, "num_layers")
    for column in _COLUMNS:
        if len(reading.sequence(config, column)) != count:
            raise DrafterError(
                f"expected {count} entries in {column}, found {len(config[column])}; extract the drafter anew"
            )
    return DrafterConfig(
        backbone_hidden_size=reading.positive_integer(config, "backbone_hidden_size"),
        hidden_size=reading.positive_integer(config, "hidden_size"),
        intermediate_size=reading.positive_integer(config, "intermediate_size"),
        vocab_size=reading.positive_integer(config, "vocab_size"),
        num_heads=reading.positive_integer(config, "num_heads"),
        layers=tuple(_layer(config, index) for index in range(count)),
        attention_scale=reading.number(config, "attention_scale"),
        rms_norm_eps=reading.number(config, "rms_norm_eps"),
        final_logit_softcap=reading.optional_number(config, "final_logit_softcap"),
        hidden_activation=reading.activation(reading.require(config, "hidden_activation")),
        max_position_embeddings=reading.optional_integer(config, "max_position_embeddings"),
    )


def _layer(config: Mapping[str, Any], index: int) -> LayerConfig:
    row = {column: config[column][index] for column in _COLUMNS}
    layer_type = row["layer_types"]
    if not isinstance(layer_type, str) or _KV_BANKS.get(layer_type) != row["kv_bank_ids"]:
        raise DrafterError(
            f"layer {index}: expected layer type and KV bank to be one of {_KV_BANKS}, found "
            f"{escape(layer_type)} with bank {escape(row['kv_bank_ids'])}; extract the drafter anew"
        )
    return LayerConfig(
        layer_type=layer_type,
        head_dim=reading.positive_integer(row, "head_dims"),
        num_kv_heads=reading.positive_integer(row, "num_kv_heads"),
        sliding_window=reading.positive_integer(row, "sliding_windows") if layer_type == SLIDING else None,
        rope=parse_rope(reading.table(config, "rope"), layer_type),
    )


def _read_names(parsed: Mapping[str, Any], roles: Mapping[Role, Any]) -> dict[str, str]:
    """Role → tensor name, as the config's table says; strict about roles."""
    table = parsed.get("tensors")
    if not isinstance(table, dict):
        raise DrafterError(
            f"expected a table of roles under 'tensors' in {FORMAT.marker}, found none; extract the drafter anew"
        )
    if unknown := sorted(set(table) - {role.name for role in roles}):
        raise DrafterError(
            f"expected no role {', '.join(map(escape, unknown))} in {FORMAT.marker}; extract the drafter anew"
        )
    if missing := sorted(role.name for role in roles if role.name not in table and not role.optional):
        raise DrafterError(
            f"expected roles {', '.join(missing)} in {FORMAT.marker}, found none; extract the drafter anew"
        )
    return {role: str(name) for role, name in table.items()}
