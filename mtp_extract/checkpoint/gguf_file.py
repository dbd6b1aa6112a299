"""GGUF, version 3: metadata and the places of all tensors, then their data, each at a multiple of 32.

What is written is made by the ``gguf`` package. It trusts what it reads, so reading is done here, every count and
length held against the file's size before anything of that size is made.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from mtp_extract.checkpoint.planned import BLOCKS, PlannedTensor
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import CheckpointError, either, escape
from mtp_extract.io.files import aligned, open_regular

ARCHITECTURE = "general.architecture"
"""The key that every file must have."""

ALIGNMENT = 32
"""Every tensor begins at a multiple of this many bytes."""

_MAGIC, _VERSION = b"GGUF", 3
_ALIGNMENT_KEY = "general.alignment"
_MOST_ENTRIES = 1 << 16
_LONGEST_NAME = 1 << 16
_LONGEST_HEADER = 1 << 27

_TYPES = MappingProxyType({0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 30: "BF16"})
"""Types of tensors by number (``ggml_type``): those that a drafter may have."""

_TEXT, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = MappingProxyType(
    dict(enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4"]))
    | {_BOOL: "<u1"}
    | dict(enumerate(["<u8", "<i8", "<f8"], 10))
)
"""Types of values by number (``gguf_type``), as NumPy calls them."""


def header(tensors: Sequence[PlannedTensor], metadata: Mapping[str, Any]) -> bytes:
    """What a file of ``tensors`` begins with.

    Metadata are typed by their Python types: int is UINT32, float FLOAT32, np.float64 FLOAT64; in lists int is INT32.
    """
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
    from gguf.gguf_writer import WriterState

    kinds = (
        (bool, GGUFValueType.BOOL),
        (np.float64, GGUFValueType.FLOAT64),
        (int, GGUFValueType.UINT32),
        (float, GGUFValueType.FLOAT32),
        (str, GGUFValueType.STRING),
        (list, GGUFValueType.ARRAY),
    )
    writer = GGUFWriter(None, str(metadata[ARCHITECTURE]))
    for key, value in metadata.items():
        if key != ARCHITECTURE:
            writer.add_key_value(key, value, next(kind for python, kind in kinds if isinstance(value, python)))
    for tensor in tensors:
        kind = GGMLQuantizationType[tensor.dtype]
        # The second type is not looked at beside the first.
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.length, raw_dtype=kind)
    # The writer opens files by name only; this one is to be part of another.
    made: Any = io.BytesIO()
    writer.fout, writer.state = [made], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return bytes(made.getvalue()) + bytes(-made.tell() % ALIGNMENT)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensors of the file at ``path``.

    Metadata are numbers, truth values, text and lists of the first two; of a list of text, which in a tokenizer has
    millions, they have the length alone. Numbers of FP32 are np.float32.

    Raises:
        CheckpointError: not such a file, of another version, or one whose header contradicts itself or the file's size.
    """
    try:
        with open_regular(path) as file:
            return _Reader(file).header()
    except OSError as error:
        raise CheckpointError(f"{escape(path)}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(
            f"{escape(path)}: {error}. The GGUF file is damaged, or no drafter of this kind."
        ) from error


def _require(sound: bool, otherwise: str) -> None:
    if not sound:
        raise ValueError(otherwise)


class _Reader:
    """Reads a header from its beginning, field by field. What is wrong is a ValueError."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self._limit = min(self._size, _LONGEST_HEADER)
        self._at = 0  # bytes read

    def header(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        start = self._file.read(len(_MAGIC))
        self._at = len(start)
        _require(start == _MAGIC, "not a GGUF file (its first bytes are not GGUF)")
        version = self._number()
        _require(version == _VERSION, f"expected GGUF version {_VERSION}, little-endian, found {version}")
        tensors, entries = self._number(8), self._number(8)
        metadata = self._named("key", entries, self._value)
        alignment = metadata.get(_ALIGNMENT_KEY, ALIGNMENT)
        _require(alignment == ALIGNMENT, f"expected {_ALIGNMENT_KEY} {ALIGNMENT}, found {escape(alignment)}")
        described = self._named("tensor", tensors, self._described)
        # The tensors follow each other to the end of the file.
        found: dict[str, StoredTensor] = {}
        begin = at = end = aligned(self._at, ALIGNMENT)
        for name, (dtype, shape, offset) in described.items():
            _require(offset == at - begin, f"expected {escape(name)} to begin at byte {at - begin}, found {offset}")
            elements, size = BLOCKS[dtype]
            found[name] = StoredTensor(dtype, shape, at, math.prod(shape) // elements * size)
            end = at + found[name].length
            at = aligned(end, ALIGNMENT)
        _require(end <= self._size, f"its tensors would end at byte {end} of {self._size}; it was cut short")
        _require(not found or at >= self._size, f"its header describes {at} bytes, it has {self._size}")
        return metadata, found

    def _named(self, what: str, count: int, read: Callable[[str], Any]) -> dict[str, Any]:
        """``count`` names, each with what ``read`` finds behind it."""
        _require(count <= _MOST_ENTRIES, f"expected at most {_MOST_ENTRIES} {what}s, found {count}")
        found: dict[str, Any] = {}
        for _ in range(count):
            name = self._text(f"the name of a {what}", _LONGEST_NAME)
            _require(name not in found, f"expected each {what} once, found {escape(name)} again")
            found[name] = read(name)
        return found

    def _value(self, key: str) -> Any:
        kind = self._number()
        if kind == _TEXT:
            return self._text(key, _LONGEST_HEADER)
        if kind != _ARRAY:
            return self._numbers(key, kind, 1)[0]
        kind, count = self._number(), self._number(8)
        if kind != _TEXT:
            return self._numbers(key, kind, count)
        for _ in range(count):
            self._take(self._number(8))
        return count

    def _numbers(self, key: str, kind: int, count: int) -> list[Any]:
        _require(kind in _NUMBERS, f"{escape(key)}: expected numbers, found values of type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        found = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if kind == _BOOL:
            _require(not (found > 1).any(), f"{escape(key)}: expected truth values to be 0 or 1, found others")
            found = found.astype(bool)
        return list(found) if dtype.kind == "f" else found.tolist()

    def _described(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """Type, shape (the longest stride first) and offset of a tensor."""
        dimensions = self._number()
        _require(1 <= dimensions <= 4, f"expected {escape(name)} to have 1 to 4 dimensions, found {dimensions}")
        shape = tuple(self._number(8) for _ in range(dimensions))[::-1]
        kind = self._number()
        _require(kind in _TYPES, f"{escape(name)}: expected {either(_TYPES.values())}, found type {kind}")
        dtype = _TYPES[kind]
        # No tensor has more elements than eight a byte of its file.
        possible = max(*shape, math.prod(shape)) <= 8 * self._size and shape[-1] % BLOCKS[dtype][0] == 0
        _require(possible, f"{escape(name)}: a shape of {list(shape)} in {dtype} cannot be")
        return dtype, shape, self._number(8)

    def _text(self, what: str, longest: int) -> str:
        length = self._number(8)
        _require(length <= longest, f"{escape(what)}: expected at most {longest} bytes of text, found {length}")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{escape(what)}: expected text in UTF-8, found other bytes") from error

    def _number(self, size: int = 4) -> int:
        return int.from_bytes(self._take(size), "little")

    def _take(self, length: int) -> bytes:
        """The next ``length`` bytes; none is read past the limit, whatever length a file claims."""
        self._at += length
        _require(self._at <= self._limit, f"its header goes on past byte {self._limit}; it was cut short")
        found = self._file.read(length)
        _require(len(found) == length, "it shrank while it was being read")
        return found
