"""safetensors: u64 little-endian length of a JSON header, the header (padded with spaces to a multiple of 8), then the
data of all tensors without gaps.

The ``safetensors`` package does not write: it wants every tensor in memory and orders metadata keys differently from
run to run. It checks every header that is read, ours too, and shares no code with the writer; it does not say where
data lie, and of a key that stands there twice it takes the last.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mtp_extract.checkpoint.documents import parse_json
from mtp_extract.checkpoint.planned import PlannedTensor
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.io.files import open_regular

ALIGNMENT = 1
"""Tensors follow each other without gaps."""

_METADATA = "__metadata__"
_KEYS = {"dtype", "shape", "data_offsets"}


def header(tensors: Sequence[PlannedTensor], metadata: Mapping[str, str]) -> bytes:
    """What a file of ``tensors`` begins with."""
    entries: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))}
    at = 0
    for tensor in tensors:
        places = [at, at := at + tensor.length]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": places}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file at ``path``; as :func:`read_file`."""
    return read_file(path)[0]


def read_file(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of the file at ``path``, checked against its size, and what its header says beside them.

    Raises:
        CheckpointError: not such a file, or one whose header contradicts itself or its size.
    """
    try:
        with open_regular(path) as file:
            with safe_open(path, framework="numpy") as checked:
                metadata = dict(checked.metadata() or {})
            start = 8 + int.from_bytes(file.read(8), "little")
            entries = parse_json(file.read(start - 8))
        entries.pop(_METADATA, None)
        # The package takes a list of three for an entry, and passes over further keys.
        if any(not isinstance(entry, dict) or entry.keys() != _KEYS for entry in entries.values()):
            raise ValueError("an entry has other keys than a tensor's")
    except OSError as error:
        raise CheckpointError(f"{escape(path)}: cannot be read: {error.strerror}.") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{escape(path)}: not a safetensors file, or damaged: {escape(error)}. Extract or fetch it again."
        ) from error
    tensors = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
    return tensors, metadata
