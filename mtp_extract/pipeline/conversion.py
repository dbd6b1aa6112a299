"""Conversion: directory → checkpoint → directory of another format. What it shares with extracting is in
:mod:`mtp_extract.pipeline.directory`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from xxhash import xxh3_128

from mtp_extract.architecture.config import DrafterConfig, known_drafter
from mtp_extract.architecture.roles import GEMMA4_MTP
from mtp_extract.bundle import Opened, open_bundle
from mtp_extract.checkpoint import record
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.checkpoint.holdings import check_codes, check_floats
from mtp_extract.checkpoint.rounding import SCALES
from mtp_extract.checkpoint.stored import stored_of
from mtp_extract.checkpoint.tensor_file import holds_tensors
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import ProofError, escape
from mtp_extract.formats import architecture_of, format_of
from mtp_extract.graph.roles import Activation
from mtp_extract.io.place import check_place, files_of
from mtp_extract.io.regular import open_regular
from mtp_extract.io.repository import checkpoint_path, name_of
from mtp_extract.io.source import Progress
from mtp_extract.pipeline.check import changed_card, files_in, verify, with_record
from mtp_extract.pipeline.directory import Choice, ExtractionResult, Prepared, Staged, finish, record_of, staging
from mtp_extract.pipeline.extraction import prove_converted
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.pipeline.staging import RECORD, recorded
from mtp_extract.pipeline.unexpected import require_manifest
from mtp_extract.pipeline.verification import verify_against_source
from mtp_extract.report.tables import REPORT_FILES

_READ = 1 << 18


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
    tokenizer: str | os.PathLike[str] | None = None,
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
        engine, dtype, codes, exact, quantize, tokenizer, overwrite, progress: as for extracting;
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
    plan = WritingPlan(engine, dtype, codes, exact, quantize, None if tokenizer is None else Path(tokenizer))
    directory = checkpoint_path(directory)
    place = with_record(directory)
    name = plan.choose(format, GEMMA4_MTP if format else architecture_of(place))
    choice = Choice.of(name, plan, overwrite=overwrite)
    target = Path(out) if out is not None else default_directory(directory, name)
    with ExitStack() as stack:
        opened = source if isinstance(source, Opened) else None
        if source is not None and not isinstance(source, Opened):
            opened = stack.enter_context(open_bundle(source, progress=progress))
        inputs = place, None if opened is None else opened.source.path, *files_of(tokenizer)
        check_place(target, overwrite=overwrite, inputs=inputs, listed=recorded)
        read = ReadDirectory.of(place)
        prepared = choice.prepare(read.checkpoint)
        with staging(prepared, target, inputs=inputs, progress=progress) as staged:
            check_codes(staged.written, prepared.checkpoint, prepared.holdings)
            check_floats(staged.written, prepared.checkpoint, prepared.holdings)
            proof = read.proof(prepared, staged.written, opened)
            result = finish(prepared, staged, read.record(prepared, staged, proof), target, read.notes())
            if opened is not None:
                verify_against_source(staged.directory, opened)
        return result


@dataclass(frozen=True)
class ReadDirectory:
    """What a directory holds, and what is known of it.

    Attributes:
        checkpoint: with all codes there are.
        layout: name of its format.
        old: its record; None where it has none.
        entries: role → what that record says of it.
        extra_codes: roles whose codes lie in a file of their own, besides their floats.
    """

    directory: Path
    checkpoint: Checkpoint
    layout: str
    old: Mapping[str, Any] | None
    entries: Mapping[str, Mapping[str, Any]]
    extra_codes: frozenset[str]

    @classmethod
    def of(cls, directory: Path) -> ReadDirectory:
        """``directory``, held against its record if it has one, and against what its format may hold.

        Raises:
            CheckpointError: it is damaged, or holds no drafter.
        """
        directory = with_record(checkpoint_path(directory))
        old = verify(directory, REPORT_FILES).record if (directory / RECORD).exists() else None
        if old is None:
            require_manifest(directory, REPORT_FILES)
        format_ = format_of(directory)
        floats = format_.read(directory)
        checkpoint = with_codes(directory, floats)
        tensors = dict(checkpoint.tensors)
        extra_codes = frozenset(role for role, tensor in tensors.items() if tensor is not floats.tensors[role])
        entries = _entries(old, floats)
        # Roles that were one stored constant are one again: formats may write it once.
        first: dict[object, Weight] = {}
        for role, entry in entries.items():
            stored = entry["source"]
            if stored is not None:
                key = stored["subgraph"], stored["tensor"], entry["xxh3"], role in extra_codes
                tensors[role] = first.setdefault(key, tensors[role])
        checkpoint = replace(checkpoint, tensors=MappingProxyType(tensors))
        if old is not None:
            checkpoint = replace(checkpoint, activations=_activations(entries))
        read = cls(directory, checkpoint, format_.name, old, entries, extra_codes)
        return replace(read, checkpoint=replace(checkpoint, provenance=record.provenance(read.source)))

    @property
    def source(self) -> Mapping[str, Any]:
        """What a record says of the file that everything came from."""
        if self.old is not None:
            found: Mapping[str, Any] = self.old["source"]
            return found
        return {
            "name": name_of(self.directory),
            "size": sum(path.stat().st_size for path in self._weights),
            "kind": record.CHECKPOINT,
            "version": None,
            "provenance": {},
            "section": None,
        }

    @property
    def sums(self) -> dict[str, str]:
        """By name: XXH3-128 of each file with tensors."""
        whole = self.directory
        return {
            path.relative_to(whole).as_posix() if path != whole else path.name: _xxh3(path) for path in self._weights
        }

    @property
    def _weights(self) -> list[Path]:
        if self.directory.is_file():
            return [self.directory]
        return [self.directory / name for name in files_in(self.directory) if holds_tensors(name)]

    def rounded_before(self, role: str) -> list[str]:
        """What happened to the numbers of ``role`` until they lay in this directory."""
        return _rounded(self.entries[role], role in self.extra_codes) if role in self.entries else []

    def notes(self) -> tuple[str, ...]:
        """What a user should know of the directory."""
        notes = []
        done = [steps for steps in map(self.rounded_before, self.entries) if steps]
        if done:
            words = ", ".join(sorted({step for steps in done for step in steps}))
            notes.append(
                f"Before this, {len(done)} weights had been rounded ({words}); that is not undone; extracted "
                "in this format right away, they would not have been."
            )
        if self.old is not None and changed_card(self.directory) is not None:
            notes.append(f"The card in {escape(self.directory)} was changed by hand; the new one is written anew.")
        return tuple(notes)

    def record(self, prepared: Prepared, staged: Staged, proof: Mapping[str, Any] | None) -> dict[str, Any]:
        """The record of what was made of it, with ``proof``."""
        config, old = self.checkpoint.config, self.old or {}
        known = known_drafter(config) if isinstance(config, DrafterConfig) else None
        evidence = {
            role: {
                **self.entries.get(role, record.UNKNOWN),
                "rounded_before": self.rounded_before(role),
                "made_codes": None,
            }
            for role in prepared.holdings
        }
        made = record_of(
            prepared,
            staged,
            source=self.source,
            known_as=old["known_as"] if old else known["name"] if known else None,
            evidence=evidence,
            set_aside=old.get("set_aside", []),
            kv_inputs=old.get("kv_inputs", {}),
            converted_from=[*old.get("converted_from", []), self._step()],
            proof=proof,
        )
        # Where the head is left out, so is what is said of it.
        kept = ["tuning", *(["ordered_head"] if prepared.holds_ordered_head else [])]
        return {**made, **{key: old[key] for key in kept if key in old}}

    def _step(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "dtype": self.old["dtype"] if self.old is not None else self.checkpoint.dtype,
            "version": self.old["tool"]["version"] if self.old is not None else None,
            "files": self.sums,
        }

    def proof(self, prepared: Prepared, written: Checkpoint, source: Opened | None) -> dict[str, Any] | None:
        """A new proof where the bundle is at hand, else the one that its record has, marked as inherited.

        Raises:
            ProofError, CheckpointError: as :func:`~mtp_extract.pipeline.extraction.prove_written`.
        """
        if source is None:
            proof = self.old["proof"] if self.old is not None else None
            return {**proof, "inherited": True} if proof else None
        source.prefetch()
        drafter = source.drafter(self.checkpoint.mtp.sliding_window)
        rounded = any(self.rounded_before(role) for role in self.entries) or bool(prepared.made)
        try:
            return {**prove_converted(drafter, prepared, written, rounded=rounded).as_json(), "inherited": False}
        except ProofError as error:
            found = f"found another drafter (first at {str(error).partition(':')[0]})"
            message = f"{escape(self.directory)}: expected what {source.source.name} computes, {found}."
            raise ProofError(
                f"{message} Give the bundle that it is of, or leave it out.", remedies=("source",)
            ) from error


def _entries(old: Mapping[str, Any] | None, floats: Checkpoint) -> dict[str, Mapping[str, Any]]:
    if old is None:
        return {}
    named = {name: entry for name, entry in old["tensors"].items() if "part" not in entry}
    entries = {entry["role"]: entry for entry in named.values()}
    for role, tensor in floats.tensors.items():
        # A tensor that is several roles stands under the first of them.
        stored = stored_of(tensor)
        if role not in entries and stored is not None and stored.name in named:
            entries[role] = named[stored.name]
    return entries


def _rounded(entry: Mapping[str, Any], has_codes: bool) -> list[str]:
    steps = list(entry["rounded_before"])
    if entry["made_codes"]:
        steps.append(entry["made_codes"]["rule"])
    if entry["rounded_to"] and not has_codes:
        steps.append(entry["rounded_to"] + (SCALES if entry["kept"] == CODES else ""))
    return steps


def _activations(
    entries: Mapping[str, Mapping[str, Any]],
) -> Mapping[str, tuple[Activation | None, Activation | None]]:
    def made(found: Mapping[str, Any] | None) -> Activation | None:
        return Activation(found["dtype"], found["scale"], found["zero_point"]) if found else None

    return MappingProxyType(
        {
            role: (made(entry["activations"]["input"]), made(entry["activations"]["output"]))
            for role, entry in entries.items()
            if entry["activations"]
        }
    )


def _xxh3(path: Path) -> str:
    digest = xxh3_128()
    with open_regular(path) as file:
        while piece := file.read(_READ):
            digest.update(piece)
    return digest.hexdigest()
