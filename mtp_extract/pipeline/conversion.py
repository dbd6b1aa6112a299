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

from mtp_extract.architecture.config import DrafterConfig, known_drafter
from mtp_extract.checkpoint import record
from mtp_extract.checkpoint.arranged import INDICES, Arranged
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.checkpoint.files import holds_tensors, sha256_of_file
from mtp_extract.checkpoint.weight import same_weight
from mtp_extract.formats import EVERY, format_of
from mtp_extract.io.address import name_of
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import check_place, staged
from mtp_extract.io.source import Progress
from mtp_extract.pipeline.check import RECORD, files_in, recorded, require_manifest, verify, with_record
from mtp_extract.pipeline.plan import Dtype, RuleName, WritingPlan
from mtp_extract.pipeline.writing import ExtractionResult, finish, prepare, write_and_read
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
        proof = read.old["proof"] if read.old is not None else None
        proof = proof and record.proof_record(proof, inherited=True)
        more, notes = read.told_of(made), read.notes()
        return finish(made, stage, target, files, read.origin, proof, converted_from=read.steps, more=more, notes=notes)


@dataclass(frozen=True)
class ReadDirectory:
    """What a directory holds, and what is known of it.

    Attributes:
        checkpoint: with all codes there are.
        layout: name of its format.
        old: its record; None where it has none.
        origin: what a record says of where everything came from.
        extra_codes: roles whose codes lie in a file of their own, besides their floats.
    """

    directory: Path
    checkpoint: Checkpoint
    layout: str
    old: Mapping[str, Any] | None
    origin: Mapping[str, Any]
    extra_codes: frozenset[str]

    @classmethod
    def of(cls, directory: Path) -> ReadDirectory:
        """``directory``, held against its record if it has one, and against what its format may hold.

        Raises:
            CheckpointError: it is damaged, or holds no drafter.
        """
        directory = with_record(Path(checkpoint_here(directory)))
        old = verify(directory, REPORT_FILES).record if (directory / RECORD).exists() else None
        if old is None:
            require_manifest(directory, REPORT_FILES)
        format_ = format_of(directory)
        floats = format_.read(directory)
        checkpoint = with_codes(directory, floats)
        tensors = dict(checkpoint.tensors)
        extra = frozenset(role for role, weight in tensors.items() if weight is not floats.tensors[role])
        origin = old or _unknown_origin(directory, checkpoint)
        # What was one stored constant is one again: formats may write it once.
        for first, *others in origin["shared"]:
            for role in others:
                if first in tensors and role in tensors and same_weight(tensors[first], tensors[role]):
                    tensors[role] = tensors[first]
        checkpoint = replace(
            checkpoint,
            tensors=MappingProxyType(tensors),
            activations=record.activations_of(old) if old is not None else checkpoint.activations,
            provenance=record.provenance(origin["source"]),
        )
        return cls(directory, checkpoint, format_.name, old, origin, extra)

    @cached_property
    def sums(self) -> dict[str, str]:
        """By name: SHA-256 of each file with tensors."""
        return {name: sha256_of_file(path) for name, path in _weights(self.directory).items()}

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The directories that the weights have been in, this one last, as a record has them."""
        old = self.old or {}
        step = {
            "layout": self.layout,
            "dtype": old.get("dtype", self.checkpoint.dtype),
            "rounded": old.get("rounded", {}),
            "made_codes": old.get("made_codes"),
            "version": old["tool"]["version"] if old else None,
            "files": self.sums,
        }
        return [*old.get("converted_from", []), step]

    def told_of(self, made: Arranged) -> dict[str, Any]:
        """What its record says of a tuning and an ordered head; of the latter nothing where ``made`` leaves it out."""
        ordered = any(kept.how == INDICES for kept in made.kept.values())
        keys = ("tuning", "ordered_head") if ordered else ("tuning",)
        return {key: self.old[key] for key in keys if self.old is not None and key in self.old}

    def notes(self) -> tuple[str, ...]:
        """What a user should know of the directory."""
        steps = self.steps if self.old is not None else []
        done = {word for step in steps for word in step["rounded"]}
        done |= {step["made_codes"]["rule"] for step in steps if step["made_codes"]}
        if not done:
            return ()
        return (
            f"Before this, weights had been rounded ({', '.join(sorted(done))}); that is not undone; extracted in this "
            "format right away, they would not have been.",
        )


def _weights(place: Path) -> dict[str, Path]:
    """By name: the files with tensors at or in ``place``."""
    if place.is_file():
        return {place.name: place}
    return {name: place / name for name in files_in(place) if holds_tensors(name)}


def _unknown_origin(directory: Path, checkpoint: Checkpoint) -> dict[str, Any]:
    """What a record says of a directory that has none: its name, and what its geometry is known as."""
    known = known_drafter(checkpoint.config) if isinstance(checkpoint.config, DrafterConfig) else None
    size = sum(path.stat().st_size for path in _weights(directory).values())
    source = {"name": name_of(directory), "size": size, "kind": record.CHECKPOINT, "version": None}
    return {
        "source": {**source, "provenance": {}, "section": None},
        "known_as": known["name"] if known else None,
        "shared": [],
        "activations": {},
    }
