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

import numpy as np
from xxhash import xxh3_128_hexdigest

from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import CODES_FILE, plan_codes
from mtp_extract.checkpoint.dtypes import ROUNDED_TO
from mtp_extract.checkpoint.formats import EVERY, format_named
from mtp_extract.checkpoint.json_file import read_object
from mtp_extract.checkpoint.planned import PlannedTensor
from mtp_extract.checkpoint.record import FORMAT_VERSION
from mtp_extract.checkpoint.rounding import rounded_again
from mtp_extract.checkpoint.staging import RECORD
from mtp_extract.checkpoint.stored import StoredTensor
from mtp_extract.checkpoint.tensor_file import differing, header_sum, read_header, read_metadata, sums_of
from mtp_extract.errors import CheckpointError, escape, few

__all__ = ["Verification", "files_in", "read_record", "verify", "verify_against", "with_record"]

_WRITER = ("mtp_extract", "mtp_extract.version")
_BESIDE_THE_DRAFTER = ("general.", "tokenizer.", "mtp_extract.source.", "mtp_extract.section.")
"""What a header may say that a bundle does not: by whom it was written, where it came from, a tokenizer."""


_ACTIVATION = ({"dtype": str, "scale": object, "zero_point": object}, None)
_PART = {"role": str, "xxh3": str}
_TENSOR = {
    "why": str,
    "kept": str,
    "rounded_to": (str, None),
    "rounded_before": [str],
    "made_codes": ({"rule": str}, None),
    "factor": (int, float),
    "name_confirms": bool,
    "quantization": ({}, None),
    "source": ({"subgraph": int, "tensor": int, "dtype": (str, None), "shape": ([int], None)}, None),
    "activations": ({"input": _ACTIVATION, "output": _ACTIVATION}, None),
}
_NUMBER = (int, float)
_PROOF = {
    "positions": [int],
    "differences_below": {"logits": _NUMBER, "projected_activations": _NUMBER},
    "rounding": ({"difference_below": _NUMBER}, None),
    "position_tables": {"positions": int},
    "mask_rows": {"tried": int, "of": int},
    "coarse_tables": [{"layer": int, "held_in": str, "outputs_move_by": _NUMBER, "outputs_at": int}],
    "activations_held_in": {},
    "inherited": bool,
}
_RECORD = {
    "files": {},
    "tensors": {},
    "source": {"name": str, "size": (int, None), "provenance": {}, "section": ({}, None)},
    "tool": {"version": str},
    "geometry": {},
    "known_as": (str, None),
    "proof": (_PROOF, None),
}
_LENGTH = {"mean_accepted_length": (int, float)}
_OVERALL = {"base": str, "overall": {"before": _LENGTH, "after": _LENGTH}}
_MADE = {
    "converted_from": [{}],
    "set_aside": [{}],
    "kv_inputs": {},
    "notes": [str],
    "tuning": {"mode": str, **_OVERALL},
    "ordered_head": {"kept": {"share": (int, float)}, **_OVERALL},
}
"""What is read of a record, and of what may be missing (``_MADE``) and of its entries (``_PART``, ``_TENSOR``);
docs/extraction.schema.json has the whole."""


@dataclass(frozen=True)
class Verification:
    """What was checked and found in order.

    Attributes:
        files, tensors: how many matched the record.
        against: name of the bundle every tensor was derived from again; None when there was none.
    """

    directory: Path
    record: dict[str, Any]
    files: int
    tensors: int
    against: str | None = None


def with_record(place: Path) -> Path:
    """``place``, or the directory of the file there where a record lies beside it, which speaks of both."""
    return place.parent if place.is_file() and (place.parent / RECORD).is_file() else place


def read_record(directory: Path) -> dict[str, Any]:
    """``extraction.json`` of ``directory``.

    Raises:
        CheckpointError: there is none, or it is not what this package writes.
    """
    path = directory / RECORD
    if directory.is_file():
        raise CheckpointError(
            f"{escape(directory)}: expected a directory that mtp-extract wrote, with {RECORD} in it, found a lone file."
        )
    record = read_object(path, "Expected a directory that mtp-extract wrote.")
    if record.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: expected format version {FORMAT_VERSION}, found {escape(record.get('format_version'))}. Another "
            "release of mtp-extract wrote it: extract the drafter again with this one."
        )
    if not _has(record, _RECORD):
        raise CheckpointError(f"{path}: not a record of mtp-extract.")
    for key, expected in _MADE.items():
        if key in record and not _has(record[key], expected):
            raise CheckpointError(f"{path}: what it says of {key} is not what mtp-extract writes.")
    for name, entry in record["tensors"].items():
        if not (_has(entry, _PART) and ("part" in entry or _has(entry, _TENSOR))):
            raise CheckpointError(f"{path}: what it says of {escape(name)} is not what mtp-extract writes.")
    if not all(isinstance(entry, dict) and _has(entry.get("tensors", {}), {}) for entry in record["files"].values()):
        raise CheckpointError(f"{path}: not a record of mtp-extract.")
    listed = EVERY.get(str(record.get("layout")))
    if listed is None or record.get("dtype") not in listed.dtypes:
        raise CheckpointError(
            f"{path}: names layout {escape(record.get('layout'))} and dtype {escape(record.get('dtype'))}, which this "
            "release does not write."
        )
    return record


def _has(value: Any, expected: Any) -> bool:
    """Whether ``value`` has at least the keys, items and types of ``expected``; a tuple lists alternatives."""
    if isinstance(expected, dict):
        return isinstance(value, dict) and all(
            key in value and _has(value[key], inner) for key, inner in expected.items()
        )
    if isinstance(expected, list):
        return isinstance(value, list) and all(_has(item, expected[0]) for item in value)
    if isinstance(expected, tuple):
        return any(_has(value, one) for one in expected)
    return value is None if expected is None else isinstance(value, expected)


def verify(directory: str | os.PathLike[str], beside: Container[str] = ()) -> Verification:
    """Check every file and every tensor of ``directory`` against its ``extraction.json``.

    Args:
        beside: files that may be there though the record does not list them: those of a report.

    Raises:
        CheckpointError: something differs, is missing or does not belong there; the message lists what.
    """
    folder = Path(directory)
    present = list(files_in(folder))
    record = read_record(folder)
    weights = format_named(record["layout"]).weights_file
    if weights not in record["files"]:
        raise CheckpointError(f"{folder}: its record does not list {weights}.")
    wrong = [
        f"{escape(name)} belongs neither to the checkpoint nor to a report"
        for name in present
        if name not in record["files"] and name != RECORD and name not in beside
    ]
    tensors = 0
    for name, expected in record["files"].items():
        path = folder / name
        if not _inside(name) or not path.is_file():
            wrong.append(f"{escape(name)} is missing")
        elif path.stat().st_size != expected.get("size"):
            wrong.append(f"{escape(name)} has {path.stat().st_size} bytes, not {escape(expected.get('size'))}")
        elif name == weights:
            stored = read_header(path)
            if expected.get("header", header := header_sum(path, stored)) != header:
                wrong.append(f"{escape(name)} has another header")
            sums = {tensor: entry.get("xxh3") for tensor, entry in record["tensors"].items()}
            wrong += [*_misdescribed(stored, record["tensors"]), *_differing(path, stored, sums)]
            tensors += len(record["tensors"])
        elif "tensors" in expected:
            wrong += _differing(path, read_header(path), expected["tensors"])
            tensors += len(expected["tensors"])
        elif xxh3_128_hexdigest(path.read_bytes()) != expected.get("xxh3"):
            wrong.append(f"{escape(name)} has other content")
    if wrong:
        raise CheckpointError(
            f"{folder}: does not match its {RECORD}: {few(wrong, separator='; ')}. Extract it again, or fetch it again."
        )
    return Verification(folder, record, len(record["files"]), tensors)


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
            if not stat.S_ISREG(mode):
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
        f"tensor {escape(name)} is {there.dtype} {list(there.shape)} in the file"
        for name, there in stored.items()
        if name in expected
        and (there.dtype, list(there.shape)) != (expected[name].get("dtype"), expected[name].get("shape"))
    ]


def _differing(path: Path, stored: Mapping[str, StoredTensor], expected: Mapping[str, Any]) -> list[str]:
    sums = sums_of(path, stored)
    wrong = [f"tensor {escape(name)} is missing" for name in expected if name not in sums]
    wrong += [f"tensor {escape(name)} is not in the record" for name in sums if name not in expected]
    wrong += [f"tensor {escape(n)} has other values" for n, found in sums.items() if expected.get(n, found) != found]
    return wrong


def verify_against(
    directory: str | os.PathLike[str], original: Checkpoint, name: str, beside: Container[str] = ()
) -> Verification:
    """Check ``directory`` as :func:`verify` does, then plan it from ``original`` again and compare all bits.

    What the record says was rounded before, or made codes of, is so rounded again.

    Args:
        name: what ``original`` is called in messages.

    Raises:
        CheckpointError: something differs; the message lists what.
        MtpExtractError: the original cannot be read.
    """
    own = verify(directory, beside)
    wrong: list[str] = []
    original = _as_recorded(original, own.record)
    weights, *documents = format_named(own.record["layout"]).plan(original, own.record["dtype"])
    codes = plan_codes(weights) if CODES_FILE in own.record["files"] else []
    for file in (weights, *codes, *documents):
        path = own.directory / file.name
        if file.tensors:
            wrong += [*_compare(path, file.tensors), *_said_otherwise(path, file.metadata)]
        elif read_object(path) != json.loads(file.text):
            wrong.append(f"{file.name} says something else")
    if wrong:
        raise CheckpointError(f"{own.directory}: differs from what {name} holds: {few(sorted(wrong), separator='; ')}.")
    return replace(own, against=name)


def _as_recorded(original: Checkpoint, record: Mapping[str, Any]) -> Checkpoint:
    """``original`` with its numbers rounded as ``record`` says, and without the codes that were left behind."""
    tensors = dict(original.tensors)
    beside = [file["tensors"] for name, file in record["files"].items() if name == CODES_FILE and "tensors" in file]
    for name, entry in record["tensors"].items():
        role, before, made = entry.get("role"), entry.get("rounded_before"), entry.get("made_codes")
        if role in tensors and "part" not in entry:
            steps = [*(before or []), *([made["rule"]] if made else [])]
            tensor = rounded_again(tensors[role], steps)
            kept = entry.get("kept") == CODES or any(f"{name}.codes" in codes for codes in beside)
            tensors[role] = tensor if kept else rounded_again(tensor, [ROUNDED_TO["f32"]])
    return replace(original, tensors=MappingProxyType(tensors))


def _compare(path: Path, planned: Sequence[PlannedTensor]) -> list[str]:
    stored = read_header(path)
    described = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    alike = [tensor for tensor in planned if described.get(tensor.name) == (tensor.dtype, tensor.shape)]
    wrong = [f"tensor {t.name} has another type or shape" for t in planned if t not in alike]
    return [*wrong, *(f"tensor {name} has other values" for name in differing(path, stored, alike))]


def _said_otherwise(path: Path, planned: Mapping[str, Any]) -> list[str]:
    """What the header of the file at ``path`` says beside its tensors, in some containers the configuration, that is
    not what ``planned`` says.
    """
    found = read_metadata(path)
    more = [key for key in found if key not in planned and not key.startswith(_BESIDE_THE_DRAFTER)]
    return [
        f"{path.name} says something else of {escape(key)}"
        for key in [*planned, *more]
        if key not in _WRITER and not key.startswith("tokenizer.") and found.get(key) != _as_stored(planned.get(key))
    ]


def _as_stored(value: Any) -> Any:
    """A number or a list of metadata as reading finds it: plain floats are FP32 there, lists tuples."""
    if isinstance(value, list):
        return tuple(value)
    return np.float32(value) if type(value) is float else value
