"""From a checkpoint to a directory with its record and its card: what extracting, converting and tuning share; and
converting, which reads a directory.

Arrange (what is kept of every weight), write into the stage, read back, require the same bits, then record and card.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.architecture import shapes_of
from mtp_extract.architecture.roles import CENTROIDS, MATRIX
from mtp_extract.checkpoint.checkpoint import CODES, INDICES, Arranged, Checkpoint, arrange
from mtp_extract.checkpoint.codes import with_codes
from mtp_extract.checkpoint.files import OutputFile, json_text, write_file
from mtp_extract.checkpoint.rounding import RULES
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import UnsupportedError, either
from mtp_extract.formats import EVERY, format_named, format_of
from mtp_extract.io.address import name_of
from mtp_extract.io.place import InputPaths, check_place, staged
from mtp_extract.io.source import Progress, counter, nothing_shown
from mtp_extract.pipeline.check import CARD, RECORD, ReadDirectory, files_in, read_record, recorded, with_record
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.report.card import model_card, roundings


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
    if (architecture := EVERY[name].architecture) != checkpoint.architecture.name:
        raise UnsupportedError(
            f"The {name} format holds drafters of the architecture {architecture}, and this is one of "
            f"{checkpoint.architecture.name}. Choose another format.",
            remedies=("format",),
        )
    arranged = arrange(format_named(name), checkpoint, plan.dtype or EVERY[name].dtypes[0], with_codes=plan.codes)
    if plan.quantize is not None:
        arranged = _quantized(arranged, plan.quantize)
    # What the format cannot express is refused before a byte is written.
    assert arranged.files
    return arranged


def _quantized(arranged: Arranged, name: str) -> Arranged:
    """``arranged`` with every matrix that has no codes rounded by the rule ``name``, where the format then keeps it as
    codes.

    Roles that share a weight share its codes.
    """
    layout = arranged.format.name
    rules = EVERY[arranged.format.name].rules
    rule = RULES[name]
    if name not in rules:
        raise UnsupportedError(
            f"The {layout} format holds no codes that {name} makes"
            + (f", but those of {either(rules)}. Choose one of these." if rules else ". Choose another format."),
            remedies=("quantize",) if rules else ("format",),
        )
    # Of an ordered head, rows of floats are read.
    unrounded = ("lm_head", CENTROIDS) if any(stored_as.how == INDICES for stored_as in arranged.kept.values()) else ()
    tensors, rounded = dict(arranged.checkpoint.tensors), dict[int, Weight]()
    for role in shapes_of(arranged.checkpoint.config):
        weight = tensors.get(role.name)
        if role.kind != MATRIX or role.name in unrounded or weight is None or weight.scheme or not rule.fits(weight):
            continue
        new = rounded.setdefault(id(weight), rule.rounded(weight))
        if arranged.format.keep(role, new, arranged.dtype).how == CODES:
            tensors[role.name] = new
    if not any(weight.rule for weight in tensors.values()):
        raise UnsupportedError(
            f"There is nothing to round by {name} for the {layout} format in {arranged.dtype}: each matrix has codes, "
            "or the format holds none of this rule for it. Choose another rule or format, or leave it out.",
            remedies=("quantize", "format"),
        )
    checkpoint = replace(arranged.checkpoint, tensors=MappingProxyType(tensors))
    return arrange(arranged.format, checkpoint, arranged.dtype, with_codes=arranged.with_codes)


def write(
    arranged: Arranged,
    target: Path,
    origin: Mapping[str, Any],
    notes: Iterable[str] = (),
    *,
    overwrite: bool,
    inputs: InputPaths,
    progress: Progress = nothing_shown,
    compare_rounded: bool = True,
) -> ExtractionResult:
    """Write the files of ``arranged`` into the directory ``target``, compare what is read there, and write the card
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
    rules, remarks = [weight.rule for weight in arranged.checkpoint.tensors.values() if weight.rule], list(notes)
    if rules:
        remarks.append(f"Codes were made here, by {rules[0]}, of {len(rules)} matrices that had none.")
    with staged(target, overwrite=overwrite, inputs=inputs, listed=recorded) as stage:
        tick = counter(progress, sum(tensor.length for file in arranged.files for tensor in file.tensors))
        files = {file.name: write_file(stage, file, tick) for file in arranged.files}
        back = arranged.format.read(stage)
        arranged.require_same(back, rounded=compare_rounded)
        if compare_rounded:
            # Codes that are not those of the floats they lie beside are refused where they are read.
            with_codes(stage, back.tensors)
        record = {
            "format_version": 5,
            "tool": {"name": "mtp-extract", "version": __version__},
            **origin,
            "layout": arranged.format.name,
            "dtype": arranged.dtype,
            "rounded": arranged.rounded,
            "rule": rules[0] if rules else None,
            "geometry": arranged.checkpoint.config.as_json(),
            "files": files,
        }
        # The card is made of the record, which lists it.
        files[CARD] = write_file(stage, OutputFile(CARD, text=model_card(record, limits=arranged.files[0].notes)))
        write_file(stage, OutputFile(RECORD, text=json_text(record)))
        read_record(stage)
        return ExtractionResult(
            directory=target,
            files={name: (stage / name).stat().st_size for name in files_in(stage)},
            record=record,
            parameters=sum(map(math.prod, shapes_of(arranged.checkpoint.config).values())),
            integers=len({t.role for t in arranged.files[0].tensors if t.role and arranged.kept[t.role].how == CODES}),
            notes=(*remarks, *arranged.notes(), *arranged.files[0].notes),
        )


def convert_checkpoint(
    directory: Path,
    out: str | os.PathLike[str] | None,
    plan: WritingPlan,
    *,
    overwrite: bool = False,
    progress: Progress = nothing_shown,
) -> ExtractionResult:
    """Write the drafter in ``directory`` to ``out`` as ``plan`` says: :func:`mtp_extract.convert` explains it."""
    place, name = with_record(directory), name_of(directory)
    chosen = plan.choose(EVERY[format_of(place).name].architecture)
    target = Path(out if out is not None else f"{Path(name).stem if directory.is_file() else name}-{chosen}")
    to: dict[str, Any] = {"overwrite": overwrite, "inputs": (place,)}
    check_place(target, **to, listed=recorded)
    read = ReadDirectory.of(place)
    arranged = prepare(read.checkpoint, chosen, plan)
    before = roundings(*read.record["converted_from"], {**read.record, "rounded": read.lost})
    lost = ", ".join(word for word in before if word not in arranged.rounded)
    note = f"These weights were rounded earlier ({lost}). Extract the bundle in this format to avoid that."
    notes = [*read.checkpoint.notes, *([note] if lost else [])]
    return write(arranged, target, origin_of(read, arranged), notes, **to, progress=progress)


def origin_of(read: ReadDirectory, arranged: Arranged) -> dict[str, Any]:
    """What a record of ``arranged``, made of what was ``read``, says of its origin, of a proof and of training.

    Of an ordered head that ``arranged`` leaves out it says nothing.
    """
    record = read.record
    carried_over = ["source", "known_as", "shared", "activations", "proof", "not_proven", "tuning"]
    if any(stored_as.how == INDICES for stored_as in arranged.kept.values()):
        carried_over.append("ordered_head")
    step = {
        "layout": read.layout,
        "dtype": record["dtype"],
        "rounded": read.lost,
        "rule": record["rule"],
        "version": record["tool"]["version"],
        "files": read.sums,
    }
    return {
        **{key: record[key] for key in carried_over if key in record},
        "converted_from": [*record["converted_from"], step],
    }
