"""Read numbers from the root map of a flexbuffer: the attributes of a composite, such as ``{"epsilon": 1e-6}``.

The published reader builds everything that a buffer describes, and parts may be shared: 4 KB can describe more than any
memory holds. This reader looks up the requested keys only, never enters values below the root, and checks every offset.

Layout, from the flexbuffers binary format: the last byte is the width of the root, the byte before it has the root's
type in its upper six bits, and the root precedes both. A map is reached by an offset *back*. Its values are preceded by
the offset back to its keys, the width of these and the count, each of the map's own width, and followed by one byte
each for their types. Keys are offsets back to strings that end in 0; their count precedes them.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator

from mtp_extract.errors import FormatError

_MOST_KEYS = 1 << 10
_UNSIGNED = 2
_MAP = 9
_TYPES = frozenset({*range(27), 36})
_INDIRECT_TYPES = {6: 1, 7: 2, 8: 3}
"""Types of numbers behind an offset → types of the same numbers in place."""
# Struct codes of integers, unsigned integers and floats, by width.
_CODES = {
    1: {1: "<b", 2: "<h", 4: "<i", 8: "<q"},
    _UNSIGNED: {1: "<B", 2: "<H", 4: "<I", 8: "<Q"},
    3: {2: "<e", 4: "<f", 8: "<d"},
}


def read_numbers(stored: bytes, names: Collection[str]) -> dict[str, float]:
    """Read the numbers of the keys ``names`` in the root map; keys that are absent or have no number are left out.

    Raises:
        FormatError: an offset leads out of the buffer, a key occurs twice, or there are more keys than any exporter
            writes.
    """
    # Keys are compared with the names, never read to their end: all of them may share one long string.
    texts = {name: name.encode() + b"\0" for name in names}
    numbers = dict[str, float | None]()
    for key, value, width, type_ in _iterate_entries(stored):
        name = next((name for name, text in texts.items() if stored.startswith(text, key)), None)
        if name is None:
            continue
        if name in numbers:
            raise FormatError(f"the key {name!r} stands there twice")
        numbers[name] = _read_number(stored, value, width, _read_unsigned(stored, type_, 1))
    return {name: number for name, number in numbers.items() if number is not None}


def _iterate_entries(stored: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each value of the root map: position of its key, its own position, its width, position of its type."""
    root_width = _read_unsigned(stored, len(stored) - 1, 1)
    root_type = _read_unsigned(stored, len(stored) - 2, 1)
    if root_type >> 2 != _MAP:
        return
    width = 1 << (root_type & 3)
    values = _follow_offset(stored, len(stored) - 2 - root_width, root_width)
    count = _read_unsigned(stored, values - width, width)
    key_width = _read_unsigned(stored, values - 2 * width, width)
    if count > _MOST_KEYS:
        raise FormatError(f"it has {count} keys, more than any exporter writes")
    keys = _follow_offset(stored, values - 3 * width, width)
    for index in range(count):
        key = _follow_offset(stored, keys + index * key_width, key_width)
        yield key, values + index * width, width, values + count * width + index


def _read_number(stored: bytes, position: int, width: int, packed_type: int) -> float | None:
    """Read the number at ``position``; None if the value is no number."""
    kind = packed_type >> 2
    if kind not in _TYPES:
        raise FormatError(f"a value of the type {kind}, which there is not")
    if kind in _INDIRECT_TYPES:
        kind = _INDIRECT_TYPES[kind]
        position = _follow_offset(stored, position, width)
        width = 1 << (packed_type & 3)
    code = _CODES.get(kind, {}).get(width)
    return None if code is None else float(_read_scalar(stored, position, code))


def _follow_offset(stored: bytes, position: int, width: int) -> int:
    """Return the position to which the offset at ``position`` leads back."""
    target = position - _read_unsigned(stored, position, width)
    if target < 0:
        raise FormatError("an offset leads out of it")
    return target


def _read_unsigned(stored: bytes, position: int, width: int) -> int:
    if width not in _CODES[_UNSIGNED]:
        raise FormatError(f"a number of {width} bytes")
    return int(_read_scalar(stored, position, _CODES[_UNSIGNED][width]))


def _read_scalar(stored: bytes, position: int, code: str) -> int | float:
    # unpack_from would count a negative position from the end.
    if position < 0 or position + struct.calcsize(code) > len(stored):
        raise FormatError("an offset leads out of it")
    number: int | float = struct.unpack_from(code, stored, position)[0]
    return number
