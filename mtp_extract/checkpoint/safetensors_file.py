"""safetensors: u64 little-endian length of a JSON header, the header (padded with spaces to a multiple of 8), then the
data of all tensors without gaps.

The ``safetensors`` package checks every header that is read, ours included. It is not used for writing: it needs every
tensor in memory, and its order of metadata keys varies between runs. It does not tell where data lie, and accepts a
key that occurs twice, so the header is parsed here, too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mtp_extract.checkpoint.documents import parse_json, report_damage
from mtp_extract.checkpoint.stored import TensorPlace
from mtp_extract.io.files import open_regular

_METADATA = "__metadata__"


def read_safetensors(path: Path) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """Read the places of tensors, checked against the file's size, and the metadata of the file at ``path``.

    Raises:
        CheckpointError: not a safetensors file, or a header that contradicts itself or the file's size.
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
            # The package accepts a list of three as an entry, and ignores further keys.
            if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
                raise ValueError("an entry has other keys than a tensor's")
            begin, end = entry["data_offsets"]
            tensors[name] = TensorPlace(entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
    return tensors, metadata


def build_safetensors_header(places: Mapping[str, TensorPlace], metadata: Mapping[str, str]) -> bytes:
    """Build the header of a file; offsets in ``places`` count from the header's end."""
    entries: dict[str, object] = {_METADATA: dict(sorted(metadata.items()))}
    for name, tensor in places.items():
        ends = [tensor.offset, tensor.offset + tensor.length]
        entries[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": ends}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
