"""What a directory of a format may hold: each file that an engine may read, and each key of those that say something.

Keys are held against what the format's own writer would say of what was read. What may be there as well, or differ, is
listed as data, because no engine computes another function for it; anything that is on no list is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mtp_extract.errors import escape

Allowed = Callable[[Any], bool]
Keys = Mapping[str, Allowed]
"""Key, with dots where it lies deeper and wildcards as in file names → whether a value of it changes nothing."""


def some(*values: Any) -> Allowed:
    """Whether a value is one of these."""
    return lambda found: any(_same(found, value) for value in values)


def anything(found: Any) -> bool:
    """Whatever it is: it is read in full elsewhere, or by nothing that computes."""
    return True


def is_text(found: Any) -> bool:
    """Text that nothing is computed from."""
    return found is None or isinstance(found, str)


def is_number(found: Any) -> bool:
    """A number that nothing is computed from."""
    return found is None or (isinstance(found, int | float) and not isinstance(found, bool))


def is_whole(found: Any) -> bool:
    """An integer, or several, that nothing is computed from."""
    several = found if isinstance(found, list) else [found]
    return all(value is None or (isinstance(value, int) and not isinstance(value, bool)) for value in several)


off = some(None, False, 0, [], {})
"""What is not there, in each of its forms."""


def at(places: Iterable[str], keys: Keys) -> Keys:
    """``keys`` below each of ``places``, which end in a dot or are empty."""
    return {f"{place}{key}": fits for place in places for key, fits in keys.items()}


@dataclass(frozen=True)
class Said:
    """A file of a checkpoint, and what it may say beside its tensors, if it has any; it may not be there."""

    path: Path
    made: Mapping[str, Any]  # what the format's writer would say there of what was read
    tolerated: Keys  # what may be there as well, or differ
    needed: Sequence[str] = ()  # keys without which engines take something else than is read here


def said_by_header(path: Path) -> Said:
    """What the header of the safetensors file at ``path`` may say beside its tensors."""
    return Said(path, {}, {"format": some("pt", "mlx"), "mtp_extract": is_text})


def said_by_index(path: Path, places: Mapping[str, str]) -> Said:
    """What the index of shards at ``path`` may say, of tensors that are read from ``places`` (tensor → file)."""
    return Said(path, {"weight_map": places}, {"metadata": anything})


def beyond(found: Mapping[str, Any], said: Said) -> Iterator[str]:
    """What ``found``, the content of a file, says beyond what may be there; in words."""
    yield from _beyond(found, said.made, said.tolerated, "")
    for name in said.needed:
        outer, _, inner = name.rpartition(".")
        place = found.get(outer)
        if found.get(name) is None and not (isinstance(place, Mapping) and place.get(inner) is not None):
            yield f"says nothing of {name}"


def _beyond(found: Mapping[str, Any], made: Mapping[str, Any], tolerated: Keys, prefix: str) -> Iterator[str]:
    for key, value in found.items():
        name = f"{prefix}{key}"
        if key in made and _same(value, made[key]):
            continue
        if any(fnmatchcase(name, pattern) and fits(value) for pattern, fits in tolerated.items()):
            continue
        if isinstance(value, Mapping) and isinstance(made.get(key), Mapping):
            yield from _beyond(value, made[key], tolerated, f"{name}.")
        else:
            yield f"says {escape(name)} {escape(value)}"


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, truth values being no numbers."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping | list | tuple) or isinstance(other, Mapping | list | tuple):
        return False
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
