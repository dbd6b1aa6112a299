"""Writing a file of tensors without ever holding one, reading back what was written, and comparing.

What the header of such a file looks like is its container's affair, which is known by the file's ending; the data
follow it, each tensor where its header says. A few threads each produce, sum and write one tensor after the other, and
the bytes depend on the input alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.checkpoint import gguf_file, safetensors_file
from mtp_extract.checkpoint.planned import Container, OutputFile, PlannedTensor
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.io.laid import Laid, Piece, made, write_laid
from mtp_extract.io.output import output_error, read_back_error
from mtp_extract.io.regular import open_regular
from mtp_extract.io.source import Advance
from mtp_extract.io.threads import run_all, workers

_CONTAINERS: Mapping[str, Container] = MappingProxyType(
    {".safetensors": safetensors_file.CONTAINER, ".gguf": gguf_file.CONTAINER}
)
"""Each kind of file that holds tensors, by the ending of its name."""


def container_of(name: str | Path) -> Container:
    """How the file of that name holds its tensors.

    Raises:
        CheckpointError: its ending is that of no such file.
    """
    found = _CONTAINERS.get(Path(name).suffix)
    if found is None:
        raise CheckpointError(f"{escape(name)}: expected a file of tensors ({', '.join(_CONTAINERS)}), found another.")
    return found


def holds_tensors(name: str | Path) -> bool:
    """Whether the file of that name is one of tensors."""
    return Path(name).suffix in _CONTAINERS


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file at ``path``, checked against its size.

    Raises:
        CheckpointError: it is damaged, or another kind of file than its name says.
    """
    return container_of(path).read_header(path)


def read_metadata(path: Path) -> Mapping[str, Any]:
    """What the header of the file at ``path`` says beside its tensors.

    Raises:
        CheckpointError: it is damaged, or another kind of file than its name says.
    """
    return container_of(path).read_metadata(path)


def write_tensors(folder: Path, file: OutputFile, advance: Advance = lambda _: None) -> dict[str, str]:
    """Write ``file`` into ``folder``, read it back, and return the XXH3-128 (32 hex digits) of each tensor's data.

    Raises:
        OutputError: the file cannot be written, or reads back differently.
    """
    path, tensors, container = folder / file.name, file.tensors, container_of(file.name)
    layout = container.lay_out(tensors, file.metadata)
    pieces = [Piece(layout.offsets[t.name], t.length, produce=partial(_bytes, t)) for t in tensors]
    try:
        path.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise output_error(path, error) from error
    laid = Laid(layout.size, (made(0, layout.header), *pieces))
    sums = write_laid(path, laid, advance, threads=workers())
    if list(container.witnessed(path).items()) != [(t.name, (t.dtype, t.shape)) for t in tensors]:
        raise read_back_error(path)
    return dict(zip((tensor.name for tensor in tensors), sums, strict=True))


def _bytes(tensor: PlannedTensor) -> Iterator[memoryview]:
    for chunk in tensor.produce():
        yield np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data


def differing(path: Path, stored: Mapping[str, StoredTensor], planned: Sequence[PlannedTensor]) -> list[str]:
    """Names of the tensors of the file at ``path`` whose bytes are not those that ``planned`` produces."""
    different: list[str] = []
    with open_regular(path) as file, ThreadPoolExecutor(workers()) as pool:

        def compare(tensor: PlannedTensor) -> None:
            at = stored[tensor.name].offset
            for chunk in tensor.produce():
                data = chunk.tobytes()
                if os.pread(file.fileno(), len(data), at) != data:
                    different.append(tensor.name)
                    return
                at += len(data)

        run_all(pool, [partial(compare, tensor) for tensor in planned])
    return different
