"""What a file says beside its tensors, compared with what we would write there.

Every key is compared with ``made``, which a format's own writer made of what was read. The few keys that may differ,
because no engine computes another function for it, are data: :data:`AllowedKeys`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract.errors import CheckpointError, escape, few

Allowed = Callable[[Any], bool]
AllowedKeys = Mapping[str, Allowed]
"""Key, with dots where it lies deeper and wildcards as in file names → whether a value of it changes nothing."""


def some(*values: Any) -> Allowed:
    """Whether a value is one of these."""
    return lambda found: any(_same(found, value) for value in values)


def anything(found: Any) -> bool:
    """Any value: the key is read in full elsewhere, or by nothing that computes."""
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


def allow(fits: Allowed, *keys: str) -> AllowedKeys:
    """Every one of ``keys``, which spaces part, if ``fits``."""
    return dict.fromkeys(" ".join(keys).split(), fits)


def at(places: Iterable[str], keys: AllowedKeys) -> AllowedKeys:
    """``keys`` below each of ``places``, which end in a dot or are empty."""
    return {f"{place}{key}": fits for place in places for key, fits in keys.items()}


HEADER: AllowedKeys = MappingProxyType({"format": some("pt", "mlx"), "mtp_extract": is_text})
"""What the header of a safetensors file may say beside its tensors."""


def require_keys(path: Path, found: Mapping[str, Any], made: Mapping[str, Any], tolerated: AllowedKeys) -> None:
    """Check that ``found``, what the file at ``path`` says, is what we would write there; as :func:`unexpected_keys`.

    Raises:
        CheckpointError: it says something else; the message names up to five keys.
    """
    if wrong := list(unexpected_keys(found, made, tolerated)):
        raise CheckpointError(
            f"{escape(path)}: expected what would be written of the drafter that it describes, found that it "
            f"{few(wrong, separator='; ')}. Undo that, or extract the drafter again."
        )


def unexpected_keys(
    found: Mapping[str, Any], made: Mapping[str, Any], tolerated: AllowedKeys, place: str = ""
) -> Iterator[str]:
    """What ``found`` says that differs from ``made`` and is not ``tolerated``, each as a clause that begins with a
    verb. A key that is not there counts as one that is null.

    Args:
        place: where both lie, for the names of keys; empty or ends in a dot.
    """
    for key in dict.fromkeys([*found, *made]):
        name, value, expected = f"{place}{key}", found.get(key), made.get(key)
        if _same(value, expected) or any(fnmatchcase(name, p) and fits(value) for p, fits in tolerated.items()):
            continue
        if isinstance(value, Mapping) and isinstance(expected, Mapping):
            yield from unexpected_keys(value, expected, tolerated, f"{name}.")
        else:
            yield f"says {escape(name)} {escape(value)}" if key in found else f"says nothing of {escape(name)}"


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, truth values being no numbers."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Mapping | list | tuple) or isinstance(other, Mapping | list | tuple):
        return False
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
