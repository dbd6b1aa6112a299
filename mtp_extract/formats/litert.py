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
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.lazy import FilledTensor, LazyTensor
from mtp_extract.checkpoint.manifest import Said, said_by_header
from mtp_extract.checkpoint.planned import OutputFile, json_text, plan_floats
from mtp_extract.errors import CheckpointError, UnsupportedError, escape
from mtp_extract.formats import reading
from mtp_extract.formats.holding import hold_floats
from mtp_extract.formats.keys import Table, fixed, held, made, positions
from mtp_extract.formats.transformers import parse_rope, rope_parameters

_KV_BANKS = {SLIDING: 0, FULL: 1}
_COLUMNS = ("layer_types", "head_dims", "num_kv_heads", "sliding_windows", "kv_bank_ids")
_TABLE = Table(
    fixed(format_version=(1,)),
    held(reading.positive_integer, "backbone_hidden_size", "hidden_size", "intermediate_size", "vocab_size"),
    made("num_layers", "num_layers"),
    held(reading.positive_integer, "num_heads"),
    # A value a layer.
    made("head_dims", lambda config: list(config.head_dims)),
    made("num_kv_heads", lambda config: list(config.num_kv_heads)),
    made("layer_types", lambda config: list(config.layer_types)),
    made("kv_bank_ids", lambda config: [_KV_BANKS[layer_type] for layer_type in config.layer_types]),
    made("sliding_windows", lambda config: [layer.sliding_window for layer in config.layers]),
    held(reading.number, "attention_scale", "rms_norm_eps"),
    held(reading.activation, "hidden_activation"),
    held(reading.optional_number, "final_logit_softcap"),
    positions("max_position_embeddings"),
    made("rope", lambda config: {t: p for t, p in rope_parameters(config).items() if t in config.rope}),
)
"""``mtp_drafter_config.json``, but for the names of tensors."""


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
            OutputFile(self.marker, text=json_text(_document(checkpoint.mtp, names))),
        ]

    def read_config(self, directory: Path) -> DrafterConfig:
        return self._read_config(directory)[0]

    def _read_config(self, directory: Path) -> tuple[DrafterConfig, Mapping[str, Any]]:
        path = directory / self.marker
        document = read_object(path)
        with reading.naming(path):
            return _parse_config(document), document

    def read(self, directory: Path) -> Checkpoint:
        config, document = self._read_config(directory)
        shapes = shapes_of(config)
        names = _read_names(document, shapes)
        held = {role: shape for role, shape in shapes.items() if role.name in names}
        stored = reading.read_tensors(directory / self.weights_file)
        weights = reading.weights_of(held, {role: names[role.name] for role in held}, stored)
        if (types := {weight.stored.dtype for weight in weights.values()}) != {"F32"}:
            where = escape(directory / self.weights_file)
            raise CheckpointError(f"{where}: expected tensors in F32, found {', '.join(sorted(types))}")
        # The graph of a layer without a scalar multiplies by nothing, which is 1.
        tensors = {role.name: weights.get(role.name, FilledTensor(shape)) for role, shape in shapes.items()}
        return Checkpoint(GEMMA4_MTP, config, MappingProxyType(tensors), "f32")

    def manifest(self, directory: Path) -> Sequence[Said]:
        config, document = self._read_config(directory)
        said = Said(directory / self.marker, _document(config, _read_names(document, shapes_of(config))), {})
        return said, said_by_header(directory / self.weights_file)


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


def _document(config: DrafterConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """``mtp_drafter_config.json``; ``tensors`` maps every role to the tensor that holds it."""
    return {**_TABLE.write(config), "tensors": dict(names)}


def _parse_config(document: Mapping[str, Any]) -> DrafterConfig:
    """The parsed ``mtp_drafter_config.json``.

    Raises:
        CheckpointError: another format version, a missing key, per-layer lists of unequal length, or a feature that
            this drafter does not have.
        DrafterError: a shape that no drafter has.
    """
    fields = _TABLE.read(document)
    count = reading.positive_integer(document, "num_layers")
    for column in _COLUMNS:
        if len(reading.sequence(document, column)) != count:
            raise CheckpointError(
                f"expected {count} entries in {column}, found {len(document[column])}; extract the drafter anew"
            )
    return DrafterConfig(**fields, layers=tuple(_layer(document, index) for index in range(count)))


def _layer(config: Mapping[str, Any], index: int) -> LayerConfig:
    row = {column: config[column][index] for column in _COLUMNS}
    layer_type = row["layer_types"]
    if not isinstance(layer_type, str) or _KV_BANKS.get(layer_type) != row["kv_bank_ids"]:
        raise CheckpointError(
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
        raise CheckpointError(
            f"expected a table of roles under 'tensors' in {FORMAT.marker}, found none; extract the drafter anew"
        )
    if unknown := sorted(set(table) - {role.name for role in roles}):
        raise CheckpointError(
            f"expected no role {', '.join(map(escape, unknown))} in {FORMAT.marker}; extract the drafter anew"
        )
    if missing := sorted(role.name for role in roles if role.name not in table and not role.optional):
        raise CheckpointError(
            f"expected roles {', '.join(missing)} in {FORMAT.marker}, found none; extract the drafter anew"
        )
    return {role: str(name) for role, name in table.items()}
