"""The files of a checkpoint's directory: which are its own, and writing one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.planned import OutputFile
from mtp_extract.checkpoint.tensor_file import header_sum, read_header, write_tensors
from mtp_extract.errors import CheckpointError, OutputError, escape
from mtp_extract.io.output import output_error
from mtp_extract.io.place import listing

__all__ = ["RECORD", "recorded", "write_file"]

RECORD = "extraction.json"
"""The file that makes a directory a checkpoint of ours. What it lists may be replaced."""


def recorded(place: Path) -> frozenset[str]:
    """The files of the checkpoint at ``place``, as its record lists them.

    Raises:
        OutputError: it has no record, or none that can be read.
    """
    listing(RECORD, ())(place)
    try:
        files = read_object(place / RECORD).get("files")
    except CheckpointError as error:
        raise OutputError(f"{error} So what lies beside it is not replaced. Choose another place.") from error
    if not isinstance(files, dict):
        raise OutputError(f"{escape(place / RECORD)}: lists no files, so what lies beside it is not replaced.")
    return frozenset({RECORD, *files})


def write_file(
    stage: Path, file: OutputFile, tick: Callable[[int], None], beside: Sequence[Callable[[], object]] = ()
) -> dict[str, Any]:
    """Write ``file`` into the directory ``stage`` and read it back; what a record says of it.

    Args:
        tick: called with the number of bytes of tensors written since the last call.
        beside: as for :func:`~mtp_extract.checkpoint.tensor_file.write_tensors`.

    Raises:
        OutputError: it cannot be written, or reads back differently.
    """
    path = stage / file.name
    if file.tensors:
        sums = write_tensors(stage, file, tick, beside)
        return {"size": path.stat().st_size, "header": header_sum(path, read_header(path)), "tensors": sums}
    # Lone surrogates, from names that are not UTF-8, cannot be written; they are shown as escapes instead.
    data = file.text.encode("utf-8", "backslashreplace")
    try:
        path.write_bytes(data)
        if path.read_bytes() != data:
            raise OSError("it reads back differently")
    except OSError as error:
        raise output_error(path, error) from error
    return {"size": len(data), "xxh3": xxh3_128_hexdigest(data)}
