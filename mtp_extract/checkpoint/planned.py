"""What a file is to hold, planned before a byte is written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.lazy import LazyTensor

__all__ = ["DTYPE_SIZES", "OutputFile", "PlannedTensor", "json_text", "plan_array", "plan_codes", "plan_floats"]

Chunks = Iterator["npt.NDArray[np.generic]"]

DTYPE_SIZES = MappingProxyType(
    {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
)
"""Bytes of an element, by the safetensors name of its type."""

_ARRAY_DTYPES = MappingProxyType({"float32": "F32", "int64": "I64"})


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written.

    Attributes:
        dtype: by its safetensors name.
        produce: yields the data in order, as arrays of that type.
        role, tensor: what it is made of; empty and None for what is no weight.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    produce: Callable[[], Chunks] = field(repr=False)
    role: str = ""
    tensor: LazyTensor | None = field(default=None, repr=False)

    @property
    def length(self) -> int:
        """Bytes of data."""
        return math.prod(self.shape) * DTYPE_SIZES[self.dtype]


@dataclass(frozen=True)
class OutputFile:
    """One file of a checkpoint: a safetensors file of ``tensors``, or, where there are none, ``text``."""

    name: str
    tensors: tuple[PlannedTensor, ...] = ()
    text: str = ""


def json_text(document: Mapping[str, Any]) -> str:
    """``document`` as every JSON file of a checkpoint is written."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plan_floats(name: str, role: str, tensor: LazyTensor, dtype: str) -> PlannedTensor:
    """The real numbers of ``tensor``, rounded to ``dtype`` ("f32", "bf16" or "f16")."""
    stored = DTYPES[dtype]
    return PlannedTensor(
        name=name,
        dtype=stored.safetensors,
        shape=tensor.shape,
        produce=lambda: (stored.narrow(chunk, name) for chunk in tensor.floats()),
        role=role,
        tensor=tensor,
    )


def plan_codes(weight: PlannedTensor) -> list[PlannedTensor]:
    """The integers, scales and zero points behind ``weight``, as stored; nothing for a weight of floats."""
    tensor = weight.tensor
    if tensor is None or tensor.scheme is None:
        return []
    return [
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


def plan_array(name: str, array: npt.NDArray[np.generic]) -> PlannedTensor:
    """A small array as it is."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return PlannedTensor(name, _ARRAY_DTYPES[array.dtype.name], array.shape, lambda: iter([flat]))
