"""safetensors: u64 little-endian length of a JSON header, the header (padded with spaces to a multiple of 8), then the
data of all tensors without gaps.

The ``safetensors`` package does not write: it wants every tensor in memory and orders metadata keys differently from
run to run. It is the witness of what was written: it reads the header alone, refuses one whose tensors do not follow
each other without gaps to the end of the file, and so says where each lies.
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
from mtp_extract.checkpoint.planned import DTYPE_SIZES, Layout, PlannedTensor
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.io.regular import open_regular

_LONGEST_HEADER = 100_000_000
_LARGEST = 1 << 63


class Safetensors:
    """The container of ``.safetensors``; metadata are strings by name."""

    def lay_out(self, tensors: Sequence[PlannedTensor], metadata: Mapping[str, Any]) -> Layout:
        entries: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
        offsets: dict[str, int] = {}
        at = 0
        for tensor in tensors:
            offsets[tensor.name] = at
            entries[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.length],
            }
            at += tensor.length
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        return Layout(header, {name: len(header) + offset for name, offset in offsets.items()}, len(header) + at)

    def read_header(self, path: Path) -> dict[str, StoredTensor]:
        try:
            size = path.stat().st_size
            length, entries = _read_json(path, size)
            tensors = {name: _described(entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"}
        except OSError as error:
            raise CheckpointError(f"{escape(path)}: cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{escape(path)}: its safetensors header is damaged.") from error
        at = 8 + length
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            elements = math.prod(tensor.shape)
            expected = elements * DTYPE_SIZES.get(tensor.dtype, -1)
            if tensor.offset != at or tensor.length != expected or tensor.length < 0:
                raise CheckpointError(
                    f"{escape(path)}: its header gives {escape(name)} a place or a size that cannot be."
                )
            at += tensor.length
        if at != size:
            raise CheckpointError(f"{escape(path)}: it has {size} bytes, its header describes {at}.")
        return tensors

    def witnessed(self, path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
        try:
            with safe_open(path, framework="numpy") as file:
                seen = {name: file.get_slice(name) for name in file.offset_keys()}
                return {name: (tensor.get_dtype(), tuple(tensor.get_shape())) for name, tensor in seen.items()}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{escape(path)}: the safetensors package cannot read it: {error}.") from error

    def read_metadata(self, path: Path) -> dict[str, str]:
        self.read_header(path)
        found = _read_json(path, path.stat().st_size)[1].get("__metadata__", {})
        if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
            raise CheckpointError(f"{escape(path)}: its safetensors header is damaged.")
        return found


CONTAINER = Safetensors()


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
