"""Writing a large file: what is copied, what is put over it, and what is made.

A file is planned as :class:`Piece` s. What is copied, given bytes and zeros are written in order, later ones over
earlier ones, a MiB at a time. Then all cores make the rest, each piece in chunks; where such a piece lies, nothing that
is planned later may lie. At the end the file is opened as any other and compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from xxhash import xxh3_128

from mtp_extract.errors import OutputError
from mtp_extract.io.files import new_file, read_back_error, write_all
from mtp_extract.io.source import Advance, LocalSource, Source
from mtp_extract.io.threads import Job, Turns, on_all_cores

Produce = Callable[[], Iterator[bytes | memoryview]]
Span = tuple[int, int]
"""Bytes of the file, ``[begin, end)``."""

# One writer at a time: two would spin on the file's lock in the kernel instead of computing.
_WRITING = threading.Lock()
_READ = 1 << 20


@dataclass(frozen=True)
class Piece:
    """``length`` bytes at ``at`` of a file: a range of ``source``, ``data``, what ``produce`` yields, or zeros."""

    at: int
    length: int
    source: Source | None = field(default=None, repr=False)
    offset: int = 0
    data: bytes | None = field(default=None, repr=False)
    produce: Produce | None = field(default=None, repr=False)
    table: object = None
    """Equal for pieces whose chunks are made in turn, because they are columns of one; None for one by itself."""

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
    """What is planned, to be read as if it were written; zeros in place of what is still to be made."""

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


def write_laid(path: Path, laid: Laid, advance: Advance = lambda _: None) -> None:
    """Write the new file ``path``, read it back and compare.

    Raises:
        OutputError: it cannot be written, or reads back differently.
        SourceError: what is copied cannot be read.
    """
    own = [piece for piece in laid.pieces if piece.produce is not None]
    given = Laid(laid.size, tuple(piece for piece in laid.pieces if piece.produce is None))
    spans = sorted((piece.at, piece.end) for piece in own)
    with new_file(path, laid.size) as fd:
        for piece in given.pieces:
            _copy(fd, piece, advance)
        sums = on_all_cores(Job(_make(fd, piece, advance), piece.length, piece.table) for piece in own)
    with LocalSource(path) as back:
        made_parts = (_reads_back(back, piece, digest) for piece, digest in zip(own, sums, strict=True))
        same = all(on_all_cores(Job(check) for check in (_is_as_given(back, given, spans), *made_parts)))
    if not same:
        raise read_back_error(path)


def _copy(fd: int, piece: Piece, advance: Advance) -> None:
    """Write a piece that is copied or given."""
    if piece.source is not None:
        # Of a remote file, one request.
        piece.source.prefetch(piece.offset, piece.length)
    for at in range(piece.at, piece.end, _READ):
        data = _part(piece, at - piece.at, min(_READ, piece.end - at))
        write_all(fd, data, at)
        advance(len(data))


def _make(fd: int, piece: Piece, advance: Advance) -> Turns[str]:
    """Make ``piece`` and write it; its XXH3-128."""
    assert piece.produce is not None
    digest, at = xxh3_128(), piece.at
    for chunk in piece.produce():
        digest.update(chunk)
        with _WRITING:
            write_all(fd, chunk, at)
        at += len(chunk)
        advance(len(chunk))
        yield
    if at != piece.end:
        raise OutputError(f"produced {at - piece.at} bytes for byte {piece.at}, planned {piece.length}.")
    return digest.hexdigest()


def _reads_back(written: Source, piece: Piece, expected: str) -> Turns[bool]:
    digest = xxh3_128()
    for at in range(piece.at, piece.end, _READ):
        digest.update(written.read(at, min(_READ, piece.end - at)))
        yield
    return digest.hexdigest() == expected


def _is_as_given(written: Source, given: Laid, made_spans: list[Span]) -> Turns[bool]:
    """Whether ``written`` is ``given`` everywhere but in ``made_spans``, which are in order."""
    planned = LaidSource(given, written.name)
    edges = [0, *(edge for span in made_spans for edge in span), given.size]
    for begin, end in zip(edges[::2], edges[1::2], strict=True):
        for at in range(begin, end, _READ):
            yield
            count = min(_READ, end - at)
            if written.read(at, count) != planned.read(at, count):
                return False
    return written.size == given.size
