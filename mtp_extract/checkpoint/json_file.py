"""A JSON object in a file that may be anything."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from mtp_extract.errors import CheckpointError, escape
from mtp_extract.io.files import read_regular

_LARGEST = 1 << 26
"""Bytes of a file."""


def parse_json(text: str | bytes) -> Any:
    """What ``text`` says in JSON, which knows neither NaN nor infinity, nor numbers beyond the largest float; each key
    of an object once: of two, readers take the one or the other.

    Raises:
        ValueError, RecursionError: it is none, or nested too deeply.
    """
    return json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError(f"{Counter(key for key, _ in pairs).most_common(1)[0][0]} stands there twice")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number")
    return number


def read_object(path: Path, advice: str = "Extract or fetch it again.") -> dict[str, Any]:
    """The object in the file at ``path``, in UTF-8; ``advice`` ends a refusal.

    Raises:
        CheckpointError: it cannot be read, is too large, or holds something else.
    """
    try:
        content = parse_json(read_regular(path, _LARGEST).decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{escape(path)}: cannot be read: {error.strerror}. {advice}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{escape(path)}: not valid JSON ({escape(error)}). {advice}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{escape(path)}: expected a JSON object, found a {type(content).__name__}. {advice}")
    return content
