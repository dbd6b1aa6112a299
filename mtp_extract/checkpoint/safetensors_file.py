"""safetensors: u64 little-endian length of a JSON header, the header (padded with spaces to a multiple of 8), then the
data of all tensors without gaps.

The ``safetensors`` package does not write: it wants every tensor in memory and orders metadata keys differently from
run to run. It reads the header of what was written, as a reader that shares no code with the writer.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from mtp_extract.checkpoint.json_file import parse_json
from mtp_extract.checkpoint.planned import DTYPE_SIZES, PlannedTensor
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.io.files import open_regular

_LONGEST_HEADER = 100_000_000
_LARGEST = 1 << 63


ALIGNMENT = 1
"""Tensors follow each other without gaps."""


def header(tensors: Sequence[PlannedTensor], metadata: Mapping[str, str]) -> bytes:
    """What a file of ``tensors`` begins with."""
    entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for tensor in tensors:
        places = [at, at := at + tensor.length]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": places}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of the file at ``path``, checked against its size.

    Raises:
        CheckpointError: not such a file, or one whose header contradicts its size.
    """
    return _read(path)[0]


def witnessed(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor of the file at ``path``, as the ``safetensors`` package reads them.

    Raises:
        CheckpointError: it cannot read the file.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            seen = {name: file.get_slice(name) for name in file.offset_keys()}
            return {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in seen.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{escape(path)}: the safetensors package cannot read it: {error}.") from error


def read_metadata(path: Path) -> dict[str, str]:
    """What the header of the file at ``path`` says beside its tensors.

    Raises:
        CheckpointError: as for the tensors, or it is no text.
    """
    found = _read(path)[1]
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError(f"{escape(path)}: its safetensors header is damaged.")
    return found


def _read(path: Path) -> tuple[dict[str, StoredTensor], Any]:
    """The tensors, and what is said beside them."""
    try:
        size = path.stat().st_size
        length, entries = _read_json(path, size)
        metadata = entries.pop("__metadata__", {})
        tensors = {name: _described(entry, 8 + length) for name, entry in entries.items()}
    except OSError as error:
        raise CheckpointError(f"{escape(path)}: cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{escape(path)}: its safetensors header is damaged.") from error
    at = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        expected = math.prod(tensor.shape) * DTYPE_SIZES.get(tensor.dtype, -1)
        if tensor.offset != at or tensor.length != expected or tensor.length < 0:
            raise CheckpointError(f"{escape(path)}: its header gives {escape(name)} a place or a size that cannot be.")
        at += tensor.length
    if at != size:
        raise CheckpointError(f"{escape(path)}: it has {size} bytes, its header describes {at}.")
    return tensors, metadata


def _described(entry: Mapping[str, Any], start: int) -> StoredTensor:
    """What the header says of one tensor, where data begin at ``start``.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: something else than the format asks for.
    """
    if entry.keys() != {"dtype", "shape", "data_offsets"} or not isinstance(entry["dtype"], str):
        raise ValueError(entry)
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    # In JSON 0.5, true and "4" would pass for integers.
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < _LARGEST for n in (*shape, begin, end)):
        raise ValueError(entry)
    return StoredTensor(entry["dtype"], tuple(shape), start + begin, end - begin)


def _read_json(path: Path, size: int) -> tuple[int, dict[str, Any]]:
    """The header's length, and its content."""
    with open_regular(path) as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise CheckpointError(f"{escape(path)}: not a safetensors file (its header claims {length} bytes).")
        entries: dict[str, Any] = parse_json(file.read(length))
    return length, entries
