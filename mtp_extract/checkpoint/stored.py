"""Weights that lie in a file of tensors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.dtypes import DTYPES, Dtype
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import CheckpointError
from mtp_extract.io.files import open_regular
from mtp_extract.litertlm.storage import Floats

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


@dataclass(frozen=True)
class Stored:
    """What a weight is that lies in the file at ``path``: the tensor called ``name``, or columns of it."""

    path: Path
    tensor: StoredTensor
    name: str = ""
    columns: tuple[int, int] | None = None
    """``[begin, end)`` of a matrix; None for all of a tensor."""
    latest: _Latest = field(default_factory=_Latest, repr=False, compare=False)
    """The rows read last, which all columns of the tensor share."""

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

    def weight(self) -> Weight:
        """It as a weight of floats, or the indices of an ordered head."""
        shape = self.tensor.shape
        if self.columns is None:
            origin = self.path, self.tensor.offset
            return Weight(shape, self._floats, read_indices=self._indices, origin=origin, source=self)
        begin, end = self.columns
        return Weight((shape[0], end - begin), self._columns, source=self)

    def _floats(self, first: int, last: int) -> Floats:
        shape = self.tensor.shape if len(self.tensor.shape) > 1 else (1,)
        found = read_rows(self.path, replace(self.tensor, shape=shape), first, last)
        return self.dtype.widen(found.data).reshape(last - first, -1)

    def _columns(self, first: int, last: int) -> Floats:
        """Columns cut out of whole rows, which are read once where a thread asks for those of several in turn."""
        assert self.columns is not None
        latest, size = self.latest, self.dtype.size
        if latest.rows != (first, last):
            # The same memory again: mapping it anew, page by page, costs as much as reading.
            latest.rows = None
            latest.read = read_rows(self.path, self.tensor, first, last, latest.read)
            latest.rows = first, last
        cut = latest.read[:, self.columns[0] * size : self.columns[1] * size]
        return self.dtype.widen(cut.tobytes()).reshape(last - first, -1)

    def _indices(self) -> npt.NDArray[np.int64]:
        if self.tensor.dtype != "I64":
            raise CheckpointError(f"{self.path}: expected indices in I64, found {self.tensor.dtype}.")
        indices: npt.NDArray[np.int64] = read_array(self.path, self.tensor, np.dtype("<i8")).reshape(self.tensor.shape)
        return indices


def stored_of(weight: Weight) -> Stored | None:
    """Where ``weight`` lies in a file of tensors; None where it lies in none, or as integers."""
    return weight.source if isinstance(weight.source, Stored) else None


def stored_weight(path: Path, tensor: StoredTensor, name: str = "") -> Weight:
    """The tensor of the file at ``path`` as a weight of floats, or the indices of an ordered head."""
    return Stored(path, tensor, name).weight()


def columns_of(weight: Weight, begin: int, end: int) -> Weight:
    """Columns ``[begin, end)`` of a matrix that lies in a file of tensors."""
    assert isinstance(weight.source, Stored)
    return replace(weight.source, columns=(begin, end)).weight()


def common_dtype(weights: Iterable[Weight]) -> str:
    """Name of the type that holds all of ``weights`` as they are: their own where they share one, else F32.

    Raises:
        CheckpointError: one that lies in a file does not hold floats.
    """
    types = {stored.dtype.safetensors if (stored := stored_of(weight)) is not None else None for weight in weights}
    return next((name for name, dtype in DTYPES.items() if types == {dtype.safetensors}), "f32")


def read_array(path: Path, stored: StoredTensor, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """All of ``stored``, flat, its bytes taken as ``dtype``.

    Raises:
        CheckpointError: the file cannot be read, or has shrunk.
    """
    return read_rows(path, replace(stored, shape=(1,)), 0, 1).reshape(-1).view(dtype)


def read_rows(path: Path, stored: StoredTensor, first: int, last: int, into: Bytes | None = None) -> Bytes:
    """Rows ``[first, last)`` of the matrix ``stored`` as its bytes, ``[last − first, bytes of a row]``.

    Args:
        into: an array to read them into, where it is of that shape.

    Raises:
        CheckpointError: the file cannot be read, or has shrunk.
    """
    row = stored.length // max(stored.shape[0], 1)
    shape = last - first, row
    found = into if into is not None and into.shape == shape else np.empty(shape, np.uint8)
    rest, offset = found.reshape(-1).data, stored.offset + first * row
    try:
        with open_regular(path) as file:
            while rest:
                if not (done := os.preadv(file.fileno(), [rest], offset)):
                    raise CheckpointError(f"{path}: the file shrank while it was being read.")
                rest, offset = rest[done:], offset + done
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    return found
