"""GGUF, version 3: metadata and the places of all tensors, then their data, each at a multiple of 32.

What is written is made by the ``gguf`` package. It trusts what it reads, so reading is done here, every count and
length held against the file's size before anything of that size is made.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from mtp_extract.checkpoint.documents import refused
from mtp_extract.checkpoint.dtypes import BLOCKS
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import escape
from mtp_extract.io.files import aligned, open_regular

ARCHITECTURE = "general.architecture"
"""The key that every file must have."""

GGUF_ALIGNMENT = 32
"""Every tensor begins at a multiple of this many bytes."""

_MOST_ENTRIES = 1 << 16
_LONGEST_HEADER = 1 << 26

_TYPES = MappingProxyType({0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 30: "BF16"})
"""Types of tensors by number (``ggml_type``): those that are read."""

_TEXT, _ARRAY = 8, 9
_NUMBERS = dict(enumerate(("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?"))) | {10: "u8", 11: "i8", 12: "f8"}
"""Types of values by number (``gguf_type``), as NumPy calls them."""


def header(places: Mapping[str, StoredTensor], metadata: Mapping[str, Any]) -> bytes:
    """What a file begins with whose tensors lie at ``places`` behind that.

    Metadata are typed by their Python types: int is UINT32, float FLOAT32, np.float64 FLOAT64; in lists int is INT32.
    """
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
    from gguf.gguf_writer import WriterState

    writer = GGUFWriter(None, str(metadata[ARCHITECTURE]))
    for key, value in metadata.items():
        kind = GGUFValueType.FLOAT64 if isinstance(value, np.float64) else GGUFValueType.get_type(value)
        if key != ARCHITECTURE:
            writer.add_key_value(key, value, GGUFValueType.UINT32 if type(value) is int else kind)
    for name, tensor in places.items():
        # The type of NumPy's is not looked at beside the other.
        dtype, raw = np.dtype(np.float32), GGMLQuantizationType[tensor.dtype]
        writer.add_tensor_info(name, tensor.shape, dtype, tensor.length, raw_dtype=raw)
    # The writer opens files by name only; this one is to be part of another.
    buffer: Any = io.BytesIO()
    writer.fout, writer.state = [buffer], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return bytes(buffer.getvalue()) + bytes(-buffer.tell() % GGUF_ALIGNMENT)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Metadata and tensors of the file at ``path``.

    Metadata are numbers, truth values, text and lists of the first two; of a list of text they have the length alone.
    Numbers of FP32 are np.float32.

    Raises:
        CheckpointError: not such a file, of another version, or one whose header contradicts itself or the file's size.
    """
    damaged = "{}. The GGUF file is damaged, or no drafter of this kind"
    with refused(path, damaged), open_regular(path) as file:
        return _read(_Header(file, os.fstat(file.fileno()).st_size))


def _require(sound: bool, otherwise: str) -> None:
    if not sound:
        raise ValueError(otherwise)


class _Header:
    """The header of a file of ``size`` bytes, read field by field; none of them is read past the file's end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self.at = 0

    def take(self, length: int) -> bytes:
        """The next ``length`` bytes."""
        self.at, limit = self.at + length, min(self.size, _LONGEST_HEADER)
        _require(self.at <= limit, f"its header goes on past byte {limit}; it was cut short")
        data = self._file.read(length)
        _require(len(data) == length, "it shrank while it was being read")
        return data

    def number(self, size: int = 8) -> int:
        return int.from_bytes(self.take(size), "little")

    def text(self) -> str:
        try:
            return self.take(self.number()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError("expected text in UTF-8, found other bytes") from error

    def value(self, key: str) -> Any:
        """A value; of a list of texts how many there are."""
        kind, count = self.number(4), 1
        if in_list := kind == _ARRAY:
            kind, count = self.number(4), self.number()
        if kind == _TEXT and in_list:
            for _ in range(count):
                self.take(self.number())
            return count
        if kind == _TEXT:
            return self.text()
        _require(kind in _NUMBERS, f"{key}: expected numbers, found values of type {kind}")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        numbers = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        values = list(numbers) if dtype.kind == "f" else numbers.tolist()
        return values if in_list else values[0]


def _read(header: _Header) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """As :func:`read_gguf`; what is wrong is a ValueError."""
    _require(header.take(4) == b"GGUF", "not a GGUF file (its first bytes are not GGUF)")
    version = header.number(4)
    tensors = header.number()
    entries = header.number()
    _require(version == 3, f"expected GGUF version 3, little-endian, found {version}")
    most = max(tensors, entries)
    _require(most <= _MOST_ENTRIES, f"expected at most {_MOST_ENTRIES} keys and tensors, found {most}")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = header.text()
        _require(key not in metadata, f"expected each key once, found {escape(key)} again")
        metadata[key] = header.value(escape(key))
    alignment = metadata.get("general.alignment", GGUF_ALIGNMENT)
    _require(alignment == GGUF_ALIGNMENT, f"expected general.alignment {GGUF_ALIGNMENT}, found {escape(alignment)}")
    # The tensors follow each other to the end of the file; where they begin is known when all are.
    places: dict[str, StoredTensor] = {}
    at = end = 0
    for _ in range(tensors):
        name, dimensions = header.text(), header.number(4)
        shown_name = escape(name)
        _require(name not in places, f"expected each tensor once, found {shown_name} again")
        _require(1 <= dimensions <= 4, f"expected {shown_name} to have 1 to 4 dimensions, found {dimensions}")
        shape = tuple(header.number() for _ in range(dimensions))[::-1]
        kind, offset = header.number(4), header.number()
        dtype, elements, bytes_of = _type(shown_name, kind)
        # No tensor has more elements than eight a byte of its file.
        possible = max(*shape, math.prod(shape)) <= 8 * header.size and shape[-1] % elements == 0
        _require(possible, f"{shown_name}: a shape of {list(shape)} in {dtype} cannot be")
        _require(offset == at, f"expected {shown_name} to begin at byte {at}, found {offset}")
        end = at + math.prod(shape) // elements * bytes_of
        places[name] = StoredTensor(dtype, shape, at, end - at)
        at = aligned(end, GGUF_ALIGNMENT)
    begin, size = aligned(header.at, GGUF_ALIGNMENT), header.size
    _require(begin + end <= size, f"its tensors would end at byte {begin + end} of {size}; it was cut short")
    _require(not places or begin + at >= size, f"its header describes {begin + at} bytes, it has {size}")
    return metadata, {name: replace(place, offset=begin + place.offset) for name, place in places.items()}


def _type(tensor: str, number: int) -> tuple[str, int, int]:
    """Name of a type of tensors, and elements and bytes of its least piece; one that is not read has a name too."""
    if (name := _TYPES.get(number)) is not None:
        return (name, *BLOCKS[name])
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    types = {kind.value: kind for kind in GGMLQuantizationType}
    _require(number in types, f"{tensor}: expected a type of tensors that GGUF has, found type {number}")
    return (types[number].name, *GGML_QUANT_SIZES[types[number]])
