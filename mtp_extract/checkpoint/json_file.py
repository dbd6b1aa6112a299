"""A JSON object in a file that may be anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mtp_extract.errors import CheckpointError, escape
from mtp_extract.io.regular import read_regular

__all__ = ["read_object"]

_LARGEST = 1 << 26


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
        content = json.loads(read_regular(path, _LARGEST))
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read: {error.strerror}. {expected}".rstrip()) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not valid JSON: the directory is damaged.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name}: expected a JSON object, found a {type(content).__name__}.")
    return content
