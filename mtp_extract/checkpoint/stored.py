"""Weights that lie in a file of tensors."""

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
"""In what type of tensor codes of so many bits lie."""


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
        self.path = path
        self.tensor = tensor
        self.name = name
        self.cut = cut
        self._latest = threading.local()  # the rows that a thread read last

    @property
    def dtype(self) -> Dtype:
        """Its type; CheckpointError where it does not hold floats."""
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
        begin, end = self.cut
        part = self._all_columns(first, last).reshape(last - first, self.tensor.shape[1], -1)[:, begin:end]
        return self.dtype.widen(part.tobytes()).reshape(last - first, -1)

    def _all_columns(self, first: int, last: int) -> Bytes:
        """Rows of the tensor that this is a part of, kept for its other parts: layers are columns of one tensor."""
        latest = self._latest
        if getattr(latest, "rows", None) != (first, last):
            # The same memory again: mapping it anew, page by page, costs as much as reading.
            latest.rows = None
            latest.read = read_rows(self.path, self.tensor, first, last, getattr(latest, "read", None))
            latest.rows = (first, last)
        packed: Bytes = latest.read
        return packed


class StoredCodes(Stored):
    """A matrix of codes in the file at ``path``, as Google's public mobile checkpoints have it (``quant_method: gemma``
    of transformers 5.18): 8 bits as I8; 4 or 2 as U8, the first in the low bits, each code less the lowest of its type.

    Args:
        tensor: ``[out, bytes]``.
        columns: of the matrix; they say how many bits a code has.
        scale: float32 ``[out, blocks]``: each row has so many blocks of equal length.

    Raises:
        CheckpointError: these do not fit each other.
    """

    def __init__(
        self,
        path: Path,
        tensor: StoredTensor,
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

    def in_columns(self, begin: int, end: int) -> StoredCodes:
        """As of other weights."""
        part = StoredCodes(self.path, self.tensor, self.name, self.all_columns, self.scale, (begin, end))
        part._latest = self._latest
        return part

    def _values(self, first: int, last: int) -> Rows:
        begin, end = self.cut or (0, self.all_columns)
        packed = self._all_columns(first, last)
        if self.bits == 8:
            return packed[:, begin:end].view(np.int8)

        # Some bytes hold codes of the columns beside these, too.
        codes_a_byte = 8 // self.bits
        part = np.ascontiguousarray(packed[:, begin // codes_a_byte : -(-end // codes_a_byte)])
        first_code = begin % codes_a_byte
        codes = unpack_bytes(part, self.bits).reshape(last - first, -1)[:, first_code : first_code + end - begin]
        signed: Rows = (codes - np.uint8(1 << self.bits - 1)).view(np.int8)
        return signed


def _cut_steps(scale: Floats, block: int, cut: tuple[int, int] | None) -> Steps:
    """What codes of these columns are worth, of whose table a ``block`` of neighbours shares a ``scale``."""
    if cut is None:
        return Steps.around_zero(block, scale)
    # Columns of a table may begin within a block.
    begin, end = cut
    shared = math.gcd(block, begin, end)
    return Steps.around_zero(shared, np.repeat(scale, block // shared, axis=1)[:, begin // shared : end // shared])


def _find_code_bits(tensor: StoredTensor, columns: int, scale: Floats) -> int | None:
    """How many bits a code has in ``tensor``, of rows of so many ``columns``; None where the three do not fit."""
    if len(tensor.shape) != 2 or not columns:
        return None
    bits, uneven = divmod(8 * tensor.shape[1], columns)
    if uneven or (tensor.dtype, bits) not in _CODES:
        return None
    if scale.ndim != 2 or len(scale) != tensor.shape[0] or not scale.shape[1] or columns % scale.shape[1]:
        return None
    return bits if (np.isfinite(scale) & (scale > 0)).all() else None


def common_dtype(weights: Iterable[Weight]) -> str:
    """Name of the type that all of ``weights``, indices left out, share; else "f32"."""
    types = {weight.tensor.dtype if isinstance(weight, Stored) else "" for weight in weights} - {"I64"}
    return next((name for name, dtype in DTYPES.items() if types == {dtype.safetensors}), "f32")


def read_array(path: Path, stored: StoredTensor) -> npt.NDArray[Any]:
    """All of ``stored``, float32, int64 or bool, in its shape; as :func:`read_rows`."""
    flat = read_rows(path, stored, 0, find_matrix_shape(stored.shape)[0]).reshape(-1)
    return flat.view(ARRAYS[stored.dtype]).reshape(stored.shape)


def read_rows(path: Path, stored: StoredTensor, first: int, last: int, into: Bytes | None = None) -> Bytes:
    """Rows ``[first, last)`` of ``stored``, as of a weight of its shape, as bytes, ``[last − first, bytes of a row]``.

    Args:
        into: an array to read them into, where it is of that shape.

    Raises:
        CheckpointError: the file cannot be read, or has shrunk.
    """
    row = stored.length // max(find_matrix_shape(stored.shape)[0], 1)
    shape = last - first, row
    rows = into if into is not None and into.shape == shape else np.empty(shape, np.uint8)
    rest, offset = rows.reshape(-1).data, stored.offset + first * row
    with report_damage(path, "{}"), open_regular(path) as file:
        while rest:
            if not (done := os.preadv(file.fileno(), [rest], offset)):
                raise ValueError("the file shrank while it was being read")
            rest, offset = rest[done:], offset + done
    return rows
