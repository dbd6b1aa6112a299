"""From a tuned checkpoint to a directory that loads wherever the one it was made from does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from xxhash import xxh3_128

from mtp_extract._version import __version__
from mtp_extract.architecture.config import known_drafter
from mtp_extract.architecture.roles import INDEX, shapes_of
from mtp_extract.checkpoint.check import files_in, verify
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import plan_codes, with_codes
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.formats import format_of
from mtp_extract.checkpoint.lazy import ArrayTensor, LazyTensor, read_floats
from mtp_extract.checkpoint.planned import OutputFile, PlannedTensor, json_text
from mtp_extract.checkpoint.record import FORMAT_VERSION
from mtp_extract.checkpoint.staging import RECORD, staged_directory, write_file
from mtp_extract.hub.card import CARD, model_card
from mtp_extract.validate.report.tables import REPORT_FILES

__all__ = ["Origin", "write_tuned"]

_READ = 1 << 18


@dataclass(frozen=True)
class Origin:
    """The directory that is tuned.

    Attributes:
        checkpoint: with the codes that lie beside its floats.
        coded: whether there are any beside them.
        record: its ``extraction.json``; None where it has none.
    """

    directory: Path
    checkpoint: Checkpoint
    coded: bool
    record: Mapping[str, Any] | None

    @classmethod
    def of(cls, directory: Path) -> Origin:
        """``directory``, held against its record if it has one.

        Raises:
            CheckpointError, DrafterError: it is damaged, or holds no drafter.
        """
        record = verify(directory, REPORT_FILES).record if (directory / RECORD).is_file() else None
        floats = format_of(directory).read(directory)
        checkpoint = with_codes(directory, floats)
        return cls(directory, checkpoint, checkpoint is not floats, record)

    @property
    def weights(self) -> Mapping[str, str]:
        """By name: XXH3-128 of the files with weights."""
        names = [name for name in files_in(self.directory) if name.endswith((".safetensors", ".gguf"))]
        return {name: _xxh3(self.directory / name) for name in names}

    @property
    def fingerprint(self) -> str:
        """Of everything that is tuned."""
        return str(sorted(self.weights.items()))

    def as_written(self, checkpoint: Checkpoint) -> Checkpoint:
        """What a reader of the directory would get: every number rounded to the type it is written in."""
        stored = DTYPES[checkpoint.dtype]
        kinds = {role.name: role.kind for role in shapes_of(checkpoint.config)}

        def rounded(role: str, tensor: LazyTensor) -> LazyTensor:
            if kinds[role] == INDEX:
                return tensor
            narrow = stored.narrow(read_floats(tensor).reshape(-1), role)
            return ArrayTensor(stored.widen(narrow.tobytes()).reshape(tensor.shape))

        tensors = {role: rounded(role, tensor) for role, tensor in checkpoint.tensors.items()}
        return replace(checkpoint, tensors=MappingProxyType(tensors))


def write_tuned(origin: Origin, tuned: Checkpoint, target: Path, record: Mapping[str, Any], *, overwrite: bool) -> Path:
    """Write ``tuned`` to ``target``, in the format, type and with the codes that ``origin`` has.

    Args:
        origin: what was tuned.
        tuned: the same with other weights.
        target: a directory that does not exist yet.
        record: what is to be said of the tuning.
        overwrite: replace ``target`` if it is a checkpoint of ours.

    Raises:
        OutputError: it cannot be written, or reads back differently; nothing is left behind.
    """
    format_ = format_of(origin.directory)
    weights, *documents = format_.plan(tuned, tuned.dtype)
    with staged_directory(target, overwrite) as stage:
        files = [weights, *(plan_codes(weights) if origin.coded else ()), *documents]
        written = {file.name: write_file(stage, file, lambda count: None) for file in files}
        sums = written[weights.name].pop("tensors")
        # That codes are those of the floats they lie beside is checked where they are read.
        with_codes(stage, format_.read(stage))
        made = _record(origin, tuned, format_.name, weights, sums, written, record)
        written[CARD] = write_file(stage, OutputFile(CARD, text=model_card(made)), lambda count: None)
        write_file(stage, OutputFile(RECORD, text=json_text(made)), lambda count: None)
    return target


def _record(
    origin: Origin,
    tuned: Checkpoint,
    layout: str,
    weights: OutputFile,
    sums: Mapping[str, str],
    written: dict[str, dict[str, Any]],
    tuning: Mapping[str, Any],
) -> dict[str, Any]:
    old = origin.record or _unknown(origin, layout)
    entries = {
        planned.name: {**old["tensors"].get(planned.name, _entry(planned)), "xxh3": sums[planned.name]}
        for planned in weights.tensors
    }
    return {
        **old,
        "tool": {"name": "mtp-extract", "version": __version__},
        "files": written,
        "tensors": entries,
        # It was of other weights.
        "proof": None,
        "tuning": {
            **tuning,
            "tuned_from": dict(origin.weights),
            "changed": _changed(origin.checkpoint, tuned, weights),
        },
    }


def _unknown(origin: Origin, layout: str) -> dict[str, Any]:
    """The record of a directory that has none."""
    config = origin.checkpoint.config
    known = known_drafter(config)
    return {
        "format_version": FORMAT_VERSION,
        "tool": {},
        "source": {
            "name": origin.directory.resolve().name,
            "size": sum((origin.directory / name).stat().st_size for name in origin.weights),
            "kind": "checkpoint",
            "version": None,
            "provenance": {},
            "section": None,
        },
        "known_as": known["name"] if known else None,
        "layout": layout,
        "dtype": origin.checkpoint.dtype,
        "geometry": config.as_json(),
        "files": {},
        "tensors": {},
        "set_aside": [],
        "kv_inputs": {},
        "proof": None,
    }


def _entry(planned: PlannedTensor) -> dict[str, Any]:
    return {
        "role": planned.role,
        "why": "the name it has in the directory that was tuned",
        "shape": list(planned.shape),
        "dtype": planned.dtype,
        "xxh3": "",
        "kept": "floats",
        "rounded_to": None,
        "factor": 1.0,
        "name_confirms": False,
        "source": None,
        "quantization": None,
        "activations": None,
    }


def _changed(before: Checkpoint, after: Checkpoint, weights: OutputFile) -> dict[str, int]:
    """By tensor: how many codes, or numbers where there are none, are others than before; those with none left out."""
    counts = {}
    for planned in weights.tensors:
        if planned.role not in after.tensors or planned.part:
            continue
        old, new = before.tensors[planned.role], after.tensors[planned.role]
        if new is old:
            continue
        count = sum(
            int(np.count_nonzero(a != b))
            for a, b in (
                zip(old.integers(), new.integers(), strict=True)
                if new.scheme is not None
                else [(read_floats(old), read_floats(new))]
            )
        )
        if count:
            counts[planned.name] = count
    return counts


def _xxh3(path: Path) -> str:
    digest = xxh3_128()
    with open(path, "rb") as file:
        while piece := file.read(_READ):
            digest.update(piece)
    return digest.hexdigest()
