"""The stored integers beside a checkpoint of floats, in a folder of their own: engines read every file at the top."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from msgspec import Struct, convert

from mtp_extract._version import __version__
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.constant import constant_of
from mtp_extract.checkpoint.json_file import parse_json
from mtp_extract.checkpoint.keys import HEADER, TEXT, require_keys
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, plan_array
from mtp_extract.checkpoint.rounding import narrowed
from mtp_extract.checkpoint.safetensors_file import read_header, read_metadata
from mtp_extract.checkpoint.stored import StoredTensor, read_array, read_rows, stored_of
from mtp_extract.checkpoint.weight import Steps, Weight, of_codes, same_floats
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.litertlm.storage import Packing

CODES_FILE = "codes/codes.safetensors"

_SCHEMES = "schemes"
_LARGEST_FACTOR = 1e30
_PARTS = ("codes", "scale", "zero_point")
_CODE_TYPES = MappingProxyType({"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)})


def plan_codes(weights: OutputFile, floats: Mapping[str, Weight]) -> list[OutputFile]:
    """The file with the integers, scales and zero points, as stored, of what ``weights`` holds as ``floats``, by role.

    None where there are none.
    """
    tensors: list[PlannedTensor] = []
    schemes: dict[str, dict[str, Any]] = {}
    for role, planned in weights.weights.items():
        weight = floats.get(role)
        steps = weight.steps if weight is not None and len(weight.shape) == 2 else None
        if weight is None or weight.scheme is None or steps is None:
            continue
        name, constant = planned.name, constant_of(weight)
        if constant is not None:
            scale, zero_point = constant.source.scale, constant.source.zero_point
        else:
            shape = (-1,) if steps.block == weight.shape[1] else steps.size.shape
            scale, zero_point = steps.size.reshape(shape), steps.zero_point.reshape(shape)
        across = steps.block == 1 < weight.shape[1]
        schemes[name] = {"bits": weight.scheme.bits, "factor": steps.factor, "axis": int(across)}
        kind = "I8" if weight.scheme.signed else "U8"
        tensors += [
            PlannedTensor(f"{name}.codes", kind, weight.shape, weight.code_chunks, role),
            plan_array(f"{name}.scale", scale),
            plan_array(f"{name}.zero_point", zero_point),
        ]
    metadata = {"format": "pt", "mtp_extract": __version__, _SCHEMES: json.dumps(schemes, sort_keys=True)}
    return [OutputFile(CODES_FILE, tensors=tuple(tensors), metadata=metadata)] if tensors else []


def with_codes(directory: Path, checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint``, read from ``directory``, with the codes that lie beside its floats; without them as it is.

    Raises:
        CheckpointError: the codes are damaged, or the floats are not what they stand for.
    """
    path = directory / CODES_FILE
    if not os.path.lexists(path):
        return checkpoint
    stored, schemes = read_header(path), _schemes(path)
    roles: dict[str, list[str]] = {}  # those that are one stored tensor have one set of codes
    for role, weight in checkpoint.tensors.items():
        if (floats := stored_of(weight)) is not None:
            roles.setdefault(floats.name, []).append(role)
    parts: dict[str, set[str]] = {}
    for entry in stored:
        parts.setdefault(entry.rpartition(".")[0], set()).add(entry.rpartition(".")[2])
    tensors = dict(checkpoint.tensors)
    for name, found in parts.items():
        if name not in roles or found != {*_PARTS}:
            raise CheckpointError(
                f"{path}: holds codes of {escape(name)}, which is no whole weight of this checkpoint."
            )
        weight = checkpoint.tensors[roles[name][0]]
        floats = stored_of(weight)
        assert floats is not None
        if name not in schemes or len(weight.shape) != 2:
            raise CheckpointError(f"{path}: nothing says how the codes of {escape(name)} are to be read.")
        coded = _coded(path, stored, name, weight.shape, schemes[name])
        if not same_floats(narrowed(coded, floats.dtype.rounding), weight):
            raise CheckpointError(
                f"{path}: the codes of {escape(name)} are not those of its floats: one of the two was changed."
            )
        tensors |= dict.fromkeys(roles[name], coded)
    return replace(checkpoint, tensors=MappingProxyType(tensors))


class _Scheme(Struct, frozen=True, forbid_unknown_fields=True):
    bits: Literal[2, 4, 8]
    factor: float  # what was folded into the scales
    axis: Literal[0, 1]  # 1 where each column has a scale


def _schemes(path: Path) -> Mapping[str, _Scheme]:
    """By name of weight, how its codes are to be read."""
    metadata = read_metadata(path)
    require_keys(path, metadata, {}, {**HEADER, _SCHEMES: TEXT})
    try:
        return convert(parse_json(metadata.get(_SCHEMES, "")), dict[str, _Scheme])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: nothing says how its codes are to be read.") from error


def _coded(
    path: Path, stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...], scheme: _Scheme
) -> Weight:
    """The codes of the weight ``name``."""
    codes, factor = stored[f"{name}.codes"], scheme.factor
    if codes.dtype not in _CODE_TYPES or codes.shape != shape:
        raise CheckpointError(f"{path}: the codes of {escape(name)} are of another type or shape.")
    parts = {part: stored[f"{name}.{part}"] for part in _PARTS[1:]}
    for part, dtype in zip(parts, ("F32", "I64"), strict=True):
        if parts[part].dtype != dtype:
            raise CheckpointError(f"{path}: {escape(name)}.{part} is {parts[part].dtype}, expected {dtype}.")
    scale = read_array(path, parts["scale"], np.dtype("<f4"))
    zero_point = read_array(path, parts["zero_point"], np.dtype("<i8"))
    sound = 0 < abs(factor) < _LARGEST_FACTOR and bool(np.isfinite(scale).all())
    if scale.size != zero_point.size or not scale.size or not sound:
        raise CheckpointError(f"{path}: the scales of {escape(name)} are damaged.")
    rows, columns = shape
    # Scales of blocks lie in rows, those of channels in one.
    if len(parts["scale"].shape) == 1 and scale.size == columns and scheme.axis == 1:
        steps = Steps.across(scale, zero_point, shape, factor)
    elif scale.size % rows == 0 and columns % (scale.size // rows) == 0:
        steps = Steps(columns * rows // scale.size, scale.reshape(rows, -1), zero_point.reshape(rows, -1), factor)
    elif rows % scale.size == 0:
        each = rows // scale.size
        steps = Steps(columns, np.repeat(scale, each)[:, None], np.repeat(zero_point, each)[:, None], factor)
    else:
        raise CheckpointError(f"{path}: {escape(name)} has {scale.size} scales for {list(shape)}.")
    kind = _CODE_TYPES[codes.dtype]
    return of_codes(
        shape,
        Packing(scheme.bits, codes.dtype == "I8"),
        lambda first, last: read_rows(path, codes, first, last).view(kind),
        lambda: steps,
        origin=(path, codes.offset),
    )
