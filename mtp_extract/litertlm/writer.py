"""Writing a bundle: what is copied, what is new, where it lies, and the header that says so.

A file is planned as :class:`Piece` s, later ones over earlier ones, and written in one pass: what is copied goes from
file to file in the kernel, so that memory does not depend on how large a bundle is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from xxhash import xxh3_128

from mtp_extract.errors import OutputError, UnsupportedError
from mtp_extract.io.output import aligned, output_error, read_back_error, reserve, write_all
from mtp_extract.io.source import Advance, LocalSource, Region, Source
from mtp_extract.litertlm.container import HEADER_START, Bundle
from mtp_extract.litertlm.flatbuffer import FlatBuffer, Table
from mtp_extract.litertlm.graft import Graft, copied_places

ALIGNMENT = 16384
"""Sections begin at a multiple of it."""

Produce = Callable[[], Iterator[bytes]]

_COPY = 1 << 24
_READ = 1 << 20

_ROOT = "oo"
_LISTING = "o"
_SECTION = "oQQB"
_PAIR = "oBo"
_STRING_VALUE = 9


@dataclass(frozen=True)
class Piece:
    """``length`` bytes at ``at`` of what is written: a range of ``source``, what ``produce`` yields, or zeros."""

    at: int
    length: int
    source: Source | None = field(default=None, repr=False)
    offset: int = 0
    produce: Produce | None = field(default=None, repr=False)

    def moved(self, by: int) -> Piece:
        """The same piece further on."""
        return replace(self, at=self.at + by)


@dataclass(frozen=True)
class Laid:
    """A file, or a section of one: ``size`` bytes, as ``pieces`` have them, later ones over earlier ones."""

    size: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Added:
    """A section that a bundle has not: its type, its items (strings) and its bytes."""

    data_type: int
    items: Mapping[str, str]
    content: Laid


def copied(source: Source, offset: int, size: int) -> Laid:
    """A range of ``source`` as it is."""
    return Laid(size, (Piece(0, size, source=source, offset=offset),))


def made(at: int, data: bytes) -> Piece:
    """A piece of bytes that are at hand."""
    return Piece(at, len(data), produce=lambda: iter([data]))


def bundle_with(
    bundle: Bundle, replaced: Mapping[int, Laid], added: Sequence[Added] = (), removed: frozenset[int] = frozenset()
) -> Laid:
    """``bundle`` with other sections, the rest in the order in which they lie.

    Args:
        replaced: index of a section → what it is to be.
        added: sections to put at the end.
        removed: indices of sections to leave out.

    Raises:
        UnsupportedError: the header has a field that cannot be rewritten, or does not fit before the first section.
    """
    kept = sorted((s for s in bundle.sections if s.index not in removed), key=lambda s: s.begin)
    contents = [replaced.get(s.index) or copied(bundle.source, s.begin, s.size) for s in kept]
    ranges: list[tuple[int, int]] = []
    pieces: list[Piece] = []
    at = ALIGNMENT
    for content in (*contents, *(entry.content for entry in added)):
        ranges.append((at, at + content.size))
        pieces += (piece.moved(at) for piece in content.pieces)
        at = aligned(at + content.size, ALIGNMENT)
    places = dict(zip((s.index for s in kept), ranges[: len(kept)], strict=True))
    size = max((end for _, end in ranges), default=ALIGNMENT)
    return Laid(size, (*_header(bundle, places, added, ranges[len(kept) :], removed), *pieces))


def _header(
    bundle: Bundle,
    places: Mapping[int, tuple[int, int]],
    added: Sequence[Added],
    new: Sequence[tuple[int, int]],
    removed: frozenset[int],
) -> Iterator[Piece]:
    """The header, with sections where they are now."""
    region = Region(bundle.source, HEADER_START, bundle.header_end - HEADER_START, "the header")
    root = FlatBuffer(region).root()
    listing = root.table(1)
    tables = list(listing.tables(0)) if listing is not None else []
    front = b""
    if added or removed:
        front = _front(bundle, root, [t for i, t in enumerate(tables) if i not in removed], added, new)
    shift = HEADER_START + len(front)
    end = shift + region.size
    if end > ALIGNMENT:
        raise UnsupportedError(f"{bundle.source.name}: its header leaves no room for another section.")
    yield Piece(0, HEADER_START, source=bundle.source)
    yield made(24, end.to_bytes(8, "little"))
    yield made(HEADER_START, front)
    yield Piece(shift, region.size, source=bundle.source, offset=HEADER_START)
    for index, place in places.items():
        for slot, value in zip((1, 2), place, strict=True):
            if not tables[index].at(slot) and place[0] < place[1]:
                raise UnsupportedError(f"{bundle.source.name}: section {index} does not say where it lies.")
            if tables[index].at(slot):
                yield made(shift + tables[index].at(slot), value.to_bytes(8, "little"))


def _front(
    bundle: Bundle, root: Table, kept: Sequence[Table], added: Sequence[Added], new: Sequence[tuple[int, int]]
) -> bytes:
    graft, what = Graft(), f"{bundle.source.name}: the header"
    objects = []
    for entry, (begin, end) in zip(added, new, strict=True):
        pairs = []
        for key, value in entry.items.items():
            name, text = graft.text(key), graft.text(value)
            pairs.append(graft.table(_PAIR, {0: name, 1: _STRING_VALUE, 2: graft.table("o", {0: text})}))
        items = graft.offsets(pairs)
        objects.append(graft.table(_SECTION, {0: items, 1: begin, 2: end, 3: entry.data_type}))
    listed = graft.offsets([*copied_places(kept, {}), *objects])
    return graft.finish(graft.copy(root, _ROOT, {1: graft.table(_LISTING, {0: listed})}, what))


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


def write_laid(path: Path, laid: Laid, advance: Advance = lambda _: None) -> None:
    """Write the new file ``path``, read it back and compare.

    Raises:
        OutputError: it cannot be written, or reads back differently.
        SourceError: what is copied cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            reserve(fd, laid.size)
            sums = [_write(fd, piece, advance) for piece in laid.pieces]
            for source in {id(piece.source): piece.source for piece in laid.pieces if piece.source}.values():
                source.confirm()
        finally:
            os.close(fd)
        same = _reads_back(path, laid, sums)
    except OSError as error:
        raise output_error(path, error) from error
    if not same:
        raise read_back_error(path)


def _write(fd: int, piece: Piece, advance: Advance) -> str:
    """Write ``piece``; the XXH3-128 of what was made for it."""
    digest = xxh3_128()
    if piece.source is not None:
        for done in range(0, piece.length, _COPY):
            count = min(_COPY, piece.length - done)
            piece.source.copy(piece.offset + done, count, fd, piece.at + done)
            advance(count)
        return ""
    at = piece.at
    for chunk in piece.produce() if piece.produce is not None else _zeros(piece.length):
        digest.update(chunk)
        write_all(fd, chunk, at)
        at += len(chunk)
        advance(len(chunk))
    if at - piece.at != piece.length:
        raise OutputError(f"produced {at - piece.at} bytes for byte {piece.at}, planned {piece.length}.")
    return digest.hexdigest()


def _zeros(length: int) -> Iterator[bytes]:
    for done in range(0, length, _READ):
        yield bytes(min(_READ, length - done))


def _reads_back(path: Path, laid: Laid, sums: Sequence[str]) -> bool:
    """Whether what was made is there, wherever nothing was laid over it. What was copied, the kernel answers for."""
    with LocalSource(path) as written:
        if written.size != laid.size:
            return False
        for index, (piece, expected) in enumerate(zip(laid.pieces, sums, strict=True)):
            if piece.source is not None:
                continue
            ranges = list(_uncovered(piece, laid.pieces[index + 1 :]))
            if ranges == [(piece.at, piece.at + piece.length)]:
                digest = xxh3_128()
                for chunk in _chunks(written, piece.at, piece.length):
                    digest.update(chunk)
                if digest.hexdigest() != expected:
                    return False
                continue
            with LaidSource(Laid(laid.size, (piece,)), str(path)) as alone:
                for begin, end in ranges:
                    pairs = zip(_chunks(alone, begin, end - begin), _chunks(written, begin, end - begin), strict=True)
                    if any(a != b for a, b in pairs):
                        return False
    return True


def _chunks(source: Source, offset: int, length: int) -> Iterator[bytes]:
    for done in range(0, length, _READ):
        yield source.read(offset + done, min(_READ, length - done))


def _uncovered(piece: Piece, later: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """The ranges of ``piece`` that none of ``later`` lies over."""
    at, end = piece.at, piece.at + piece.length
    for other in sorted(later, key=lambda p: p.at):
        if other.at + other.length <= at or other.at >= end:
            continue
        if other.at > at:
            yield at, other.at
        at = max(at, other.at + other.length)
    if at < end:
        yield at, end
