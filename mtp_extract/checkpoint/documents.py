"""JSON objects in files that may be anything, and what a file says compared with what we would write there.

Every key is compared with ``made``, which a format's own writer made of what was read. The few keys that may differ,
because no engine computes another function for it, are data: :data:`AllowedKeys`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract.errors import CheckpointError, escape, few
from mtp_extract.io.files import read_regular

_LARGEST = 1 << 26
"""Bytes of a file."""

Allowed = tuple[Any, ...]
"""What a value may be for nothing to change: values, and types of values, where a truth value is no ``int``."""

AllowedKeys = Mapping[str, Allowed]
"""Key, with dots where it lies deeper and wildcards as in file names → what it may be."""

ANYTHING: Allowed = (object,)
"""The key is read in full elsewhere, or by nothing that computes."""

TEXT: Allowed = (str, None)
NUMBER: Allowed = (int, float, None)
WHOLE: Allowed = (int, list, None)
FLAG: Allowed = (bool, None)
OFF: Allowed = (None, False, 0, [], {})
"""What is not there, in each of its forms."""

HEADER: AllowedKeys = MappingProxyType({"format": ("pt", "mlx"), "mtp_extract": TEXT})
"""What the header of a safetensors file may say beside its tensors."""


@contextmanager
def refused(path: Path, damaged: str, advice: str = "Extract or fetch it again.") -> Iterator[None]:
    """Around reading the file at ``path``: what opening or parsing it raises is a CheckpointError that names it.

    Args:
        damaged: what is wrong with it, with ``{}`` for the ValueError.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{escape(path)}: cannot be read: {error.strerror}. {advice}") from error
    except (ValueError, RecursionError) as error:
        # It may hold a name of full length, and then the reason.
        raise CheckpointError(f"{escape(path)}: {damaged.format(escape(error, 500))}. {advice}") from error


def parse_json(text: str | bytes) -> Any:
    """What ``text`` says in JSON: finite numbers, and each key of an object once.

    Raises:
        ValueError, RecursionError: it is none, or nested too deeply.
    """

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise ValueError(f"{text} is no number")
        return number

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(made := dict(pairs)) != len(pairs):
            raise ValueError("a key stands there twice")
        return made

    return json.loads(text, parse_constant=finite, parse_float=finite, object_pairs_hook=once)


def read_object(path: Path, advice: str = "Extract or fetch it again.") -> dict[str, Any]:
    """The object in the file at ``path``, in UTF-8; ``advice`` ends a refusal.

    Raises:
        CheckpointError: it cannot be read, is too large, or holds something else.
    """
    with refused(path, "not valid JSON ({})", advice):
        content = parse_json(read_regular(path, _LARGEST).decode("utf-8"))
    if not isinstance(content, dict):
        raise CheckpointError(f"{escape(path)}: expected a JSON object, found a {type(content).__name__}. {advice}")
    return content


def allow(values: Allowed, *keys: str) -> AllowedKeys:
    """Every one of ``keys``, which spaces part, may be ``values``."""
    return dict.fromkeys(" ".join(keys).split(), values)


def at(places: Iterable[str], keys: AllowedKeys) -> AllowedKeys:
    """``keys`` below each of ``places``."""
    return {f"{place}{key}": values for place in places for key, values in keys.items()}


def require_keys(path: Path, found: Mapping[str, Any], made: Mapping[str, Any], tolerated: AllowedKeys) -> None:
    """Check that ``found``, what the file at ``path`` says, is what we would write there, ``made``, or ``tolerated``.

    Raises:
        CheckpointError: it says something else; the message names up to five keys.
    """
    if wrong := list(_unexpected_keys(found, made, tolerated)):
        raise CheckpointError(
            f"{escape(path)}: expected what would be written of the drafter that it describes, found that it "
            f"{few(wrong, separator='; ')}. Undo that, or extract the drafter again."
        )


def _unexpected_keys(
    found: Mapping[str, Any], made: Mapping[str, Any], tolerated: AllowedKeys, place: str = ""
) -> Iterator[str]:
    """What ``found`` says, at ``place``, that differs from ``made`` and is not ``tolerated``, each as a clause; a key
    that is not there counts as one that is null."""
    for key in dict.fromkeys([*found, *made]):
        name, value, expected = f"{place}{key}", found.get(key), made.get(key)
        allowed = (one for pattern, values in tolerated.items() if fnmatchcase(name, pattern) for one in values)
        if value == expected or any(_is(value, one) for one in allowed):
            continue
        if isinstance(value, Mapping) and isinstance(expected, Mapping):
            yield from _unexpected_keys(value, expected, tolerated, f"{name}.")
        else:
            yield f"says {escape(name)} {escape(value)}" if key in found else f"says nothing of {escape(name)}"


def _is(value: Any, allowed: Any) -> bool:
    """Whether ``value`` is what ``allowed`` is, or of that type; a list is one of whole numbers."""
    if not isinstance(allowed, type):
        return bool(value == allowed)
    if allowed is list:
        return isinstance(value, list) and all(type(one) is int for one in value)
    return allowed is object or (isinstance(value, allowed) and (allowed is bool or not isinstance(value, bool)))
