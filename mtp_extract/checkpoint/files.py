"""Files of a checkpoint: written piece by piece, read back and compared. The bytes depend on the input alone.

safetensors: u64 little-endian length of a JSON header, the header (padded with spaces to a multiple of 8), then the
data of all tensors without gaps. The ``safetensors`` package does not write: it wants every tensor in memory and orders
metadata keys differently from run to run. It checks every header that is read, ours too, and shares no code with the
writer; it does not say where data lie, and of a key that stands there twice it takes the last.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from xxhash import xxh3_128

from mtp_extract._version import __version__
from mtp_extract.checkpoint import gguf_file
from mtp_extract.checkpoint.documents import parse_json, refused
from mtp_extract.checkpoint.dtypes import ARRAYS, BLOCKS
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.checkpoint.weight import Rows, Weight, row_ranges
from mtp_extract.errors import OutputError, escape
from mtp_extract.io.files import aligned, new_file, open_regular, read_back_error, write_all
from mtp_extract.io.source import Advance
from mtp_extract.io.threads import check_interrupted

TENSOR_FILES = (".safetensors", ".gguf")
"""Endings of the names of files of tensors."""

_METADATA = "__metadata__"
_READ = 1 << 18


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written."""

    name: str
    dtype: str  # a name in BLOCKS
    shape: tuple[int, ...]  # of the array, not of its bytes
    produce: Callable[[], Iterator[npt.NDArray[Any]]] = field(repr=False)  # the data in order, as arrays of any shape
    role: str = ""  # what it holds, or holds a part of; empty for what is no weight

    @property
    def length(self) -> int:
        """Bytes of data."""
        elements, size = BLOCKS[self.dtype]
        return math.prod(self.shape) // elements * size


@dataclass(frozen=True)
class OutputFile:
    """One file of a checkpoint: ``tensors``, in the container its ending names, or, where there are none, ``text``.

    Attributes:
        metadata: what the header says beside the tensors, in the container's terms.
        notes: what a user should know of what is no weight and is not held, or held as nowhere else.
    """

    name: str
    tensors: tuple[PlannedTensor, ...] = ()
    text: str = ""
    metadata: Mapping[str, Any] = field(default_factory=lambda: {"format": "pt", "mtp_extract": __version__})
    notes: tuple[str, ...] = ()


def json_text(document: Mapping[str, Any]) -> str:
    """``document`` as every JSON file of a checkpoint is written."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plan_rows(
    name: str, role: str, weight: Weight, dtype: str, made: Callable[[int, int], Rows], shape: tuple[int, ...] = ()
) -> PlannedTensor:
    """A tensor of what is ``made`` of some rows ``[first, last)`` of ``weight`` at a time; of its shape by default."""
    return PlannedTensor(name, dtype, shape or weight.shape, lambda: (made(*rows) for rows in row_ranges(weight)), role)


def plan_array(name: str, array: npt.NDArray[Any], role: str = "") -> PlannedTensor:
    """A small array as it is."""
    dtype = next(name for name, dtype_known in ARRAYS.items() if dtype_known == array.dtype)
    return PlannedTensor(name, dtype, array.shape, lambda: iter([array]), role)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file of tensors at ``path``, checked against its size.

    Raises:
        CheckpointError: it is damaged, or another kind of file than its name says.
    """
    return gguf_file.read_gguf(path)[1] if path.suffix == ".gguf" else read_safetensors(path)[0]


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of the file at ``path``, checked against its size, and what its header says beside them.

    Raises:
        CheckpointError: not such a file, or one whose header contradicts itself or its size.
    """
    tensors = {}
    with refused(path, "not a safetensors file, or damaged: {}"), open_regular(path) as file:
        try:
            with safe_open(path, framework="numpy") as checked:
                metadata = dict(checked.metadata() or {})
        except SafetensorError as error:
            raise ValueError(error) from error
        start = 8 + int.from_bytes(file.read(8), "little")
        entries = parse_json(file.read(start - 8))
        entries.pop(_METADATA, None)
        for name, entry in entries.items():
            # The package takes a list of three for an entry, and passes over further keys.
            if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
                raise ValueError("an entry has other keys than a tensor's")
            begin, end = entry["data_offsets"]
            tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
    return tensors, metadata


def safetensors_header(places: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with; offsets of its tensors count from the header's end."""
    entries: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))}
    for name, tensor in places.items():
        ends = [tensor.offset, tensor.offset + tensor.length]
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": ends}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_file(folder: Path, file: OutputFile, advance: Advance = lambda done: None) -> dict[str, Any]:
    """Write ``file`` into ``folder`` and read it back; its size and SHA-256, as a record has them.

    Args:
        advance: called with the number of bytes written since the last call.

    Raises:
        OutputError: it cannot be written, or reads back differently.
        Interrupted: a signal came.
    """
    path = folder / file.name
    at = 0
    end = 0
    written = xxh3_128()
    places = dict[str, StoredTensor]()
    alignment, make_header = 1, safetensors_header
    if path.suffix == ".gguf":
        alignment, make_header = gguf_file.GGUF_ALIGNMENT, gguf_file.header
    for tensor in file.tensors:
        places[tensor.name] = StoredTensor(tensor.dtype, tensor.shape, end, tensor.length)
        end += aligned(tensor.length, alignment)
    # Lone surrogates, from names that are not UTF-8, cannot be written; they are shown as escapes instead.
    header = make_header(places, file.metadata) if places else file.text.encode("utf-8", "backslashreplace")
    expected = {name: replace(place, offset=len(header) + place.offset) for name, place in places.items()}
    with new_file(path, len(header) + end) as fd:
        for piece in chain([header], *(_data(tensor, alignment) for tensor in file.tensors)):
            written.update(piece)
            write_all(fd, piece, at)
            at += len(piece)
            advance(len(piece))
    check_interrupted()
    sum_read, sha256 = _sums(path)
    if sum_read != written.hexdigest() or (places and read_header(path) != expected):
        raise read_back_error(path)
    return {"size": at, "sha256": sha256}


def _data(tensor: PlannedTensor, alignment: int) -> Iterator[bytes | memoryview]:
    """The bytes of ``tensor``, and what fills them up."""
    written = 0
    for rows in tensor.produce():
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        written += len(data)
        yield data
    if written != tensor.length:
        raise OutputError(f"{escape(tensor.name)}: expected {tensor.length} bytes of data, found {written}.")
    yield bytes(-written % alignment)


def sha256_of_file(path: Path) -> str:
    """SHA-256 of the bytes of the file at ``path``."""
    return _sums(path)[1]


def _sums(path: Path) -> tuple[str, str]:
    """XXH3-128 and SHA-256 of the bytes of the file at ``path``."""
    quick, digest = xxh3_128(), hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_READ):
            quick.update(piece)
            digest.update(piece)
    return quick.hexdigest(), digest.hexdigest()
