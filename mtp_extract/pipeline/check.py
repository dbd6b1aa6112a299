"""A checkpoint's directory as every command reads it: which files are its own, what else an engine would read there,
its own record, and what all of it holds."""

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
from mtp_extract.checkpoint.codes import CODES_FILE, with_codes
from mtp_extract.checkpoint.documents import differences, read_object
from mtp_extract.checkpoint.dtypes import FLOAT_NAMES
from mtp_extract.checkpoint.files import TENSOR_FILES, compute_sha256
from mtp_extract.checkpoint.format import Format
from mtp_extract.checkpoint.record import CHECKPOINT, Extraction, Pairs, flatten_provenance
from mtp_extract.checkpoint.rounding import SCALES
from mtp_extract.checkpoint.stored import Stored
from mtp_extract.checkpoint.weight import Weight, same_weight
from mtp_extract.errors import CheckpointError, OutputError, escape, few
from mtp_extract.formats import EVERY, format_named, format_of, is_called, own_files, weights_of
from mtp_extract.formats.transformers import GENERATION_FILE
from mtp_extract.io.address import is_cached, name_of
from mtp_extract.io.place import listing
from mtp_extract.io.typed import read
from mtp_extract.report.files import REPORT_FILES

RECORD = "extraction.json"
"""The file that makes a directory a checkpoint of ours. What it lists may be replaced."""

CARD = "README.md"
"""The model card. It is for people, who may change it."""

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
"""Drafts are tokens of the base: what the drafter's own tokenizer calls them changes none."""

_FOUND_BY_ENDING = (*TENSOR_FILES, ".npz", ".bin", ".pt", ".pth", ".py", ".json")
"""What some engines look for by ``*`` and this, which finds hidden files too. No others of those are read."""

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
    OutputError where it has no record, or none that can be read."""
    listing(RECORD, ())(place)
    try:
        if not isinstance(files := read_object(place / RECORD).get("files"), dict):
            raise CheckpointError(f"{escape(place / RECORD)}: lists no files.")
    except CheckpointError as error:
        raise OutputError(f"{error} So what lies beside it is not replaced. Choose another place.") from error
    written = {CARD, CODES_FILE, GENERATION_FILE}
    written |= {name for format_ in map(format_named, EVERY) for name in (format_.weights_file, format_.marker)}
    return frozenset({RECORD, *(name for name in files if any(is_called(name, pattern) for pattern in written))})


def read_record(place: Path) -> dict[str, Any]:
    """``extraction.json`` of the checkpoint at ``place``, empty where there is none; CheckpointError where it is not
    what this package writes."""
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
    return card.is_file() and compute_sha256(card) != record["files"].get(CARD, {}).get("sha256")


def find_changed_files(folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """Which files in ``folder``, the card left out, are not as ``record`` lists them: name → a clause."""
    present = set(files_in(folder))
    layout = record["layout"]
    changed = dict[str, str]()
    weights_file = format_named(layout).weights_file
    if weights_of(format_named(layout), record["files"]) is None:
        changed[weights_file] = f"{weights_file} is not listed"
    for name, expected in sorted(record["files"].items()):
        path = folder / name
        if name == CARD:
            continue
        if name not in present:
            changed[name] = f"{escape(name)} is missing, or a link"
        elif path.stat().st_size != expected["size"] or compute_sha256(path) != expected["sha256"]:
            changed[name] = f"{escape(name)} has other content"
    if not changed and (layout_of_files := format_of(folder).name) not in (layout, EVERY[layout].read_as):
        changed[weights_file] = f"the layout is {layout_of_files}, not {layout}"
    return changed


def files_in(folder: Path) -> Iterator[str]:
    """Files below ``folder``, hidden ones left out, as the record writes them."""
    for path in _walk_files(folder):
        if not path.name.startswith(".") and _is_file(path):
            yield path.relative_to(folder).as_posix()


def unexpected_in(place: Path, format_: Format) -> Iterator[str]:
    """What an engine may read at ``place``, a drafter in ``format_``, and is not its own, each as a clause that names a
    file. What its own files say is compared where they are read; those of a validation's report may be there."""
    if place.is_file():
        return
    belonging = {*own_files(place, format_), RECORD, CODES_FILE, *REPORT_FILES}
    for path in _walk_files(place):
        name = path.relative_to(place).as_posix()
        if not _is_file(path):
            yield f"{escape(name)} is a link, or no file"
        elif name not in belonging and not _is_unused(name):
            yield f"{escape(name)} belongs neither to the checkpoint nor to a report"
        elif name in _TOKENIZER and name.endswith("_config.json") and _may_name_code(path):
            yield f"{escape(name)} names code, or cannot be read"


def _may_name_code(path: Path) -> bool:
    """Whether the configuration of a tokenizer at ``path`` names code of its own, or may for all that can be read."""
    try:
        return "auto_map" in read_object(path)
    except CheckpointError:
        return True


def _walk_files(folder: Path) -> Iterator[Path]:
    """What lies below ``folder`` and is no directory, links to directories included: engines follow these. Hidden
    directories are not looked into: they are git's, the Hub's and editors'."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links = [name for name in folders if Path(root, name).is_symlink()]
        yield from (Path(root, name) for name in sorted([*links, *names]))


def _is_file(path: Path) -> bool:
    """Whether a file lies at ``path``, or a link of the Hub's cache to one: other links may lead to anything. Nothing
    is opened: a pipe would be waited for."""
    return is_cached(path) or (path.is_file() and not path.is_symlink())


def _is_unused(name: str) -> bool:
    """Whether a file of that name, relative to the directory, is read by no engine or changes nothing."""
    base = name.rpartition("/")[2]
    if base.startswith("."):
        return not base.endswith(_FOUND_BY_ENDING)
    return name in _TOKENIZER or any(fnmatchcase(base, pattern) for pattern in _FOR_PEOPLE)


@dataclass(frozen=True)
class ReadDirectory:
    """What a directory holds, and what is known of it."""

    directory: Path  # or a file that is a checkpoint by itself
    layout: str  # name of its format
    written: Checkpoint  # what its files of that format hold
    checkpoint: Checkpoint  # the same with the codes that lie beside its floats, and all that was not read
    known_as: str | None  # the name of its geometry; None for one that is not listed
    record: Mapping[str, Any]  # its own; where it has none, what would stand there
    is_recorded: bool  # whether it has one
    changed: frozenset[str]  # names of files that are not as it lists them; none of them holds tensors

    @classmethod
    def of(cls, place: str | os.PathLike[str]) -> ReadDirectory:
        """The drafter in ``place``. What lies beside it, and what its files say that nothing here reads, is listed in
        ``checkpoint.unread``: who asks for a proof wants none. Where it came from takes the bundle to check.

        Raises:
            CheckpointError: it is damaged or no drafter's; or, where it has a record, its tensors are not those that
                were written, or its config describes another drafter.
        """
        folder = with_record(Path(place))
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
            tensors=_merge_shared(with_codes(folder, written.tensors), stated["shared"]),
            activations=MappingProxyType(typed(stated["activations"], Pairs)),
            provenance=flatten_provenance(stated["source"]),
            unread=(*written.unread, *changed.values(), *unexpected_in(folder, format_)),
        )
        return cls(folder, format_.name, written, checkpoint, known_as, stated, bool(record), frozenset(changed))

    @property
    def extra_codes(self) -> frozenset[str]:
        """Roles whose codes lie in a file of their own, besides their floats."""
        coded = [role for role, weight in self.checkpoint.tensors.items() if weight.scheme]
        return frozenset(role for role in coded if not self.written.tensors[role].scheme)

    @property
    def lost(self) -> list[str]:
        """What its numbers, or scales of codes, were rounded to for good: of those that codes lie beside nothing is."""
        rounded: list[str] = self.record["rounded"]
        if not self.extra_codes:
            return rounded
        weights = (weight for role, weight in self.written.tensors.items() if role not in self.extra_codes)
        types = {weight.tensor.dtype for weight in weights if isinstance(weight, Stored)}
        names = {FLOAT_NAMES[name].rounding for name in types if name in FLOAT_NAMES}
        return [word for word in rounded if word.endswith(SCALES) or word in names]

    @property
    def sums(self) -> dict[str, str]:
        """By name: SHA-256 of each file with tensors."""
        if self.is_recorded:
            return {name: of["sha256"] for name, of in self.record["files"].items() if name.endswith(TENSOR_FILES)}
        return {name: compute_sha256(path) for name, path in _find_tensor_files(self.directory).items()}


def _require_tensors(folder: Path, record: Mapping[str, Any], changed: Mapping[str, str]) -> None:
    """Raise CheckpointError where a file of tensors is ``changed``; those that ``record`` lists count."""
    weights = format_named(record["layout"]).weights_file if record else ""
    if wrong := [what for name, what in changed.items() if name == CODES_FILE or is_called(name, weights)]:
        raise CheckpointError(
            f"{escape(folder)}: expected the tensors that its {RECORD} lists, found that "
            f"{few(wrong, separator='; ')}. {AGAIN}"
        )


def _read_files(folder: Path, changed: Mapping[str, str]) -> tuple[Format, Checkpoint]:
    """The format of ``folder``, and what its files hold; a refusal names those that are ``changed``, too."""
    try:
        format_ = format_of(folder)
        return format_, format_.read(folder)
    except CheckpointError as error:
        if not changed:
            raise
        raise CheckpointError(f"{error} By its {RECORD}, {few(changed.values(), separator='; ')}.") from error


def _merge_shared(tensors: Mapping[str, Weight], shared: Sequence[Sequence[str]]) -> Mapping[str, Weight]:
    """``tensors`` by role, in which what was one stored constant is one again: formats may write it once."""
    by_role = dict(tensors)
    for first, *others in shared:
        for role in others:
            if first in by_role and role in by_role and same_weight(by_role[first], by_role[role]):
                by_role[role] = by_role[first]
    return MappingProxyType(by_role)


def _require_geometry(path: Path, config: Config, record: Mapping[str, Any]) -> None:
    """Raise CheckpointError where ``config``, which was read of ``path``, is not the shape that ``record`` states."""
    wrong = [
        f"{escape(difference.place)} is {escape(difference.found)}, not {escape(difference.expected)}"
        for difference in differences(record["geometry"], to_builtins(config.as_json()))
        if difference.place not in ("max_position_embeddings", "base")
    ]
    if wrong:
        what = f"describes another drafter than its {RECORD}: {few(wrong, separator='; ')}"
        raise CheckpointError(f"{escape(path)}: {what}. {AGAIN}")


def _find_tensor_files(place: Path) -> dict[str, Path]:
    """By name: the files that the tensors at ``place`` lie in, those of codes beside floats too."""
    if place.is_file():
        return {place.name: place}
    listed = sorted(own_files(place, format_of(place)))
    names = [name for name in (*listed, CODES_FILE) if name.endswith(TENSOR_FILES) and (place / name).is_file()]
    return {name: place / name for name in names}


def _build_implied_record(place: Path, checkpoint: Checkpoint, known_as: str | None) -> dict[str, Any]:
    """What a record would say of a directory that has none: its name, and how it holds numbers."""
    size = sum(path.stat().st_size for path in _find_tensor_files(place).values())
    source = {"name": name_of(place), "size": size, "kind": CHECKPOINT, "version": None, "section": None}
    return {
        "tool": {"version": None},
        "known_as": known_as,
        "source": {**source, "provenance": {}},
        "dtype": checkpoint.dtype,
        "activations": {role: to_builtins([*pair]) for role, pair in checkpoint.activations.items()},
        **{"rule": None, "proof": None, "rounded": [], "converted_from": [], "shared": []},
    }
