"""Checking a checkpoint directory: against its own record, and against the bundle it came from."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_extract.bundle import Opened
from mtp_extract.checkpoint.safetensors_file import StoredTensor, check_safetensors, read_header, run_all, workers
from mtp_extract.checkpoint.staging import RECORD
from mtp_extract.checkpoint.tensors import DTYPES, PlannedTensor, Segment
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.extraction import FORMAT_VERSION, layout_of, plan_tensor

__all__ = ["Verification", "read_record", "verify", "verify_against"]

_LARGEST_RECORD = 1 << 26


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


def read_record(directory: Path) -> dict[str, Any]:
    """``extraction.json`` of ``directory``.

    Raises:
        CheckpointError: there is none, or it is not what this package writes.
    """
    path = directory / RECORD
    try:
        if path.stat().st_size > _LARGEST_RECORD:
            raise CheckpointError(f"{path}: larger than any record of mtp-extract.")
        record = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror}. Expected a directory that mtp-extract wrote."
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: the directory is damaged.") from error
    if isinstance(record, dict) and record.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format version {record.get('format_version')!r}; this release reads {FORMAT_VERSION}. "
            "Look for a newer release of mtp-extract."
        )
    if not isinstance(record, dict) or not all(
        isinstance(record.get(key), dict) for key in ("files", "tensors", "source", "tool", "geometry")
    ):
        raise CheckpointError(f"{path}: not a record of mtp-extract.")
    files, tensors = record["files"].values(), record["tensors"].values()
    if not all(isinstance(entry, dict) and isinstance(entry.get("tensors", {}), dict) for entry in (*files, *tensors)):
        raise CheckpointError(f"{path}: not a record of mtp-extract.")
    return record


def _weights_file(record: Mapping[str, Any]) -> str:
    return "model.safetensors" if record.get("layout") == "transformers" else "mtp_drafter.safetensors"


def verify(directory: str | os.PathLike[str]) -> Verification:
    """Check every file and every tensor of ``directory`` against its ``extraction.json``.

    Raises:
        CheckpointError: something differs; the message lists what.
    """
    folder = Path(directory)
    record = read_record(folder)
    weights = _weights_file(record)
    if weights not in record["files"]:
        raise CheckpointError(f"{folder}: its record does not list {weights}.")
    wrong: list[str] = []
    tensors = 0
    for name, expected in record["files"].items():
        path = folder / Path(name).name
        if not path.is_file():
            wrong.append(f"{escape(name)} is missing")
        elif path.stat().st_size != expected.get("size"):
            wrong.append(f"{escape(name)} has {path.stat().st_size} bytes, not {expected.get('size')}")
        elif name == weights:
            stored = read_header(path)
            sums = {tensor: entry.get("crc32") for tensor, entry in record["tensors"].items()}
            wrong += [*_misdescribed(stored, record["tensors"]), *_differing(path, stored, sums)]
            tensors += len(record["tensors"])
        elif "tensors" in expected:
            wrong += _differing(path, read_header(path), expected["tensors"])
            tensors += len(expected["tensors"])
        elif f"{zlib.crc32(path.read_bytes()):08x}" != expected.get("crc32"):
            wrong.append(f"{escape(name)} has other content")
    if wrong:
        raise CheckpointError(
            f"{folder}: does not match its {RECORD}: {'; '.join(wrong)}. Extract it again, or fetch it again."
        )
    return Verification(folder, record, len(record["files"]), tensors)


def _misdescribed(stored: Mapping[str, StoredTensor], expected: Mapping[str, Any]) -> list[str]:
    """Tensors that the file gives another type or shape than the record does."""
    return [
        f"tensor {escape(name)} is {there.dtype} {list(there.shape)} in the file"
        for name, there in stored.items()
        if name in expected
        and (there.dtype, list(there.shape)) != (expected[name].get("dtype"), expected[name].get("shape"))
    ]


def _differing(path: Path, stored: Mapping[str, StoredTensor], expected: Mapping[str, Any]) -> list[str]:
    sums = check_safetensors(path, stored)
    wrong = [f"tensor {escape(name)} is missing" for name in expected if name not in sums]
    wrong += [f"tensor {escape(name)} is not in the record" for name in sums if name not in expected]
    wrong += [f"tensor {escape(n)} has other values" for n, crc in sums.items() if expected.get(n, crc) != crc]
    return wrong


def verify_against(directory: str | os.PathLike[str], opened: Opened) -> Verification:
    """Check ``directory`` as :func:`verify` does, then derive every tensor from ``opened`` again and compare all bits.

    Raises:
        CheckpointError: something differs; the message lists what.
        MtpExtractError: the bundle cannot be read.
    """
    own = verify(directory)
    record = own.record
    layout, dtype = str(record.get("layout")), str(record.get("dtype"))
    if layout not in ("transformers", "litert") or dtype not in DTYPES:
        raise CheckpointError(f"{own.directory}: its record names layout {layout!r} and dtype {dtype!r}.")
    window = record["geometry"].get("sliding_window")
    opened.prefetch()
    drafter = opened.drafter(window if isinstance(window, int) else None)
    plan = layout_of(drafter, layout, dtype)
    path = own.directory / plan.weights_file
    planned = [plan_tensor(entry, dtype) for entry in plan.entries]
    wrong = _compare(path, planned)
    for name, document in plan.documents.items():
        if _json_of(own.directory / name) != json.loads(json.dumps(document)):
            wrong.append(f"{name} says something else")
    if wrong:
        raise CheckpointError(
            f"{own.directory}: differs from what {opened.source.name} holds: {'; '.join(sorted(wrong))}."
        )
    return Verification(own.directory, record, own.files, own.tensors, opened.source.name)


def _json_of(path: Path) -> object:
    try:
        content: object = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: the directory is damaged.") from error
    return content


def _compare(path: Path, planned: list[PlannedTensor]) -> list[str]:
    stored = read_header(path)
    wrong: list[str] = []
    different: set[str] = set()

    def comparing(fd: int, tensor: PlannedTensor, segment: Segment, base: int) -> Callable[[], None]:
        def job() -> None:
            at = base + segment.offset
            for chunk in segment.produce():
                data = chunk.tobytes()
                if os.pread(fd, len(data), at) != data:
                    different.add(tensor.name)
                    return
                at += len(data)

        return job

    with open(path, "rb") as file, ThreadPoolExecutor(workers()) as pool:
        jobs = []
        for tensor in planned:
            there = stored.get(tensor.name)
            if there is None or (there.dtype, there.shape) != (tensor.dtype, tensor.shape):
                wrong.append(f"tensor {tensor.name} has another type or shape")
                continue
            jobs += [comparing(file.fileno(), tensor, segment, there.offset) for segment in tensor.segments]
        run_all(pool, jobs)
    return [*wrong, *(f"tensor {name} has other values" for name in different)]
