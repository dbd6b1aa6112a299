"""Writing a large file: what is copied, what is made, and where it lies.

A file is planned as :class:`Piece` s, later ones over earlier ones, and each byte is written once: what is copied goes
from file to file in the kernel, so that memory does not depend on how large a file is.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path

from xxhash import xxh3_128

from mtp_extract.errors import OutputError
from mtp_extract.io.output import output_error, read_back_error, reserve, write_all
from mtp_extract.io.source import Advance, LocalSource, Source
from mtp_extract.io.threads import Job, Turns, cores, on_all_cores, run_all

Produce = Callable[[], Iterator[bytes | memoryview]]
Span = tuple[int, int]
"""Bytes of the file, ``[begin, end)``."""

# One writer at a time: two would spin on the file's lock in the kernel instead of computing.
_WRITING = threading.Lock()
_begin, _end = itemgetter(0), itemgetter(1)
_COPY = 1 << 24
_READ = 1 << 20


@dataclass(frozen=True)
class Piece:
    """``length`` bytes at ``at`` of what is written: a range of ``source``, what ``produce`` yields, or zeros."""

    at: int
    length: int
    source: Source | None = field(default=None, repr=False)
    offset: int = 0
    produce: Produce | None = field(default=None, repr=False)
    beside: object = None
    """Equal for pieces whose chunks are made in turn, because they are of one place; None for one by itself."""

    def moved(self, by: int) -> Piece:
        """The same piece further on."""
        return replace(self, at=self.at + by)


@dataclass(frozen=True)
class Laid:
    """A file, or a section of one: ``size`` bytes, as ``pieces`` have them, later ones over earlier ones."""

    size: int
    pieces: tuple[Piece, ...]


def copied(source: Source, offset: int, size: int) -> Laid:
    """A range of ``source`` as it is."""
    return Laid(size, (Piece(0, size, source=source, offset=offset),))


def made(at: int, data: bytes) -> Piece:
    """A piece of bytes that are at hand."""
    return Piece(at, len(data), produce=lambda: iter([data]))


class LaidSource(Source):
    """What is planned, to be read as if it were written."""

    def __init__(self, laid: Laid, name: str) -> None:
        self.name, self.size, self.provenance = name, laid.size, {}
        self.laid = laid
        self._made: dict[int, bytes] = {}

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        result = bytearray(length)
        for index, piece in enumerate(self.laid.pieces):
            begin, end = max(piece.at, offset), min(piece.at + piece.length, offset + length)
            if begin < end:
                result[begin - offset : end - offset] = self._part(index, piece, begin - piece.at, end - begin)
        return bytes(result)

    def _part(self, index: int, piece: Piece, start: int, count: int) -> bytes:
        if piece.source is not None:
            return piece.source.read(piece.offset + start, count)
        if piece.produce is None:
            return bytes(count)
        if index not in self._made:
            self._made[index] = b"".join(piece.produce())
        return self._made[index][start : start + count]


def write_laid(
    path: Path,
    laid: Laid,
    advance: Advance = lambda _: None,
    *,
    beside: Iterable[Callable[[], object]] = (),
    threads: int | None = None,
) -> list[str]:
    """Write the new file ``path``, read back what was made for it and compare.

    Args:
        beside: further jobs for the same threads.
        threads: to make pieces with; by default one for each core.

    Returns:
        Of each piece that was made, XXH3-128 (32 hex digits) of what of it was written.

    Raises:
        OutputError: it cannot be written, or reads back differently.
        SourceError: what is copied cannot be read.
    """
    # No byte is written twice, so that the order does not matter.
    placed = list(zip(laid.pieces, _shown(laid.pieces), strict=True))
    mine = [each for each in placed if each[0].source is None]
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            reserve(fd, laid.size)
            for piece, spans in placed:
                if piece.source is not None:
                    _copy(fd, piece, spans, advance)
            jobs: list[Job[str]] = [(_make(fd, *each, advance), each[0].length, each[0].beside) for each in mine]
            sums = on_all_cores([*jobs, *((_alone(job), 0, None) for job in beside)], threads)[: len(mine)]
            for source in {id(piece.source): piece.source for piece in laid.pieces if piece.source}.values():
                source.confirm()
        finally:
            os.close(fd)
        with LocalSource(path) as back, ThreadPoolExecutor(threads or cores()) as pool:
            checks = (partial(_reads_back, back, spans, own) for (_, spans), own in zip(mine, sums, strict=True))
            same = back.size == laid.size and all(run_all(pool, checks))
    except OSError as error:
        raise output_error(path, error) from error
    if not same:
        raise read_back_error(path)
    return sums


def check_copied(path: Path, laid: Laid) -> None:
    """Compare what :func:`write_laid` copied to ``path`` with what it was copied from.

    Raises:
        OutputError: they differ.
    """
    with LocalSource(path) as written:
        for piece, spans in zip(laid.pieces, _shown(laid.pieces), strict=True):
            if piece.source is not None:
                shift = piece.offset - piece.at
                for begin, end in spans:
                    for at, chunk in _chunks(written, begin, end):
                        if piece.source.read(at + shift, len(chunk)) != chunk:
                            raise read_back_error(path)


def _copy(fd: int, piece: Piece, spans: Sequence[Span], advance: Advance) -> None:
    assert piece.source is not None
    for begin, end in spans:
        for at in range(begin, end, _COPY):
            count = min(_COPY, end - at)
            piece.source.copy(piece.offset + at - piece.at, count, fd, at)
            advance(count)


def _make(fd: int, piece: Piece, spans: Sequence[Span], advance: Advance) -> Turns[str]:
    """Write what of ``piece`` is shown; its XXH3-128."""
    digest = xxh3_128()
    for at, chunk in _made(piece, spans):
        digest.update(chunk)
        with _WRITING:
            write_all(fd, chunk, at)
        advance(len(chunk))
        yield
    return digest.hexdigest()


def _alone(job: Callable[[], object]) -> Turns[str]:
    job()
    yield
    return ""


def _made(piece: Piece, spans: Sequence[Span]) -> Iterator[tuple[int, bytes | memoryview]]:
    """What of ``piece`` is shown, and where."""
    at, end = piece.at, piece.at + piece.length
    if piece.produce is None or spans != [(at, end)]:
        with LaidSource(Laid(end, (piece,)), "what is made") as alone:
            for span in spans:
                yield from _chunks(alone, *span)
        return
    for chunk in piece.produce():
        yield at, chunk
        at += len(chunk)
    if at != end:
        raise OutputError(f"produced {at - piece.at} bytes for byte {piece.at}, planned {piece.length}.")


def _reads_back(written: Source, spans: Sequence[Span], expected: str) -> bool:
    digest = xxh3_128()
    for span in spans:
        for _, chunk in _chunks(written, *span):
            digest.update(chunk)
    return digest.hexdigest() == expected


def _chunks(source: Source, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    for at in range(begin, end, _READ):
        yield at, source.read(at, min(_READ, end - at))


def _shown(pieces: Sequence[Piece]) -> list[list[Span]]:
    """Of each piece, the ranges that no later one lies over."""
    covered: list[Span] = []
    found: list[list[Span]] = []
    for piece in reversed(pieces):
        at, end = piece.at, piece.at + piece.length
        over = slice(bisect_right(covered, at, key=_end), bisect_left(covered, end, key=_begin))
        edges = [at, *chain.from_iterable(covered[over]), end]
        found.append([span for span in zip(edges[::2], edges[1::2], strict=True) if span[0] < span[1]])
        if at < end:
            covered[over] = [(min(at, edges[1]), max(end, edges[-2]))]
    return found[::-1]
