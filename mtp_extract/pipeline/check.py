"""Checking a checkpoint directory: against its own record, and against the checkpoint it was made from."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from xxhash import xxh3_128_hexdigest

from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import CODES_FILE, plan_codes
from mtp_extract.checkpoint.dtypes import ROUNDED_TO
from mtp_extract.checkpoint.gguf_file import as_stored
from mtp_extract.checkpoint.holdings import holdings_of
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.planned import PlannedTensor
from mtp_extract.checkpoint.record import provenance
from mtp_extract.checkpoint.record_fields import FORMAT_VERSION, check_extraction
from mtp_extract.checkpoint.rounding import rounded_again
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.checkpoint.tensor_file import described, differing, read_header, read_metadata
from mtp_extract.errors import CheckpointError, escape, few
from mtp_extract.formats import EVERY, format_named, format_of, weights_of
from mtp_extract.io.repository import is_cached
from mtp_extract.pipeline.staging import CARD, RECORD
from mtp_extract.pipeline.unexpected import is_harmless, unexpected_in

_WRITER = ("mtp_extract", "mtp_extract.version")
_TOKENIZER = "tokenizer."
"""What a header may say that a bundle does not: which release wrote it, and a tokenizer."""


@dataclass(frozen=True)
class Verification:
    """What was checked and found in order.

    Attributes:
        found: by name, what a record has of every file but the card, read from the file.
        tensors: how many matched the record.
        against: name of the bundle that everything was derived from again; None when there was none.
    """

    directory: Path
    record: dict[str, Any]
    found: dict[str, dict[str, Any]]
    tensors: int
    against: str | None = None

    @property
    def files(self) -> int:
        """How many files matched the record."""
        return len(self.found)


def with_record(place: Path) -> Path:
    """``place``; of a file that lies in a directory with a record, that directory."""
    return place.parent if place.is_file() and (place.parent / RECORD).is_file() else place


def changed_card(directory: Path) -> str | None:
    """The card in ``directory``, if it is no longer as it was written; None if it is, or if nothing says so."""
    if not all((directory / name).is_file() for name in (RECORD, CARD)):
        return None
    try:
        record, card = json.loads((directory / RECORD).read_bytes()), (directory / CARD).read_bytes()
        written = record["files"][CARD]["xxh3"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return None if xxh3_128_hexdigest(card) == written else card.decode("utf-8", "replace")


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
    """Check ``directory`` against its ``extraction.json``: every file but the card, every tensor, and, as far as they
    say it themselves, what the record says of them. Where the record says that they came from is not checked.

    Args:
        allowed: names of files that may be there though the record does not list them: those of a report.

    Raises:
        CheckpointError: something differs, is missing or does not belong there; the message lists what.
    """
    folder = Path(directory)
    present = list(files_in(folder))
    record = read_record(folder)
    layout = format_named(record["layout"])
    weights = weights_of(layout, record["files"])
    if weights is None:
        raise CheckpointError(f"{folder}: its record does not list {layout.weights_file}.")
    wrong = [
        f"{escape(name)} belongs neither to the checkpoint nor to a report"
        for name in present
        if name not in record["files"] and name != RECORD and name not in allowed and not is_harmless(name)
    ]
    found: dict[str, dict[str, Any]] = {}
    tensors = 0
    for name, expected in record["files"].items():
        path = folder / name
        if name == CARD:
            continue
        if not _inside(name) or not path.is_file():
            wrong.append(f"{escape(name)} is missing")
        elif path.stat().st_size != expected.get("size"):
            wrong.append(f"{escape(name)} has {path.stat().st_size} bytes, not {escape(expected.get('size'))}")
        elif name == weights or "tensors" in expected:
            own = record["tensors"] if name == weights else {}
            sums = {tensor: entry.get("xxh3") for tensor, entry in own.items()} or expected.get("tensors", {})
            stored = read_header(path)
            found[name] = described(path, stored)
            if expected.get("header", found[name]["header"]) != found[name]["header"]:
                wrong.append(f"{escape(name)} has another header")
            wrong += [*_misdescribed(stored, own), *_differing(found[name]["tensors"], sums)]
            tensors += len(sums)
        else:
            found[name] = {"size": path.stat().st_size, "xxh3": xxh3_128_hexdigest(path.read_bytes())}
            if found[name]["xxh3"] != expected.get("xxh3"):
                wrong.append(f"{escape(name)} has other content")
    if not wrong:
        wrong = unexpected_in(folder, allowed) or list(_contradicted(folder, record))
    if wrong:
        raise CheckpointError(
            f"{escape(folder)}: does not match its {RECORD}: {few(wrong, separator='; ')}. Extract it "
            "again, or fetch it again."
        )
    return Verification(folder, record, found, tensors)


def _contradicted(folder: Path, record: Mapping[str, Any]) -> Iterator[str]:
    """What ``record`` says of the files in ``folder`` and their content contradicts."""
    found, layout = format_of(folder), format_named(record["layout"])
    if layout.name not in (found.name, *EVERY[found.name].otherwise.values()):
        yield f"the layout is {found.name}, not {layout.name}"
        return
    checkpoint = found.read(folder)
    for key, value in json.loads(json.dumps(checkpoint.config.as_json())).items():
        if record["geometry"].get(key) != value and key != "max_position_embeddings":
            yield f"{key} is {escape(value)}, not {escape(record['geometry'].get(key))}"
    weights, *_ = layout.plan(checkpoint, record["dtype"])
    holdings = holdings_of(layout, checkpoint, record["dtype"])
    for planned in weights.tensors:
        entry = record["tensors"].get(planned.name, {})
        part = {"part": planned.part} if planned.part else {"kept": holdings[planned.role].kept}
        for key, value in {"role": planned.role, **part}.items():
            if entry.get(key) != value:
                yield f"tensor {escape(planned.name)} has the {key} {value}, not {escape(entry.get(key))}"


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


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _misdescribed(stored: Mapping[str, StoredTensor], expected: Mapping[str, Any]) -> list[str]:
    """Tensors that the file gives another type or shape than the record does."""
    return [
        f"tensor {escape(name)} is {tensor.dtype} {list(tensor.shape)} in the file"
        for name, tensor in stored.items()
        if name in expected
        and (tensor.dtype, list(tensor.shape)) != (expected[name].get("dtype"), expected[name].get("shape"))
    ]


def _differing(sums: Mapping[str, str], expected: Mapping[str, Any]) -> list[str]:
    wrong = [f"tensor {escape(name)} is missing" for name in expected if name not in sums]
    wrong += [f"tensor {escape(name)} is not in the record" for name in sums if name not in expected]
    wrong += [f"tensor {escape(n)} has other values" for n, found in sums.items() if expected.get(n, found) != found]
    return wrong


def verify_against(
    directory: str | os.PathLike[str], original: Checkpoint, name: str, allowed: Container[str] = ()
) -> Verification:
    """Check ``directory`` as :func:`verify` does, then plan it from ``original`` again, rounded as the record says, and
    compare all bits.

    Args:
        name: what ``original`` is called in messages.

    Raises:
        CheckpointError: something differs; the message lists what.
        MtpExtractError: the original cannot be read.
    """
    own = verify(directory, allowed)
    wrong: list[str] = []
    original = as_recorded(original, own.record)
    weights, *documents = format_named(own.record["layout"]).plan(original, own.record["dtype"])
    codes = plan_codes(weights) if CODES_FILE in own.record["files"] else []
    for file in (weights, *codes, *documents):
        path = own.directory / file.name
        if file.tensors:
            wrong += [*_compare(path, file.tensors), *_other_metadata(path, file.metadata)]
        elif read_object(path) != json.loads(file.text):
            wrong.append(f"{file.name} says something else")
    if wrong:
        raise CheckpointError(
            f"{own.directory}: differs from what {name} holds: {few(sorted(wrong), separator='; ')}. It may "
            "be of another bundle, or have been changed since."
        )
    return replace(own, against=name)


def as_recorded(original: Checkpoint, record: Mapping[str, Any]) -> Checkpoint:
    """``original`` with its numbers rounded as ``record`` says, without codes that were not kept, and with the
    provenance that ``record`` has.

    Raises:
        CheckpointError: what was done to it, as ``record`` says it, cannot be done.
    """
    tensors = dict(original.tensors)
    codes = record["files"].get(CODES_FILE, {}).get("tensors", {})
    for name, entry in record["tensors"].items():
        role, before, made = entry.get("role"), entry.get("rounded_before"), entry.get("made_codes")
        if role in tensors and "part" not in entry:
            steps = [*(before or []), *([made["rule"]] if made else [])]
            tensor = rounded_again(tensors[role], steps)
            kept = entry.get("kept") == CODES or f"{name}.codes" in codes
            tensors[role] = tensor if kept else rounded_again(tensor, [ROUNDED_TO["f32"]])
    return replace(original, tensors=MappingProxyType(tensors), provenance=provenance(record["source"]))


def _compare(path: Path, planned: Sequence[PlannedTensor]) -> list[str]:
    stored = read_header(path)
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    alike = [tensor for tensor in planned if described.get(tensor.name) == (tensor.dtype, tensor.shape)]
    wrong = [f"tensor {t.name} has another type or shape" for t in planned if t not in alike]
    return [*wrong, *(f"tensor {name} has other values" for name in differing(path, stored, alike))]


def _other_metadata(path: Path, planned: Mapping[str, Any]) -> list[str]:
    """Keys of the metadata of the file at ``path``, in GGUF the configuration, that are not as planned."""
    found = read_metadata(path)
    expected = as_stored(planned)
    return [
        f"{path.name} says something else of {escape(key)}"
        for key in dict.fromkeys([*planned, *found])
        if key not in _WRITER and not key.startswith(_TOKENIZER) and found.get(key) != expected.get(key)
    ]
