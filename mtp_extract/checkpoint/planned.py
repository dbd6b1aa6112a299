"""What a file is to hold, before a byte of it is written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract._version import __version__
from mtp_extract.checkpoint.dtypes import Dtype
from mtp_extract.checkpoint.weight import Rows, Weight, row_ranges
from mtp_extract.errors import CheckpointError, escape

BLOCKS = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64"), (1, 8)),
        **dict.fromkeys(("F32", "I32", "U32"), (1, 4)),
        **dict.fromkeys(("F16", "BF16", "I16"), (1, 2)),
        **dict.fromkeys(("I8", "U8", "BOOL"), (1, 1)),
        "Q4_0": (32, 18),
        "Q8_0": (32, 34),
    }
)
"""Elements and bytes of the least piece of every type, by its name in safetensors and GGUF."""

_ARRAY_DTYPES = MappingProxyType({"float32": "F32", "int64": "I64", "bool": "BOOL"})


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written.

    Attributes:
        dtype: a name in :data:`BLOCKS`.
        shape: of the array, not of its bytes.
        produce: yields the data in order, as arrays of any shape whose bytes they are.
        role: what it holds, or holds a part of; empty for what is no weight.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    produce: Callable[[], Iterator[npt.NDArray[Any]]] = field(repr=False)
    role: str = ""

    @property
    def length(self) -> int:
        """Bytes of data."""
        elements, size = BLOCKS[self.dtype]
        return math.prod(self.shape) // elements * size


@dataclass(frozen=True)
class OutputFile:
    """One file of a checkpoint: ``tensors``, in the container its ending names, or, where there are none, ``text``.

    Attributes:
        metadata: what the header says beside the tensors, in the container's terms.
        notes: what a user should know of what is no weight and is not held, or held as nowhere else.
    """

    name: str
    tensors: tuple[PlannedTensor, ...] = ()
    text: str = ""
    metadata: Mapping[str, Any] = field(default_factory=lambda: {"format": "pt", "mtp_extract": __version__})
    notes: tuple[str, ...] = ()

    @property
    def weights(self) -> dict[str, PlannedTensor]:
        """Role → the tensor of its numbers or codes, which is the first of the role."""
        found: dict[str, PlannedTensor] = {}
        for tensor in self.tensors:
            found.setdefault(tensor.role, tensor)
        return {role: tensor for role, tensor in found.items() if role}


def json_text(document: Mapping[str, Any]) -> str:
    """``document`` as every JSON file of a checkpoint is written."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plan_rows(
    name: str, role: str, weight: Weight, dtype: str, made: Callable[[int, int], Rows], shape: tuple[int, ...] = ()
) -> PlannedTensor:
    """A tensor of what is ``made`` of some rows ``[first, last)`` of ``weight`` at a time; of its shape by default."""
    return PlannedTensor(name, dtype, shape or weight.shape, lambda: (made(*rows) for rows in row_ranges(weight)), role)


def plan_floats(name: str, role: str, weight: Weight, stored: Dtype) -> PlannedTensor:
    """The real numbers of ``weight``, rounded to ``stored``; infinities and NaN are refused."""

    def rounded(first: int, last: int) -> Rows:
        numbers = weight.floats(first, last).reshape(-1)
        if not np.isfinite(numbers).all():
            raise CheckpointError(
                f"{escape(name)}: expected finite numbers, found others: what it was read from is damaged."
            )
        return stored.narrow(numbers, name)

    return plan_rows(name, role, weight, stored.safetensors, rounded)


def plan_array(name: str, array: npt.NDArray[Any], role: str = "") -> PlannedTensor:
    """A small array as it is."""
    return PlannedTensor(name, _ARRAY_DTYPES[array.dtype.name], array.shape, lambda: iter([array]), role)
