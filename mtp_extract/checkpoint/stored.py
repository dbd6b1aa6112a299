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
from mtp_extract.checkpoint.dtypes import ARRAYS, DTYPES, Dtype
from mtp_extract.checkpoint.weight import Rows, Weight, rows_of
from mtp_extract.errors import CheckpointError
from mtp_extract.io.files import open_regular

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``length`` bytes at ``offset`` from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


class _Latest(threading.local):
    """The rows that this thread read last."""

    rows: tuple[int, int] | None = None
    read: Bytes = np.empty((0, 0), np.uint8)


class Stored(Weight):
    """A weight of floats, or the indices of an ordered head, in the file at ``path``.

    Attributes:
        name: of the tensor in its file.
        cut: which columns ``[begin, end)`` of a matrix it is; None for all of a tensor.
    """

    def __init__(self, path: Path, tensor: StoredTensor, name: str = "", cut: tuple[int, int] | None = None) -> None:
        shape = tensor.shape if cut is None else (tensor.shape[0], cut[1] - cut[0])
        super().__init__(shape, self._values, origin=(path, tensor.offset) if cut is None else None)
        self.path, self.tensor, self.name, self.cut, self._latest = path, tensor, name, cut, _Latest()

    @property
    def dtype(self) -> Dtype:
        """Its type.

        Raises:
            CheckpointError: it does not hold floats.
        """
        for dtype in DTYPES.values():
            if dtype.safetensors == self.tensor.dtype:
                return dtype
        raise CheckpointError(f"{self.path}: expected weights in floats, found {self.tensor.dtype}.")

    def in_columns(self, begin: int, end: int) -> Stored:
        """Columns ``[begin, end)`` of a matrix. Those of one tensor are cut out of the same rows, read once where a
        thread asks for them in turn."""
        part = Stored(self.path, self.tensor, self.name, (begin, end))
        part._latest = self._latest
        return part

    def _values(self, first: int, last: int) -> Rows:
        if self.cut is None:
            stored = read_rows(self.path, self.tensor, first, last)
            return (
                stored.view("<i8")
                if self.tensor.dtype == "I64"
                else self.dtype.widen(stored.data).reshape(stored.shape[0], -1)
            )
        latest, (begin, end) = self._latest, self.cut
        if latest.rows != (first, last):
            # The same memory again: mapping it anew, page by page, costs as much as reading.
            latest.rows = None
            latest.read = read_rows(self.path, self.tensor, first, last, latest.read)
            latest.rows = first, last
        part = latest.read.reshape(last - first, self.tensor.shape[1], -1)[:, begin:end]
        return self.dtype.widen(part.tobytes()).reshape(last - first, -1)


def common_dtype(weights: Iterable[Weight]) -> str:
    """Name of the type that holds all of ``weights``, which are floats, as they are: their own where they share one,
    else F32; indices are passed over."""
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
