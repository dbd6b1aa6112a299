"""Numbers in the root map of a flexbuffer: what a composite says of itself, such as ``{"epsilon": 1e-6}``.

The published reader makes of a buffer all that it describes, and parts may be shared: 4 KB can describe more than any
memory holds. Here only the keys that are asked for are looked up, nothing below the root is entered, and every offset
is checked.

Layout, from the flexbuffers binary format: the last byte is the width of the root, the one before it says its type in
the upper six bits, and before these two the root stands. A map is reached by an offset *back*; before its values stand
their count, the width of its keys and the offset back to these, each of the map's own width; behind them a byte each
says their types. Keys are offsets back to strings that end in 0, and their count stands before them.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass

from mtp_extract.errors import FormatError

_MOST_KEYS = 1 << 10
_INTEGER = 1
_UNSIGNED = 2
_FLOAT = 3
_INDIRECT_INTEGER = 6
_INDIRECT_UNSIGNED = 7
_INDIRECT_FLOAT = 8
_MAP = 9
_TYPES = frozenset({*range(27), 36})
_DIRECT = {_INDIRECT_INTEGER: _INTEGER, _INDIRECT_UNSIGNED: _UNSIGNED, _INDIRECT_FLOAT: _FLOAT}
_CODES = {
    _INTEGER: {1: "<b", 2: "<h", 4: "<i", 8: "<q"},
    _UNSIGNED: {1: "<B", 2: "<H", 4: "<I", 8: "<Q"},
    _FLOAT: {2: "<e", 4: "<f", 8: "<d"},
}


def read_numbers(stored: bytes, names: Collection[str]) -> dict[str, float]:
    """Those of ``names`` that are keys of the root and have a number, each with it; the root of ``{"a": 1}`` gives 1.

    Raises:
        FormatError: an offset leads out of the buffer, a key stands there twice, or there are more keys than any
            exporter writes.
    """
    try:
        return _Reader(stored).numbers(names)
    except struct.error as error:
        raise FormatError("an offset leads out of it") from error


@dataclass(frozen=True)
class _Map:
    """How many values a map has, where they and their keys stand, and how wide each of both is."""

    count: int
    width: int
    values: int
    key_width: int
    keys: int


class _Reader:
    def __init__(self, stored: bytes) -> None:
        self.stored = stored

    def numbers(self, names: Collection[str]) -> dict[str, float]:
        root = self._root()
        if root is None:
            return {}
        if root.count > _MOST_KEYS:
            raise FormatError(f"it has {root.count} keys, more than any exporter writes")
        # Each key is compared with the names, never read to its end: all may be one string.
        texts = {name: name.encode() + b"\0" for name in names}
        numbers = dict[str, float | None]()
        for index in range(root.count):
            start = self._back(root.keys + index * root.key_width, root.key_width)
            name = next((name for name, text in texts.items() if self.stored.startswith(text, start)), None)
            if name is not None and name in numbers:
                raise FormatError(f"the key {name!r} stands there twice")
            if name is not None:
                numbers[name] = self._value(root, index)
        return {name: number for name, number in numbers.items() if number is not None}

    def _root(self) -> _Map | None:
        """The map at the root; None where something else stands there."""
        root_width = self._unsigned(len(self.stored) - 1, 1)
        root_type = self._unsigned(len(self.stored) - 2, 1)
        if root_type >> 2 != _MAP:
            return None
        width = 1 << (root_type & 3)
        values = self._back(len(self.stored) - 2 - root_width, root_width)
        count = self._unsigned(values - width, width)
        key_width = self._unsigned(values - 2 * width, width)
        # Of too many keys none is looked for.
        keys = self._back(values - 3 * width, width) if count <= _MOST_KEYS else 0
        return _Map(count, width, values, key_width, keys)

    def _value(self, root: _Map, index: int) -> float | None:
        """The number that a map has at ``index``; None where something else stands there."""
        kind = self._unsigned(root.values + root.count * root.width + index, 1)
        return self._number(root.values + index * root.width, root.width, kind)

    def _number(self, position: int, width: int, packed_type: int) -> float | None:
        """The number at ``position``; None for what is none."""
        kind = packed_type >> 2
        if kind not in _TYPES:
            raise FormatError(f"a value of the type {kind}, which there is not")
        if kind in _DIRECT:
            kind = _DIRECT[kind]
            position = self._back(position, width)
            width = 1 << (packed_type & 3)
        code = _CODES.get(kind, {}).get(width)
        return None if code is None else float(self._scalar(code, position))

    def _back(self, position: int, width: int) -> int:
        """Where the offset at ``position`` leads."""
        target = position - self._unsigned(position, width)
        if target < 0:
            raise FormatError("an offset leads out of it")
        return target

    def _unsigned(self, position: int, width: int) -> int:
        if width not in _CODES[_UNSIGNED]:
            raise FormatError(f"a number of {width} bytes")
        return int(self._scalar(_CODES[_UNSIGNED][width], position))

    def _scalar(self, code: str, position: int) -> int | float:
        # A negative position would be counted from the end.
        if position < 0:
            raise FormatError("an offset leads out of it")
        number: int | float = struct.unpack_from(code, self.stored, position)[0]
        return number
