"""Writes the files of a checkpoint piece by piece and reads them back. Their bytes depend on the input alone."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from mtp_extract._version import __version__
from mtp_extract.checkpoint.dtypes import ARRAYS, BLOCKS
from mtp_extract.checkpoint.gguf_file import GGUF_ALIGNMENT, build_gguf_header, read_gguf
from mtp_extract.checkpoint.safetensors_file import build_safetensors_header, read_safetensors
from mtp_extract.checkpoint.stored import TensorPlace
from mtp_extract.checkpoint.weight import Rows, Weight, split_rows
from mtp_extract.errors import OutputError, escape
from mtp_extract.io.files import align_up, create_file, make_read_back_error, open_regular, write_all
from mtp_extract.io.threads import check_interrupted

_READ = 1 << 18


@dataclass(frozen=True)
class Container:
    """A file type for tensors: a header with their places, then their data, one after another."""

    read_tensors: Callable[[Path], Mapping[str, TensorPlace]]  # raises CheckpointError if the header is damaged
    # Builds the header of (tensors whose offsets count from the header's end, metadata).
    make_header: Callable[[Mapping[str, TensorPlace], Mapping[str, Any]], bytes]
    alignment: int = 1  # every tensor begins at a multiple of this many bytes


CONTAINERS = {
    ".safetensors": Container(lambda path: read_safetensors(path)[0], build_safetensors_header),
    ".gguf": Container(lambda path: read_gguf(path)[1], build_gguf_header, GGUF_ALIGNMENT),
}
"""Ending of a file's name → its type."""

TENSOR_FILES = tuple(CONTAINERS)
"""Endings of the names of files with tensors."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written."""

    name: str
    dtype: str  # a name in BLOCKS
    shape: tuple[int, ...]  # of the array, not of its stored bytes
    produce: Callable[[], Iterator[npt.NDArray[Any]]] = field(repr=False)  # the data in order, in arrays of any shape

    @property
    def length(self) -> int:
        """Bytes of data."""
        elements, size = BLOCKS[self.dtype]
        return math.prod(self.shape) // elements * size


@dataclass(frozen=True)
class OutputFile:
    """A file of a checkpoint: it holds ``tensors``, in the container that its name ends in, or ``text``.

    Attributes:
        metadata: further entries of the header, in the container's terms.
        notes: for the user, on settings that the file cannot hold, or holds in a way of its own.
    """

    name: str
    tensors: tuple[PlannedTensor, ...] = ()
    text: str = ""
    metadata: Mapping[str, Any] = field(default_factory=lambda: {"format": "pt", "mtp_extract": __version__})
    notes: tuple[str, ...] = ()


def format_json(document: Mapping[str, Any]) -> str:
    """Format ``document`` as every JSON file of a checkpoint is written."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plan_rows(
    name: str, weight: Weight, dtype: str, produce_rows: Callable[[int, int], Rows], shape: tuple[int, ...] = ()
) -> PlannedTensor:
    """Plan a tensor whose rows ``produce_rows(first, last)`` returns; its shape is that of ``weight`` by default."""
    return PlannedTensor(name, dtype, shape or weight.shape, lambda: (produce_rows(*r) for r in split_rows(weight)))


def plan_array(name: str, array: npt.NDArray[Any]) -> PlannedTensor:
    """Plan a small array, stored as it is."""
    dtype = next(name for name, array_type in ARRAYS.items() if array_type == array.dtype)
    return PlannedTensor(name, dtype, array.shape, lambda: iter([array]))


def write_file(folder: Path, file: OutputFile, advance: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """Write ``file`` into ``folder`` and read it back. Return its size and SHA-256 for the record.

    Args:
        advance: called with the number of bytes written since the last call.

    Raises:
        OutputError: the file cannot be written, or reads back differently.
        Interrupted: a signal came.
    """
    path = folder / file.name
    container = CONTAINERS[path.suffix] if file.tensors else None
    alignment = container.alignment if container else 1
    places, data_size = _place_tensors(file.tensors, alignment)
    if container:
        header = container.make_header(places, file.metadata)
    else:
        # Lone surrogates, from names that are not UTF-8, cannot be encoded; they become escapes.
        header = file.text.encode("utf-8", "backslashreplace")

    data = (piece for tensor in file.tensors for piece in _produce_bytes(tensor, alignment))
    written = _write_pieces(path, chain([header], data), len(header) + data_size, advance)
    check_interrupted()

    sum_read, sha256 = _compute_sums(path)
    expected = {name: replace(place, offset=len(header) + place.offset) for name, place in places.items()}
    if sum_read != written or (container and container.read_tensors(path) != expected):
        raise make_read_back_error(path)
    return {"size": len(header) + data_size, "sha256": sha256}


def _write_pieces(path: Path, pieces: Iterable[bytes | memoryview], size: int, advance: Callable[[int], None]) -> str:
    """Write a file of ``size`` bytes. Return their XXH3-128."""
    offset = 0
    digest = xxh3_128()
    with create_file(path, size) as descriptor:
        for piece in pieces:
            digest.update(piece)
            write_all(descriptor, piece, offset)
            offset += len(piece)
            advance(len(piece))
    return digest.hexdigest()


def _place_tensors(tensors: Sequence[PlannedTensor], alignment: int) -> tuple[dict[str, TensorPlace], int]:
    """Return each tensor's place, with offsets from the header's end, and the bytes of all data."""
    places = dict[str, TensorPlace]()
    end = 0
    for tensor in tensors:
        places[tensor.name] = TensorPlace(tensor.dtype, tensor.shape, end, tensor.length)
        end += align_up(tensor.length, alignment)
    return places, end


def _produce_bytes(tensor: PlannedTensor, alignment: int) -> Iterator[bytes | memoryview]:
    written = 0
    for rows in tensor.produce():
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        written += len(data)
        yield data
    if written != tensor.length:
        raise OutputError(f"{escape(tensor.name)}: expected {tensor.length} bytes of data, found {written}.")
    yield bytes(-written % alignment)


def compute_sha256(path: Path) -> str:
    """Return the SHA-256 of the file at ``path``."""
    return _compute_sums(path)[1]


def _compute_sums(path: Path) -> tuple[str, str]:
    """XXH3-128 and SHA-256."""
    xxh3 = xxh3_128()
    sha256 = hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_READ):
            xxh3.update(piece)
            sha256.update(piece)
    return xxh3.hexdigest(), sha256.hexdigest()
