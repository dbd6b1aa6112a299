"""The formats, one module each. What ``FORMATS`` lists is what there is to choose from."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_extract.errors import DrafterError, escape

if TYPE_CHECKING:
    from mtp_extract.checkpoint.checkpoint import Checkpoint, Format

__all__ = ["FORMATS", "format_named", "format_of", "read_checkpoint"]

# Imported when chosen: --help lists the names and loads nothing.
FORMATS = {
    "transformers": "mtp_extract.checkpoint.formats.transformers",
    "litert": "mtp_extract.checkpoint.formats.litert",
}
"""Name → the module whose ``FORMAT`` it is."""


def format_named(name: str) -> Format:
    """The format called ``name``.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in FORMATS:
        raise ValueError(f"format {name!r}: expected {' or '.join(FORMATS)}.")
    found: Format = import_module(FORMATS[name]).FORMAT
    return found


def format_of(directory: Path) -> Format:
    """The format of the checkpoint in ``directory``, by the file that marks it.

    Raises:
        DrafterError: it is of none.
    """
    formats = [format_named(name) for name in FORMATS]
    for found in formats:
        if (directory / found.marker).is_file():
            return found
    raise DrafterError(
        f"expected {' or '.join(f.marker for f in formats)} in {escape(directory)}, found neither; "
        "give the directory an extraction wrote"
    )


def read_checkpoint(directory: Path | str) -> Checkpoint:
    """The checkpoint in ``directory``, of whichever format.

    Raises:
        DrafterError, CheckpointError: as :meth:`Format.read`.
    """
    folder = Path(directory)
    return format_of(folder).read(folder)
