"""Files assembled from parts of others; and large copies that are modified, read back and compared."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from mtp_extract.io.files import create_file, make_read_back_error, write_all
from mtp_extract.io.source import LocalSource, Region, Source
from mtp_extract.io.threads import map_on_all_cores

Put = Callable[[int, bytes | memoryview], None]
"""Writes bytes at an offset of the file."""

_READ = 1 << 20


class Assembled(Source):
    """A file of ``size`` bytes that is assembled from parts of other sources, and exists nowhere.

    ``pieces`` are offsets and the regions that begin there. A later piece covers an earlier one; gaps are zeros.
    """

    def __init__(self, name: str, size: int, pieces: Iterable[tuple[int, Region]]) -> None:
        self.name = name
        self.size = size
        self.provenance = {}
        self.pieces = tuple(pieces)

    def _list_parts(self, offset: int, length: int) -> Iterator[tuple[int, Region]]:
        """Yield the parts of pieces that lie in a range, with their offsets in it."""
        for at, piece in self.pieces:
            begin, end = max(at, offset), min(at + piece.size, offset + length)
            if begin < end:
                yield begin - offset, piece.part(begin - at, end - begin, piece.what)

    def read(self, offset: int, length: int) -> bytes:
        self.check(offset, length)
        result = bytearray(length)
        for at, part in self._list_parts(offset, length):
            result[at : at + part.size] = part.source.read(part.begin, part.size)
        return bytes(result)

    def prefetch(self, offset: int, length: int) -> None:
        for _, part in self._list_parts(offset, length):
            part.source.prefetch(part.begin, part.size)


def write_copy(
    path: Path,
    source: Source,
    advance: Callable[[int], None] = lambda _: None,
    fill: Callable[[Put], None] = lambda _: None,
) -> None:
    """Write a new file: the bytes that ``fill`` puts, from any thread, and elsewhere those of ``source``. Verify it.

    Raises:
        OutputError: ``path`` cannot be written, or reads back differently.
        SourceError: ``source`` cannot be read.
    """
    written: list[tuple[int, int, str]] = []  # begin, length and digest
    # One writer at a time: two would spin on the file's lock in the kernel instead of computing.
    writing = threading.Lock()
    source.prefetch(0, source.size)
    with create_file(path, source.size) as fd:

        def put(at: int, data: bytes | memoryview) -> None:
            with writing:
                write_all(fd, data, at)
            written.append((at, len(data), xxh3_128_hexdigest(data)))
            advance(len(data))

        fill(put)
        end = 0
        for begin, length, _ in [*sorted(written), (source.size, 0, "")]:
            for at in range(end, begin, _READ):
                put(at, source.read(at, min(_READ, begin - at)))
            end = begin + length
    with LocalSource(path) as copy:
        matches = map_on_all_cores(lambda span: xxh3_128_hexdigest(copy.read(*span[:2])) == span[2], written)
        if copy.size != source.size or not all(matches):
            raise make_read_back_error(path)
