"""GGUF, version 3: metadata and the places of all tensors, then their data, each tensor at a multiple of 32.

The ``gguf`` package builds headers. It trusts what it reads, so headers are read here: every count and length is
checked against the file's size before memory of that size is allocated.
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
from mtp_extract.checkpoint.stored import TensorPlace
from mtp_extract.errors import escape
from mtp_extract.io.files import align_up, open_regular

ARCHITECTURE = "general.architecture"
"""Key that every file must have."""

GGUF_ALIGNMENT = 32
"""Every tensor begins at a multiple of this many bytes."""

_MOST_ENTRIES = 1 << 16
_LONGEST_HEADER = 1 << 26

_TEXT, _ARRAY = 8, 9
_NUMBERS = dict(enumerate(("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?"))) | {10: "u8", 11: "i8", 12: "f8"}
"""Number of a value's type (``gguf_type``) → NumPy's name of it."""


def build_gguf_header(places: Mapping[str, TensorPlace], metadata: Mapping[str, Any]) -> bytes:
    """Build the header of a file; offsets in ``places`` count from the header's end.

    The Python type of a value decides its type: int is UINT32 (INT32 in a list), float FLOAT32, np.float64 FLOAT64.
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
        # The writer ignores the NumPy type where a GGML type is passed.
        dtype = np.dtype(np.float32)
        writer.add_tensor_info(name, tensor.shape, dtype, tensor.length, GGMLQuantizationType[tensor.dtype])
    # The writer opens files by name only, and this header becomes the start of another file.
    buffer: Any = io.BytesIO()
    writer.fout = [buffer]
    writer.state = WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return bytes(buffer.getvalue()) + bytes(-buffer.tell() % GGUF_ALIGNMENT)


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    """Read the metadata and the places of tensors of the file at ``path``.

    A value is a number, bool, text, a list of numbers or bools, or the length of a list of text. FP32 is np.float32.

    Raises:
        CheckpointError: not a GGUF file, another version, or a header that contradicts itself or the file's size.
    """
    damaged = "{}. The GGUF file is damaged, or no drafter of this kind"
    with report_damage(path, damaged), open_regular(path) as file:
        return _read(_Header(file, os.fstat(file.fileno()).st_size))


def _require(is_sound: bool, problem: str) -> None:
    if not is_sound:
        raise ValueError(problem)


class _Header:
    """The header of a file of ``size`` bytes, read field by field and never past the file's end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self.position = 0

    def take(self, length: int) -> bytes:
        """Read the next ``length`` bytes."""
        limit = min(self.size, _LONGEST_HEADER)
        self.position += length
        _require(self.position <= limit, f"its header goes on past byte {limit}; it was cut short")
        data = self._file.read(length)
        _require(len(data) == length, "it shrank while it was being read")
        return data

    def read_number(self, size: int = 8) -> int:
        return int.from_bytes(self.take(size), "little")

    def read_text(self) -> str:
        try:
            return self.take(self.read_number()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError("expected text in UTF-8, found other bytes") from error

    def read_value(self, key: str) -> Any:
        """Read the value of ``key``; for a list of texts return its length."""
        kind = self.read_number(4)
        count = 1
        if in_list := kind == _ARRAY:
            kind = self.read_number(4)
            count = self.read_number()
        if kind == _TEXT and in_list:
            for _ in range(count):
                self.take(self.read_number())
            return count
        if kind == _TEXT:
            return self.read_text()
        _require(kind in _NUMBERS, f"{key}: expected numbers, found values of type {kind}")
        dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
        numbers = np.frombuffer(self.take(count * dtype.itemsize), dtype)
        values = list(numbers) if dtype.kind == "f" else numbers.tolist()
        return values if in_list else values[0]


def _read(header: _Header) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    _require(header.take(4) == b"GGUF", "not a GGUF file (its first bytes are not GGUF)")
    version = header.read_number(4)
    tensors = header.read_number()
    entries = header.read_number()
    _require(version == 3, f"expected GGUF version 3, little-endian, found {version}")
    most = max(tensors, entries)
    _require(most <= _MOST_ENTRIES, f"expected at most {_MOST_ENTRIES} keys and tensors, found {most}")
    metadata = _read_metadata(header, entries)
    places = _read_places(header, tensors)

    begin = align_up(header.position, GGUF_ALIGNMENT)
    _require_filled(header.size, begin, places)
    return metadata, {name: replace(place, offset=begin + place.offset) for name, place in places.items()}


def _require_filled(size: int, begin: int, places: Mapping[str, TensorPlace]) -> None:
    """Require that tensors fill a file of ``size`` bytes from ``begin`` on, up to the padding of the last."""
    last = max((place.offset + place.length for place in places.values()), default=0)
    end = begin + last
    padded = begin + align_up(last, GGUF_ALIGNMENT)
    _require(end <= size, f"its tensors would end at byte {end} of {size}; it was cut short")
    _require(not places or padded >= size, f"its header describes {padded} bytes, it has {size}")


def _read_metadata(header: _Header, entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = header.read_text()
        _require(key not in metadata, f"expected each key once, found {escape(key)} again")
        metadata[key] = header.read_value(escape(key))
    alignment = metadata.get("general.alignment", GGUF_ALIGNMENT)
    _require(alignment == GGUF_ALIGNMENT, f"expected general.alignment {GGUF_ALIGNMENT}, found {escape(alignment)}")
    return metadata


def _read_places(header: _Header, tensors: int) -> dict[str, TensorPlace]:
    """Read the places of tensors, which must follow each other; offsets count from the first tensor's data."""
    places: dict[str, TensorPlace] = {}
    offset = 0
    for _ in range(tensors):
        name = header.read_text()
        _require(name not in places, f"expected each tensor once, found {escape(name)} again")
        places[name] = _read_place(header, escape(name), offset)
        offset = align_up(offset + places[name].length, GGUF_ALIGNMENT)
    return places


def _read_place(header: _Header, label: str, expected_offset: int) -> TensorPlace:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    dimensions = header.read_number(4)
    _require(1 <= dimensions <= 4, f"expected {label} to have 1 to 4 dimensions, found {dimensions}")
    shape = tuple(header.read_number() for _ in range(dimensions))[::-1]
    number = header.read_number(4)
    offset = header.read_number()

    types = {kind.value: kind for kind in GGMLQuantizationType}
    _require(number in types, f"{label}: expected a type of tensors that GGUF has, found type {number}")
    kind = types[number]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    elements = math.prod(shape)
    # A tensor has at most eight elements for each byte of its file.
    is_possible = max(*shape, elements) <= 8 * header.size and shape[-1] % block == 0
    _require(is_possible, f"{label}: a shape of {list(shape)} in {kind.name} cannot be")
    _require(offset == expected_offset, f"expected {label} to begin at byte {expected_offset}, found {offset}")
    return TensorPlace(kind.name, shape, offset, elements // block * block_bytes)
