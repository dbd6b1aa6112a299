"""A configuration as a table, read both ways: for each key what is written there, and which field it is read into.

One :class:`Table` writes a configuration, reads it strictly, and gives the manifest what else may stand there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from mtp_extract.checkpoint.manifest import Allowed, Keys, at, is_whole, some
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.formats.reading import optional_integer

Reader = Callable[[Mapping[str, Any], str], Any]
"""Takes an object and the name of a key; raises CheckpointError where the value is of another type or range."""

Writer = Callable[[Any], Any]
"""Makes a value of a drafter's shape, a DrafterConfig or an Eagle3Config."""

_NOTHING = some()
_MAX_POSITIONS = 131072
"""Written of a drafter that does not say for how many positions it was made: the official assistants'."""


@dataclass(frozen=True)
class Key:
    """One key of a configuration."""

    name: str
    write: Writer | None = None  # None: it is not written
    read: Reader | None = None  # fills ``field`` of the shape
    field: str = ""
    values: tuple[Any, ...] = ()  # the only ones that can be read, types included; None: no such key. Empty: any
    repeats: bool = False  # it repeats what other keys say, and may not contradict them
    tolerated: Allowed = _NOTHING  # what it may be beside what is written: no engine computes another function for it


def held(read: Reader, *names: str | tuple[str, str], tolerated: Allowed = _NOTHING) -> Iterable[Key]:
    """Keys that hold the fields of their own names, or, as (key, field), of another."""
    pairs = (name if isinstance(name, tuple) else (name, name) for name in names)
    return [Key(name, attrgetter(field), read, field, tolerated=tolerated) for name, field in pairs]


def positions(name: str) -> Key:
    """A key for the longest context, from which nothing is computed."""
    field = "max_position_embeddings"
    return Key(name, lambda shape: getattr(shape, field) or _MAX_POSITIONS, optional_integer, field, tolerated=is_whole)


def made(name: str, write: str | Writer, *, repeats: bool = False, tolerated: Allowed = _NOTHING) -> Key:
    """A key that is made of the attribute of that name, or of several."""
    return Key(name, attrgetter(write) if isinstance(write, str) else write, repeats=repeats, tolerated=tolerated)


def _always(value: Any) -> Writer:
    return lambda _: value


def constant(**values: Any) -> Iterable[Key]:
    """Keys that always have these values, and that nothing is read from."""
    return [Key(name, _always(value)) for name, value in values.items()]


def fixed(**values: tuple[Any, ...]) -> Iterable[Key]:
    """Keys that change what is computed or which tensors there are: values that do not; the first is written."""
    return [Key(name, _always(of[0]), values=of) for name, of in values.items()]


def unwritten(keys: Iterable[Key]) -> Iterable[Key]:
    """These keys, which may be there and are not written."""
    return [replace(key, write=None) for key in keys]


class Table:
    """The keys of one object of a configuration, in the order in which they are written."""

    def __init__(self, *keys: Key | Iterable[Key]) -> None:
        self.keys = tuple(key for part in keys for key in ([part] if isinstance(part, Key) else part))

    def write(self, shape: Any) -> dict[str, Any]:
        """The object of a drafter of this shape."""
        return {key.name: key.write(shape) for key in self.keys if key.write}

    def read(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a shape that the object ``found`` says.

        Raises:
            CheckpointError: a value is of another type or range, or says what no such drafter has.
        """
        for key in self.keys:
            value = found.get(key.name)
            if key.values and not _is_one_of(value, key.values):
                expected = " or ".join(json.dumps(one) for one in key.values)
                raise CheckpointError(
                    f"expected {key.name} to be {expected}, found {escape(value)}; it is not supported"
                )
        return {key.field: key.read(found, key.name) for key in self.keys if key.read}

    def require_agreement(self, found: Mapping[str, Any], shape: Any) -> None:
        """Hold the keys that repeat what others say against ``shape``, which was read from those.

        Raises:
            CheckpointError: one contradicts it.
        """
        for key in self.keys:
            value = found.get(key.name)
            if key.repeats and key.write and value is not None and not key.tolerated(value):
                expected = key.write(shape)
                if not _is_one_of(value, [expected]):
                    raise CheckpointError(
                        f"expected {key.name} {expected}, found {escape(value)}; the config contradicts itself"
                    )

    def allowed(self, place: str = "") -> Keys:
        """What each key below ``place`` may be beside what is written."""
        fits = {key.name: some(*key.values) if key.values else key.tolerated for key in self.keys}
        return at([place], {name: fit for name, fit in fits.items() if fit is not _NOTHING})


def _is_one_of(found: Any, values: Sequence[Any]) -> bool:
    """Whether ``found`` is one of ``values``, of the same type: true is not 1."""
    return (type(found), found) in [(type(value), value) for value in values]
