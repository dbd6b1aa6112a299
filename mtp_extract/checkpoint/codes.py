"""The stored integers beside a checkpoint of floats, in a subfolder, since engines read every file at the top level."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
from msgspec import Struct, convert, to_builtins

from mtp_extract._version import __version__
from mtp_extract.checkpoint.documents import parse_json, report_damage
from mtp_extract.checkpoint.files import OutputFile, PlannedTensor, plan_array, plan_rows
from mtp_extract.checkpoint.format import FLOATS, Plan
from mtp_extract.checkpoint.rounding import round_weight
from mtp_extract.checkpoint.safetensors_file import read_safetensors
from mtp_extract.checkpoint.stored import FileWeight, TensorPlace, read_array, read_rows
from mtp_extract.checkpoint.weight import BundleWeight, Steps, Weight, is_same_weight
from mtp_extract.litertlm.storage import Integers, Packing

CODES_FILE = "codes/codes.safetensors"

_SCHEMES = "schemes"
_LARGEST_FACTOR = 1e30
_PARTS = MappingProxyType({"codes": ("I8", "U8"), "scale": ("F32",), "zero_point": ("I64",)})
"""The tensors of one matrix, and the safetensors types that each may have."""


class _Scheme(Struct, frozen=True, forbid_unknown_fields=True):
    bits: Literal[2, 4, 8]
    factor: float  # folded into the scales
    axis: Literal[0] = 0  # scales belong to rows, or to blocks of a row


def add_codes(plan: Plan) -> Plan:
    """Return ``plan`` with a further file for the integers, if any, of the matrices that it stores as floats."""
    weights, *others = plan.files
    tensors: list[PlannedTensor] = []
    schemes: dict[str, _Scheme] = {}
    for name in (tensor.name for tensor in weights.tensors if tensor.name in plan.roles):
        stored_as = plan.stored[plan.roles[name]]
        weight = stored_as.weight
        if stored_as.how == FLOATS and weight.scheme is not None and len(weight.shape) == 2:
            schemes[name] = _Scheme(weight.bits, weight.steps.factor)  # type: ignore[arg-type]  # as all formats keep
            tensors += _plan_matrix(name, weight, weight.scheme)
    if not tensors:
        return plan
    described = json.dumps(to_builtins(schemes), sort_keys=True)
    metadata = {"format": "pt", "mtp_extract": __version__, _SCHEMES: described}
    return replace(plan, files=(weights, OutputFile(CODES_FILE, tuple(tensors), metadata=metadata), *others))


def _plan_matrix(name: str, weight: Weight, scheme: Packing) -> Iterator[PlannedTensor]:
    """Plan the codes of a matrix as they are stored, with one scale and one zero point per row or block."""
    steps = weight.steps
    if isinstance(weight, BundleWeight):
        scale = weight.source.scale
        zero_point = weight.source.zero_point
    else:
        shape = (-1,) if steps.block == weight.columns else steps.size.shape
        scale = steps.size.reshape(shape)
        zero_point = steps.zero_point.reshape(shape)
    yield plan_rows(f"{name}.codes", weight, "I8" if scheme.signed else "U8", weight.codes)
    yield plan_array(f"{name}.scale", scale)
    yield plan_array(f"{name}.zero_point", zero_point)


def attach_codes(directory: Path, weights: Mapping[str, Weight]) -> Mapping[str, Weight]:
    """Return ``weights``, by role, with the codes that ``directory`` holds beside their floats, if any.

    Raises:
        CheckpointError: the codes are damaged, or do not give the floats.
    """
    path = directory / CODES_FILE
    if not os.path.lexists(path):
        return weights
    stored, metadata = read_safetensors(path)
    tensors = dict(weights)
    with report_damage(path, "not the codes of its matrices, or damaged: {}"):
        for name, scheme in convert(parse_json(metadata.get(_SCHEMES, "")), dict[str, _Scheme]).items():
            # Roles that share a stored tensor share its codes.
            floats = {role: w for role, w in weights.items() if isinstance(w, FileWeight) and w.name == name}
            parts = {part: stored.pop(f"{name}.{part}") for part in _PARTS if f"{name}.{part}" in stored}
            tensors |= dict.fromkeys(
                floats, _read_checked_codes(path, name, next(iter(floats.values()), None), scheme, parts)
            )
        if stored:
            raise ValueError(f"nothing says how {next(iter(stored))} is to be read")
    return MappingProxyType(tensors)


def _read_checked_codes(
    path: Path, name: str, floats: FileWeight | None, scheme: _Scheme, parts: Mapping[str, TensorPlace]
) -> Weight:
    """Read the codes of the matrix called ``name``; ValueError if they are damaged or do not give its ``floats``."""
    coded = _read_codes(path, floats.shape, scheme, parts) if floats is not None else None
    if floats is None or coded is None:
        wanted = "codes of a matrix in I8 or U8, with finite scales in F32 and zero points in I64"
        raise ValueError(f"{name}: expected {wanted}, found others")
    if not is_same_weight(round_weight(coded, floats.dtype.rounding), floats):
        raise ValueError(f"the codes of {name} are not those of its floats")
    return coded


def _read_codes(path: Path, shape: tuple[int, ...], scheme: _Scheme, parts: Mapping[str, TensorPlace]) -> Weight | None:
    """Read the codes of a matrix; None if a part is missing, damaged, or has the wrong type or shape."""
    if len(shape) != 2 or any(part not in parts or parts[part].dtype not in types for part, types in _PARTS.items()):
        return None
    codes = parts["codes"]
    size, zeros = (read_array(path, parts[part]).reshape(-1) for part in ("scale", "zero_point"))
    is_sound = np.isfinite(size).all() and 0 < abs(scheme.factor) < _LARGEST_FACTOR and size.size == zeros.size
    steps = Steps.spread(size, zeros, shape, scheme.factor) if is_sound else None
    if steps is None or codes.shape != shape:
        return None
    packing = Packing(scheme.bits, codes.dtype == "I8")

    def read(first: int, last: int) -> Integers:
        return read_rows(path, codes, first, last).view(packing.dtype)

    return Weight(shape, read, packing, steps, origin=(path, codes.offset))
