"""GGUF, version 3: metadata and the places of all tensors, then their data, each at a multiple of 32.

What is written is made by the ``gguf`` package. It trusts what it reads, so reading is done here, every count and
length held against the file's size before anything of that size is made.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from mtp_extract.checkpoint.documents import refused
from mtp_extract.checkpoint.dtypes import BLOCKS
from mtp_extract.checkpoint.planned import PlannedTensor
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import either, escape
from mtp_extract.io.files import aligned, open_regular

ARCHITECTURE = "general.architecture"
"""The key that every file must have."""

ALIGNMENT = 32
"""Every tensor begins at a multiple of this many bytes."""

_ALIGNMENT_KEY = "general.alignment"
_MOST_ENTRIES = 1 << 16
_LONGEST_NAME = 1 << 16
_LONGEST_HEADER = 1 << 26

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

    writer = GGUFWriter(None, str(metadata[ARCHITECTURE]))
    for key, value in metadata.items():
        kind = GGUFValueType.FLOAT64 if isinstance(value, np.float64) else GGUFValueType.get_type(value)
        if key != ARCHITECTURE:
            writer.add_key_value(key, value, GGUFValueType.UINT32 if type(value) is int else kind)
    for tensor in tensors:
        # The type of NumPy's is not looked at beside the other.
        dtype, raw = np.dtype(np.float32), GGMLQuantizationType[tensor.dtype]
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.length, raw_dtype=raw)
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
    damaged = "{}. The GGUF file is damaged, or no drafter of this kind"
    with refused(path, damaged), open_regular(path) as file:
        return _read(file, os.fstat(file.fileno()).st_size)


def _require(sound: bool, otherwise: str) -> None:
    if not sound:
        raise ValueError(otherwise)


def _read(file: BinaryIO, size: int) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """As :func:`read_gguf`, of a file of ``size`` bytes; what is wrong is a ValueError."""
    _require(file.read(4) == b"GGUF", "not a GGUF file (its first bytes are not GGUF)")
    fields = _Fields(file, min(size, _LONGEST_HEADER))
    version, tensors, entries = fields.number(4), fields.number(), fields.number()
    _require(version == 3, f"expected GGUF version 3, little-endian, found {version}")
    metadata: dict[str, Any] = {}
    _require(entries <= _MOST_ENTRIES, f"expected at most {_MOST_ENTRIES} keys, found {entries}")
    for _ in range(entries):
        key = fields.name("key", metadata)
        metadata[key] = fields.value(escape(key))
    alignment = metadata.get(_ALIGNMENT_KEY, ALIGNMENT)
    _require(alignment == ALIGNMENT, f"expected {_ALIGNMENT_KEY} {ALIGNMENT}, found {escape(alignment)}")
    # The tensors follow each other to the end of the file; where they begin is known when all are.
    _require(tensors <= _MOST_ENTRIES, f"expected at most {_MOST_ENTRIES} tensors, found {tensors}")
    places: dict[str, StoredTensor] = {}
    at = end = 0
    for _ in range(tensors):
        name = fields.name("tensor", places)
        said, dimensions = escape(name), fields.number(4)
        _require(1 <= dimensions <= 4, f"expected {said} to have 1 to 4 dimensions, found {dimensions}")
        shape = tuple(fields.number() for _ in range(dimensions))[::-1]
        kind, offset = fields.number(4), fields.number()
        _require(kind in _TYPES, f"{said}: expected {either(_TYPES.values())}, found type {kind}")
        elements, bytes_of = BLOCKS[_TYPES[kind]]
        # No tensor has more elements than eight a byte of its file.
        possible = max(*shape, math.prod(shape)) <= 8 * size and shape[-1] % elements == 0
        _require(possible, f"{said}: a shape of {list(shape)} in {_TYPES[kind]} cannot be")
        _require(offset == at, f"expected {said} to begin at byte {at}, found {offset}")
        places[name] = StoredTensor(_TYPES[kind], shape, at, math.prod(shape) // elements * bytes_of)
        end = at + places[name].length
        at = aligned(end, ALIGNMENT)
    begin = aligned(fields.at, ALIGNMENT)
    _require(begin + end <= size, f"its tensors would end at byte {begin + end} of {size}; it was cut short")
    _require(not places or begin + at >= size, f"its header describes {begin + at} bytes, it has {size}")
    return metadata, {name: replace(place, offset=begin + place.offset) for name, place in places.items()}


class _Fields:
    """Reads a header behind its first four bytes, field by field, up to byte ``limit`` of the file."""

    def __init__(self, file: BinaryIO, limit: int) -> None:
        self._file, self._limit, self.at = file, limit, 4

    def take(self, length: int) -> bytes:
        """The next ``length`` bytes; none is read past the limit, whatever length a file claims."""
        self.at += length
        _require(self.at <= self._limit, f"its header goes on past byte {self._limit}; it was cut short")
        found = self._file.read(length)
        _require(len(found) == length, "it shrank while it was being read")
        return found

    def number(self, size: int = 8) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self, what: str, longest: int) -> str:
        length = self.number()
        _require(length <= longest, f"{what}: expected at most {longest} bytes of text, found {length}")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what}: expected text in UTF-8, found other bytes") from error

    def name(self, what: str, known: Container[str]) -> str:
        found = self.text(f"the name of a {what}", _LONGEST_NAME)
        _require(found not in known, f"expected each {what} once, found {escape(found)} again")
        return found

    def value(self, key: str) -> Any:
        """A value; of a list of texts how many there are."""
        kind, count, in_list = self.number(4), 1, False
        if kind == _ARRAY:
            kind, count, in_list = self.number(4), self.number(), True
        if kind == _TEXT and in_list:
            for _ in range(count):
                self.take(self.number())
            return count
        if kind == _TEXT:
            return self.text(key, _LONGEST_HEADER)
        _require(kind in _NUMBERS, f"{key}: expected numbers, found values of type {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        found = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind == _BOOL:
            _require(not (found > 1).any(), f"{key}: expected truth values to be 0 or 1, found others")
            found = found.astype(bool)
        values = list(found) if dtype.kind == "f" else found.tolist()
        return values if in_list else values[0]
