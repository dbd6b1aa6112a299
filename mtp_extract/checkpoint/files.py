"""Files of a checkpoint: written piece by piece, read back and compared.

What the header of a file of tensors looks like is its container's affair, which is known by the file's ending. The
data follow it in the order of the tensors; the bytes depend on the input alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from xxhash import xxh3_128

from mtp_extract.checkpoint import gguf_file, safetensors_file
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import OutputError, escape
from mtp_extract.io.files import aligned, new_file, open_regular, read_back_error, write_all
from mtp_extract.io.source import Advance
from mtp_extract.io.threads import check_interrupted

_CONTAINERS = MappingProxyType({".safetensors": safetensors_file, ".gguf": gguf_file})
"""Each kind of file that holds tensors, by the ending of its name: ``header``, ``ALIGNMENT``, ``read_header``."""

_READ = 1 << 18


def holds_tensors(name: str | Path) -> bool:
    """Whether the file of that name is one of tensors."""
    return Path(name).suffix in _CONTAINERS


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file of tensors at ``path``, checked against its size.

    Raises:
        CheckpointError: it is damaged, or another kind of file than its name says.
    """
    found: dict[str, StoredTensor] = _CONTAINERS[path.suffix].read_header(path)
    return found


def sha256_of_file(path: Path) -> str:
    """SHA-256 of the bytes of the file at ``path``."""
    return _sums(path)[1]


def write_file(folder: Path, file: OutputFile, advance: Advance = lambda done: None) -> dict[str, Any]:
    """Write ``file`` into ``folder`` and read it back; its size and SHA-256, as a record has them.

    Args:
        advance: called with the number of bytes written since the last call.

    Raises:
        OutputError: it cannot be written, or reads back differently.
        Interrupted: a signal came.
    """
    path, at, written = folder / file.name, 0, xxh3_128()
    container = _CONTAINERS[path.suffix] if file.tensors else None
    # Lone surrogates, from names that are not UTF-8, cannot be written; they are shown as escapes instead.
    text = file.text.encode("utf-8", "backslashreplace")
    header = container.header(file.tensors, file.metadata) if container else text
    alignment, size = container.ALIGNMENT if container else 1, len(header)
    places: dict[str, StoredTensor] = {}
    for tensor in file.tensors:
        places[tensor.name] = StoredTensor(tensor.dtype, tensor.shape, size, tensor.length)
        size += aligned(tensor.length, alignment)
    with new_file(path, size) as fd:
        for piece in chain([header], *(_data(tensor, alignment) for tensor in file.tensors)):
            written.update(piece)
            write_all(fd, piece, at)
            at += len(piece)
            advance(len(piece))
    check_interrupted()
    found, sha256 = _sums(path)
    if found != written.hexdigest() or (places and read_header(path) != places):
        raise read_back_error(path)
    return {"size": size, "sha256": sha256}


def _data(tensor: PlannedTensor, alignment: int) -> Iterator[bytes | memoryview]:
    """The bytes of ``tensor``, and what fills them up."""
    made = 0
    for rows in tensor.produce():
        data = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        made += len(data)
        yield data
    if made != tensor.length:
        raise OutputError(f"{escape(tensor.name)}: expected {tensor.length} bytes of data, found {made}.")
    yield bytes(-made % alignment)


def _sums(path: Path) -> tuple[str, str]:
    """XXH3-128 and SHA-256 of the bytes of the file at ``path``."""
    quick, digest = xxh3_128(), hashlib.sha256()
    with open_regular(path) as file:
        while piece := file.read(_READ):
            quick.update(piece)
            digest.update(piece)
    return quick.hexdigest(), digest.hexdigest()
