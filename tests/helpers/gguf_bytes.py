"""GGUF files made field by field, to be right or wrong in one place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Entry", "Info", "array", "entry", "gguf_bytes", "number", "text"]

Entry = bytes


def text(value: str | bytes) -> bytes:
    """A string with its length."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def number(value: int) -> bytes:
    """A value of type UINT32, with its type."""
    return struct.pack("<II", 4, value)


def array(kind: int, count: int, data: bytes) -> bytes:
    """A value that is a list, with its type."""
    return struct.pack("<IIQ", 9, kind, count) + data


def entry(key: str, value: bytes) -> Entry:
    """A key and its value."""
    return text(key) + value


@dataclass(frozen=True)
class Info:
    """A tensor as the header describes it: dimensions shortest stride first."""

    name: str
    dimensions: tuple[int, ...]
    kind: int = 0
    offset: int = 0

    def __bytes__(self) -> bytes:
        sizes = struct.pack(f"<I{len(self.dimensions)}Q", len(self.dimensions), *self.dimensions)
        return text(self.name) + sizes + struct.pack("<IQ", self.kind, self.offset)


def gguf_bytes(
    entries: Sequence[Entry] = (),
    tensors: Sequence[Info] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file; ``counts`` are those of tensors and of entries, if not the true ones."""
    head = magic + struct.pack("<IQQ", version, *(counts or (len(tensors), len(entries))))
    head += b"".join(entries) + b"".join(map(bytes, tensors))
    return head + bytes(-len(head) % alignment) + data
