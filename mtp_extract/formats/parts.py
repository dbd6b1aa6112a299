"""The tensors that hold one packed matrix: codes, scales, and what else a format wants of it; written and read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.packing import pack, unpack
from mtp_extract.checkpoint.planned import DTYPE_SIZES, PlannedTensor, plan_array
from mtp_extract.checkpoint.stored import StoredTensor, read_array, read_rows
from mtp_extract.checkpoint.weight import RowCodes, Steps, Weight, of_codes, row_ranges
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.graph.roles import Activation
from mtp_extract.litertlm.storage import Packing

INPUT, OUTPUT = "input_activation", "output_activation"
"""Kinds of parts: the static scale of what goes in and of what comes out; 0 where there is none."""

Activations = tuple[Activation | None, Activation | None]

_TYPES: Mapping[str, np.dtype[Any]] = MappingProxyType({"F32": np.dtype("<f4"), "I64": np.dtype("<i8")})


@dataclass(frozen=True)
class Packed:
    """How a matrix is packed."""

    shape: tuple[int, ...]  # [out, in]
    bits: int  # of a code
    group: int  # neighbouring elements of a row that share a scale; ``in`` where a row has one

    @property
    def scales(self) -> tuple[int, int]:
        """The shape of its scales."""
        return self.shape[0], self.shape[1] // self.group


@dataclass(frozen=True)
class Part:
    """One of the tensors that hold a matrix."""

    suffix: str  # what its name adds to the module's
    kind: str  # "codes", "scales", "biases", "shape", INPUT or OUTPUT
    dtype: str  # codes of type I8 are not packed
    shape: tuple[int, ...]


def plan_parts(
    module: str,
    role: str,
    codes: RowCodes,
    packed: Packed,
    parts: Sequence[Part],
    activations: Activations,
) -> Iterator[PlannedTensor]:
    """``parts`` of the matrix of ``role``, named after ``module``."""
    for part in parts:
        name = f"{module}{part.suffix}"
        if part.kind == "codes":
            producer = partial(_packing, codes, packed, part)
            yield PlannedTensor(name, part.dtype, part.shape, producer, role, codes)
        else:
            made = plan_array(name, _values(part.kind, codes, packed, activations))
            yield replace(made, role=role, part=part.kind)


def _packing(codes: RowCodes, packed: Packed, part: Part) -> Iterator[npt.NDArray[np.generic]]:
    for first, last in row_ranges(codes):
        rows = codes.codes(first, last).astype(np.int8, copy=False)
        yield rows if part.dtype == "I8" else pack(rows, packed.bits, DTYPE_SIZES[part.dtype])


def _values(kind: str, codes: RowCodes, packed: Packed, activations: Activations) -> npt.NDArray[Any]:
    if kind == "shape":
        return np.array(packed.shape, np.int64)
    if kind in (INPUT, OUTPUT):
        return np.array(static_scale(activations[kind == OUTPUT]), np.float32)
    scales = codes.steps.in_blocks(packed.group)
    return _biases(packed.bits, scales) if kind == "biases" else scales


def static_scale(activation: Activation | None) -> float:
    """The scale of what is quantized to INT8 around zero, 0 for anything else."""
    if activation is None or activation.type != "int8" or activation.zero_point != 0:
        return 0.0
    return activation.scale


def _biases(bits: int, scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """What is added to ``stored · scale``: half the codes' range below 0. Exact, being a power of two times a scale."""
    result: npt.NDArray[np.float32] = scales * np.float32(-(1 << bits - 1))
    return result


@dataclass(frozen=True)
class Matrix:
    """A packed matrix in the file at ``path``; its tensors have the types and shapes of ``parts``, the codes first."""

    path: Path
    stored: Mapping[str, StoredTensor]
    module: str
    packed: Packed
    parts: Sequence[Part]

    def tensor(self) -> Weight:
        """As a weight; its scales are read and checked when they are asked for.

        Raises:
            CheckpointError: it says itself that it has another shape.
        """
        shape = self._array("shape").tolist()
        if shape and tuple(shape) != self.packed.shape:
            raise self._damaged(f"expected the shape {list(self.packed.shape)}, found {shape}")
        codes = self.stored[self.module + self.parts[0].suffix]

        def rows(first: int, last: int) -> npt.NDArray[np.int8]:
            found = read_rows(self.path, codes, first, last)
            return found.view(np.int8) if codes.dtype == "I8" else unpack(found, self.packed.bits, self.packed.shape[1])

        packing = Packing(self.packed.bits, signed=True)
        return of_codes(self.packed.shape, packing, rows, self._steps, origin=(self.path, codes.offset))

    def activations(self) -> Activations:
        """Static scales of what goes in and comes out, where there are any.

        Raises:
            CheckpointError: they are damaged.
        """
        return self._activation(INPUT), self._activation(OUTPUT)

    def _activation(self, kind: str) -> Activation | None:
        scale = float(self._array(kind).sum())
        if not 0 <= scale < np.inf:
            raise self._damaged(f"expected a scale of activations that is finite and not negative, found {scale}")
        return Activation("int8", scale, 0) if scale else None

    def _steps(self) -> Steps:
        scales, biases, bits = self._array("scales"), self._array("biases"), self.packed.bits
        with np.errstate(over="ignore", invalid="ignore"):
            sound = (scales >= 0) & np.isfinite(_biases(bits, scales))
        if not sound.all():
            raise self._damaged("expected scales that are finite and not negative, found others")
        if biases.size and not np.array_equal(biases, _biases(bits, scales)):
            raise self._damaged(f"expected biases of −{1 << bits - 1} scales, as codes around zero have, found others")
        return Steps.around_zero(self.packed.group, scales).by_row()

    def _array(self, kind: str) -> npt.NDArray[Any]:
        """The part of that kind; empty where the format has none."""
        part = next((part for part in self.parts if part.kind == kind), None)
        if part is None:
            return np.empty(0)
        return read_array(self.path, self.stored[self.module + part.suffix], _TYPES[part.dtype]).reshape(part.shape)

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{escape(self.path)}: {escape(self.module)}: {what}. Extract the drafter anew.")
