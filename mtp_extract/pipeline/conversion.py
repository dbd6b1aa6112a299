"""Conversion: directory → checkpoint → directory of another format. What it shares with extracting is in
:mod:`mtp_extract.pipeline.writing`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtp_extract.checkpoint.checkpoint import INDICES, Arranged
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.formats import EVERY, format_of
from mtp_extract.io.address import name_of
from mtp_extract.io.opening import checkpoint_here
from mtp_extract.io.place import check_place
from mtp_extract.io.source import Progress, nothing_shown
from mtp_extract.pipeline.check import recorded, with_record
from mtp_extract.pipeline.plan import Dtype, RuleName, WritingPlan
from mtp_extract.pipeline.reading import ReadDirectory
from mtp_extract.pipeline.writing import ExtractionResult, prepare, write
from mtp_extract.report.card import roundings


def convert(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    format: str | None = None,  # noqa: A002 - the command's word for it
    dtype: Dtype | None = None,
    codes: bool = False,
    quantize: RuleName | None = None,
    overwrite: bool = False,
    progress: Progress = nothing_shown,
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
    place, name = with_record(directory), name_of(directory)
    chosen = plan.choose(EVERY[format_of(place).name].architecture)
    target = Path(out if out is not None else f"{Path(name).stem if directory.is_file() else name}-{chosen}")
    to: dict[str, Any] = {"overwrite": overwrite, "inputs": (place,)}
    check_place(target, **to, listed=recorded)
    read = ReadDirectory.of(place)
    made = prepare(read.checkpoint, chosen, plan)
    return write(made, target, origin_of(read, made), _notes(read, made), **to, progress=progress)


def origin_of(read: ReadDirectory, made: Arranged) -> dict[str, Any]:
    """What the record of ``made``, made of what was ``read``, says of where it came from, of a proof and of training.

    Of an ordered head that ``made`` leaves out it says nothing.
    """
    own: Mapping[str, Any] = read.record
    step = {"layout": read.layout, **{key: own[key] for key in ("dtype", "rounded", "rule")}}
    kept = ["source", "known_as", "shared", "activations", "proof", "tuning"]
    if any(one.how == INDICES for one in made.kept.values()):
        kept.append("ordered_head")
    step |= {"version": own["tool"]["version"], "files": read.sums}
    return {**{key: own[key] for key in kept if key in own}, "converted_from": [*own["converted_from"], step]}


def _notes(read: ReadDirectory, made: Arranged) -> Iterator[str]:
    """What a user should know of the directory: which rounding ``made`` has that extracting it had not made."""
    own = {DTYPES[made.dtype].rounding} if made.dtype in DTYPES else set[str]()
    if (made.format.name, made.dtype) == (read.layout, read.record["dtype"]):
        own.update(read.record["rounded"])
    before = roundings(*read.record["converted_from"], read.record)
    if done := ", ".join(word for word in before if word not in own):
        yield f"These weights were rounded earlier ({done}). Extract the bundle in this format to avoid that."
