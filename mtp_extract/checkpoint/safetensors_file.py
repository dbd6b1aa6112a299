"""safetensors: u64 little-endian length of a JSON header, the header (padded with spaces to a multiple of 8), then the
data of all tensors without gaps.

The ``safetensors`` package does not write: it wants every tensor in memory and orders metadata keys differently from
run to run. It checks every header that is read, ours too, and shares no code with the writer; it does not say where
data lie, and of a key that stands there twice it takes the last.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mtp_extract.checkpoint.documents import parse_json, report_damage
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.io.files import open_regular

_METADATA = "__metadata__"


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of the file at ``path``, checked against its size, and what its header says beside them.

    Raises:
        CheckpointError: not such a file, or one whose header contradicts itself or its size.
    """
    tensors = {}
    with report_damage(path, "not a safetensors file, or damaged: {}"), open_regular(path) as file:
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


def build_safetensors_header(places: Mapping[str, StoredTensor], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with; offsets of its tensors count from the header's end."""
    entries: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))}
    for name, tensor in places.items():
        ends = [tensor.offset, tensor.offset + tensor.length]
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": ends}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
