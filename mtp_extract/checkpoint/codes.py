"""The stored integers beside a checkpoint of floats, in a folder of their own: engines read every file at the top."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from msgspec import Struct, convert, to_builtins

from mtp_extract._version import __version__
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.constant import Constant
from mtp_extract.checkpoint.json_file import parse_json
from mtp_extract.checkpoint.keys import HEADER, TEXT, require_keys
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, plan_array
from mtp_extract.checkpoint.rounding import narrowed
from mtp_extract.checkpoint.safetensors_file import read_file
from mtp_extract.checkpoint.stored import Stored, StoredTensor, read_array, read_rows
from mtp_extract.checkpoint.weight import RowCodes, Steps, Weight, row_ranges, same_floats
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.litertlm.storage import Packing

CODES_FILE = "codes/codes.safetensors"

_SCHEMES = "schemes"
_LARGEST_FACTOR = 1e30
_PARTS = ("codes", "scale", "zero_point")
_CODE_TYPES = MappingProxyType({"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)})


class _Scheme(Struct, frozen=True, forbid_unknown_fields=True):
    """How the codes of a weight are to be read."""

    bits: Literal[2, 4, 8]
    factor: float  # what was folded into the scales
    axis: Literal[0, 1]  # 1 where each column has a scale


def plan_codes(weights: OutputFile, floats: Mapping[str, Weight]) -> list[OutputFile]:
    """The file with the integers, scales and zero points, as stored, of what ``weights`` holds as ``floats``, by role.

    None where there are none.
    """
    tensors: list[PlannedTensor] = []
    schemes: dict[str, _Scheme] = {}
    for role, planned in weights.weights.items():
        weight = floats.get(role)
        steps = weight.steps if weight is not None and len(weight.shape) == 2 else None
        if weight is None or weight.scheme is None or steps is None:
            continue
        if isinstance(weight, Constant):
            scale, zero_point = weight.source.scale, weight.source.zero_point
        else:
            shape = (-1,) if steps.block == weight.columns else steps.size.shape
            scale, zero_point = steps.size.reshape(shape), steps.zero_point.reshape(shape)
        axis: Literal[0, 1] = 1 if steps.block == 1 < weight.columns else 0
        schemes[planned.name] = _Scheme(weight.bits, steps.factor, axis)  # type: ignore[arg-type]  # as all formats keep
        tensors += [
            PlannedTensor(
                f"{planned.name}.codes",
                "I8" if weight.scheme.signed else "U8",
                weight.shape,
                lambda weight=weight: (weight.codes(*rows) for rows in row_ranges(weight)),  # type: ignore[misc]
                role,
            ),
            plan_array(f"{planned.name}.scale", scale),
            plan_array(f"{planned.name}.zero_point", zero_point),
        ]
    told = json.dumps(to_builtins(schemes), sort_keys=True)
    metadata = {"format": "pt", "mtp_extract": __version__, _SCHEMES: told}
    return [OutputFile(CODES_FILE, tensors=tuple(tensors), metadata=metadata)] if tensors else []


def with_codes(directory: Path, checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint``, read from ``directory``, with the codes that lie beside its floats; without them as it is.

    Raises:
        CheckpointError: the codes are damaged, or the floats are not what they stand for.
    """
    path = directory / CODES_FILE
    if not os.path.lexists(path):
        return checkpoint
    stored, metadata = read_file(path)
    require_keys(path, metadata, {}, {**HEADER, _SCHEMES: TEXT})
    try:
        schemes = convert(parse_json(metadata.get(_SCHEMES, "")), dict[str, _Scheme])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: nothing says how its codes are to be read.") from error
    parts: dict[str, set[str]] = {}
    for entry in stored:
        parts.setdefault(entry.rpartition(".")[0], set()).add(entry.rpartition(".")[2])
    tensors = dict(checkpoint.tensors)
    for name, found in parts.items():
        # Roles that are one stored tensor have one set of codes.
        roles = [r for r, floats in checkpoint.tensors.items() if isinstance(floats, Stored) and floats.name == name]
        if not roles or found != {*_PARTS}:
            raise CheckpointError(
                f"{path}: holds codes of {escape(name)}, which is no whole weight of this checkpoint."
            )
        weight = checkpoint.tensors[roles[0]]
        if name not in schemes or len(weight.shape) != 2:
            raise CheckpointError(f"{path}: nothing says how the codes of {escape(name)} are to be read.")
        coded = _coded(path, stored, name, weight, schemes[name])
        assert isinstance(weight, Stored)
        if not same_floats(narrowed(coded, weight.dtype.rounding), weight):
            raise CheckpointError(
                f"{path}: the codes of {escape(name)} are not those of its floats: one of the two was changed."
            )
        tensors |= dict.fromkeys(roles, coded)
    return replace(checkpoint, tensors=MappingProxyType(tensors))


def _coded(path: Path, stored: Mapping[str, StoredTensor], name: str, floats: Weight, scheme: _Scheme) -> RowCodes:
    """The codes of the weight ``name``."""
    codes, scales, zeros = (stored[f"{name}.{part}"] for part in _PARTS)
    if codes.dtype not in _CODE_TYPES or codes.shape != floats.shape:
        raise CheckpointError(f"{path}: the codes of {escape(name)} are of another type or shape.")
    if (scales.dtype, zeros.dtype) != ("F32", "I64"):
        raise CheckpointError(f"{path}: {escape(name)}: expected scales in F32 and zero points in I64, found others.")
    scale = read_array(path, scales, np.dtype("<f4")).reshape(-1)
    zero_point = read_array(path, zeros, np.dtype("<i8")).reshape(-1)
    sound = 0 < abs(scheme.factor) < _LARGEST_FACTOR and bool(np.isfinite(scale).all())
    if scale.size != zero_point.size or not scale.size or not sound:
        raise CheckpointError(f"{path}: the scales of {escape(name)} are damaged.")
    rows, columns, factor = floats.rows, floats.columns, scheme.factor
    # Scales of blocks lie in rows, those of channels in one.
    if len(scales.shape) == 1 and scale.size == columns and scheme.axis == 1:
        steps = Steps.across(scale, zero_point, floats.shape, factor)
    elif scale.size % rows == 0 and columns % (scale.size // rows) == 0:
        steps = Steps(columns * rows // scale.size, scale.reshape(rows, -1), zero_point.reshape(rows, -1), factor)
    elif rows % scale.size == 0:
        each = rows // scale.size
        steps = Steps(columns, np.repeat(scale, each)[:, None], np.repeat(zero_point, each)[:, None], factor)
    else:
        raise CheckpointError(f"{path}: {escape(name)} has {scale.size} scales for {list(floats.shape)}.")
    kind = _CODE_TYPES[codes.dtype]
    return RowCodes(
        floats.shape,
        Packing(scheme.bits, codes.dtype == "I8"),
        lambda first, last: read_rows(path, codes, first, last).view(kind),
        lambda: steps,
        (path, codes.offset),
    )
