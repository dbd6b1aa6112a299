"""Extraction: bundle → checkpoint → directory. What converting shares is in :mod:`mtp_extract.pipeline.directory`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.architecture.roles import GEMMA4_MTP, SCALAR, roles_of
from mtp_extract.bundle import Opened, Shard, open_bundle
from mtp_extract.checkpoint import record
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint, Format
from mtp_extract.checkpoint.constant import Constant, constant_of
from mtp_extract.checkpoint.holdings import check_codes, check_floats
from mtp_extract.checkpoint.weight import Weight, filled
from mtp_extract.formats import EVERY
from mtp_extract.io.place import check_place, files_of
from mtp_extract.io.source import Progress, Source
from mtp_extract.litertlm.storage import Floats, QuantizedTensor
from mtp_extract.pipeline.directory import Choice, ExtractionResult, Prepared, Staged, finish, record_of, staging
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.pipeline.staging import recorded
from mtp_extract.proof.proof import Proof, prove


def default_directory(source: str | os.PathLike[str]) -> Path:
    """Where a result goes when the user does not say: ``NAME-mtp-drafter`` in the current directory."""
    name = os.fspath(source).rstrip("/").rsplit("/", 1)[-1].split("@")[0].split("?")[0]
    for ending in (".litertlm", ".tflite"):
        name = name.removesuffix(ending)
    return Path(f"{name or 'model'}-mtp-drafter")


def checkpoint_of(drafter: Shard) -> Checkpoint:
    """The drafter of a bundle as a checkpoint; no weight is read yet.

    Raises:
        UnsupportedError: weights this release cannot read.
        FormatError: damaged quantization.
    """
    tensors: dict[str, Weight] = {}
    for found in drafter.walk.roles:
        if found.tensor is None:
            tensors[found.role] = filled(found.shape)
        else:
            tensors[found.role] = Constant.of(drafter.model, found).weight
    activations = {found.role: (found.input, found.output) for found in drafter.walk.roles if len(found.shape) == 2}
    return Checkpoint(
        GEMMA4_MTP, drafter.config, MappingProxyType(tensors), "f32", activations=MappingProxyType(activations)
    )


def extract(
    source: str | os.PathLike[str] | Source | Opened,
    out: str | os.PathLike[str] | None = None,
    *,
    format: str | None = None,  # noqa: A002 - the command's word for it
    engine: str | None = None,
    dtype: str | None = None,
    codes: bool = False,
    exact: bool = False,
    quantize: str | None = None,
    overwrite: bool = False,
    sliding_window: int | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    section: int | None = None,
    signature: str | None = None,
    progress: Progress = lambda done, total: None,
) -> ExtractionResult:
    """Extract the drafter of ``source`` into the directory ``out``.

    Args:
        source: a path, an id of the Hub, a URL, or something already opened, as
            :func:`~mtp_extract.bundle.open_source` takes it.
        out: a directory that does not exist yet; by default :func:`default_directory`.
        format: a name in :data:`mtp_extract.formats.FORMATS`; by default the best that ``engine`` loads, and without
            an engine "transformers".
        engine: a name in :data:`mtp_extract.formats.SERVES`: what is to serve the drafter.
        dtype: "bf16", "f16", "f32" or "codes"; by default the format's own choice.
        codes: write the integers, scales and zero points of what is written in floats, too
            (``codes/codes.safetensors``).
        exact: refuse to write anything rounded.
        quantize: a name in :data:`mtp_extract.checkpoint.rounding.RULES`: round matrices that have no codes by it.
        overwrite: replace ``out`` if it is a checkpoint of ours.
        sliding_window: used only where the file leaves the window to the runtime.
        tokenizer: a directory with the base's ``tokenizer.json``, for a format that keeps one.
        section, signature: as for :func:`~mtp_extract.bundle.open_bundle`, for what is not open yet.
        progress: called with bytes done and bytes in all, from worker threads.

    Raises:
        SourceError, FormatError, UnsupportedError, NoDrafterError, RoleError, OutputError: as their names say;
            nothing is left behind.
        ValueError: an unknown ``format``, ``dtype`` or ``quantize``, a ``tokenizer`` for a format without room for one,
            or an ``engine`` that does not load it.
    """
    plan = WritingPlan(engine, dtype, codes, exact, quantize, None if tokenizer is None else Path(tokenizer))
    choice = Choice.of(format, plan, overwrite=overwrite)
    with (
        nullcontext(source)
        if isinstance(source, Opened)
        else open_bundle(source, progress=progress, section=section, signature=signature)
    ) as opened:
        target = Path(out) if out is not None else default_directory(opened.source.name)
        inputs = opened.source.path, *files_of(tokenizer)
        check_place(target, overwrite=overwrite, inputs=inputs, listed=recorded)
        opened.prefetch()
        drafter = opened.drafter(sliding_window)
        checkpoint = checkpoint_of(drafter)
        hashes = Hashes(drafter, checkpoint)
        if EVERY[choice.format.name].provenance_inside:
            hashes.hash_section()
            checkpoint = replace(checkpoint, provenance=record.provenance(hashes.source()))
        prepared = choice.prepare(checkpoint)
        with staging(prepared, target, inputs=inputs, jobs=hashes.jobs(), progress=progress) as staged:
            proof = prove_written(drafter, checkpoint, prepared, staged.written)
            opened.source.confirm()
            made = record_of_drafter(drafter, prepared, staged, hashes, proof)
            return finish(prepared, staged, made, target, _notes(drafter, checkpoint, choice.format))


def prove_written(drafter: Shard, checkpoint: Checkpoint, prepared: Prepared, written: Checkpoint) -> Proof:
    """Execute the graph and what was written side by side.

    What is not rounded is executed as it was read back. Of what is, the values before rounding are: that the file
    holds their roundings, bit for bit, is what reading it back has shown. Where codes are kept, they are held against
    the original's; and where their scales are rounded, all that was written is executed as well, and may part by what
    such a rounding does and no more.

    Args:
        checkpoint: the drafter's own.
        prepared: the same as it was to be written.
        written: the same, read back.

    Raises:
        ProofError, CheckpointError: they part, or what was written is something else.
    """
    holdings = prepared.holdings
    if prepared.choice.quantize:
        check_codes(written, prepared.checkpoint, holdings)
        check_floats(written, prepared.checkpoint, holdings)
        return prove_checkpoint(drafter, replace(checkpoint, config=written.config))
    check_codes(written, checkpoint, holdings)
    rounded = {role: holding for role, holding in holdings.items() if holding.rounded_to}
    before = {role: tensor for role, tensor in checkpoint.tensors.items() if role in rounded}
    exact = replace(written, tensors=MappingProxyType({**written.tensors, **before}))
    if all(holding.kept != CODES for holding in rounded.values()):
        return prove_checkpoint(drafter, exact)
    return prove_checkpoint(drafter, exact, written, {role: holding.bound for role, holding in rounded.items()})


def prove_converted(drafter: Shard, prepared: Prepared, written: Checkpoint, *, rounded: bool) -> Proof:
    """The same of a directory that was converted, and not extracted.

    Args:
        rounded: whether its numbers were rounded on the way, which deriving them again shows; what they were before is
            executed then.

    Raises:
        ProofError, CheckpointError: as :func:`prove_written`.
    """
    original = checkpoint_of(drafter)
    if rounded:
        return prove_checkpoint(drafter, replace(original, config=written.config))
    return prove_written(drafter, original, prepared, written)


def prove_checkpoint(
    drafter: Shard,
    checkpoint: Checkpoint,
    rounded: Checkpoint | None = None,
    bounds: Mapping[str, float] | None = None,
) -> Proof:
    """Execute the graph of ``drafter`` and what ``checkpoint`` holds side by side.

    Args:
        rounded: the same with numbers that differ by the share that ``bounds`` (role → share) says at most.

    Raises:
        ProofError: they do not compute the same.
        UnsupportedError: the graph holds an operator that cannot be executed here.
    """
    read, stored = _reading(checkpoint), None if rounded is None else _reading(rounded)
    # Damaged numbers may overflow; what comes of it is not equal, and so refused.
    with np.errstate(over="ignore", invalid="ignore"):
        return prove(drafter.graph, drafter.walk, checkpoint.mtp, read, stored, bounds)


def _reading(checkpoint: Checkpoint) -> Callable[[str], Iterator[Floats]]:
    """Role → its numbers."""
    tensors = checkpoint.whole().tensors
    return lambda role: tensors[role].chunks()


class Hashes:
    """SHA-256 of the section and of every role's stored bytes, computed while weights are written."""

    def __init__(self, drafter: Shard, checkpoint: Checkpoint) -> None:
        self._drafter, self._checkpoint = drafter, checkpoint
        self._tensors = {
            role: constant.source
            for role, tensor in checkpoint.tensors.items()
            if (constant := constant_of(tensor)) is not None
        }
        self.section: str | None = None
        self.roles: dict[str, str] = {}

    def jobs(self) -> list[Callable[[], object]]:
        """The hashes that are still to be computed."""
        jobs: list[Callable[[], object]] = [
            partial(self._hash_role, role, source) for role, source in self._tensors.items()
        ]
        return jobs if self.section else [self.hash_section, *jobs]

    def hash_section(self) -> None:
        """Compute that of the section now."""
        # A model found by scanning has no end of its own to hash up to.
        if self._drafter.found_by != "scan":
            region = self._drafter.model.region
            self.section = record.sha256_of(region, 0, region.size)

    def _hash_role(self, role: str, source: QuantizedTensor) -> None:
        location = source.location
        self.roles[role] = record.sha256_of(location.region, location.offset, location.length)

    def source(self) -> dict[str, Any]:
        """What a record says of the file."""
        drafter = self._drafter
        return record.source_record(drafter, Path(drafter.opened.source.name).name, self.section)

    def evidence(self, role: str) -> dict[str, Any]:
        """What a record says of ``role``, before anything is done to it."""
        found = next((one for one in self._drafter.walk.roles if one.role == role), None)
        confirmed = role in self._drafter.names.confirmed
        return record.evidence(found, self._checkpoint.tensors.get(role), self.roles.get(role), confirmed)


def record_of_drafter(
    drafter: Shard, prepared: Prepared, staged: Staged, hashes: Hashes, proof: Proof
) -> dict[str, Any]:
    """The record of what was extracted.

    Args:
        hashes: whose jobs are done.
        proof: of what was written.
    """
    return record_of(
        prepared,
        staged,
        source=hashes.source(),
        known_as=drafter.known["name"] if drafter.known else None,
        evidence={role: hashes.evidence(role) for role in prepared.holdings},
        set_aside=record.set_aside(drafter),
        kv_inputs=record.caches(drafter),
        converted_from=[],
        proof={**proof.as_json(), "inherited": False},
    )


def _notes(drafter: Shard, checkpoint: Checkpoint, format_: Format) -> tuple[str, ...]:
    notes = list(drafter.opened.source.notes)
    scalars = [role.name for role in roles_of(drafter.config.num_layers) if role.kind == SCALAR]
    absent = [name for name in scalars if name not in checkpoint.tensors]
    if absent:
        notes.append(
            f"The graph has no layer scalar in {len(absent)} layers; 1.0 was written, which is what it computes."
        )
    folded = [r.role for r in drafter.walk.roles if r.factor != 1.0]
    if folded:
        notes.append(f"The soft cap's factor was folded into {', '.join(folded)}; it was divided out.")
    if not drafter.names.confirmed:
        notes.append(
            "The names in the file are not those of Google's published files; the roles rest on the graph alone."
        )
    notes += [
        f"The name of {role}'s constant is that of {' or '.join(others)}; the graph decides."
        for role, others in drafter.names.contradicted.items()
    ]
    if any(r.input is not None for r in drafter.walk.roles) and not EVERY[format_.name].activations:
        notes.append(
            "The graph quantizes activations statically; extraction.json records their scales, which this "
            "format does not hold."
        )
    return tuple(notes)
