"""From a checkpoint that was made here to a directory that loads wherever the one it was made from does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.checkpoint.arranged import NOTHING, Arranged, arrange
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.checkpoint.planned import OutputFile
from mtp_extract.checkpoint.weight import row_ranges
from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.formats import EVERY, format_named
from mtp_extract.io.place import Inputs, staged
from mtp_extract.pipeline.conversion import ReadDirectory
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.pipeline.staging import recorded
from mtp_extract.pipeline.writing import ExtractionResult, finish, prepare, write_and_read


def as_written(origin: ReadDirectory, checkpoint: Checkpoint) -> Checkpoint:
    """``checkpoint`` as it reads back where it is written like ``origin``: rounded to what that holds."""
    tensors = dict(checkpoint.tensors)
    for role, kept in arrange(format_named(origin.layout), checkpoint, _dtype(origin)).kept.items():
        if kept.rounded_to and role in tensors:
            tensors[role] = kept.written
    return replace(checkpoint, tensors=MappingProxyType(tensors))


def check_writable(
    origin: ReadDirectory,
    like: Checkpoint,
    what: str,
    advice: str,
    remedies: tuple[str, ...] = (),
    needed: Collection[str] = (),
) -> None:
    """Refuse what the format of ``origin`` has no room for.

    Args:
        like: a checkpoint with all that is to be made, whatever its numbers are.
        needed: roles that may not be left out.

    Raises:
        UnsupportedError: it has no room.
    """
    try:
        arranged = _arranged(origin, like)
        for role, kept in arranged.kept.items():
            if role in needed and kept.how == NOTHING:
                raise UnsupportedError(f"{kept.why}.")
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{escape(origin.directory)}: expected a format with room for {what}, found {origin.layout}: {error} "
            f"{advice}",
            remedies=remedies,
        ) from error


def _dtype(origin: ReadDirectory) -> str:
    """What ``origin`` is written in: integers where they are not beside floats but in their place."""
    tensors, dtypes = origin.checkpoint.tensors, EVERY[origin.layout].dtypes
    coded = any(tensor.scheme is not None and role not in origin.extra_codes for role, tensor in tensors.items())
    return CODES if CODES in dtypes and coded else origin.checkpoint.dtype


def _arranged(origin: ReadDirectory, checkpoint: Checkpoint) -> Arranged:
    """``checkpoint`` in the format, type and with the codes that ``origin`` has."""
    return prepare(checkpoint, origin.layout, WritingPlan(dtype=_dtype(origin), codes=bool(origin.extra_codes)))


def write_made(
    origin: ReadDirectory,
    made: Checkpoint,
    target: Path,
    key: str,
    about: Mapping[str, Any],
    *,
    overwrite: bool,
    inputs: Inputs,
) -> ExtractionResult:
    """Write ``made`` to ``target``, in the format, type and with the codes that ``origin`` has.

    Args:
        made: ``origin`` with other weights or another head.
        key: of the record, under which ``about`` stands: "tuning", or "ordered_head".
        inputs: what is read, and so is not replaced.

    Raises:
        OutputError: it cannot be written, or reads back differently; nothing is left behind.
    """
    arranged = _arranged(origin, made)
    with staged(target, overwrite=overwrite, inputs=inputs, listed=recorded) as stage:
        files, back = write_and_read(arranged, stage)
        arranged.require_same(back)
        # Codes that are not those of the floats they lie beside are refused where they are read.
        with_codes(stage, back)
        if key == "tuning":
            own = {"tuned_from": origin.sums, "changed": _changed(origin.checkpoint, made, arranged.files[0])}
        else:
            own = {"made_from": origin.sums}
        more = {**origin.told_of(arranged), key: {**about, **own}}
        # What was proven was proven of other weights, or another head.
        proof = None
        return finish(arranged, stage, target, files, origin.origin, proof, converted_from=origin.steps, more=more)


def _changed(origin: Checkpoint, tuned: Checkpoint, weights: OutputFile) -> dict[str, int]:
    """By tensor: how many of its codes, or numbers where it has no codes, were changed; those with none left out."""
    counts = {}
    for role, planned in weights.weights.items():
        old, new = origin.tensors.get(role), tuned.tensors.get(role)
        if old is None or new is None or new is old:
            continue
        if new.scheme is not None:
            count = sum(int(np.count_nonzero(old.codes(*rows) != new.codes(*rows))) for rows in row_ranges(old, new))
        else:
            count = sum(int(np.count_nonzero(old.floats(*rows) != new.floats(*rows))) for rows in row_ranges(old, new))
        if count:
            counts[planned.name] = count
    return counts
