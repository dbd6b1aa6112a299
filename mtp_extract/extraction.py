"""Extraction: bundle → checkpoint → directory, in one page."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.architecture.roles import GEMMA4_MTP, SCALAR, roles_of, shapes_of
from mtp_extract.bundle import Drafter, Opened, open_bundle
from mtp_extract.checkpoint import record
from mtp_extract.checkpoint.check import Verification, files_in, read_record, verify_against
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint, Format, Holding
from mtp_extract.checkpoint.codes import plan_codes
from mtp_extract.checkpoint.formats import FORMATS, format_named, name_for
from mtp_extract.checkpoint.holdings import check_codes, holdings_of, notes_of, require_exact
from mtp_extract.checkpoint.lazy import ConstantTensor, FilledTensor, LazyTensor
from mtp_extract.checkpoint.planned import OutputFile, json_text
from mtp_extract.checkpoint.proof import Proof, Rounding, prove
from mtp_extract.checkpoint.staging import RECORD, staged_directory, write_file
from mtp_extract.hub.card import CARD, model_card
from mtp_extract.io.source import Progress, Source
from mtp_extract.litertlm.quantized import Floats, QuantizedTensor

__all__ = [
    "ExtractionResult",
    "checkpoint_of",
    "default_directory",
    "extract",
    "prove_checkpoint",
    "verify_against_source",
]


@dataclass(frozen=True)
class ExtractionResult:
    """What :func:`extract` did.

    Attributes:
        files: name → size in bytes.
        record: the content of ``extraction.json``.
        notes: things worth knowing that are not errors.
    """

    directory: Path
    files: dict[str, int]
    record: dict[str, Any]
    notes: tuple[str, ...]


def default_directory(source: str | os.PathLike[str]) -> Path:
    """Where a result goes when the user does not say: ``NAME-mtp-drafter`` in the current directory."""
    name = os.fspath(source).rstrip("/").rsplit("/", 1)[-1].split("@")[0].split("?")[0]
    for ending in (".litertlm", ".tflite"):
        name = name.removesuffix(ending)
    return Path(f"{name or 'model'}-mtp-drafter")


def checkpoint_of(drafter: Drafter) -> Checkpoint:
    """The drafter of a bundle as a checkpoint; no weight is read yet.

    Raises:
        UnsupportedError: weights this release cannot read.
        FormatError: damaged quantization.
    """
    tensors: dict[str, LazyTensor] = {}
    for found in drafter.walk.roles:
        if found.tensor is None:
            tensors[found.role] = FilledTensor(found.shape)
        else:
            source = QuantizedTensor.of(drafter.model, found.tensor)
            tensors[found.role] = ConstantTensor(found.shape, source, found.factor, found.transposed)
    activations = {found.role: (found.input, found.output) for found in drafter.walk.roles if len(found.shape) == 2}
    return Checkpoint(
        GEMMA4_MTP, drafter.config, MappingProxyType(tensors), "f32", activations=MappingProxyType(activations)
    )


def extract(
    source: str | os.PathLike[str] | Source | Opened,
    out: str | os.PathLike[str] | None = None,
    *,
    format: str = "transformers",  # noqa: A002 - the command's word for it
    engine: str | None = None,
    dtype: str | None = None,
    codes: bool = False,
    exact: bool = False,
    overwrite: bool = False,
    sliding_window: int | None = None,
    progress: Progress = lambda done, total: None,
) -> ExtractionResult:
    """Extract the drafter of ``source`` into the directory ``out``.

    Args:
        source: a path, ``hf://org/repo/file[@revision]``, an ``https://`` URL, or something already opened.
        out: a directory that does not exist yet; by default :func:`default_directory`.
        format: a name in :data:`mtp_extract.checkpoint.formats.FORMATS`.
        engine: one that wants the format otherwise ("sglang").
        dtype: "bf16", "f16", "f32" or "codes"; by default the format's own choice.
        codes: write the integers, scales and zero points of what is written in floats, too
            (``codes/codes.safetensors``).
        exact: refuse to write anything rounded.
        overwrite: replace ``out`` if it is a checkpoint of ours.
        sliding_window: used only where the file leaves the window to the runtime.
        progress: called with bytes done and bytes in all, from worker threads.

    Raises:
        SourceError, FormatError, UnsupportedError, NoDrafterError, RoleError, OutputError: as their names say;
            nothing is left behind.
        ValueError: an unknown ``format`` or ``dtype``, or an ``engine`` for which the format has no other way.
    """
    chosen = format_named(name_for(format, engine))
    dtypes = FORMATS[format].dtypes
    dtype = dtype or dtypes[0]
    if dtype not in dtypes:
        raise ValueError(f"dtype {dtype!r}: the {format} layout is written in {' or '.join(dtypes)}.")
    if isinstance(source, Opened):
        return _extract(source, out, chosen, dtype, codes, exact, overwrite, sliding_window, progress)
    with open_bundle(source) as opened:
        return _extract(opened, out, chosen, dtype, codes, exact, overwrite, sliding_window, progress)


def _extract(
    opened: Opened,
    out: str | os.PathLike[str] | None,
    format_: Format,
    dtype: str,
    codes: bool,
    exact: bool,
    overwrite: bool,
    sliding_window: int | None,
    progress: Progress,
) -> ExtractionResult:
    opened.prefetch()
    drafter = opened.drafter(sliding_window)
    checkpoint = checkpoint_of(drafter)
    hashes = _Hashes(drafter, checkpoint)
    if FORMATS[format_.name].provenance_inside:
        hashes.hash_section()
        checkpoint = replace(checkpoint, provenance=record.provenance(drafter, hashes.section))
    holdings = holdings_of(format_, checkpoint, dtype)
    if exact:
        require_exact(holdings, format_.name)
    weights, *documents = format_.plan(checkpoint, dtype)
    files = [weights, *(plan_codes(weights) if codes else ()), *documents]
    target = Path(out) if out is not None else default_directory(opened.source.name)
    with staged_directory(target, overwrite) as stage:
        tick = _counter(progress, sum(t.length for file in files for t in file.tensors))
        written: dict[str, dict[str, Any]] = {}
        for file in files:
            written[file.name] = write_file(stage, file, tick, hashes.jobs() if file is weights else ())
        proof = _prove(drafter, checkpoint, format_.read(stage), holdings)
        made = _record(drafter, opened, holdings, format_, dtype, weights, written, hashes, proof)
        written[CARD] = write_file(stage, OutputFile(CARD, text=model_card(made)), tick)
        write_file(stage, OutputFile(RECORD, text=json_text(made)), tick)
        sizes = {name: (stage / name).stat().st_size for name in files_in(stage)}
    return ExtractionResult(
        directory=target,
        files=sizes,
        record=made,
        notes=(*_notes(drafter, checkpoint, format_), *notes_of(holdings), *weights.notes),
    )


def verify_against_source(
    directory: str | os.PathLike[str], opened: Opened, beside: Container[str] = ()
) -> Verification:
    """Check ``directory`` against its own record, then derive every tensor from ``opened`` again and compare all bits.

    Raises:
        CheckpointError: something differs; the message lists what.
        MtpExtractError: ``opened`` cannot be read.
    """
    window = read_record(Path(directory))["geometry"].get("sliding_window")
    opened.prefetch()
    drafter = opened.drafter(window if isinstance(window, int) else None)
    return verify_against(directory, checkpoint_of(drafter), opened.source.name, beside)


def _prove(drafter: Drafter, checkpoint: Checkpoint, written: Checkpoint, holdings: Mapping[str, Holding]) -> Proof:
    """Execute the graph and what was written side by side.

    What is not rounded is executed as it was read back. Of what is, the values before rounding are: that the file
    holds their roundings, bit for bit, is what reading it back has shown. Where codes are kept, they are held against
    the original's; and where their scales are rounded, all that was written is executed as well, and may part by what
    such a rounding does and no more.
    """
    check_codes(written, checkpoint, holdings)
    rounded = {role: holding for role, holding in holdings.items() if holding.rounded_to}
    before = {role: tensor for role, tensor in checkpoint.tensors.items() if role in rounded}
    exact = replace(written, tensors=MappingProxyType({**written.tensors, **before}))
    if all(holding.kept != CODES for holding in rounded.values()):
        return prove_checkpoint(drafter, exact)
    return prove_checkpoint(drafter, exact, written, {role: holding.bound for role, holding in rounded.items()})


def prove_checkpoint(
    drafter: Drafter,
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
    rounding = Rounding(_reading(rounded), bounds or {}) if rounded is not None else None
    return prove(drafter.graph, drafter.walk, checkpoint.config, _reading(checkpoint), rounding=rounding)


def _reading(checkpoint: Checkpoint) -> Callable[[str], Iterator[Floats]]:
    """Role → its numbers; an optional role that is absent is one of ones."""
    tensors: dict[str, LazyTensor] = {
        role.name: FilledTensor(shape) for role, shape in shapes_of(checkpoint.config).items() if role.optional
    }
    tensors.update(checkpoint.tensors)
    return lambda role: tensors[role].floats()


class _Hashes:
    """SHA-256 of the section and of every role's stored bytes, computed beside the writing."""

    def __init__(self, drafter: Drafter, checkpoint: Checkpoint) -> None:
        self._drafter = drafter
        self._tensors = {
            role: tensor.source for role, tensor in checkpoint.tensors.items() if isinstance(tensor, ConstantTensor)
        }
        self.section: str | None = None
        self.roles: dict[str, str] = {}

    def jobs(self) -> list[Callable[[], object]]:
        jobs = [self._hashing(role, source) for role, source in self._tensors.items()]
        return jobs if self.section else [self.hash_section, *jobs]

    def hash_section(self) -> None:
        # A model found by scanning has no end of its own to hash up to.
        if self._drafter.found_by != "scan":
            self.section = record.sha256_of_region(self._drafter.model.region)

    def _hashing(self, role: str, source: QuantizedTensor) -> Callable[[], object]:
        def job() -> None:
            self.roles[role] = record.sha256_of_location(source.location)

        return job


def _record(
    drafter: Drafter,
    opened: Opened,
    holdings: Mapping[str, Holding],
    format_: Format,
    dtype: str,
    weights: OutputFile,
    written: dict[str, dict[str, Any]],
    hashes: _Hashes,
    proof: Proof,
) -> dict[str, Any]:
    confirmed = set(drafter.names.confirmed)
    found = {role.role: role for role in drafter.walk.roles}
    sums = written[weights.name].pop("tensors")
    return {
        "format_version": record.FORMAT_VERSION,
        "tool": {"name": "mtp-extract", "version": __version__},
        "source": record.source_record(drafter, Path(opened.source.name).name, hashes.section),
        "known_as": drafter.known["name"] if drafter.known else None,
        "layout": format_.name,
        "dtype": dtype,
        "geometry": drafter.config.as_json(),
        "files": written,
        "tensors": {
            planned.name: record.tensor_record(
                planned=planned,
                found=found.get(planned.role),
                sha256=hashes.roles.get(planned.role),
                confirmed=planned.role in confirmed,
                xxh3=sums[planned.name],
                holding=holdings[planned.role],
            )
            if not planned.part
            else record.part_record(planned, sums[planned.name])
            for planned in weights.tensors
        },
        "set_aside": record.set_aside(drafter),
        "kv_inputs": record.caches(drafter),
        "proof": proof.as_json(),
    }


def _notes(drafter: Drafter, checkpoint: Checkpoint, format_: Format) -> tuple[str, ...]:
    notes = []
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
    if any(r.input is not None for r in drafter.walk.roles) and not FORMATS[format_.name].activations:
        notes.append(
            "The graph quantizes activations statically; extraction.json records their scales, which this "
            "format does not hold."
        )
    return tuple(notes)


def _counter(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return tick
