"""A JSON object in a file that may be anything."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from mtp_extract.errors import CheckpointError, escape
from mtp_extract.io.regular import read_regular

_LARGEST = 1 << 26


def parse_json(text: str | bytes) -> Any:
    """What ``text`` says in JSON, which knows neither NaN nor infinity, nor numbers beyond the largest float; each key
    of an object once.

    Raises:
        ValueError, RecursionError: it is none, or nested too deeply.
    """
    return json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=once)


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON each key of which stands once: of two, readers take the one or the other.

    Raises:
        ValueError: one stands twice.
    """
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"{Counter(key for key, _ in pairs).most_common(1)[0][0]} twice")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def read_object(path: Path, expected: str = "") -> dict[str, Any]:
    """The object in ``path``.

    Args:
        path: of at most 64 MiB.
        expected: a sentence that says what should have been there, for a file that cannot be read.

    Raises:
        CheckpointError: it cannot be read, is too large, or holds something else.
    """
    name = escape(path)
    try:
        content = parse_json(read_regular(path, _LARGEST))
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read: {error.strerror}. {expected}".rstrip()) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not valid JSON: the directory is damaged.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: expected a JSON object, found a {type(content).__name__}.")
    return content
