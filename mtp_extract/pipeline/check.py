"""Reads a checkpoint's directory for every command: its record, the files that belong to it, files that do not and that
an engine might read, and the drafter itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import convert as typed
from msgspec import to_builtins

from mtp_extract.architecture.config import Config
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import CODES_FILE, attach_codes
from mtp_extract.checkpoint.documents import find_differences, read_object
from mtp_extract.checkpoint.dtypes import FLOAT_NAMES
from mtp_extract.checkpoint.files import TENSOR_FILES, compute_sha256
from mtp_extract.checkpoint.format import Format
from mtp_extract.checkpoint.record import CHECKPOINT, Extraction, Pairs, flatten_provenance
from mtp_extract.checkpoint.rounding import SCALES
from mtp_extract.checkpoint.stored import FileWeight
from mtp_extract.checkpoint.weight import Weight, is_same_weight
from mtp_extract.errors import CheckpointError, OutputError, escape, list_few
from mtp_extract.formats import (
    ALL_FORMATS,
    detect_format,
    find_weights_file,
    list_checkpoint_files,
    load_format,
    matches_pattern,
)
from mtp_extract.formats.transformers import GENERATION_FILE
from mtp_extract.io.address import is_cached, name_checkpoint
from mtp_extract.io.place import make_own_files
from mtp_extract.io.typed import parse_record
from mtp_extract.report.files import REPORT_FILES

RECORD = "extraction.json"
"""The record, which makes a directory a checkpoint of ours. Files that it lists may be replaced."""

CARD = "README.md"
"""The model card, which people may change."""

LEGAL = tuple(f"{name}{ending}" for name in ("LICENSE", "NOTICE") for ending in ("", "*.txt", "*.md"))
_FOR_PEOPLE = (
    *LEGAL,
    "CITATION.cff",
    *(f"*.{ending}" for ending in ("md", "png", "jpg", "jpeg", "gif", "webp", "pdf")),
)

_TOKENIZER = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "processor_config.json", "preprocessor_config.json"),
)
"""Tokenizer files, which do not matter: drafts are token ids of the base."""

_FOUND_BY_ENDING = (*TENSOR_FILES, ".npz", ".bin", ".pt", ".pth", ".py", ".json")
"""Endings by which some engines find files, hidden ones included."""

AGAIN = "Extract it again, or fetch it again."
"""Advice for a directory that was changed."""


@dataclass(frozen=True)
class Check:
    """The result of a check."""

    name: str  # key in the report
    what: str  # the statement that is checked
    passed: bool | None  # None if it was not run
    evidence: str  # figures, or the problems, the first one first


def resolve_place(place: Path) -> Path:
    """Return the directory of the file ``place`` if that has a record; else ``place``."""
    return place.parent if place.is_file() and (place.parent / RECORD).is_file() else place


def list_recorded_files(place: Path) -> frozenset[str]:
    """List the files of formats that the record at ``place`` lists; OutputError if there is no readable record."""
    make_own_files(RECORD, ())(place)
    try:
        if not isinstance(files := read_object(place / RECORD).get("files"), dict):
            raise CheckpointError(f"{escape(place / RECORD)}: lists no files.")
    except CheckpointError as error:
        raise OutputError(f"{error} So what lies beside it is not replaced. Choose another place.") from error
    written = {CARD, CODES_FILE, GENERATION_FILE}
    written |= {name for format_ in map(load_format, ALL_FORMATS) for name in (format_.weights_file, format_.marker)}
    return frozenset({RECORD, *(name for name in files if any(matches_pattern(name, pattern) for pattern in written))})


def read_record(place: Path) -> dict[str, Any]:
    """Read ``extraction.json`` of the checkpoint at ``place``; empty if there is none.

    The record is the JSON object itself, so that objects that a conversion copies keep the keys of other releases, and
    the figures of a training, which its type does not list.

    Raises:
        CheckpointError: the record is not one that this package writes.
    """
    path = resolve_place(place) / RECORD
    if not path.exists():
        return {}
    record = read_object(path)
    try:
        parse_record(record, Extraction)
        if record["layout"] not in ALL_FORMATS or record["dtype"] not in ALL_FORMATS[record["layout"]].dtypes:
            raise ValueError(f"layout {record['layout']} in {record['dtype']}")
    except ValueError as error:
        why = f"not what this release of mtp-extract writes: {escape(error)}"
        raise CheckpointError(f"{path}: {why}. {AGAIN}") from error
    return record


def is_card_changed(directory: Path, record: Mapping[str, Any]) -> bool:
    """Whether ``directory`` has a card that differs from the one that ``record`` lists."""
    card = directory / CARD
    return card.is_file() and compute_sha256(card) != record["files"].get(CARD, {}).get("sha256")


def find_changed_files(folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """Return the files in ``folder``, but for the card, that are not as ``record`` lists them: name → a clause."""
    present = set(list_directory_files(folder))
    layout = record["layout"]
    changed = dict[str, str]()
    weights_file = load_format(layout).weights_file
    if find_weights_file(load_format(layout), record["files"]) is None:
        changed[weights_file] = f"{weights_file} is not listed"
    for name, expected in sorted(record["files"].items()):
        path = folder / name
        if name == CARD:
            continue
        if name not in present:
            changed[name] = f"{escape(name)} is missing, or a link"
        elif path.stat().st_size != expected["size"] or compute_sha256(path) != expected["sha256"]:
            changed[name] = f"{escape(name)} has other content"
    if not changed and (layout_of_files := detect_format(folder).name) not in (layout, ALL_FORMATS[layout].read_as):
        changed[weights_file] = f"the layout is {layout_of_files}, not {layout}"
    return changed


def list_directory_files(folder: Path) -> Iterator[str]:
    """Yield the paths of files below ``folder``, without hidden ones, as the record writes them."""
    for path in _walk_files(folder):
        if not path.name.startswith(".") and _is_file(path):
            yield path.relative_to(folder).as_posix()


def find_unexpected_files(place: Path, format_: Format) -> Iterator[str]:
    """Yield a clause on each file at ``place`` that an engine may read, and that neither drafter nor report needs."""
    if place.is_file():
        return
    belonging = {*list_checkpoint_files(place, format_), RECORD, CODES_FILE, *REPORT_FILES}
    for path in _walk_files(place):
        name = path.relative_to(place).as_posix()
        if not _is_file(path):
            yield f"{escape(name)} is a link, or no file"
        elif name not in belonging and not _is_unused(name):
            yield f"{escape(name)} belongs neither to the checkpoint nor to a report"
        elif name in _TOKENIZER and name.endswith("_config.json") and _may_name_code(path):
            yield f"{escape(name)} names code, or cannot be read"


def _may_name_code(path: Path) -> bool:
    try:
        return "auto_map" in read_object(path)
    except CheckpointError:
        return True


def _walk_files(folder: Path) -> Iterator[Path]:
    """Yield files below ``folder``, and links to directories, since engines follow these; skip hidden directories."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if Path(root, name).is_symlink()]
        yield from (Path(root, name) for name in sorted([*links, *names]))


def _is_file(path: Path) -> bool:
    """Whether ``path`` is a file, or a link of the Hub's cache to one. Nothing is opened: a pipe would block."""
    return is_cached(path) or (path.is_file() and not path.is_symlink())


def _is_unused(name: str) -> bool:
    """Whether no engine reads a file called ``name``, a path in the directory, or the drafter does not depend on it."""
    base = name.rpartition("/")[2]
    if base.startswith("."):
        return not base.endswith(_FOUND_BY_ENDING)
    return name in _TOKENIZER or any(fnmatchcase(base, pattern) for pattern in _FOR_PEOPLE)


@dataclass(frozen=True)
class CheckpointDirectory:
    """A drafter's directory, and its record."""

    directory: Path  # or a file that is a checkpoint by itself
    layout: str  # name of its format
    written: Checkpoint  # as the files of its format hold it
    checkpoint: Checkpoint  # with the codes that lie beside its floats, and notes on files that were not read
    known_as: str | None  # the name of its geometry, if that is listed
    record: Mapping[str, Any]  # its record; without one, the fields that a record would have
    is_recorded: bool  # whether it has a record
    changed: frozenset[str]  # names of files, without tensors, that are not as the record lists them

    @classmethod
    def of(cls, place: str | os.PathLike[str]) -> CheckpointDirectory:
        """Read the drafter in ``place``.

        ``checkpoint.unread`` lists foreign files and keys that were not read; a proof requires that there are none.
        The origin is not checked: that takes the bundle.

        Raises:
            CheckpointError: the directory is damaged or holds no drafter; or it has a record, and its tensors were
                changed since, or its config describes another drafter.
        """
        folder = resolve_place(Path(place))
        record = read_record(folder)
        changed = find_changed_files(folder, record) if record else {}
        _require_tensors(folder, record, changed)
        format_, written = _read_files(folder, changed)
        if changed:
            _require_geometry(folder / format_.marker, written.config, record)
        known_as = written.architecture.known_as(written.config)
        stated = record or _build_implied_record(folder, written, known_as)
        checkpoint = replace(
            written,
            tensors=_merge_shared(attach_codes(folder, written.tensors), stated["shared"]),
            activations=MappingProxyType(typed(stated["activations"], Pairs)),
            provenance=flatten_provenance(stated["source"]),
            unread=(*written.unread, *changed.values(), *find_unexpected_files(folder, format_)),
        )
        return cls(folder, format_.name, written, checkpoint, known_as, stated, bool(record), frozenset(changed))

    @property
    def extra_codes(self) -> frozenset[str]:
        """Roles whose codes lie beside their floats, in another file."""
        coded = [role for role, weight in self.checkpoint.tensors.items() if weight.scheme]
        return frozenset(role for role in coded if not self.written.tensors[role].scheme)

    @property
    def lost(self) -> list[str]:
        """Names of the roundings that cannot be undone: floats with codes beside them lost nothing."""
        rounded: list[str] = self.record["rounded"]
        if not self.extra_codes:
            return rounded
        weights = (weight for role, weight in self.written.tensors.items() if role not in self.extra_codes)
        types = {weight.tensor.dtype for weight in weights if isinstance(weight, FileWeight)}
        names = {FLOAT_NAMES[name].rounding for name in types if name in FLOAT_NAMES}
        return [word for word in rounded if word.endswith(SCALES) or word in names]

    @property
    def sums(self) -> dict[str, str]:
        """Name → SHA-256 of each file with tensors."""
        if self.is_recorded:
            files = self.record["files"]
            return {name: file["sha256"] for name, file in files.items() if name.endswith(TENSOR_FILES)}
        return {name: compute_sha256(path) for name, path in _find_tensor_files(self.directory).items()}


def _require_tensors(folder: Path, record: Mapping[str, Any], changed: Mapping[str, str]) -> None:
    """Raise CheckpointError if a file of tensors that ``record`` lists is ``changed``."""
    weights = load_format(record["layout"]).weights_file if record else ""
    if wrong := [clause for name, clause in changed.items() if name == CODES_FILE or matches_pattern(name, weights)]:
        raise CheckpointError(
            f"{escape(folder)}: expected the tensors that its {RECORD} lists, found that "
            f"{list_few(wrong, separator='; ')}. {AGAIN}"
        )


def _read_files(folder: Path, changed: Mapping[str, str]) -> tuple[Format, Checkpoint]:
    """Read the format and the checkpoint of ``folder``; an error also names the files that are ``changed``."""
    try:
        format_ = detect_format(folder)
        return format_, format_.read(folder)
    except CheckpointError as error:
        if not changed:
            raise
        raise CheckpointError(f"{error} By its {RECORD}, {list_few(changed.values(), separator='; ')}.") from error


def _merge_shared(tensors: Mapping[str, Weight], shared: Sequence[Sequence[str]]) -> Mapping[str, Weight]:
    """Let ``shared`` roles have one weight again, if their weights are equal: formats may write it once."""
    by_role = dict(tensors)
    for first, *others in shared:
        for role in others:
            if first in by_role and role in by_role and is_same_weight(by_role[first], by_role[role]):
                by_role[role] = by_role[first]
    return MappingProxyType(by_role)


def _require_geometry(path: Path, config: Config, record: Mapping[str, Any]) -> None:
    """Raise CheckpointError if ``config``, read from ``path``, is not the geometry that ``record`` states."""
    wrong = [
        f"{escape(difference.place)} is {escape(difference.found)}, not {escape(difference.expected)}"
        for difference in find_differences(record["geometry"], to_builtins(config.as_json()))
        if difference.place not in ("max_position_embeddings", "base")
    ]
    if wrong:
        problems = list_few(wrong, separator="; ")
        raise CheckpointError(f"{escape(path)}: describes another drafter than its {RECORD}: {problems}. {AGAIN}")


def _find_tensor_files(place: Path) -> dict[str, Path]:
    """Find the files with tensors at ``place``, including codes beside floats: name → path."""
    if place.is_file():
        return {place.name: place}
    listed = sorted(list_checkpoint_files(place, detect_format(place)))
    names = [name for name in (*listed, CODES_FILE) if name.endswith(TENSOR_FILES) and (place / name).is_file()]
    return {name: place / name for name in names}


def _build_implied_record(place: Path, checkpoint: Checkpoint, known_as: str | None) -> dict[str, Any]:
    """Return the fields that the record of a directory without one would have: its name and how it stores numbers."""
    size = sum(path.stat().st_size for path in _find_tensor_files(place).values())
    source = {"name": name_checkpoint(place), "size": size, "kind": CHECKPOINT, "version": None, "section": None}
    return {
        "tool": {"version": None},
        "known_as": known_as,
        "source": {**source, "provenance": {}},
        "dtype": checkpoint.dtype,
        "activations": {role: to_builtins([*pair]) for role, pair in checkpoint.activations.items()},
        **{"rule": None, "proof": None, "rounded": [], "converted_from": [], "shared": []},
    }
