"""The files of a checkpoint's directory: which are its own, and writing one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from mtp_extract.checkpoint.codes import CODES_FILE
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.planned import OutputFile
from mtp_extract.checkpoint.record import sha256_of_file
from mtp_extract.checkpoint.tensor_file import write_tensors
from mtp_extract.errors import CheckpointError, OutputError, escape
from mtp_extract.formats import EVERY, format_named, is_called
from mtp_extract.formats.transformers import GENERATION_FILE
from mtp_extract.io.output import output_error
from mtp_extract.io.place import listing
from mtp_extract.io.source import Advance

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


def write_file(stage: Path, file: OutputFile, advance: Advance = lambda done: None) -> dict[str, Any]:
    """Write ``file`` into the directory ``stage`` and read it back; its size and SHA-256, as a record has them.

    Args:
        advance: called with the number of bytes of tensors written since the last call.

    Raises:
        OutputError: it cannot be written, or reads back differently.
    """
    path = stage / file.name
    if file.tensors:
        write_tensors(stage, file, advance)
        return {"size": path.stat().st_size, "sha256": sha256_of_file(path)}
    # Lone surrogates, from names that are not UTF-8, cannot be written; they are shown as escapes instead.
    data = file.text.encode("utf-8", "backslashreplace")
    try:
        path.write_bytes(data)
        if path.read_bytes() != data:
            raise OSError("it reads back differently")
    except OSError as error:
        raise output_error(path, error) from error
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
