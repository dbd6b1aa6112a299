"""Checking a checkpoint's directory against its own record: every file of it, by size and SHA-256."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_extract.checkpoint.files import sha256_of_file
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.record_fields import FORMAT_VERSION, check_extraction
from mtp_extract.errors import CheckpointError, escape, few
from mtp_extract.formats import EVERY, format_named, format_of, weights_of
from mtp_extract.io.address import is_cached
from mtp_extract.pipeline.staging import CARD, RECORD
from mtp_extract.pipeline.unexpected import is_harmless, unexpected_in


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str  # key in the report
    what: str  # what it asks
    passed: bool | None  # None where it was not run
    evidence: str  # figures, or what is wrong, the first place first


@dataclass(frozen=True)
class Verification:
    """What was checked.

    Attributes:
        record: of the directory; empty where it has none, or a bundle's check of it failed.
        files: how many files matched the record, the card left out.
        against: name of the bundle that everything was derived from again; None when there was none.
        checks: what was held against that bundle.
        comparable: whether it is at least of the shape of that bundle's drafter, so that the two can run side by side.
    """

    directory: Path
    record: dict[str, Any]
    files: int
    against: str | None = None
    checks: tuple[Check, ...] = ()
    comparable: bool = False


def with_record(place: Path) -> Path:
    """``place``; of a file that lies in a directory with a record, that directory."""
    return place.parent if place.is_file() and (place.parent / RECORD).is_file() else place


def changed_card(directory: Path, record: Mapping[str, Any]) -> bool:
    """Whether the card in ``directory`` is there, and another than the one that ``record`` lists."""
    card = directory / CARD
    return card.is_file() and sha256_of_file(card) != record["files"].get(CARD, {}).get("sha256")


def read_record(directory: Path) -> dict[str, Any]:
    """``extraction.json`` of ``directory``.

    Raises:
        CheckpointError: there is none, or it is not what this package writes.
    """
    path = directory / RECORD
    if directory.is_file():
        raise CheckpointError(
            f"{escape(directory)}: expected a directory that mtp-extract wrote, with {RECORD} in it, found a file. "
            "Extract its drafter first."
        )
    record = read_object(path, "Expected a directory that mtp-extract wrote.")
    if record.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: expected format version {FORMAT_VERSION}, found {escape(record.get('format_version'))}. Another "
            "release of mtp-extract wrote it: extract the drafter again with this one."
        )
    try:
        check_extraction(record)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: not what mtp-extract writes: {escape(error)}. Extract it again, or fetch it again."
        ) from error
    listed = EVERY.get(str(record.get("layout")))
    if listed is None or record.get("dtype") not in listed.dtypes:
        raise CheckpointError(
            f"{path}: names layout {escape(record.get('layout'))} and dtype {escape(record.get('dtype'))}, which this "
            "release does not write."
        )
    return record


def verify(directory: str | os.PathLike[str], allowed: Container[str] = ()) -> Verification:
    """Check ``directory`` against its record: size and SHA-256 of each file but the card, format and geometry; and that
    nothing else lies there that an engine may read. Where it came from is not checked: that takes the bundle.

    Args:
        allowed: names of files that may be there though the record does not list them: those of a report.

    Raises:
        CheckpointError: something differs, is missing or does not belong there; the message lists what.
    """
    folder = Path(directory)
    present = list(files_in(folder))
    record = read_record(folder)
    layout = format_named(record["layout"])
    if weights_of(layout, record["files"]) is None:
        raise CheckpointError(f"{folder}: its record does not list {layout.weights_file}.")
    wrong = [
        f"{escape(name)} belongs neither to the checkpoint nor to a report"
        for name in present
        if name not in record["files"] and name != RECORD and name not in allowed and not is_harmless(name)
    ]
    listed = {name: expected for name, expected in record["files"].items() if name != CARD}
    for name, expected in listed.items():
        path = folder / name
        if name not in present:
            wrong.append(f"{escape(name)} is missing")
        elif path.stat().st_size != expected["size"]:
            wrong.append(f"{escape(name)} has {path.stat().st_size} bytes, not {expected['size']}")
        elif sha256_of_file(path) != expected["sha256"]:
            wrong.append(f"{escape(name)} has other content")
    if wrong := wrong or list(_otherwise(folder, record)) or unexpected_in(folder, allowed):
        raise CheckpointError(
            f"{escape(folder)}: does not match its {RECORD}: {few(wrong, separator='; ')}. Extract it again, or fetch "
            "it again."
        )
    return Verification(folder, record, len(listed))


def _otherwise(folder: Path, record: dict[str, Any]) -> Iterator[str]:
    """Where ``record`` calls what lies in ``folder`` by the name of another format, or of another drafter."""
    found, layout = format_of(folder), record["layout"]
    if found.name not in (layout, EVERY[layout].read_as):
        yield f"the layout is {found.name}, not {layout}"
        return
    config = json.loads(json.dumps(found.read_config(folder).as_json()))
    for key, value in config.items():
        if record["geometry"].get(key) != value and key != "max_position_embeddings":
            yield f"{key} is {escape(value)}, not {escape(record['geometry'].get(key))}"


_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


def files_in(folder: Path) -> Iterator[str]:
    """Files below ``folder``, hidden ones left out, as the record writes them.

    Nothing is opened: a pipe would be waited for, a link may lead to a file that is nobody's business.

    Raises:
        CheckpointError: there is something else than files and directories.
    """
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted([*folders, *names]):
            path = Path(root, name)
            mode = path.lstat().st_mode
            if name.startswith(".") or stat.S_ISDIR(mode):
                continue
            if not stat.S_ISREG(mode) and not is_cached(path):
                raise CheckpointError(
                    f"{escape(path)}: expected a regular file, found {_KINDS.get(stat.S_IFMT(mode), 'a device')}, "
                    "which is no part of a checkpoint. Put the file itself there, or move it elsewhere."
                )
            yield path.relative_to(folder).as_posix()
