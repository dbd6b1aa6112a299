"""Writing a large file: what is copied, what is put over it, and what is made.

A file is planned as :class:`Piece` s, which are written in order, later ones over earlier ones, a MiB at a time. Then
all cores make the rest and write it where it goes. At the end the file is opened as any other and compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from mtp_extract.io.files import new_file, read_back_error, write_all
from mtp_extract.io.source import Advance, LocalSource, Source
from mtp_extract.io.threads import on_all_cores

Put = Callable[[int, bytes | memoryview], None]
"""Writes bytes at a place of the file."""
Span = tuple[int, int]
"""Bytes of the file, ``[begin, end)``."""

# One writer at a time: two would spin on the file's lock in the kernel instead of computing.
_WRITING = threading.Lock()
_READ = 1 << 20


@dataclass(frozen=True)
class Piece:
    """``length`` bytes at ``at`` of a file: a range of ``source``, ``data``, or zeros."""

    at: int
    length: int
    source: Source | None = field(default=None, repr=False)
    offset: int = 0
    data: bytes | None = field(default=None, repr=False)

    @property
    def end(self) -> int:
        """Where it ends."""
        return self.at + self.length

    def moved(self, by: int) -> Piece:
        """The same piece further on."""
        return replace(self, at=self.at + by)


@dataclass(frozen=True)
class Laid:
    """A file, or a section of one: ``size`` bytes, as ``pieces`` have them, zeros where there is none."""

    size: int
    pieces: tuple[Piece, ...]


def copied(source: Source, offset: int, size: int) -> Laid:
    """A range of ``source`` as it is."""
    return Laid(size, (Piece(0, size, source=source, offset=offset),))


def made(at: int, data: bytes) -> Piece:
    """A piece of bytes that are at hand."""
    return Piece(at, len(data), data=data)


class LaidSource(Source):
    """What is planned, to be read as if it were written."""

    def __init__(self, laid: Laid, name: str) -> None:
        self.name, self.size, self.provenance = name, laid.size, {}
        self.laid = laid

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        result = bytearray(length)
        for piece in self.laid.pieces:
            begin, end = max(piece.at, offset), min(piece.end, offset + length)
            if begin < end:
                result[begin - offset : end - offset] = _part(piece, begin - piece.at, end - begin)
        return bytes(result)


def _part(piece: Piece, start: int, count: int) -> bytes:
    if piece.source is not None:
        return piece.source.read(piece.offset + start, count)
    return bytes(count) if piece.data is None else piece.data[start : start + count]


def write_laid(
    path: Path, laid: Laid, advance: Advance = lambda _: None, fill: Callable[[Put], None] = lambda _: None
) -> None:
    """Write the new file ``path``, read it back and compare.

    Args:
        fill: writes what is made, over the rest, by the function that it is given, from any thread.

    Raises:
        OutputError: it cannot be written, or reads back differently.
        SourceError: what is copied cannot be read.
    """
    filled: list[tuple[int, int, str]] = []
    with new_file(path, laid.size) as fd:
        for piece in laid.pieces:
            _copy(fd, piece, advance)

        def put(at: int, data: bytes | memoryview) -> None:
            with _WRITING:
                write_all(fd, data, at)
            filled.append((at, at + len(data), xxh3_128_hexdigest(data)))
            advance(len(data))

        fill(put)
    planned = LaidSource(laid, str(path))
    filled.sort()
    edges = [0, *(edge for begin, end, _ in filled for edge in (begin, end)), laid.size]
    rest = [(at, min(at + _READ, end)) for begin, end in _pairs(edges) for at in range(begin, end, _READ)]
    with LocalSource(path) as back:
        same = on_all_cores(lambda span: _read(back, *span) == _read(planned, *span), rest)
        same += on_all_cores(lambda entry: xxh3_128_hexdigest(_read(back, *entry[:2])) == entry[2], filled)
        if not all(same) or back.size != laid.size:
            raise read_back_error(path)


def _pairs(edges: list[int]) -> Iterator[Span]:
    return zip(edges[::2], edges[1::2], strict=True)


def _read(source: Source, begin: int, end: int) -> bytes:
    return source.read(begin, end - begin)


def _copy(fd: int, piece: Piece, advance: Advance) -> None:
    """Write a piece that is copied or given."""
    if piece.source is not None:
        # Of a remote file, one request.
        piece.source.prefetch(piece.offset, piece.length)
    for at in range(piece.at, piece.end, _READ):
        data = _part(piece, at - piece.at, min(_READ, piece.end - at))
        write_all(fd, data, at)
        advance(len(data))
