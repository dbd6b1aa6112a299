"""Changing a flatbuffer without knowing all of it: new tables in front, the old buffer behind them as it was.

An offset of a flatbuffer leads forward only, so a changed table has to stand before everything it leads to. A graft
is a new root and the tables that change, built with the ``flatbuffers`` library, whose unchanged fields lead on into
the old buffer. Whatever the schema has learned since (options of operators, metadata) is never taken apart and cannot
be lost; of a table that *is* copied every field has to be known, and one that is not is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import flatbuffers
import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.litertlm.flatbuffer import Table

ALIGNMENT = 64
"""What the old buffer is moved by is a multiple of it, so that whatever was aligned in it still is."""

OFFSET = "o"

Field = int | bool | None
"""A new value of a field: a number, where a thing of the graft or the old buffer stands, or None to leave it out."""

_WRITERS = MappingProxyType(
    {
        "?": "PrependBool",
        "b": "PrependInt8",
        "B": "PrependUint8",
        "h": "PrependInt16",
        "H": "PrependUint16",
        "i": "PrependInt32",
        "I": "PrependUint32",
        "q": "PrependInt64",
        "Q": "PrependUint64",
        OFFSET: "PrependUOffsetTRelative",
    }
)


class Graft:
    """What stands in front of an old flatbuffer. Places are the builder's: from the end, so negative in the old one."""

    def __init__(self) -> None:
        self._builder = flatbuffers.Builder(1 << 12)

    @staticmethod
    def old(position: int) -> int:
        """The place of what stands at ``position`` of the old buffer."""
        return -position

    def copy(self, table: Table, kinds: str, changes: Mapping[int, Field], what: str) -> int:
        """A copy of ``table`` with some fields changed; its place.

        Args:
            kinds: the :mod:`struct` code of each slot's scalar, or "o" for an offset.
            what: what the table is, for the message.

        Raises:
            UnsupportedError: it has a field beyond ``kinds``, which cannot be copied unknown.
        """
        if unknown := [slot for slot in range(len(kinds), len(table.slots)) if table.slots[slot]]:
            raise UnsupportedError(
                f"{what} has a field (slot {unknown[0]}) that is newer than this release, so it cannot be rebuilt; "
                "changes that leave types and layout alone can still be written."
            )
        fields: dict[int, Field] = {}
        for slot, kind in enumerate(kinds):
            if slot in changes:
                fields[slot] = changes[slot]
            elif table.at(slot):
                fields[slot] = self.old(table.follow(slot)) if kind == OFFSET else int(table.scalar(slot, kind))
        return self.table(kinds, fields)

    def table(self, kinds: str, fields: Mapping[int, Field]) -> int:
        """A new table; its place."""
        self._builder.StartObject(len(kinds))
        for slot, value in sorted(fields.items()):
            if value is not None:
                # Not by the methods that leave defaults out: some readers tell absent from zero.
                getattr(self._builder, _WRITERS[kinds[slot]])(value)
                self._builder.Slot(slot)
        return int(self._builder.EndObject())

    def offsets(self, places: Sequence[int]) -> int:
        """A vector of offsets; its place."""
        self._builder.StartVector(4, len(places), 4)
        for place in reversed(places):
            self._builder.PrependUOffsetTRelative(place)
        return int(self._builder.EndVector())

    def numbers(self, array: npt.NDArray[np.generic]) -> int:
        """A vector of numbers; its place."""
        return int(self._builder.CreateNumpyVector(array))

    def text(self, text: str) -> int:
        """A string; its place."""
        return int(self._builder.CreateString(text))

    def finish(self, root: int, identifier: bytes | None = None) -> bytes:
        """What is to stand right before the old buffer; a multiple of :data:`ALIGNMENT` bytes."""
        self._builder.Prep(ALIGNMENT, 0)
        self._builder.Finish(root, identifier)
        return bytes(self._builder.Output())


def copied_places(tables: Sequence[Table], changed: Mapping[int, int]) -> list[int]:
    """Places of a vector's ``tables``, some of them ``changed`` for others."""
    return [changed.get(index, Graft.old(table.position)) for index, table in enumerate(tables)]
