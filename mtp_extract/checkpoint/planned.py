"""What a file is to hold, before a byte of it is written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt

from mtp_extract._version import __version__
from mtp_extract.checkpoint.dtypes import ARRAYS, BLOCKS
from mtp_extract.checkpoint.weight import Rows, Weight, row_ranges


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


def json_text(document: Mapping[str, Any]) -> str:
    """``document`` as every JSON file of a checkpoint is written."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plan_rows(
    name: str, role: str, weight: Weight, dtype: str, made: Callable[[int, int], Rows], shape: tuple[int, ...] = ()
) -> PlannedTensor:
    """A tensor of what is ``made`` of some rows ``[first, last)`` of ``weight`` at a time; of its shape by default."""
    return PlannedTensor(name, dtype, shape or weight.shape, lambda: (made(*rows) for rows in row_ranges(weight)), role)


def plan_array(name: str, array: npt.NDArray[Any], role: str = "") -> PlannedTensor:
    """A small array as it is."""
    dtype = next(name for name, known in ARRAYS.items() if known == array.dtype)
    return PlannedTensor(name, dtype, array.shape, lambda: iter([array]), role)
