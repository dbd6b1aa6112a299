"""GGUF, version 3: metadata and the places of all tensors, then their data, each at a multiple of 32.

What is written is made by the ``gguf`` package. It trusts what it reads, so reading is done here, every count and
length held against the file's size before anything of that size is made.
"""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from mtp_extract.checkpoint.planned import BLOCKS, Layout, PlannedTensor
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.io.output import aligned
from mtp_extract.io.regular import open_regular

ARCHITECTURE = "general.architecture"
"""The key that every file must have."""

_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
_ALIGNMENT_KEY = "general.alignment"
_MOST_ENTRIES = 1 << 16
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 1 << 16
_LONGEST_HEADER = 1 << 27
_READ = 1 << 18

_TYPES = MappingProxyType({0: "F32", 1: "F16", 2: "Q4_0", 8: "Q8_0", 30: "BF16"})
"""Types of tensors by number (``ggml_type``): those that a drafter may have."""

_TEXT, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = MappingProxyType(
    dict(enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4"]))
    | {_BOOL: "<u1"}
    | dict(enumerate(["<u8", "<i8", "<f8"], 10))
)
"""Types of values by number (``gguf_type``), as NumPy calls them."""


@dataclass(frozen=True)
class Texts:
    """A list of strings, of which only the length is kept: those of a tokenizer are millions."""

    count: int


@dataclass(frozen=True)
class Header:
    """What a file says before its data."""

    metadata: Mapping[str, Any]
    """Numbers, truth values, text; tuples of the first two, :class:`Texts` for lists of text. Numbers of FP32 are
    np.float32."""
    tensors: dict[str, StoredTensor]


class Gguf:
    """The container of ``.gguf``.

    Metadata are typed by their Python types: int is UINT32, float FLOAT32, np.float64 FLOAT64; in lists int is INT32.
    """

    def lay_out(self, tensors: Sequence[PlannedTensor], metadata: Mapping[str, Any]) -> Layout:
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
            writer.add_tensor_info(
                tensor.name,
                tensor.shape,
                np.dtype(np.float32),  # not looked at beside the type that follows
                tensor.length,
                raw_dtype=GGMLQuantizationType[tensor.dtype],
            )
        # The writer opens files by name only; this one is to be part of another.
        made: Any = io.BytesIO()
        writer.fout, writer.state = [made], WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        header = made.getvalue() + bytes(-made.tell() % _ALIGNMENT)
        offsets, at = {}, len(header)
        for tensor in tensors:
            offsets[tensor.name] = at
            at += aligned(tensor.length, _ALIGNMENT)
        return Layout(header, offsets, at)

    def read_header(self, path: Path) -> dict[str, StoredTensor]:
        return read_gguf(path).tensors

    def witnessed(self, path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
        # The gguf package would read every text of a tokenizer, one by one.
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self.read_header(path).items()}

    def read_metadata(self, path: Path) -> Mapping[str, Any]:
        return read_gguf(path).metadata


CONTAINER = Gguf()


def as_stored(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """``metadata`` as reading finds them: plain floats are FP32 there, lists tuples, and of texts only the count."""

    def stored(value: Any) -> Any:
        if isinstance(value, list):
            return Texts(len(value)) if value and isinstance(value[0], str) else tuple(value)
        return np.float32(value) if type(value) is float else value

    return {key: stored(value) for key, value in metadata.items()}


def read_gguf(path: Path) -> Header:
    """What the file at ``path`` says before its data.

    Raises:
        CheckpointError: not such a file, of another version, or one whose header contradicts itself or the file's size.
    """
    try:
        with open_regular(path) as file:
            return _Parser(path, file, path.stat().st_size).header()
    except OSError as error:
        raise CheckpointError(f"{escape(path)}: cannot be read: {error.strerror}.") from error


class _Parser:
    """Reads a header from its beginning; ``at`` is how far it has come."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file = path, file
        self._size, self._limit = size, min(size, _LONGEST_HEADER)
        self._held = bytearray()
        self._at = 0

    def header(self) -> Header:
        if self._limit < len(_MAGIC) or self._take(len(_MAGIC)) != _MAGIC:
            raise CheckpointError(f"{escape(self._path)}: not a GGUF file (its first bytes are not GGUF).")
        version = self._number("<u4")
        if version != _VERSION:
            found = f"{_VERSION} in the other byte order" if version == _VERSION << 24 else version
            raise self._damaged(f"expected GGUF version {_VERSION}, found {found}")
        count, entries = self._count("tensors"), self._count("entries of metadata")
        metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._name("key")
            if key in metadata:
                raise self._damaged(f"expected each key once, found {escape(key)} again")
            metadata[key] = self._value(key, self._number("<u4"))
        alignment = metadata.get(_ALIGNMENT_KEY, _ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= _LONGEST_NAME or alignment & alignment - 1:
            raise self._damaged(f"expected {_ALIGNMENT_KEY} to be a power of two, found {escape(alignment)}")
        return Header(MappingProxyType(metadata), dict(self._tensors(count, alignment)))

    def _tensors(self, count: int, alignment: int) -> Iterator[tuple[str, StoredTensor]]:
        described: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for _ in range(count):
            name = self._name("name of a tensor")
            if name in described:
                raise self._damaged(f"expected each tensor once, found {escape(name)} again")
            described[name] = (*self._shape(name), self._number("<u8"))
        at = start = aligned(self._at, alignment)
        for name, (dtype, shape, offset) in described.items():
            if at != start + offset:
                raise self._damaged(
                    f"expected {escape(name)} to begin {at - start} bytes into the data, found {offset}"
                )
            elements, size = BLOCKS[dtype]
            length = math.prod(shape) // elements * size
            if at + length > self._size:
                raise self._damaged(f"{escape(name)} would end at byte {at + length} of {self._size}; it was cut short")
            yield name, StoredTensor(dtype, shape, at, length)
            last, at = at + length, at + aligned(length, alignment)
        if count and not last <= self._size <= at:
            raise self._damaged(f"its header describes {at} bytes, it has {self._size}")

    def _shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type and shape, the longest stride first."""
        dimensions = self._number("<u4")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self._damaged(f"expected {escape(name)} to have 1 to 4 dimensions, found {dimensions}")
        shape = tuple(self._number("<u8") for _ in range(dimensions))
        kind = self._number("<u4")
        if kind not in _TYPES:
            raise self._damaged(
                f"{escape(name)}: expected one of the types {', '.join(_TYPES.values())}, found {_type_name(kind)}"
            )
        dtype = _TYPES[kind]
        # No tensor has more elements than eight a byte of its file.
        if any(n > 8 * self._size for n in shape) or math.prod(shape) > 8 * self._size or shape[0] % BLOCKS[dtype][0]:
            raise self._damaged(f"{escape(name)}: a shape of {list(shape)[::-1]} in {dtype} cannot be")
        return dtype, shape[::-1]

    def _value(self, key: str, kind: int) -> Any:
        if kind == _TEXT:
            return self._text(key)
        if kind != _ARRAY:
            return self._numbers(key, kind, 1)[0]
        kind, count = self._number("<u4"), self._number("<u8")
        if kind != _TEXT:
            return tuple(self._numbers(key, kind, count))
        self._skip_texts(count)
        return Texts(count)

    def _numbers(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise self._damaged(f"{escape(key)}: expected a type of value below 13 and no list of lists, found {kind}")
        dtype = np.dtype(_NUMBERS[kind])
        found = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        if kind == _BOOL and (found > 1).any():
            raise self._damaged(f"{escape(key)}: expected truth values to be 0 or 1, found {int(found.max())}")
        if dtype.kind == "f":
            return list(found)
        return [bool(n) for n in found] if kind == _BOOL else [int(n) for n in found]

    def _skip_texts(self, count: int) -> None:
        # There may be a million of them: a call for each is what they would cost.
        held = self._held
        for _ in range(count):
            begin = self._at + 8
            if begin > len(held):
                self._need(8)
            self._at = begin + int.from_bytes(held[begin - 8 : begin], "little")
            if self._at > len(held):
                self._need(0)

    def _name(self, what: str) -> str:
        return self._text(f"the {what}", _LONGEST_NAME)

    def _text(self, what: str, longest: int = _LONGEST_HEADER) -> str:
        length = self._number("<u8")
        if length > longest:
            raise self._damaged(f"{escape(what)}: expected at most {longest} bytes of text, found {length}")
        try:
            return self._take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"{escape(what)}: expected text in UTF-8, found other bytes") from error

    def _count(self, what: str) -> int:
        count = self._number("<u8")
        if count > _MOST_ENTRIES:
            raise self._damaged(f"expected at most {_MOST_ENTRIES} {what}, found {count}")
        return count

    def _number(self, dtype: str) -> int:
        self._need(8 if dtype == "<u8" else 4)
        (found,) = struct.unpack_from("<Q" if dtype == "<u8" else "<I", self._held, self._at)
        self._at += 8 if dtype == "<u8" else 4
        return int(found)

    def _take(self, length: int) -> bytes:
        self._need(length)
        self._at += length
        return bytes(self._held[self._at - length : self._at])

    def _need(self, length: int) -> None:
        """Hold ``length`` bytes more than what was read."""
        end = self._at + length
        if end > self._limit:
            raise self._damaged(f"its header goes on to byte {end}, past {self._limit}; it was cut short")
        while len(self._held) < end:
            piece = self._file.read(max(_READ, end - len(self._held)))
            if not piece:
                raise self._damaged("it shrank while it was being read")
            self._held += piece

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{escape(self._path)}: {why}. The GGUF file is damaged, or no drafter of this kind.")


def _type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    known = {int(member): member.name for member in GGMLQuantizationType}
    return known.get(kind, f"number {kind}")
