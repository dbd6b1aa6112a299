"""Conversion: directory → checkpoint → directory of another format. What it shares with extracting is in
:mod:`mtp_extract.pipeline.writing`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import convert as typed
from msgspec import to_builtins

from mtp_extract.architecture.config import DrafterConfig, known_drafter
from mtp_extract.checkpoint.arranged import INDICES, Arranged, arrange
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.files import TENSOR_FILES, sha256_of_file
from mtp_extract.checkpoint.record import CHECKPOINT, Pairs, provenance
from mtp_extract.checkpoint.weight import same_weight
from mtp_extract.formats import EVERY, format_named, format_of
from mtp_extract.io.address import name_of
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import check_place, staged
from mtp_extract.io.source import Progress
from mtp_extract.pipeline.check import files_in, recorded, verify, with_record
from mtp_extract.pipeline.plan import Dtype, RuleName, WritingPlan
from mtp_extract.pipeline.writing import ExtractionResult, finish, prepare, write_and_read
from mtp_extract.report.card import roundings
from mtp_extract.report.files import REPORT_FILES


def convert(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    format: str | None = None,  # noqa: A002 - the command's word for it
    dtype: Dtype | None = None,
    codes: bool = False,
    quantize: RuleName | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> ExtractionResult:
    """Write the drafter in ``directory`` to ``out`` in another format, or the same with other types.

    Args:
        directory: what :func:`~mtp_extract.pipeline.extraction.extract` or this function wrote, which is
            then held against its record first; an official assistant as transformers has it; or a ``.gguf``.
        out: a directory that does not exist yet; by default ``NAME-FORMAT`` in the current one.
        format: a name in :data:`mtp_extract.formats.EVERY`, or an engine's, whose best it then is.
        dtype, codes, quantize, overwrite, progress: as for extracting.

    Raises:
        CheckpointError: the directory is damaged, or holds no drafter.
        UnsupportedError, OutputError: as their names say; nothing is left behind.
        ValueError: an unknown ``format``, ``dtype`` or ``quantize``, or no format.
    """
    if format is None:
        raise ValueError("format: expected one, or the engine that is to load it; found none.")
    plan = WritingPlan(format, dtype, codes, quantize)
    directory = Path(checkpoint_here(directory))
    place = with_record(directory)
    chosen, own = plan.choose(EVERY[format_of(place).name].architecture), name_of(directory)
    target = Path(out if out is not None else f"{Path(own).stem if directory.is_file() else own}-{chosen}")
    check_place(target, overwrite=overwrite, inputs=(place,), listed=recorded)
    read = ReadDirectory.of(place)
    made = prepare(read.checkpoint, chosen, plan)
    with staged(target, overwrite=overwrite, inputs=(place,), listed=recorded) as stage:
        files, back = write_and_read(made, stage, progress)
        made.require_same(back)
        return finish(made, stage, target, files, read.origin_of(made), read.notes(made))


@dataclass(frozen=True)
class ReadDirectory:
    """What a directory holds, and what is known of it.

    Attributes:
        checkpoint: with all codes there are.
        layout: name of its format.
        record: its own; where it has none, what would stand there.
        extra_codes: roles whose codes lie in a file of their own, besides their floats.
    """

    directory: Path
    checkpoint: Checkpoint
    layout: str
    record: Mapping[str, Any]
    extra_codes: frozenset[str]

    @classmethod
    def of(cls, directory: Path) -> ReadDirectory:
        """``directory``, held against its record if it has one, and against what its format may hold.

        Raises:
            CheckpointError: it is damaged, or holds no drafter.
        """
        directory = with_record(Path(checkpoint_here(directory)))
        record = verify(directory, REPORT_FILES)
        format_ = format_of(directory)
        floats = format_.read(directory)
        checkpoint = with_codes(directory, floats)
        tensors = dict(checkpoint.tensors)
        extra = frozenset(role for role, weight in tensors.items() if weight is not floats.tensors[role])
        record = record or _without_record(directory, checkpoint)
        # What was one stored constant is one again: formats may write it once.
        for first, *others in record["shared"]:
            for role in others:
                if first in tensors and role in tensors and same_weight(tensors[first], tensors[role]):
                    tensors[role] = tensors[first]
        checkpoint = replace(
            checkpoint,
            tensors=MappingProxyType(tensors),
            activations=MappingProxyType(typed(record["activations"], Pairs)),
            provenance=provenance(record["source"]),
        )
        return cls(directory, checkpoint, format_.name, record, extra)

    @cached_property
    def sums(self) -> dict[str, str]:
        """By name: SHA-256 of each file with tensors."""
        return {name: sha256_of_file(path) for name, path in _weights(self.directory).items()}

    def origin_of(self, made: Arranged) -> dict[str, Any]:
        """What the record of ``made``, made of this directory, says of where it came from, of a proof and of training.

        Of an ordered head that ``made`` leaves out it says nothing.
        """
        own = {key: self.record[key] for key in ("dtype", "rounded", "rule")}
        step = {"layout": self.layout, **own, "version": self.record["tool"]["version"], "files": self.sums}
        kept = ["source", "known_as", "shared", "activations", "proof", "tuning"]
        if any(one.how == INDICES for one in made.kept.values()):
            kept.append("ordered_head")
        origin = {key: self.record[key] for key in kept if key in self.record}
        return {**origin, "converted_from": [*self.record["converted_from"], step]}

    def limits(self) -> tuple[str, ...]:
        """Where an engine does not do what the bundle says, as the format notes it."""
        return arrange(format_named(self.layout), self.checkpoint, self.record["dtype"]).files[0].notes

    def notes(self, made: Arranged) -> tuple[str, ...]:
        """What a user should know of the directory: which rounding ``made`` has that extracting it had not made."""
        own = {DTYPES[made.dtype].rounding} if made.dtype in DTYPES else set[str]()
        if (made.format.name, made.dtype) == (self.layout, self.record["dtype"]):
            own.update(self.record["rounded"])
        done = [word for word in roundings(*self.record["converted_from"], self.record) if word not in own]
        if not done:
            return ()
        return (
            f"These weights were rounded earlier ({', '.join(done)}). Extract the bundle in this format to avoid that.",
        )


def _weights(place: Path) -> dict[str, Path]:
    """By name: the files with tensors at or in ``place``."""
    if place.is_file():
        return {place.name: place}
    return {name: place / name for name in files_in(place) if name.endswith(TENSOR_FILES)}


def _without_record(directory: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """What a record would say of a directory that has none: its name, and what its geometry is known as."""
    known = known_drafter(checkpoint.config) if isinstance(checkpoint.config, DrafterConfig) else None
    size = sum(path.stat().st_size for path in _weights(directory).values())
    source = {"name": name_of(directory), "size": size, "kind": CHECKPOINT, "version": None}
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
    }
