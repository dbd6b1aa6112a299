"""Weights that lie in a file of tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.documents import refused
from mtp_extract.checkpoint.dtypes import ARRAYS, DTYPES, FLOAT_NAMES, Bytes, Dtype
from mtp_extract.checkpoint.weight import Rows, Weight, rows_of
from mtp_extract.errors import CheckpointError
from mtp_extract.io.files import open_regular


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``length`` bytes at ``offset`` from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


class Stored(Weight):
    """A weight of floats, or the indices of an ordered head, in the file at ``path``.

    Attributes:
        name: of the tensor in its file.
        cut: which columns ``[begin, end)`` of a matrix it is; None for all of a tensor.
    """

    def __init__(self, path: Path, tensor: StoredTensor, name: str = "", cut: tuple[int, int] | None = None) -> None:
        shape = tensor.shape if cut is None else (tensor.shape[0], cut[1] - cut[0])
        super().__init__(shape, self._values, origin=(path, tensor.offset) if cut is None else None)
        self.path, self.tensor, self.name, self.cut = path, tensor, name, cut
        self._latest = threading.local()  # the rows that a thread read last

    @property
    def dtype(self) -> Dtype:
        """Its type.

        Raises:
            CheckpointError: it does not hold floats.
        """
        if self.tensor.dtype not in FLOAT_NAMES:
            raise CheckpointError(f"{self.path}: expected weights in floats, found {self.tensor.dtype}.")
        return FLOAT_NAMES[self.tensor.dtype]

    def in_columns(self, begin: int, end: int) -> Stored:
        """Columns ``[begin, end)`` of a matrix; rows are read once where a thread asks for several such in turn."""
        part = Stored(self.path, self.tensor, self.name, (begin, end))
        part._latest = self._latest
        return part

    def _values(self, first: int, last: int) -> Rows:
        if self.cut is None:
            stored = read_rows(self.path, self.tensor, first, last)
            if self.tensor.dtype == "I64":
                return stored.view("<i8")
            return self.dtype.widen(stored.data).reshape(len(stored), -1)
        latest, (begin, end) = self._latest, self.cut
        if getattr(latest, "rows", None) != (first, last):
            # The same memory again: mapping it anew, page by page, costs as much as reading.
            latest.rows, into = None, getattr(latest, "read", None)
            latest.read, latest.rows = read_rows(self.path, self.tensor, first, last, into), (first, last)
        part = latest.read.reshape(last - first, self.tensor.shape[1], -1)[:, begin:end]
        return self.dtype.widen(part.tobytes()).reshape(last - first, -1)


def common_dtype(weights: Iterable[Weight]) -> str:
    """Name of the type that all of ``weights``, indices left out, share; else "f32"."""
    types = {weight.tensor.dtype if isinstance(weight, Stored) else "" for weight in weights} - {"I64"}
    return next((name for name, dtype in DTYPES.items() if types == {dtype.safetensors}), "f32")


def read_array(path: Path, stored: StoredTensor) -> npt.NDArray[Any]:
    """All of ``stored``, float32, int64 or bool, in its shape; as :func:`read_rows`."""
    flat = read_rows(path, stored, 0, rows_of(stored.shape)[0]).reshape(-1)
    return flat.view(ARRAYS[stored.dtype]).reshape(stored.shape)


def read_rows(path: Path, stored: StoredTensor, first: int, last: int, into: Bytes | None = None) -> Bytes:
    """Rows ``[first, last)`` of ``stored``, as of a weight of its shape, as bytes, ``[last − first, bytes of a row]``.

    Args:
        into: an array to read them into, where it is of that shape.

    Raises:
        CheckpointError: the file cannot be read, or has shrunk.
    """
    row = stored.length // max(rows_of(stored.shape)[0], 1)
    shape = last - first, row
    found = into if into is not None and into.shape == shape else np.empty(shape, np.uint8)
    rest, offset = found.reshape(-1).data, stored.offset + first * row
    with refused(path, "{}"), open_regular(path) as file:
        while rest:
            if not (done := os.preadv(file.fileno(), [rest], offset)):
                raise ValueError("the file shrank while it was being read")
            rest, offset = rest[done:], offset + done
    return found
