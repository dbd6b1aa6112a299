"""The files of a checkpoint's directory: which are its own."""

from __future__ import annotations

from pathlib import Path

from mtp_extract.checkpoint.codes import CODES_FILE
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.errors import CheckpointError, OutputError, escape
from mtp_extract.formats import EVERY, format_named, is_called
from mtp_extract.formats.transformers import GENERATION_FILE
from mtp_extract.io.place import listing

RECORD = "extraction.json"
"""The file that makes a directory a checkpoint of ours. What it lists may be replaced."""

CARD = "README.md"
"""The model card. It is for people, who may change it."""

_WRITTEN = (CARD, CODES_FILE, GENERATION_FILE)
"""What is written besides weights and configuration."""


def recorded(place: Path) -> frozenset[str]:
    """The files of the checkpoint at ``place``: what its record lists of what formats have. It may list more.

    Raises:
        OutputError: it has no record, or none that can be read.
    """
    listing(RECORD, ())(place)
    try:
        found = read_object(place / RECORD)
    except CheckpointError as error:
        raise OutputError(f"{error} So what lies beside it is not replaced. Choose another place.") from error
    files = found.get("files")
    if not isinstance(files, dict):
        raise OutputError(f"{escape(place / RECORD)}: lists no files, so what lies beside it is not replaced.")
    formats = map(format_named, EVERY)
    written = {*_WRITTEN, *(name for format_ in formats for name in (format_.weights_file, format_.marker))}
    return frozenset({RECORD, *(name for name in files if any(is_called(name, known) for known in written))})
