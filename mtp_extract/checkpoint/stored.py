"""Weights in safetensors and GGUF files."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.documents import report_damage
from mtp_extract.checkpoint.dtypes import ARRAYS, DTYPES, FLOAT_NAMES, Bytes, Dtype
from mtp_extract.checkpoint.weight import Rows, Steps, Weight, find_matrix_shape
from mtp_extract.errors import CheckpointError
from mtp_extract.io.files import open_regular
from mtp_extract.litertlm.storage import Floats, Packing, unpack_bytes

_CODES = frozenset({("I8", 8), ("U8", 4), ("U8", 2)})
"""The tensor type in which codes of each width are stored."""


@dataclass(frozen=True)
class TensorPlace:
    """The place of a tensor: ``length`` bytes at ``offset`` from the start of its file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    length: int


class FileWeight(Weight):
    """A weight of floats, or the indices of an ordered head, in the file at ``path``.

    Attributes:
        name: the tensor's name in its file.
        cut: the columns ``[begin, end)`` of the tensor that it is; None for all of them.
    """

    def __init__(self, path: Path, tensor: TensorPlace, name: str = "", cut: tuple[int, int] | None = None) -> None:
        shape = tensor.shape if cut is None else (tensor.shape[0], cut[1] - cut[0])
        super().__init__(shape, self._read_values, origin=(path, tensor.offset) if cut is None else None)
        self.path = path
        self.tensor = tensor
        self.name = name
        self.cut = cut
        self._latest = threading.local()  # the rows that this thread read last

    @property
    def dtype(self) -> Dtype:
        """The float type; CheckpointError if the tensor does not hold floats."""
        if self.tensor.dtype not in FLOAT_NAMES:
            raise CheckpointError(f"{self.path}: expected weights in floats, found {self.tensor.dtype}.")
        return FLOAT_NAMES[self.tensor.dtype]

    def cut_columns(self, begin: int, end: int) -> FileWeight:
        """Return columns ``[begin, end)`` of the matrix. A thread that reads several parts in turn reads rows once."""
        part = FileWeight(self.path, self.tensor, self.name, (begin, end))
        part._latest = self._latest
        return part

    def _read_values(self, first: int, last: int) -> Rows:
        if self.cut is None:
            stored = read_rows(self.path, self.tensor, first, last)
            if self.tensor.dtype == "I64":
                return stored.view("<i8")
            return self.dtype.widen(stored.data).reshape(len(stored), -1)
        begin, end = self.cut
        part = self._read_all_columns(first, last).reshape(last - first, self.tensor.shape[1], -1)[:, begin:end]
        return self.dtype.widen(part.tobytes()).reshape(last - first, -1)

    def _read_all_columns(self, first: int, last: int) -> Bytes:
        """Read rows of the entire tensor, and keep them for its other parts: every layer is a range of columns."""
        latest = self._latest
        if getattr(latest, "rows", None) != (first, last):
            # Memory is reused: mapping new pages costs as much as reading.
            latest.rows = None
            latest.read = read_rows(self.path, self.tensor, first, last, getattr(latest, "read", None))
            latest.rows = (first, last)
        packed: Bytes = latest.read
        return packed


class FileCodes(FileWeight):
    """A matrix of codes in a file of Google's public mobile checkpoints (``quant_method: gemma`` of transformers 5.18).

    Codes of 8 bits are I8. Codes of 4 or 2 bits are packed in U8, the first in the low bits, plus half their range.
    Those of 8 bits are returned as a view, which the thread's next read of the table overwrites: copying them took 40 %
    longer.

    Args:
        tensor: ``[out, bytes]``.
        columns: of the matrix; with the bytes of a row they give the bits of a code.
        scale: float32 ``[out, blocks]``; blocks of a row have equal lengths.

    Raises:
        CheckpointError: the three do not fit each other.
    """

    def __init__(
        self,
        path: Path,
        tensor: TensorPlace,
        name: str,
        columns: int,
        scale: Floats,
        cut: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(path, tensor, name, cut)
        bits = _find_code_bits(tensor, columns, scale)
        if bits is None:
            raise CheckpointError(
                f"{self.path}: expected {name} as codes of 2, 4 or 8 bits, {columns} a row, with a scale a row or for "
                f"each block of it, found {tensor.dtype} {list(tensor.shape)} and scales {list(scale.shape)}. Fetch it "
                "again."
            )
        begin, end = cut or (0, columns)
        self.scheme = Packing(bits, True)
        self.scale = scale
        self.all_columns = columns
        self.columns = end - begin
        self.shape = (tensor.shape[0], end - begin)
        self._steps = _cut_steps(scale, columns // scale.shape[1], cut)

    def cut_columns(self, begin: int, end: int) -> FileCodes:
        part = FileCodes(self.path, self.tensor, self.name, self.all_columns, self.scale, (begin, end))
        part._latest = self._latest
        return part

    def _read_values(self, first: int, last: int) -> Rows:
        begin, end = self.cut or (0, self.all_columns)
        packed = self._read_all_columns(first, last)
        if self.bits == 8:
            return packed[:, begin:end].view(np.int8)

        # The first and the last byte may also hold codes of neighbouring columns.
        codes_a_byte = 8 // self.bits
        part = np.ascontiguousarray(packed[:, begin // codes_a_byte : -(-end // codes_a_byte)])
        first_code = begin % codes_a_byte
        codes = unpack_bytes(part, self.bits).reshape(last - first, -1)[:, first_code : first_code + end - begin]
        signed: Rows = (codes - np.uint8(1 << self.bits - 1)).view(np.int8)
        return signed


def _cut_steps(scale: Floats, block: int, cut: tuple[int, int] | None) -> Steps:
    """Return the steps of the columns ``cut``, of a table in which every ``block`` of columns shares a ``scale``."""
    if cut is None:
        return Steps.around_zero(block, scale)
    # The columns may begin within a block.
    begin, end = cut
    shared = math.gcd(block, begin, end)
    return Steps.around_zero(shared, np.repeat(scale, block // shared, axis=1)[:, begin // shared : end // shared])


def _find_code_bits(tensor: TensorPlace, columns: int, scale: Floats) -> int | None:
    """Return the bits of a code in ``tensor``; None if its shape, ``columns`` and ``scale`` do not fit each other."""
    if len(tensor.shape) != 2 or not columns:
        return None
    bits, uneven = divmod(8 * tensor.shape[1], columns)
    if uneven or (tensor.dtype, bits) not in _CODES:
        return None
    if scale.ndim != 2 or len(scale) != tensor.shape[0] or not scale.shape[1] or columns % scale.shape[1]:
        return None
    return bits if (np.isfinite(scale) & (scale > 0)).all() else None


def find_common_dtype(weights: Iterable[Weight]) -> str:
    """Return the name of the float type that all ``weights`` but indices are stored in; "f32" if they differ."""
    types = {weight.tensor.dtype if isinstance(weight, FileWeight) else "" for weight in weights} - {"I64"}
    return next((name for name, dtype in DTYPES.items() if types == {dtype.safetensors}), "f32")


def read_array(path: Path, stored: TensorPlace) -> npt.NDArray[Any]:
    """Read all of ``stored``, float32, int64 or bool, in its shape; errors are those of :func:`read_rows`."""
    flat = read_rows(path, stored, 0, find_matrix_shape(stored.shape)[0]).reshape(-1)
    return flat.view(ARRAYS[stored.dtype]).reshape(stored.shape)


def read_rows(path: Path, stored: TensorPlace, first: int, last: int, into: Bytes | None = None) -> Bytes:
    """Read rows ``[first, last)`` of ``stored`` as bytes, ``[last − first, bytes of a row]``.

    Args:
        into: an array to read into, used if it has that shape.

    Raises:
        CheckpointError: the file cannot be read, or has shrunk.
    """
    row = stored.length // max(find_matrix_shape(stored.shape)[0], 1)
    shape = last - first, row
    rows = into if into is not None and into.shape == shape else np.empty(shape, np.uint8)
    unread = rows.reshape(-1).data
    offset = stored.offset + first * row
    with report_damage(path, "{}"), open_regular(path) as file:
        while unread:
            if not (count := os.preadv(file.fileno(), [unread], offset)):
                raise ValueError("the file shrank while it was being read")
            unread = unread[count:]
            offset += count
    return rows
