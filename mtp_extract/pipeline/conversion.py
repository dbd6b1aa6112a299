"""Conversion: directory → checkpoint → directory of another format. What it shares with extracting is in
:mod:`mtp_extract.pipeline.writing`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract.architecture.config import DrafterConfig, known_drafter
from mtp_extract.architecture.roles import GEMMA4_MTP
from mtp_extract.bundle import Opened, open_bundle
from mtp_extract.checkpoint import record
from mtp_extract.checkpoint.arranged import INDICES, Arranged
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.checkpoint.files import holds_tensors, sha256_of_file
from mtp_extract.checkpoint.record import activations_of
from mtp_extract.checkpoint.weight import Weight, same_weight
from mtp_extract.errors import escape
from mtp_extract.formats import architecture_of, format_of
from mtp_extract.io.address import name_of
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import check_place, staged
from mtp_extract.io.source import Progress
from mtp_extract.pipeline.check import changed_card, files_in, verify, with_record
from mtp_extract.pipeline.identity import check_identity, drafter_for
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.pipeline.staging import RECORD, recorded
from mtp_extract.pipeline.unexpected import require_manifest
from mtp_extract.pipeline.writing import ExtractionResult, Files, finish, prepare, record_of, write_and_read
from mtp_extract.report.files import REPORT_FILES


def default_directory(directory: str | os.PathLike[str], format: str) -> Path:  # noqa: A002
    """Where a result goes when the user does not say: ``NAME-FORMAT`` in the current directory."""
    place = Path(directory)
    name = name_of(place)
    return Path(f"{Path(name).stem if place.is_file() else name}-{format}")


def convert(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    format: str | None = None,  # noqa: A002 - the command's word for it
    engine: str | None = None,
    dtype: str | None = None,
    codes: bool = False,
    exact: bool = False,
    quantize: str | None = None,
    source: str | os.PathLike[str] | Opened | None = None,
    overwrite: bool = False,
    progress: Progress = lambda done, total: None,
) -> ExtractionResult:
    """Write the drafter in ``directory`` to ``out`` in another format, or the same with other types.

    Args:
        directory: what :func:`~mtp_extract.pipeline.extraction.extract` or this function wrote, which is
            then held against its record first; an official assistant as transformers has it; or a ``.gguf``.
        out: a directory that does not exist yet; by default :func:`default_directory`.
        format: a name in :data:`mtp_extract.formats.EVERY`; None for the best that ``engine`` loads.
        engine, dtype, codes, exact, quantize, overwrite, progress: as for extracting;
            exactness is towards ``directory``.
        source: the bundle that it was extracted from: the proof is run again, over what is written, and every tensor
            derived again and compared.

    Raises:
        CheckpointError: the directory is damaged, or holds no drafter.
        UnsupportedError, OutputError, ProofError: as their names say; nothing is left behind.
        ValueError: an unknown ``format``, ``engine``, ``dtype`` or ``quantize``, or neither of the first two.
    """
    if format is None and engine is None:
        raise ValueError("format: expected one, or an engine to choose it by; found neither.")
    plan = WritingPlan(engine, dtype, codes, exact, quantize)
    directory = Path(checkpoint_here(directory))
    place = with_record(directory)
    name = plan.choose(format, GEMMA4_MTP if format else architecture_of(place))
    target = Path(out) if out is not None else default_directory(directory, name)
    with ExitStack() as stack:
        opened = source if isinstance(source, Opened) else None
        if source is not None and not isinstance(source, Opened):
            opened = stack.enter_context(open_bundle(source, progress=progress))
        inputs = place, None if opened is None else opened.source.path
        check_place(target, overwrite=overwrite, inputs=inputs, listed=recorded)
        read = ReadDirectory.of(place)
        made = prepare(read.checkpoint, name, plan)
        with staged(target, overwrite=overwrite, inputs=inputs, listed=recorded) as stage:
            files, back = write_and_read(made, stage, progress)
            made.require_same(back)
            proof = read.old_proof() if opened is None else _new_proof(stage, opened, read)
            return finish(made, stage, read.record(made, files, proof), target, read.notes())


def _new_proof(stage: Path, source: Opened, read: ReadDirectory) -> dict[str, Any]:
    """Derive what was written into ``stage`` from the bundle again, and prove that it computes the same."""
    source.prefetch()
    found = check_identity(stage, drafter_for(source, read.checkpoint.mtp))
    found.require(read.directory, source.source.name)
    assert found.proof is not None
    return {**found.proof.as_json(), "inherited": False}


@dataclass(frozen=True)
class ReadDirectory:
    """What a directory holds, and what is known of it.

    Attributes:
        checkpoint: with all codes there are.
        layout: name of its format.
        old: its record; None where it has none.
        extra_codes: roles whose codes lie in a file of their own, besides their floats.
    """

    directory: Path
    checkpoint: Checkpoint
    layout: str
    old: Mapping[str, Any] | None
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
        extra = frozenset(role for role, tensor in checkpoint.tensors.items() if tensor is not floats.tensors[role])
        if old is not None:
            tensors = _shared(checkpoint.tensors, old["shared"])
            checkpoint = replace(checkpoint, tensors=tensors, activations=activations_of(old))
        read = cls(directory, checkpoint, format_.name, old, extra)
        return replace(read, checkpoint=replace(checkpoint, provenance=record.provenance(read.origin["source"])))

    @property
    def origin(self) -> Mapping[str, Any]:
        """What a record says of where everything came from."""
        if self.old is not None:
            return self.old
        config = self.checkpoint.config
        known = known_drafter(config) if isinstance(config, DrafterConfig) else None
        return {
            "source": {
                "name": name_of(self.directory),
                "size": sum(path.stat().st_size for path in self._weights),
                "kind": record.CHECKPOINT,
                "version": None,
                "provenance": {},
                "section": None,
            },
            "known_as": known["name"] if known else None,
            "counts": {"stored": {}, "names_confirmed": 0, "set_aside": 0, "static": 0},
            "shared": [],
            "activations": {},
        }

    @property
    def sums(self) -> dict[str, str]:
        """By name: SHA-256 of each file with tensors."""
        whole = self.directory
        return {
            path.relative_to(whole).as_posix() if path != whole else path.name: sha256_of_file(path)
            for path in self._weights
        }

    @property
    def _weights(self) -> list[Path]:
        if self.directory.is_file():
            return [self.directory]
        return [self.directory / name for name in files_in(self.directory) if holds_tensors(name)]

    def notes(self) -> tuple[str, ...]:
        """What a user should know of the directory."""
        if self.old is None:
            return ()
        notes = []
        done = {word for step in (*self.old["converted_from"], self.old) for word in _rounded(step)}
        if done:
            notes.append(
                f"Before this, weights had been rounded ({', '.join(sorted(done))}); that is not undone; extracted "
                "in this format right away, they would not have been."
            )
        if changed_card(self.directory) is not None:
            notes.append(f"The card in {escape(self.directory)} was changed by hand; the new one is written anew.")
        return tuple(notes)

    def record(self, made: Arranged, files: Files, proof: Mapping[str, Any] | None) -> dict[str, Any]:
        """The record of what was made of it, with ``proof``."""
        old, checkpoint = self.old or {}, self.checkpoint
        step = {
            "layout": self.layout,
            "dtype": old.get("dtype", checkpoint.dtype),
            "rounded": old.get("rounded", {}),
            "made_codes": old.get("made_codes"),
            "version": old["tool"]["version"] if old else None,
            "files": self.sums,
        }
        steps = [*old.get("converted_from", []), step]
        # Where the head is left out, so is what is said of it.
        ordered = any(kept.how == INDICES for kept in made.kept.values())
        told = [key for key in ("tuning", *(["ordered_head"] if ordered else [])) if key in old]
        return {**record_of(made, files, self.origin, proof, steps), **{key: old[key] for key in told}}

    def old_proof(self) -> dict[str, Any] | None:
        """The proof that its record has, marked as inherited."""
        proof = self.old["proof"] if self.old is not None else None
        return {**proof, "inherited": True} if proof else None


def _shared(tensors: Mapping[str, Weight], groups: Iterable[Sequence[str]]) -> Mapping[str, Weight]:
    """``tensors``, where those that were one stored constant are one again: formats may write it once."""
    shared = dict(tensors)
    for first, *others in groups:
        for role in others:
            if first in tensors and role in tensors and same_weight(tensors[first], tensors[role]):
                shared[role] = tensors[first]
    return MappingProxyType(shared)


def _rounded(step: Mapping[str, Any]) -> list[str]:
    made = step["made_codes"]
    return [*step["rounded"], *([made["rule"]] if made else [])]
