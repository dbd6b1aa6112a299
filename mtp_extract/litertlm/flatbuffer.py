"""A bounds-checked reader of flatbuffer tables over a :class:`~mtp_extract.io.source.Region`.

The published ``flatbuffers`` runtime trusts its input (an offset out of range gives a ``struct.error`` or wrong bytes)
and needs the whole buffer in memory. Bundles come from the network and hold gigabytes, so this reader checks every
access against the region, reads only what it needs, and counts it against a budget that bounds a hostile file.

Layout, from the flatbuffers binary format: the root is a u32 offset; a table begins with an i32, its distance from its
vtable (u16 size of vtable, u16 size of table, then a u16 field offset per slot, 0 for absent); strings, vectors and
tables are reached through u32 offsets relative to their own position; a vector begins with its u32 length.
"""

from __future__ import annotations

import builtins
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from mtp_extract.errors import FormatError, TruncatedError
from mtp_extract.io.source import Region

_BUDGET = 2_000_000
_READS_OF_A_BYTE = 8
"""How often, on average, a byte may be read: more than once, because a writer may store equal small tables once."""
_SPARE = 1 << 16
_BYTES_PER_ELEMENT = 32
_LONGEST_STRING = 1 << 16
_STRUCTS = {code: struct.Struct("<" + code) for code in "?bBhHiIfqQd"}


class Budget:
    """The number of elements that may still be read. Several flatbuffers can share a budget."""

    def __init__(self, elements: int = _BUDGET) -> None:
        self.elements = elements


class FlatBuffer:
    """The flatbuffer at the start of ``region``; ``budget`` is by default not shared."""

    def __init__(self, region: Region, budget: Budget | None = None) -> None:
        self.region = region
        self._bytes_read = 0  # of tables, strings and vectors; counted again when read again
        self._budget = budget or Budget()
        self._vtables = dict[int, tuple[int, tuple[int, ...]]]()
        self._stored = dict[tuple[int, int], bytes]()
        self._contents = dict[bytes, bytes]()

    def spend_budget(self, elements: int, length: int) -> None:
        """Count ``elements`` in ``length`` bytes against the budget and against the size of the buffer.

        Tables and strings may be shared, so that a few kilobytes describe gigabytes. Every read counts, so the work for
        a buffer is at most proportional to its size.

        Raises:
            FormatError: more elements than any real model has, or than so few bytes hold.
        """
        self._budget.elements -= elements
        self._bytes_read += length
        if self._budget.elements < 0:
            raise self.make_error("it describes more elements than any real model has")
        if self._bytes_read > _READS_OF_A_BYTE * self.region.size + _SPARE:
            raise self.make_error(
                f"its {self.region.size} bytes describe more elements than they hold, by sharing parts"
            )

    def read_stored(self, start: int, length: int) -> bytes:
        """Read bytes, once for all references to them; equal bytes are one object, so that comparing them is cheap."""
        if (start, length) not in self._stored:
            self.spend_budget(0, length)
            content = self.region.read(start, length)
            self._stored[start, length] = self._contents.setdefault(content, content)
        return self._stored[start, length]

    def make_error(self, problem: str) -> FormatError:
        return FormatError(f"{self.region.source.name}: {self.region.what} is not a valid flatbuffer: {problem}.")

    def read_scalar(self, code: str, position: int) -> int | float | bool:
        """Read the scalar with the :mod:`struct` code ``code``."""
        form = _STRUCTS[code]
        try:
            value: int | float | bool = form.unpack(self.region.read(position, form.size))[0]
        except TruncatedError as error:
            raise self.make_error(f"an offset leads to byte {position} of {self.region.size}") from error
        return value

    def read_integer(self, code: str, position: int) -> int:
        return int(self.read_scalar(code, position))

    def read_root(self) -> Table:
        return self.read_table(self.read_integer("I", 0))

    def read_table(self, position: int) -> Table:
        """Read the table at ``position`` and check its vtable."""
        vtable = position - self.read_integer("i", position)
        length, slots = self._vtables.get(vtable) or self._read_vtable(vtable)
        if position + length > self.region.size:
            raise self.make_error(f"the table at byte {position} has size {length}")
        self.spend_budget(1, length + 4)  # with the offset that leads to it
        return Table(self, position, slots)

    def _read_vtable(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Read a vtable, which many tables share: the size of the tables, and the offset of each slot's field."""
        size = self.read_integer("H", position)
        if size < 4 or size % 2:
            raise self.make_error(f"the vtable at byte {position} has size {size}")
        length = self.read_integer("H", position + 2)
        if length < 4:
            raise self.make_error(f"the vtable at byte {position} is of tables of size {length}")
        self.spend_budget(0, size)
        slots = struct.unpack(f"<{size // 2 - 2}H", self.region.read(position + 4, size - 4)) if size > 4 else ()
        if any(slot >= length for slot in slots):
            raise self.make_error(f"the vtable at byte {position} has a field outside its table")
        self._vtables[position] = length, slots
        return length, slots

    def read_vector(self, position: int, width: int) -> Vector:
        """Read the length of the vector at ``position``, whose elements have ``width`` bytes."""
        count = self.read_integer("I", position)
        if position + 4 + count * width > self.region.size:
            raise self.make_error(f"the vector at byte {position} claims {count} elements of {width} bytes")
        return Vector(self, position + 4, count, width)

    def read_string(self, position: int) -> str:
        """Read the string at ``position``; bytes that are not UTF-8 become backslash escapes."""
        vector = self.read_vector(position, 1)
        if vector.count > _LONGEST_STRING:
            raise self.make_error(f"a string of {vector.count} bytes")
        self.spend_budget(1 + vector.count // _BYTES_PER_ELEMENT, 4 + vector.count)
        return vector.bytes().decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector of ``count`` elements of ``width`` bytes, which are read later."""

    buffer: FlatBuffer
    start: int  # in the buffer; 0 if the vector is absent
    count: int
    width: int

    def bytes(self) -> bytes:
        return self.buffer.region.read(self.start, self.count * self.width) if self.count else b""

    def stored(self) -> builtins.bytes:
        """:meth:`bytes`, read once for all references."""
        return self.buffer.read_stored(self.start, self.count * self.width) if self.count else b""


@dataclass(frozen=True, slots=True)
class Table:
    """A table, whose fields are addressed by slot, in the order of the schema.

    An absent number is its default, an absent string or table None, and an absent vector empty.
    """

    buffer: FlatBuffer
    position: int
    slots: tuple[int, ...]

    def at(self, slot: int) -> int:
        """Return the position of a field; 0 if absent."""
        offset = self.slots[slot] if slot < len(self.slots) else 0
        return self.position + offset if offset else 0

    def follow(self, slot: int) -> int:
        """Return the position to which an offset field points; 0 if absent."""
        at = self.at(slot)
        return at + self.buffer.read_integer("I", at) if at else 0

    def integer(self, slot: int, code: str, default: int = 0) -> int:
        at = self.at(slot)
        return self.buffer.read_integer(code, at) if at else default

    def scalar(self, slot: int, code: str, default: int | float | bool = 0) -> int | float | bool:
        at = self.at(slot)
        return self.buffer.read_scalar(code, at) if at else default

    def string(self, slot: int) -> str | None:
        at = self.follow(slot)
        return self.buffer.read_string(at) if at else None

    def table(self, slot: int) -> Table | None:
        at = self.follow(slot)
        return self.buffer.read_table(at) if at else None

    def vector(self, slot: int, width: int) -> Vector:
        at = self.follow(slot)
        return self.buffer.read_vector(at, width) if at else Vector(self.buffer, 0, 0, width)

    def integers(self, slot: int, code: str) -> tuple[int, ...]:
        vector = self.vector(slot, _STRUCTS[code].size)
        self.buffer.spend_budget(vector.count, vector.count * vector.width)
        return struct.unpack(f"<{vector.count}{code}", vector.bytes())

    def tables(self, slot: int) -> Iterator[Table]:
        vector = self.vector(slot, 4)
        for offset in range(vector.start, vector.start + 4 * vector.count, 4):
            yield self.buffer.read_table(offset + self.buffer.read_integer("I", offset))
