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
from typing import Any, BinaryIO

import numpy as np

from mtp_extract.checkpoint.documents import report_damage
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import escape
from mtp_extract.io.files import aligned, open_regular

ARCHITECTURE = "general.architecture"
"""The key that every file must have."""

GGUF_ALIGNMENT = 32
"""Every tensor begins at a multiple of this many bytes."""

_MOST_ENTRIES = 1 << 16
_LONGEST_HEADER = 1 << 26

_TEXT, _ARRAY = 8, 9
_NUMBERS = dict(enumerate(("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?"))) | {10: "u8", 11: "i8", 12: "f8"}
"""Types of values by number (``gguf_type``), as NumPy calls them."""


def gguf_header(places: Mapping[str, StoredTensor], metadata: Mapping[str, Any]) -> bytes:
    """What a file begins with whose tensors lie at ``places`` behind that.

    Metadata are typed by their Python types: int is UINT32, float FLOAT32, np.float64 FLOAT64; in lists int is INT32.
    """
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
    from gguf.gguf_writer import WriterState

    writer = GGUFWriter(None, str(metadata[ARCHITECTURE]))
    for key, value in metadata.items():
        if key == ARCHITECTURE:
            continue
        kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        writer.add_key_value(key, value, GGUFValueType.FLOAT64 if isinstance(value, np.float64) else kind)
    for name, tensor in places.items():
        # The type of NumPy's is not looked at beside the other.
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(name, tensor.shape, dtype, tensor.length, GGMLQuantizationType[tensor.dtype])
    # The writer opens files by name only; this one is to be part of another.
    buffer: Any = io.BytesIO()
    writer.fout = [buffer]
    writer.state = WriterState.EMPTY
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
    with report_damage(path, damaged), open_regular(path) as file:
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
        limit = min(self.size, _LONGEST_HEADER)
        self.at += length
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
        kind = self.number(4)
        count = 1
        if in_list := kind == _ARRAY:
            kind = self.number(4)
            count = self.number()
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
    metadata = _read_metadata(header, entries)
    places = _read_places(header, tensors)

    begin = aligned(header.at, GGUF_ALIGNMENT)
    _require_filled(header.size, begin, places)
    return metadata, {name: replace(place, offset=begin + place.offset) for name, place in places.items()}


def _require_filled(size: int, begin: int, places: Mapping[str, StoredTensor]) -> None:
    """Require that the data of all tensors fill a file of this ``size`` from ``begin``, up to what aligns the last."""
    last = max((place.offset + place.length for place in places.values()), default=0)
    end = begin + last
    padded = begin + aligned(last, GGUF_ALIGNMENT)
    _require(end <= size, f"its tensors would end at byte {end} of {size}; it was cut short")
    _require(not places or padded >= size, f"its header describes {padded} bytes, it has {size}")


def _read_metadata(header: _Header, entries: int) -> dict[str, Any]:
    """So many keys with their values."""
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = header.text()
        _require(key not in metadata, f"expected each key once, found {escape(key)} again")
        metadata[key] = header.value(escape(key))
    alignment = metadata.get("general.alignment", GGUF_ALIGNMENT)
    _require(alignment == GGUF_ALIGNMENT, f"expected general.alignment {GGUF_ALIGNMENT}, found {escape(alignment)}")
    return metadata


def _read_places(header: _Header, tensors: int) -> dict[str, StoredTensor]:
    """So many tensors, which follow each other; offsets count from where the data of the first begin."""
    places: dict[str, StoredTensor] = {}
    offset = 0
    for _ in range(tensors):
        name = header.text()
        _require(name not in places, f"expected each tensor once, found {escape(name)} again")
        places[name] = _read_place(header, escape(name), offset)
        offset = aligned(offset + places[name].length, GGUF_ALIGNMENT)
    return places


def _read_place(header: _Header, label: str, expected_offset: int) -> StoredTensor:
    """A tensor of any type that GGUF has, behind its name."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    dimensions = header.number(4)
    _require(1 <= dimensions <= 4, f"expected {label} to have 1 to 4 dimensions, found {dimensions}")
    shape = tuple(header.number() for _ in range(dimensions))[::-1]
    number = header.number(4)
    offset = header.number()

    types = {kind.value: kind for kind in GGMLQuantizationType}
    _require(number in types, f"{label}: expected a type of tensors that GGUF has, found type {number}")
    kind = types[number]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    elements = math.prod(shape)
    # No tensor has more elements than eight a byte of its file.
    is_possible = max(*shape, elements) <= 8 * header.size and shape[-1] % block == 0
    _require(is_possible, f"{label}: a shape of {list(shape)} in {kind.name} cannot be")
    _require(offset == expected_offset, f"expected {label} to begin at byte {expected_offset}, found {offset}")
    return StoredTensor(kind.name, shape, offset, elements // block * block_bytes)
