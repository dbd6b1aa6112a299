"""Extraction: from an opened file to a checkpoint directory."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.bundle import Drafter, Opened, open_bundle
from mtp_extract.checkpoint import record
from mtp_extract.checkpoint.formats import litert, transformers
from mtp_extract.checkpoint.safetensors_file import output_error, write_safetensors
from mtp_extract.checkpoint.staging import RECORD, staged_directory
from mtp_extract.checkpoint.tensors import DTYPES, PlannedTensor, plan_array, plan_codes, plan_values
from mtp_extract.graph import FoundRole
from mtp_extract.graph.roles import LAYER_SCALAR, roles_of
from mtp_extract.hub.card import model_card
from mtp_extract.io.source import Source
from mtp_extract.litertlm.quantized import QuantizedTensor

__all__ = [
    "CODES_FILE",
    "FORMAT_VERSION",
    "ExtractionResult",
    "Layout",
    "default_directory",
    "extract",
    "layout_of",
    "plan_tensor",
]

CODES_FILE = "codes.safetensors"
FORMAT_VERSION = 1

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True)
class ExtractionResult:
    """What :func:`extract` did.

    Attributes:
        files: name → size in bytes, in the order written.
        record: the content of ``extraction.json``.
        notes: things worth knowing that are not errors.
    """

    directory: Path
    files: dict[str, int]
    record: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One output tensor and where it comes from. ``found`` is None for a layer scalar that the graph lacks."""

    name: str
    role: str
    shape: tuple[int, ...]
    found: FoundRole | None
    source: QuantizedTensor | None


@dataclass(frozen=True)
class Layout:
    """The tensors of a layout, and the JSON files that go with them."""

    weights_file: str
    entries: tuple[Entry, ...]
    documents: Mapping[str, Mapping[str, Any]] = field(repr=False)


def default_directory(source: str | os.PathLike[str]) -> Path:
    """Where a result goes when the user does not say: ``NAME-mtp-drafter`` in the current directory."""
    name = os.fspath(source).rstrip("/").rsplit("/", 1)[-1].split("@")[0].split("?")[0]
    for ending in (".litertlm", ".tflite"):
        name = name.removesuffix(ending)
    return Path(f"{name or 'model'}-mtp-drafter")


def layout_of(drafter: Drafter, format: str, dtype: str) -> Layout:  # noqa: A002 - the command's word for it
    """Plan the tensors of ``drafter`` in the layout ``format``.

    Raises:
        UnsupportedError: weights this release cannot read, or a geometry the layout cannot express.
        FormatError: damaged quantization.
    """
    found = {role.role: role for role in drafter.walk.roles}
    sources = {role.role: QuantizedTensor.of(drafter.model, role.tensor) for role in drafter.walk.roles if role.tensor}
    layers = drafter.geometry.num_layers
    if format == "transformers":
        entries = tuple(
            Entry(
                role.transformers,
                role.name,
                found[role.name].shape if role.name in found else (1,),
                found.get(role.name),
                sources.get(role.name),
            )
            for role in roles_of(layers)
        )
        documents = {
            "config.json": transformers.config(drafter.geometry, DTYPES[dtype].transformers, drafter.known),
            "generation_config.json": transformers.generation_config(),
        }
        return Layout("model.safetensors", entries, documents)
    names = litert.tensor_names(found, layers)
    first = {name: role for role, name in reversed(names.items())}
    entries = tuple(
        Entry(name, role, found[role].shape, found[role], sources.get(role)) for name, role in reversed(first.items())
    )
    positions = int(drafter.known["max_position_embeddings"]) if drafter.known else transformers.MAX_POSITIONS
    return Layout(
        "mtp_drafter.safetensors",
        entries,
        {"mtp_drafter_config.json": litert.config(drafter.geometry, names, positions)},
    )


def extract(
    source: str | os.PathLike[str] | Source | Opened,
    out: str | os.PathLike[str] | None = None,
    *,
    format: str = "transformers",  # noqa: A002 - the command's word for it
    dtype: str | None = None,
    codes: bool = False,
    overwrite: bool = False,
    sliding_window: int | None = None,
    progress: Progress = lambda done, total: None,
) -> ExtractionResult:
    """Extract the drafter of ``source`` into the directory ``out``.

    Args:
        source: a path, ``hf://org/repo/file[@revision]``, an ``https://`` URL, or something already opened.
        out: a directory that does not exist yet; by default :func:`default_directory`.
        format: "transformers" or "litert".
        dtype: "bf16" (the default of transformers), "f16" or "f32" (the default of litert, which has no other).
        codes: write the integers, scales and zero points as stored, too (``codes.safetensors``).
        overwrite: replace ``out`` if it is a checkpoint of ours.
        sliding_window: used only where the file leaves the window to the runtime.
        progress: called with bytes done and bytes in all, from worker threads.

    Raises:
        SourceError, FormatError, UnsupportedError, NoDrafterError, RoleError, OutputError: as their names say;
            nothing is left behind.
        ValueError: an unknown ``format`` or ``dtype``.
    """
    dtype = dtype or ("bf16" if format == "transformers" else "f32")
    if format not in ("transformers", "litert") or dtype not in DTYPES:
        raise ValueError(f"format {format!r} and dtype {dtype!r}: expected transformers|litert and bf16|f16|f32.")
    if format == "litert" and dtype != "f32":
        raise ValueError("The litert layout is F32.")
    if isinstance(source, Opened):
        return _extract(source, out, format, dtype, codes, overwrite, sliding_window, progress)
    with open_bundle(source) as opened:
        return _extract(opened, out, format, dtype, codes, overwrite, sliding_window, progress)


def _extract(
    opened: Opened,
    out: str | os.PathLike[str] | None,
    format: str,  # noqa: A002
    dtype: str,
    codes: bool,
    overwrite: bool,
    sliding_window: int | None,
    progress: Progress,
) -> ExtractionResult:
    opened.prefetch()
    drafter = opened.drafter(sliding_window)
    layout = layout_of(drafter, format, dtype)
    target = Path(out) if out is not None else default_directory(opened.source.name)
    planned = [plan_tensor(entry, dtype) for entry in layout.entries]
    code_tensors = _code_tensors(layout) if codes else []
    with staged_directory(target, overwrite) as stage:
        hashes = _Hashes(drafter)
        tick = _counter(progress, sum(t.length for t in [*planned, *code_tensors]))
        metadata = {"format": "pt", "mtp_extract": __version__}
        crcs = write_safetensors(stage / layout.weights_file, planned, metadata, tick, hashes.jobs(layout))
        contents: dict[str, dict[str, Any]] = {layout.weights_file: {"size": _size(stage / layout.weights_file)}}
        if code_tensors:
            code_crcs = write_safetensors(stage / CODES_FILE, code_tensors, metadata, tick)
            contents[CODES_FILE] = {"size": _size(stage / CODES_FILE), "tensors": code_crcs}
        for name, document in layout.documents.items():
            contents[name] = _write_text(stage / name, _json(document))
        made = _record(drafter, opened, layout, format, dtype, crcs, hashes, contents)
        contents["README.md"] = _write_text(stage / "README.md", model_card(made))
        _write_text(stage / RECORD, _json(made))
        files = {path.name: path.stat().st_size for path in sorted(stage.iterdir())}
    return ExtractionResult(target, files, made, _notes(drafter, layout))


def plan_tensor(entry: Entry, dtype: str) -> PlannedTensor:
    """How the tensor ``entry`` is derived, in the output type ``dtype`` ("bf16", "f16" or "f32")."""
    factor = entry.found.factor if entry.found else 1.0
    return plan_values(entry.name, entry.shape, DTYPES[dtype], entry.source, factor)


def _code_tensors(layout: Layout) -> list[PlannedTensor]:
    tensors = []
    for entry in layout.entries:
        source = entry.source
        if source is not None and source.packing is not None:
            tensors += [
                plan_codes(f"{entry.name}.codes", source),
                plan_array(f"{entry.name}.scale", source.scale),
                plan_array(f"{entry.name}.zero_point", source.zero_point),
            ]
    return tensors


class _Hashes:
    """SHA-256 of the section and of every tensor's stored bytes, computed beside the writing."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.section: str | None = None
        self.tensors: dict[str, str] = {}

    def jobs(self, layout: Layout) -> list[Callable[[], object]]:
        jobs: list[Callable[[], object]] = []
        # A model found by scanning has no end of its own to hash up to.
        if self._drafter.found_by != "scan":
            jobs.append(self._hash_section)
        sources = [(entry.name, entry.source) for entry in layout.entries]
        jobs += [self._hashing(name, source) for name, source in sources if source is not None]
        return jobs

    def _hash_section(self) -> None:
        self.section = record.sha256_of_region(self._drafter.model.region)

    def _hashing(self, name: str, source: QuantizedTensor) -> Callable[[], object]:
        def job() -> None:
            self.tensors[name] = record.sha256_of_location(source.location)

        return job


def _record(
    drafter: Drafter,
    opened: Opened,
    layout: Layout,
    format: str,  # noqa: A002
    dtype: str,
    crcs: Mapping[str, str],
    hashes: _Hashes,
    files: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    confirmed = set(drafter.names.confirmed)
    stored_type = DTYPES[dtype].safetensors
    return {
        "format_version": FORMAT_VERSION,
        "tool": {"name": "mtp-extract", "version": __version__},
        "source": record.source_record(drafter, Path(opened.source.name).name, hashes.section),
        "known_as": drafter.known["name"] if drafter.known else None,
        "layout": format,
        "dtype": dtype,
        "geometry": drafter.geometry.as_json(),
        "files": files,
        "tensors": {
            entry.name: record.tensor_record(
                entry.found,
                entry.role,
                entry.source,
                hashes.tensors.get(entry.name),
                entry.role in confirmed,
                entry.shape,
                stored_type,
                crcs[entry.name],
            )
            for entry in layout.entries
        },
        "set_aside": record.set_aside(drafter),
        "kv_inputs": record.caches(drafter),
    }


def _notes(drafter: Drafter, layout: Layout) -> tuple[str, ...]:
    notes = []
    absent = [e.role for e in layout.entries if e.found is None and e.role.endswith(LAYER_SCALAR)]
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
    if any(r.input is not None for r in drafter.walk.roles):
        notes.append(
            "The graph quantizes activations statically; extraction.json records their scales, which a float "
            "checkpoint does not apply."
        )
    return tuple(notes)


def _counter(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def tick(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return tick


def _json(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _write_text(path: Path, text: str) -> dict[str, Any]:
    # Lone surrogates, from names that are not UTF-8, cannot be written; they are shown as escapes instead.
    data = text.encode("utf-8", "backslashreplace")
    try:
        path.write_bytes(data)
        if path.read_bytes() != data:
            raise OSError("it reads back differently")
    except OSError as error:
        raise output_error(path, error) from error
    return {"size": len(data), "crc32": f"{zlib.crc32(data):08x}"}


def _size(path: Path) -> int:
    return path.stat().st_size
