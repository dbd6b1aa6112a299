"""A checkpoint's directory: which files are its own, what else an engine would read there, and its own record."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mtp_extract.checkpoint.codes import CODES_FILE
from mtp_extract.checkpoint.documents import read_object
from mtp_extract.checkpoint.files import sha256_of_file
from mtp_extract.checkpoint.record import Extraction
from mtp_extract.errors import CheckpointError, OutputError, escape
from mtp_extract.formats import EVERY, format_named, format_of, is_called, weights_of
from mtp_extract.formats.transformers import GENERATION_FILE
from mtp_extract.io.address import is_cached
from mtp_extract.io.place import listing
from mtp_extract.io.typed import read
from mtp_extract.report.files import REPORT_FILES

RECORD = "extraction.json"
"""The file that makes a directory a checkpoint of ours. What it lists may be replaced."""

CARD = "README.md"
"""The model card. It is for people, who may change it."""

LEGAL = tuple(f"{name}{ending}" for name in ("LICENSE", "NOTICE") for ending in ("", "*.txt", "*.md"))
_HARMLESS = (*LEGAL, "CITATION.cff", *(f"*.{ending}" for ending in ("md", "png", "jpg", "jpeg", "gif", "webp", "pdf")))
"""What no engine reads: it is for people."""

_TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "processor_config.json", "preprocessor_config.json"),
)
"""Drafts are tokens of the base: what the drafter's own tokenizer calls them changes none."""

_CODE = "auto_map"
"""Key of a configuration that names code to be run."""

_FOUND_BY_ENDING = (".safetensors", ".gguf", ".npz", ".bin", ".pt", ".pth", ".py", ".json")
"""What some engines look for by ``*`` and this, which finds hidden files too. No others of those are read."""

_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}

AGAIN = "Extract it again, or fetch it again."
"""What to do with a directory that was changed."""


@dataclass(frozen=True)
class Check:
    """One thing that was checked."""

    name: str  # key in the report
    what: str  # what it asks
    passed: bool | None  # None where it was not run
    evidence: str  # figures, or what is wrong, the first place first


def with_record(place: Path) -> Path:
    """``place``; of a file that lies in a directory with a record, that directory."""
    return place.parent if place.is_file() and (place.parent / RECORD).is_file() else place


def recorded(place: Path) -> frozenset[str]:
    """The files of the checkpoint at ``place``: what its record lists of what formats have. It may list more.

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
    written = {CARD, CODES_FILE, GENERATION_FILE}
    written |= {name for one in map(format_named, EVERY) for name in (one.weights_file, one.marker)}
    return frozenset({RECORD, *(name for name in files if any(is_called(name, known) for known in written))})


def read_record(place: Path) -> dict[str, Any]:
    """``extraction.json`` of the checkpoint at ``place``; empty where there is none.

    Raises:
        CheckpointError: it is not what this package writes.
    """
    path = with_record(place) / RECORD
    if not path.exists():
        return {}
    record = read_object(path)
    try:
        read(record, Extraction)
        if record["layout"] not in EVERY or record["dtype"] not in EVERY[record["layout"]].dtypes:
            raise ValueError(f"layout {record['layout']} in {record['dtype']}")
    except ValueError as error:
        why = f"not what this release of mtp-extract writes: {escape(error)}"
        raise CheckpointError(f"{path}: {why}. {AGAIN}") from error
    return record


def changed_card(directory: Path, record: Mapping[str, Any]) -> bool:
    """Whether the card in ``directory`` is there, and another than the one that ``record`` lists."""
    card = directory / CARD
    return card.is_file() and sha256_of_file(card) != record["files"].get(CARD, {}).get("sha256")


def changed_files(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Which files in ``folder``, the card left out, are not as ``record`` lists them, each as a clause."""
    present, layout, wrong = set(files_in(folder)), record["layout"], list[str]()
    if weights_of(format_named(layout), record["files"]) is None:
        wrong.append(f"{format_named(layout).weights_file} is not listed")
    for name, expected in sorted(record["files"].items()):
        path = folder / name
        if name == CARD:
            continue
        if name not in present:
            wrong.append(f"{escape(name)} is {_irregular(path) or 'missing'}")
        elif path.stat().st_size != expected["size"]:
            wrong.append(f"{escape(name)} has {path.stat().st_size} bytes, not {expected['size']}")
        elif sha256_of_file(path) != expected["sha256"]:
            wrong.append(f"{escape(name)} has other content")
    if not wrong and (found := format_of(folder).name) not in (layout, EVERY[layout].read_as):
        wrong.append(f"the layout is {found}, not {layout}")
    return wrong


def files_in(folder: Path) -> Iterator[str]:
    """Files below ``folder``, hidden ones left out, as the record writes them."""
    for path in _entries(folder):
        if not path.name.startswith(".") and not _irregular(path):
            yield path.relative_to(folder).as_posix()


def unexpected_in(place: Path) -> Iterator[str]:
    """What an engine may read at ``place`` and is not the drafter's, each as a clause that names a file.

    What the drafter's own files say is checked where they are read; those of a validation's report may be there.

    Raises:
        CheckpointError: ``place`` holds no drafter, or a damaged one.
    """
    format_ = format_of(place)
    if place.is_file():
        return
    own = {
        min((path.name for path in place.glob(pattern)), default=pattern)
        for pattern in (format_.marker, format_.weights_file, *format_.further_files)
    }
    own |= {RECORD, CODES_FILE, *REPORT_FILES}
    for path in _entries(place):
        name = path.relative_to(place).as_posix()
        if what := _irregular(path):
            yield f"{escape(name)} is {what} (put the file itself there)"
        elif name not in own and not _is_harmless(name):
            yield f"{escape(name)} belongs neither to the checkpoint nor to a report (move it elsewhere)"
    configs = [place / name for name in _TOKENIZER if name.endswith("_config.json") and (place / name).is_file()]
    yield from (f"{path.name} names code" for path in configs if _CODE in read_object(path))


def _entries(folder: Path) -> Iterator[Path]:
    """What lies below ``folder`` and is no directory, links to directories included: engines follow these.

    Hidden directories are not looked into: they are git's, the Hub's and editors'.
    """
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if Path(root, name).is_symlink()]
        yield from (Path(root, name) for name in sorted([*links, *names]))


def _irregular(path: Path) -> str:
    """What lies at ``path`` in place of a file; empty for a file, and for a link of the Hub's cache to one.

    Nothing is opened: a pipe would be waited for, a link may lead to a file that is nobody's business.
    """
    try:
        mode = path.lstat().st_mode
    except OSError:
        return "missing"
    return "" if stat.S_ISREG(mode) or is_cached(path) else _KINDS.get(stat.S_IFMT(mode), "a device")


def _is_harmless(name: str) -> bool:
    """Whether a file of that name, relative to the directory, is read by no engine or changes nothing."""
    base = name.rpartition("/")[2]
    if base.startswith("."):
        return not base.endswith(_FOUND_BY_ENDING)
    return name in _TOKENIZER or any(fnmatchcase(base, pattern) for pattern in _HARMLESS)
