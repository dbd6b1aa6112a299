"""A file put together from parts of others; and writing a large file: copied, written over, read back, compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from mtp_extract.io.files import new_file, read_back_error, write_all
from mtp_extract.io.source import Advance, LocalSource, Region, Source
from mtp_extract.io.threads import on_all_cores

Put = Callable[[int, bytes | memoryview], None]
"""Writes bytes at a place of the file."""
Span = tuple[int, int]
"""Bytes of the file, ``[begin, end)``."""

_READ = 1 << 20


class Assembled(Source):
    """A file of ``size`` bytes put together from parts of other sources; it is not written anywhere.

    Args:
        pieces: where each begins, and the region that lies there; a later piece covers an earlier one, and zeros lie
            where there is none.
    """

    def __init__(self, name: str, size: int, pieces: Iterable[tuple[int, Region]]) -> None:
        self.name, self.size, self.provenance, self.pieces = name, size, {}, tuple(pieces)

    def _parts(self, offset: int, length: int) -> list[tuple[int, Source, int, int]]:
        """The parts of pieces that lie in a range: where in the range, their source, their offset in it, their size."""
        parts = []
        for at, piece in self.pieces:
            begin, end = max(at, offset), min(at + piece.size, offset + length)
            if begin < end:
                parts.append((begin - offset, piece.source, piece.begin + begin - at, end - begin))
        return parts

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        parts = self._parts(offset, length)
        if parts and parts[-1][3] == length:
            return parts[-1][1].read(*parts[-1][2:])
        result = bytearray(length)
        for at, source, begin, count in parts:
            result[at : at + count] = source.read(begin, count)
        return bytes(result)

    def prefetch(self, offset: int, length: int) -> None:
        for _, source, begin, count in self._parts(offset, length):
            source.prefetch(begin, count)


def write_copy(
    path: Path, source: Source, advance: Advance = lambda _: None, fill: Callable[[Put], None] = lambda _: None
) -> None:
    """Write the new file ``path``: ``source``, and over it what ``fill`` writes. Read it back and compare.

    Args:
        fill: is given a function that writes bytes at a place of the file, from any thread.

    Raises:
        OutputError: it cannot be written, or reads back differently.
        SourceError: ``source`` cannot be read.
    """
    filled: list[tuple[int, int, str]] = []
    # One writer at a time: two would spin on the file's lock in the kernel instead of computing.
    writing = threading.Lock()
    source.prefetch(0, source.size)
    with new_file(path, source.size) as fd:

        def put(at: int, data: bytes | memoryview) -> None:
            with writing:
                write_all(fd, data, at)
            filled.append((at, at + len(data), xxh3_128_hexdigest(data)))
            advance(len(data))

        for begin, end in _spans(0, source.size):
            write_all(fd, source.read(begin, end - begin), begin)
            advance(end - begin)
        fill(put)
    edges = [0, *(edge for begin, end, _ in sorted(filled) for edge in (begin, end)), source.size]
    rest = [span for gap in zip(edges[::2], edges[1::2], strict=True) for span in _spans(*gap)]
    with LocalSource(path) as back:

        def is_copied(span: Span) -> bool:
            return back.read(span[0], span[1] - span[0]) == source.read(span[0], span[1] - span[0])

        def is_filled(entry: tuple[int, int, str]) -> bool:
            return xxh3_128_hexdigest(back.read(entry[0], entry[1] - entry[0])) == entry[2]

        same = on_all_cores(is_copied, rest) + on_all_cores(is_filled, filled)
        if not all(same) or back.size != source.size:
            raise read_back_error(path)


def _spans(begin: int, end: int) -> list[Span]:
    return [(at, min(at + _READ, end)) for at in range(begin, end, _READ)]
