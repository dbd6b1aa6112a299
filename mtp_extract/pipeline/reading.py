"""A checkpoint's directory as every command reads it: held against its own record, and against what may lie there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import convert as typed
from msgspec import to_builtins

from mtp_extract.architecture.config import DrafterConfig, known_drafter
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.checkpoint.files import TENSOR_FILES, sha256_of_file
from mtp_extract.checkpoint.record import CHECKPOINT, Pairs, provenance
from mtp_extract.checkpoint.weight import same_weight
from mtp_extract.errors import CheckpointError, escape, few
from mtp_extract.formats import format_of
from mtp_extract.io.address import name_of
from mtp_extract.pipeline.check import AGAIN, RECORD, changed_files, files_in, read_record, unexpected_in, with_record


@dataclass(frozen=True)
class ReadDirectory:
    """What a directory holds, and what is known of it.

    Attributes:
        directory: or a file that is a checkpoint by itself.
        layout: name of its format.
        written: what its files of that format hold.
        checkpoint: the same with the codes that lie beside its floats.
        record: its own; where it has none, what would stand there.
        is_recorded: whether it has one.
    """

    directory: Path
    layout: str
    written: Checkpoint
    checkpoint: Checkpoint
    record: Mapping[str, Any]
    is_recorded: bool

    @classmethod
    def of(cls, place: str | os.PathLike[str]) -> ReadDirectory:
        """The drafter in ``place``, beside which nothing lies that an engine may read; and where it has a record, every
        file but the card has the size and SHA-256 that stand there. Where it came from takes the bundle to check.

        Raises:
            CheckpointError: something differs, is missing or does not belong there; the message lists what.
        """
        folder = with_record(Path(place))
        record = read_record(folder)
        wrong = (changed_files(folder, record) if record else []) or list(unexpected_in(folder))
        if wrong:
            raise CheckpointError(
                f"{escape(folder)}: expected a drafter{f', as its {RECORD} lists it,' if record else ''} and nothing "
                f"else that an engine may read, found that {few(wrong, separator='; ')}. {AGAIN}"
            )
        format_ = format_of(folder)
        written = format_.read(folder)
        checkpoint = replace(written, tensors=with_codes(folder, written.tensors))
        told = record or _implied(folder, checkpoint)
        tensors = dict(checkpoint.tensors)
        # What was one stored constant is one again: formats may write it once.
        for first, *others in told["shared"]:
            for role in others:
                if first in tensors and role in tensors and same_weight(tensors[first], tensors[role]):
                    tensors[role] = tensors[first]
        checkpoint = replace(
            checkpoint,
            tensors=MappingProxyType(tensors),
            activations=MappingProxyType(typed(told["activations"], Pairs)),
            provenance=provenance(told["source"]),
        )
        return cls(folder, format_.name, written, checkpoint, told, bool(record))

    @property
    def extra_codes(self) -> frozenset[str]:
        """Roles whose codes lie in a file of their own, besides their floats."""
        floats = self.written.tensors
        return frozenset(
            role for role, weight in self.checkpoint.tensors.items() if weight.scheme and not floats[role].scheme
        )

    @property
    def sums(self) -> dict[str, str]:
        """By name: SHA-256 of each file with tensors."""
        if self.is_recorded:
            return {name: of["sha256"] for name, of in self.record["files"].items() if name.endswith(TENSOR_FILES)}
        return {name: sha256_of_file(path) for name, path in _files_of_tensors(self.directory).items()}


def _files_of_tensors(place: Path) -> dict[str, Path]:
    folder, names = (place, files_in(place)) if place.is_dir() else (place.parent, [place.name])
    return {name: folder / name for name in names if name.endswith(TENSOR_FILES)}


def _implied(place: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """What a record would say of a directory that has none: its name, and what its geometry is known as."""
    known = known_drafter(checkpoint.config) if isinstance(checkpoint.config, DrafterConfig) else None
    size = sum(path.stat().st_size for path in _files_of_tensors(place).values())
    source = {"name": name_of(place), "size": size, "kind": CHECKPOINT, "version": None}
    return {
        "tool": {"version": None},
        "source": {**source, "provenance": {}, "section": None},
        "converted_from": [],
        "known_as": known["name"] if known else None,
        "dtype": checkpoint.dtype,
        "rounded": [],
        "rule": None,
        "shared": [],
        "activations": {role: to_builtins([*pair]) for role, pair in checkpoint.activations.items()},
        "proof": None,
        "files": {},
    }
