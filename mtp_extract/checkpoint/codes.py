"""The stored integers beside a checkpoint of floats, in a folder of their own: engines read every file at the top."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract._version import __version__
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.json_file import parse_json
from mtp_extract.checkpoint.lazy import LazyTensor, Steps
from mtp_extract.checkpoint.manifest import Said, is_text, said_by_header
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, plan_array, plan_floats
from mtp_extract.checkpoint.safetensors_file import CONTAINER
from mtp_extract.checkpoint.stored import StoredCodes, StoredTensor, StoredWeight, read_rows
from mtp_extract.checkpoint.tensor_file import differing
from mtp_extract.errors import CheckpointError, escape

CODES_FILE = "codes/codes.safetensors"

_SCHEMES = "schemes"
_LARGEST_FACTOR = 1e30
_PARTS = ("codes", "scale", "zero_point")
_FLOATS = frozenset(dtype.safetensors for dtype in DTYPES.values())
_CODE_TYPES = MappingProxyType({"I8": np.dtype(np.int8), "U8": np.dtype(np.uint8)})


def plan_codes(weights: OutputFile) -> list[OutputFile]:
    """The file with the integers, scales and zero points behind the floats of ``weights``, as stored.

    None where there are none: what is written as integers needs no others beside it.
    """
    tensors: list[PlannedTensor] = []
    schemes: dict[str, dict[str, Any]] = {}
    for weight in weights.tensors:
        tensor = weight.tensor
        if tensor is None or tensor.scheme is None or weight.dtype not in _FLOATS:
            continue
        factor = tensor.steps.factor if tensor.steps is not None else None
        schemes[weight.name] = {"bits": tensor.scheme.bits, "factor": factor, "axis": tensor.scheme.axis}
        tensors += [
            PlannedTensor(
                name=f"{weight.name}.codes",
                dtype="I8" if tensor.scheme.signed else "U8",
                shape=tensor.shape,
                produce=tensor.integers,
                role=weight.role,
            ),
            plan_array(f"{weight.name}.scale", tensor.scale),
            plan_array(f"{weight.name}.zero_point", tensor.zero_point),
        ]
    metadata = {"format": "pt", "mtp_extract": __version__, _SCHEMES: json.dumps(schemes, sort_keys=True)}
    return [OutputFile(CODES_FILE, tensors=tuple(tensors), metadata=metadata)] if tensors else []


def said_of_codes(path: Path) -> Said:
    """What the header of the file with the integers at ``path`` may say beside its tensors."""
    header = said_by_header(path)
    return replace(header, tolerated={**header.tolerated, _SCHEMES: is_text})


def with_codes(directory: Path, checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint``, read from ``directory``, with the codes that lie beside its floats; without them as it is.

    Raises:
        CheckpointError: the codes are damaged, or the floats are not what they stand for.
    """
    path = directory / CODES_FILE
    if not os.path.lexists(path):
        return checkpoint
    stored = CONTAINER.read_header(path)
    schemes = _schemes(path)
    names = {tensor.name: role for role, tensor in checkpoint.tensors.items() if isinstance(tensor, StoredWeight)}
    tensors = dict(checkpoint.tensors)
    parts: dict[str, set[str]] = {}
    for entry in stored:
        parts.setdefault(entry.rpartition(".")[0], set()).add(entry.rpartition(".")[2])
    for name, there in parts.items():
        weight = checkpoint.tensors.get(names.get(name, ""))
        if not isinstance(weight, StoredWeight) or there != {*_PARTS}:
            raise CheckpointError(
                f"{path}: holds codes of {escape(name)}, which is no whole weight of this checkpoint."
            )
        if len(weight.shape) != 2:
            continue
        coded = _Beside(path, stored, name, weight.shape, schemes.get(name, {})).tensor()
        if coded is None:
            continue
        dtype = next(key for key, dtype in DTYPES.items() if dtype is weight.dtype)
        planned = plan_floats(name, "", coded, dtype)
        if differing(weight.path, {name: weight.stored}, [planned]):
            raise CheckpointError(
                f"{path}: the codes of {escape(name)} are not those of its floats: one of the two was changed."
            )
        # Roles that are one stored tensor have one set of codes.
        for role, tensor in checkpoint.tensors.items():
            if isinstance(tensor, StoredWeight) and tensor.name == name:
                tensors[role] = coded
    return replace(checkpoint, tensors=MappingProxyType(tensors))


def _schemes(path: Path) -> Mapping[str, Any]:
    """By name of weight, how many bits its codes have and what was folded into its scales."""
    try:
        found: Mapping[str, Any] = parse_json(CONTAINER.read_metadata(path)[_SCHEMES])
        return {name: dict(scheme) for name, scheme in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: nothing says how its codes are to be read.") from error


@dataclass(frozen=True)
class _Beside:
    """The codes of one weight in the file at ``path``."""

    path: Path
    stored: Mapping[str, StoredTensor]
    name: str
    shape: tuple[int, ...]
    scheme: Mapping[str, Any]

    def tensor(self) -> LazyTensor | None:
        """As a weight; None where its scales are no matter of rows and blocks of them."""
        codes = self.stored[f"{self.name}.codes"]
        bits, factor = self.scheme.get("bits"), self.scheme.get("factor")
        if codes.dtype not in _CODE_TYPES or codes.shape != self.shape or bits not in (2, 4, 8):
            raise CheckpointError(f"{self.path}: the codes of {escape(self.name)} are of another type or shape.")
        if factor is None:
            return None
        steps = self._steps(factor)
        kind = _CODE_TYPES[codes.dtype]
        return StoredCodes(
            shape=self.shape,
            bits=bits,
            signed=codes.dtype == "I8",
            grid=lambda: steps,
            rows=lambda first, last: read_rows(self.path, codes, first, last).view(kind),
            origin=(self.path, codes.offset),
        )

    def _steps(self, factor: float) -> Steps:
        rows, columns = self.shape
        scale = self._array("scale", "F32", np.dtype("<f4"))
        zero_point = self._array("zero_point", "I64", np.dtype("<i8"))
        factor_is_one = type(factor) in (int, float) and 0 < abs(factor) < _LARGEST_FACTOR
        if scale.size != zero_point.size or not scale.size or not factor_is_one:
            raise CheckpointError(f"{self.path}: the scales of {escape(self.name)} are damaged.")
        # Scales of blocks lie in rows, those of channels in one.
        channels = len(self.stored[f"{self.name}.scale"].shape) == 1
        if channels and scale.size == columns and self.scheme.get("axis") == 1:
            sizes, zeros = np.broadcast_to(scale, self.shape), np.broadcast_to(zero_point, self.shape)
            return Steps(1, sizes, zeros, factor)
        if scale.size % rows == 0 and columns % (scale.size // rows) == 0:
            blocks = scale.size // rows
            return Steps(columns // blocks, scale.reshape(rows, -1), zero_point.reshape(rows, -1), factor)
        if rows % scale.size:
            raise CheckpointError(f"{self.path}: {escape(self.name)} has {scale.size} scales for {list(self.shape)}.")
        each = rows // scale.size
        return Steps(columns, np.repeat(scale, each)[:, None], np.repeat(zero_point, each)[:, None], factor)

    def _array(self, part: str, dtype: str, kind: np.dtype[Any]) -> npt.NDArray[Any]:
        stored = self.stored[f"{self.name}.{part}"]
        if stored.dtype != dtype:
            raise CheckpointError(f"{self.path}: {escape(self.name)}.{part} is {stored.dtype}, expected {dtype}.")
        flat = StoredTensor(stored.dtype, (1,), stored.offset, stored.length)
        return read_rows(self.path, flat, 0, 1).reshape(-1).view(kind)
