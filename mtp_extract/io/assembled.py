"""A file put together from parts of others; and writing a large file: copied, written over, read back, compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from mtp_extract.io.files import new_file, read_back_error, write_all
from mtp_extract.io.source import Advance, LocalSource, Region, Source
from mtp_extract.io.threads import on_all_cores

Put = Callable[[int, bytes | memoryview], None]
"""Writes bytes at a place of the file."""

_READ = 1 << 20


class Assembled(Source):
    """A file of ``size`` bytes put together from parts of other sources; it is not written anywhere.

    Args:
        pieces: where each begins, and the region that lies there; a later piece covers an earlier one, and zeros lie
            where there is none.
    """

    def __init__(self, name: str, size: int, pieces: Iterable[tuple[int, Region]]) -> None:
        self.name, self.size, self.provenance, self.pieces = name, size, {}, tuple(pieces)

    def _parts(self, offset: int, length: int) -> Iterator[tuple[int, Region]]:
        """The parts of pieces that lie in a range, and where in the range."""
        for at, piece in self.pieces:
            begin, end = max(at, offset), min(at + piece.size, offset + length)
            if begin < end:
                yield begin - offset, piece.part(begin - at, end - begin, piece.what)

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        result = bytearray(length)
        for at, part in self._parts(offset, length):
            result[at : at + part.size] = part.source.read(part.begin, part.size)
        return bytes(result)

    def prefetch(self, offset: int, length: int) -> None:
        for _, part in self._parts(offset, length):
            part.source.prefetch(part.begin, part.size)


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

        for begin in range(0, source.size, _READ):
            piece = source.read(begin, min(_READ, source.size - begin))
            write_all(fd, piece, begin)
            advance(len(piece))
        fill(put)
    with LocalSource(path) as back:

        def agrees(span: tuple[int, int, str]) -> bool:
            """Whether what was filled in has its digest; what has none is the source's."""
            begin, length, digest = span[0], span[1] - span[0], span[2]
            found = back.read(begin, length)
            return xxh3_128_hexdigest(found) == digest if digest else found == source.read(begin, length)

        edges = [0, *(edge for begin, end, _ in sorted(filled) for edge in (begin, end)), source.size]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        copied = [(at, min(at + _READ, end), "") for begin, end in gaps for at in range(begin, end, _READ)]
        if back.size != source.size or not all(on_all_cores(agrees, copied + filled)):
            raise read_back_error(path)
