"""Weights that lie in a file of tensors: floats, and the integers that stand for them."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.dtypes import DTYPES, Dtype
from mtp_extract.checkpoint.lazy import FloatsOnly, Steps, rows_of
from mtp_extract.errors import CheckpointError
from mtp_extract.io.regular import open_regular
from mtp_extract.litertlm.storage import CHUNK_ELEMENTS, Floats, Integers, Packing

# Small enough that the buffer is reused rather than mapped anew, page by page, for every read.
_READ = 1 << 18


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: ``length`` bytes at ``offset`` from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


@dataclass(frozen=True)
class StoredWeight(FloatsOnly):
    """A weight that is a tensor of the file at ``path``: floats, or the indices of an ordered head."""

    path: Path
    stored: StoredTensor
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def origin(self) -> object:
        return self.path, self.stored.offset

    @property
    def dtype(self) -> Dtype:
        """Its type.

        Raises:
            CheckpointError: it does not hold floats.
        """
        for dtype in DTYPES.values():
            if dtype.safetensors == self.stored.dtype:
                return dtype
        raise CheckpointError(f"{self.path}: expected weights in floats, found {self.stored.dtype}.")

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        rows, columns = rows_of(self.shape)
        row = columns * self.dtype.size
        begin, end = first * row, (rows if last is None else last) * row
        with open_regular(self.path) as file:
            for piece in pieces(self.path, file.fileno(), self.stored.offset + begin, end - begin):
                yield self.dtype.widen(piece)

    def rows(self, first: int, last: int) -> npt.NDArray[np.uint8]:
        """Rows ``[first, last)`` as their bytes, ``[rows, bytes of a row]``; the next call may overwrite them.

        Raises:
            CheckpointError: the file cannot be read, or has shrunk.
        """
        latest = self._latest
        if latest.rows != (first, last):
            # The same memory again: mapping it anew, page by page, costs as much as reading.
            latest.rows, into = None, latest.read
            latest.read = read_rows(self.path, self.stored, first, last, into)
            latest.rows = first, last
        return latest.read

    @cached_property
    def _latest(self) -> _Latest:
        return _Latest()

    def indices(self) -> npt.NDArray[np.int64]:
        """All of it, where it holds int64.

        Raises:
            CheckpointError: it does not.
        """
        if self.stored.dtype != "I64":
            raise CheckpointError(f"{self.path}: expected indices in I64, found {self.stored.dtype}.")
        indices: npt.NDArray[np.int64] = read_array(self.path, self.stored, np.dtype("<i8")).reshape(self.shape).copy()
        return indices


class _Latest(threading.local):
    """The rows that this thread read last."""

    rows: tuple[int, int] | None = None
    read: npt.NDArray[np.uint8] = np.empty((0, 0), np.uint8)


@dataclass(frozen=True)
class StoredColumns(FloatsOnly):
    """Columns ``[begin, end)`` of the matrix ``whole``, cut out of whole rows.

    These are read once where a thread asks for the same rows of several such tables in turn, and again by each that is
    read by itself.
    """

    whole: StoredWeight
    begin: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.whole.shape[0], self.end - self.begin

    @property
    def dtype(self) -> Dtype:
        """As the whole's."""
        return self.whole.dtype

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        size = self.dtype.size
        count = max(1, CHUNK_ELEMENTS // max(self.end - self.begin, 1))
        end = self.shape[0] if last is None else last
        for begin in range(first, end, count):
            cut = self.whole.rows(begin, min(begin + count, end))[:, self.begin * size : self.end * size]
            yield self.dtype.widen(cut.tobytes())


class CodesOfRows(ABC):
    """A matrix of integers, ``(code − zero point) · step``, wherever they come from."""

    shape: tuple[int, ...]
    """``[out, in]``."""
    bits: int
    signed: bool
    """Of a code."""

    @property
    @abstractmethod
    def steps(self) -> Steps:
        """What a code is worth."""

    @abstractmethod
    def row_blocks(self, first: int, last: int) -> Iterator[tuple[int, Integers]]:
        """(first row, codes ``[rows, in]``) of rows ``[first, last)``, some rows at a time."""

    @property
    def scheme(self) -> Packing:
        return Packing(self.bits, self.signed)

    @property
    def scale(self) -> Floats:
        steps = self.steps
        return steps.size.reshape(-1) if steps.block == self.shape[1] else steps.size

    @property
    def zero_point(self) -> npt.NDArray[np.int64]:
        return self.steps.zero_point.reshape(self.scale.shape)

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        for begin, codes in self.row_blocks(first, self.shape[0] if last is None else last):
            yield self.steps.floats(codes, begin)

    def integers(self, first: int = 0, last: int | None = None) -> Iterator[Integers]:
        for _, codes in self.row_blocks(first, self.shape[0] if last is None else last):
            yield codes.reshape(-1)


@dataclass(frozen=True)
class StoredCodes(CodesOfRows):
    """A matrix whose rows of codes can be read in any order, as from a file."""

    shape: tuple[int, ...]
    bits: int
    signed: bool
    grid: Callable[[], Steps]
    """Reads the steps; called once, when they are needed."""
    rows: Callable[[int, int], Integers]
    """Codes of rows ``[first, last)``: ``[last − first, in]``, int8 or uint8."""
    origin: object = None

    @cached_property
    def steps(self) -> Steps:
        return self.grid()

    def row_blocks(self, first: int, last: int) -> Iterator[tuple[int, Integers]]:
        count = max(1, _READ // max(self.shape[1], 1))
        for begin in range(first, last, count):
            yield begin, self.rows(begin, min(begin + count, last))


def common_dtype(weights: Iterable[StoredWeight]) -> str:
    """Name of the type that holds all of ``weights`` as they are: their own where they share one, else F32.

    Raises:
        CheckpointError: one does not hold floats.
    """
    types = {weight.dtype.safetensors for weight in weights}
    return next((name for name, dtype in DTYPES.items() if types == {dtype.safetensors}), "f32")


def read_array(path: Path, stored: StoredTensor, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """All of ``stored``, flat, its bytes taken as ``dtype``.

    Raises:
        CheckpointError: the file cannot be read, or has shrunk.
    """
    return read_rows(path, replace(stored, shape=(1,)), 0, 1).reshape(-1).view(dtype)


def read_rows(
    path: Path, stored: StoredTensor, first: int, last: int, into: npt.NDArray[np.uint8] | None = None
) -> npt.NDArray[np.uint8]:
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


def pieces(path: Path, fd: int, offset: int, length: int) -> Iterator[bytes]:
    """``length`` bytes from ``offset``, a little at a time.

    Raises:
        CheckpointError: the file ends before that, or cannot be read.
    """
    while length:
        try:
            piece = os.pread(fd, min(_READ, length), offset)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
        if not piece:
            raise CheckpointError(f"{path}: the file shrank while it was being read.")
        yield piece
        offset, length = offset + len(piece), length - len(piece)
