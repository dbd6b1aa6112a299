"""Add sections to a bundle, and rewrite its header.

The old header stays: a new root and a new list of sections are written before it and point into it, as offsets of a
flatbuffer lead forward. Newer fields of the old sections are kept that way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flatbuffers

from mtp_extract.errors import UnsupportedError
from mtp_extract.io.assembled import Assembled
from mtp_extract.io.files import align_up
from mtp_extract.io.source import BytesSource, Region
from mtp_extract.litertlm.container import HEADER_START, BundleHeader, Section
from mtp_extract.litertlm.flatbuffer import FlatBuffer, Table

SECTION_ALIGNMENT = 16384
"""Sections begin at a multiple of this many bytes."""

_STRING_VALUE = 9
# The old header moves by a multiple of it, so that its fields stay aligned.
_HEADER_ALIGNMENT = 64


class NewSection(NamedTuple):
    """A section to add: its type, its items and its bytes."""

    data_type: int
    items: Mapping[str, str]
    content: Region


def add_sections(bundle: BundleHeader, added: Sequence[NewSection]) -> Assembled:
    """Return ``bundle`` with the sections ``added`` at its end; nothing is copied.

    Raises:
        UnsupportedError: the header has a field that cannot be rewritten, or does not fit before the first section.
    """
    sections = sorted(bundle.sections, key=lambda section: section.begin)
    contents = [*map(bundle.region, sections), *(entry.content for entry in added)]
    ranges = list[tuple[int, int]]()
    begin = SECTION_ALIGNMENT
    for content in contents:
        ranges.append((begin, begin + content.size))
        begin = align_up(begin + content.size, SECTION_ALIGNMENT)
    header = _build_header(bundle, sections, added, ranges)
    pieces = [(0, Region(BytesSource(header), 0, len(header), "the new header"))]
    pieces += [(place[0], content) for place, content in zip(ranges, contents, strict=True)]
    size = max((end for _, end in ranges), default=SECTION_ALIGNMENT)
    return Assembled(bundle.source.name, size, pieces)


def _build_header(
    bundle: BundleHeader, sections: Sequence[Section], added: Sequence[NewSection], ranges: Sequence[tuple[int, int]]
) -> bytes:
    """Build the header of ``sections`` and ``added`` ones, which lie at ``ranges``."""
    source, name = bundle.source, bundle.source.name
    region = Region(source, HEADER_START, bundle.header_end - HEADER_START, "the header")
    root = FlatBuffer(region).read_root()
    listing = root.table(1)
    tables = list(listing.tables(0)) if listing is not None else []
    if any(root.slots[2:]) or (listing is not None and any(listing.slots[1:])):
        raise UnsupportedError(
            f"{name}: its header has a field that is newer than this release, so no section can be added."
        )
    front = _build_front(root, tables, added, ranges[len(sections) :])
    end = HEADER_START + len(front) + region.size
    if end > SECTION_ALIGNMENT:
        raise UnsupportedError(f"{name}: its header leaves no room for another section.")
    places = dict(zip((section.index for section in sections), ranges, strict=False))
    listed = bytearray(region.read())
    for section in sections:
        fields = [tables[section.index].at(slot) for slot in (1, 2)]
        if section.size and not all(fields):
            raise UnsupportedError(f"{name}: {section.label} does not say where it lies.")
        _write_place(listed, fields, places[section.index])
    start = bytearray(source.read(0, HEADER_START))
    start[24:32] = end.to_bytes(8, "little")
    return bytes(start + front + listed)


def _write_place(listed: bytearray, fields: Sequence[int], place: tuple[int, int]) -> None:
    """Write (begin, end) of a section to the positions ``fields``; 0: the field is absent."""
    for at, value in zip(fields, place, strict=True):
        if at:
            listed[at : at + 8] = value.to_bytes(8, "little")


def _build_front(
    root: Table, tables: Sequence[Table], added: Sequence[NewSection], ranges: Sequence[tuple[int, int]]
) -> bytes:
    """Build the root and the list of sections that precede the old header and point into it."""
    builder = flatbuffers.Builder(1 << 12)
    to = builder.PrependUOffsetTRelative
    byte = builder.PrependUint8
    number = builder.PrependUint64

    def write_table(*fields: tuple[Callable[[int], None], int] | None) -> int:
        builder.StartObject(len(fields))
        for slot, field in enumerate(fields):
            if field is not None:
                field[0](field[1])
                builder.Slot(slot)
        return int(builder.EndObject())

    def write_offsets(places: Sequence[int]) -> int:
        builder.StartVector(4, len(places), 4)
        for place in reversed(places):
            to(place)
        return int(builder.EndVector())

    sections = []
    for (data_type, items, _), (begin, end) in zip(added, ranges, strict=True):
        pairs = []
        for key, value in items.items():
            name, text = builder.CreateString(key), builder.CreateString(value)
            pairs.append(write_table((to, name), (byte, _STRING_VALUE), (to, write_table((to, text)))))
        sections.append(write_table((to, write_offsets(pairs)), (number, begin), (number, end), (byte, data_type)))
    # Positions count back from the end of the new part: those in the old header are negative.
    listed = write_table((to, write_offsets([*(-table.position for table in tables), *sections])))
    new = write_table((to, -root.follow(0)) if root.at(0) else None, (to, listed))
    builder.Prep(_HEADER_ALIGNMENT, 0)
    builder.Finish(new)
    return bytes(builder.Output())
