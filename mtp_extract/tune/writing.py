"""From a tuned checkpoint to a directory that loads wherever the one it was made from does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.architecture.roles import HEAD_ROLES
from mtp_extract.checkpoint.checkpoint import CODES, NOTHING, Checkpoint
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.checkpoint.holdings import check_codes, check_floats, holdings_of
from mtp_extract.checkpoint.lazy import read_floats
from mtp_extract.checkpoint.planned import OutputFile
from mtp_extract.checkpoint.rounding import SCALES, rounded_again
from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.formats import EVERY, format_named
from mtp_extract.io.place import Inputs
from mtp_extract.pipeline.conversion import ReadDirectory
from mtp_extract.pipeline.directory import Choice, ExtractionResult, finish, staging
from mtp_extract.report.card import UNSAID, CardWords

_MADE = "made here, from what the drafter's states look for"


def as_written(origin: ReadDirectory, checkpoint: Checkpoint) -> Checkpoint:
    """What a reader of ``origin`` would get, were ``checkpoint`` in it: rounded to what it is written in."""
    tensors = dict(checkpoint.tensors)
    for role, holding in holdings_of(format_named(origin.layout), checkpoint, _dtype(origin)).items():
        if holding.rounded_to and role in tensors:
            step = holding.rounded_to + (SCALES if holding.kept == CODES else "")
            tensors[role] = rounded_again(tensors[role], [step])
    return replace(checkpoint, tensors=MappingProxyType(tensors))


def check_writable(origin: ReadDirectory, like: Checkpoint, mode: str) -> None:
    """Whether what comes of ``origin`` can be written as it is.

    Args:
        origin: what is tuned.
        like: the same with all that is trained changed.
        mode: by which.

    Raises:
        UnsupportedError: the format of ``origin`` has no room for it.
    """
    choice = _choice(origin)
    try:
        choice.format.plan(choice.prepare(like).checkpoint, choice.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{escape(origin.directory)}: expected a format with room for what {mode} makes, found {origin.layout}: "
            f"{error} Train norms or codes, or convert it to the transformers format first.",
            remedies=("mode=norms", "mode=qat"),
        ) from error


def check_head_writable(origin: ReadDirectory, like: Checkpoint) -> None:
    """Whether an ordered head can be written beside what ``origin`` holds.

    Args:
        origin: what it is made for.
        like: the same with such a head.

    Raises:
        UnsupportedError: the format of ``origin`` has no room for it.
    """
    choice = _choice(origin)
    prepared = choice.prepare(like)
    place = f"{escape(origin.directory)}: expected a format with room for an ordered head, found {origin.layout}"
    advice = "Convert the drafter to the transformers format first."
    left = [
        holding.why for role, holding in prepared.holdings.items() if role in HEAD_ROLES and holding.kept == NOTHING
    ]
    if left:
        raise UnsupportedError(f"{place}: {left[0]}. {advice}")
    try:
        choice.format.plan(prepared.checkpoint, choice.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"{place}: {error} {advice}") from error


def _dtype(origin: ReadDirectory) -> str:
    """What ``origin`` is written in: integers where they are not beside floats but in their place."""
    tensors, dtypes = origin.checkpoint.tensors, EVERY[origin.layout].dtypes
    coded = any(tensor.scheme is not None and role not in origin.extra_codes for role, tensor in tensors.items())
    return CODES if CODES in dtypes and coded else origin.checkpoint.dtype


def _choice(origin: ReadDirectory, *, overwrite: bool = False, card: CardWords = UNSAID) -> Choice:
    format_, codes = format_named(origin.layout), bool(origin.extra_codes)
    return Choice(format_, _dtype(origin), codes=codes, overwrite=overwrite, card=card.over(origin.old))


def write_tuned(
    origin: ReadDirectory,
    tuned: Checkpoint,
    target: Path,
    tuning: Mapping[str, Any],
    *,
    overwrite: bool,
    inputs: Inputs,
    card: CardWords = UNSAID,
) -> ExtractionResult:
    """Write ``tuned`` to ``target``, in the format, type and with the codes that ``origin`` has.

    Args:
        origin: what was tuned.
        tuned: the same with other weights.
        target: a directory that does not exist yet.
        tuning: what the record is to say of it.
        overwrite: replace ``target`` if it is a checkpoint of ours.
        inputs: what is read, and so is not replaced.
        card: what to say on the card.

    Raises:
        OutputError: it cannot be written, or reads back differently; nothing is left behind.
    """

    def describe(record: dict[str, Any], weights: OutputFile) -> dict[str, Any]:
        changed = _changed(origin.checkpoint, tuned, weights)
        return {**record, "tuning": {**tuning, "tuned_from": origin.sums, "changed": changed}}

    return _write(origin, tuned, target, describe, overwrite=overwrite, inputs=inputs, card=card)


def write_ordered(
    origin: ReadDirectory,
    ordered: Checkpoint,
    target: Path,
    about: Mapping[str, Any],
    *,
    overwrite: bool,
    inputs: Inputs,
    card: CardWords = UNSAID,
) -> ExtractionResult:
    """Write ``ordered``, which is what ``origin`` holds with an ordered head; the rest as :func:`write_tuned`.

    Args:
        about: what the record is to say of the head.
    """

    def describe(record: dict[str, Any], weights: OutputFile) -> dict[str, Any]:
        for planned in weights.tensors:
            if planned.role in HEAD_ROLES:
                record["tensors"][planned.name]["why"] = _MADE
        return {**record, "ordered_head": {**about, "made_from": origin.sums}}

    return _write(origin, ordered, target, describe, overwrite=overwrite, inputs=inputs, card=card)


def _write(
    origin: ReadDirectory,
    checkpoint: Checkpoint,
    target: Path,
    describe: Callable[[dict[str, Any], OutputFile], dict[str, Any]],
    *,
    overwrite: bool,
    inputs: Inputs,
    card: CardWords,
) -> ExtractionResult:
    prepared = _choice(origin, overwrite=overwrite, card=card).prepare(checkpoint)
    with staging(prepared, target, inputs=inputs) as staged:
        check_codes(staged.written, checkpoint, prepared.holdings)
        check_floats(staged.written, checkpoint, prepared.holdings)
        # Codes that are not those of the floats they lie beside are refused where they are read.
        with_codes(staged.directory, staged.written)
        # What was proven was proven of other weights, or another head.
        record = describe(origin.record(prepared, staged, proof=None), staged.weights)
        return finish(prepared, staged, record, target)


def _changed(before: Checkpoint, after: Checkpoint, weights: OutputFile) -> dict[str, int]:
    """By tensor: how many codes, or numbers where there are none, are others than before; those with none left out."""
    counts = {}
    for planned in weights.tensors:
        old, new = before.tensors.get(planned.role), after.tensors.get(planned.role)
        if old is None or new is None or new is old or planned.part:
            continue
        if new.scheme is not None:
            pairs = zip(old.integers(), new.integers(), strict=True)
            count = sum(int(np.count_nonzero(mine != theirs)) for mine, theirs in pairs)
        else:
            count = int(np.count_nonzero(read_floats(old) != read_floats(new)))
        if count:
            counts[planned.name] = count
    return counts
