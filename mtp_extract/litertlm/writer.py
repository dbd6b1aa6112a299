"""Writing a bundle: its sections, and the header that says where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mtp_extract.errors import UnsupportedError
from mtp_extract.io.files import aligned
from mtp_extract.io.laid import Laid, Piece, copied, made
from mtp_extract.io.source import Region
from mtp_extract.litertlm.container import HEADER_START, Bundle
from mtp_extract.litertlm.flatbuffer import FlatBuffer, Table
from mtp_extract.litertlm.graft import Graft, copied_places

ALIGNMENT = 16384
"""Sections begin at a multiple of it."""

_ROOT = "oo"
_LISTING = "o"
_SECTION = "oQQB"
_PAIR = "oBo"
_STRING_VALUE = 9


@dataclass(frozen=True)
class Added:
    """A section that a bundle has not: its type, its items (strings) and its bytes."""

    data_type: int
    items: Mapping[str, str]
    content: Laid


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
