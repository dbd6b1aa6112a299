"""From a checkpoint to a directory with its record and its card: what extracting, converting and tuning share.

Arrange (what is kept of every weight), write into the stage, read back, require the same bits, then record and card.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.architecture.roles import CENTROIDS, MATRIX, shapes_of
from mtp_extract.checkpoint.checkpoint import CODES, FLOATS, INDICES, Arranged, Checkpoint, arrange
from mtp_extract.checkpoint.codes import CODES_FILE, with_codes
from mtp_extract.checkpoint.files import OutputFile, json_text, write_file
from mtp_extract.checkpoint.rounding import RULES, SCALES
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import CheckpointError, UnsupportedError, either
from mtp_extract.formats import EVERY, format_named
from mtp_extract.io.place import Inputs, staged
from mtp_extract.io.source import Progress, counter, nothing_shown
from mtp_extract.pipeline.check import CARD, RECORD, changed_card, files_in, read_record, recorded
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.report.card import model_card


@dataclass(frozen=True)
class ExtractionResult:
    """What an extraction or a conversion did.

    Attributes:
        files: name → size in bytes.
        record: the content of ``extraction.json``.
        parameters: how many numbers the drafter has.
        integers: how many weights are held as integers with scales; what several share, once.
        notes: for the user: things worth knowing that are not errors.
    """

    directory: Path
    files: dict[str, int]
    record: dict[str, Any]
    parameters: int
    integers: int
    notes: tuple[str, ...]


def prepare(checkpoint: Checkpoint, name: str, plan: WritingPlan) -> Arranged:
    """``checkpoint`` as the format called ``name`` will hold it, in the format's own type where ``plan`` names none.

    Raises:
        UnsupportedError: something would be rounded that may not be, or the format cannot hold what was asked for.
    """
    # Asked of what was read: of a damaged configuration nobody knows the architecture before.
    if (architecture := EVERY[name].architecture) != checkpoint.architecture:
        raise UnsupportedError(
            f"The {name} format holds drafters of the architecture {architecture}, and this is one of "
            f"{checkpoint.architecture}. Choose another format.",
            remedies=("format",),
        )
    made = arrange(format_named(name), checkpoint, plan.dtype or EVERY[name].dtypes[0], with_codes=plan.codes)
    if plan.quantize is not None:
        made = _quantized(made, plan.quantize)
    # What the format cannot express is refused before a byte is written.
    assert made.files
    return made


def _quantized(made: Arranged, name: str) -> Arranged:
    """``made`` with every matrix that has no codes rounded by the rule ``name``, where the format then keeps it as
    codes.

    Roles that share a weight share its codes.
    """
    layout, rules, rule = made.format.name, EVERY[made.format.name].rules, RULES[name]
    if name not in rules:
        raise UnsupportedError(
            f"The {layout} format holds no codes that {name} makes"
            + (f", but those of {either(rules)}. Choose one of these." if rules else ". Choose another format."),
            remedies=("quantize",) if rules else ("format",),
        )
    # Of an ordered head, rows of floats are read.
    left = ("lm_head", CENTROIDS) if any(one.how == INDICES for one in made.kept.values()) else ()
    tensors, rounded, why = dict(made.checkpoint.tensors), dict[int, Weight](), "every matrix has its codes"
    for role in shapes_of(made.checkpoint.config):
        weight = tensors.get(role.name)
        if role.kind != MATRIX or role.name in left or weight is None or weight.scheme is not None:
            continue
        if not rule.fits(weight):
            why = f"no row is a whole number of blocks of {rule.block}"
            continue
        new = rounded.setdefault(id(weight), rule.rounded(weight))
        held = made.format.keep(role, new, made.dtype)
        tensors[role.name], why = (new, why) if held.how == CODES else (weight, held.why)
    if not any(weight.rule for weight in tensors.values()):
        raise UnsupportedError(
            f"There is nothing to round by {name} for the {layout} format in {made.dtype}: {why}. Choose another rule "
            "or format, or leave it out.",
            remedies=("quantize", "format"),
        )
    checkpoint = replace(made.checkpoint, tensors=MappingProxyType(tensors))
    return arrange(made.format, checkpoint, made.dtype, with_codes=made.with_codes)


def write(
    made: Arranged,
    target: Path,
    origin: Mapping[str, Any],
    notes: Iterable[str] = (),
    *,
    overwrite: bool,
    inputs: Inputs,
    progress: Progress = nothing_shown,
    compare_rounded: bool = True,
) -> ExtractionResult:
    """Write the files of ``made`` into the directory ``target``, compare what is read there with it, and write the card
    and the record.

    Args:
        origin: what the record says of where the weights came from, of a proof and of a training.
        notes: for the user, besides those on how weights are kept.
        overwrite, inputs: as for :func:`~mtp_extract.io.place.staged`.
        progress: called with bytes done and bytes in all.
        compare_rounded: whether floats that were rounded are compared, too, once more than as the bytes of their file.

    Raises:
        OutputError, CheckpointError: it cannot be written, or reads back differently; nothing is left behind.
    """
    rules, told = [one.rule for one in made.checkpoint.tensors.values() if one.rule], list(notes)
    # A record of another release says nothing of its card.
    with suppress(CheckpointError):
        if (old := read_record(target)) and changed_card(target, old):
            told.append(f"{CARD} had been changed by hand, and is replaced.")
    if rules:
        told.append(f"Codes were made here, by {rules[0]}, of {len(rules)} matrices that had none.")
    with staged(target, overwrite=overwrite, inputs=inputs, listed=recorded) as stage:
        tick = counter(progress, sum(tensor.length for file in made.files for tensor in file.tensors))
        files = {file.name: write_file(stage, file, tick) for file in made.files}
        back = made.format.read(stage)
        made.require_same(back, rounded=compare_rounded)
        if compare_rounded:
            # Codes that are not those of the floats they lie beside are refused where they are read.
            with_codes(stage, back.tensors)
        if made.with_codes and CODES_FILE not in files:
            told.append(f"{CODES_FILE} was not written: nothing that has integers is kept in floats.")
        record = {
            "format_version": 5,
            "tool": {"name": "mtp-extract", "version": __version__},
            **origin,
            "layout": made.format.name,
            "dtype": made.dtype,
            "rounded": _rounded(made),
            "rule": rules[0] if rules else None,
            "geometry": made.checkpoint.config.as_json(),
            "files": files,
        }
        # The card is made of the record, which lists it.
        files[CARD] = write_file(stage, OutputFile(CARD, text=model_card(record, limits=made.files[0].notes)))
        write_file(stage, OutputFile(RECORD, text=json_text(record)))
        read_record(stage)
        return ExtractionResult(
            directory=target,
            files={name: (stage / name).stat().st_size for name in files_in(stage)},
            record=record,
            parameters=sum(map(math.prod, shapes_of(made.checkpoint.config).values())),
            integers=len({t.role for t in made.files[0].tensors if t.role and made.kept[t.role].how == CODES}),
            notes=(*told, *made.notes(), *made.files[0].notes),
        )


def _rounded(made: Arranged) -> list[str]:
    """What numbers were rounded to, and scales of codes. What lies beside its own codes is not lost."""
    words, coded = set[str](), CODES_FILE in [file.name for file in made.files]
    for kept in made.kept.values():
        beside = coded and kept.how == FLOATS and kept.weight.scheme is not None
        if kept.rounded_to and not beside:
            words.add(kept.rounded_to + (SCALES if kept.how == CODES else ""))
    return sorted(words)
