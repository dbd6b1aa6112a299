"""From a checkpoint to a directory with its record and its card: what extracting, converting and tuning share; and
converting, which reads a directory.

Plan (how every weight is stored), write into the stage, read back, require the same bits, then record and card.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.architecture import shapes_of
from mtp_extract.architecture.roles import CENTROIDS, INDEX, MATRIX, Role
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import add_codes, with_codes
from mtp_extract.checkpoint.files import OutputFile, json_text, write_file
from mtp_extract.checkpoint.format import INDICES, Format, Plan, require_same
from mtp_extract.checkpoint.rounding import RULES
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import UnsupportedError, either
from mtp_extract.formats import EVERY, format_named, format_of
from mtp_extract.io.address import name_of
from mtp_extract.io.place import InputPaths, check_place, staged
from mtp_extract.pipeline.check import CARD, RECORD, ReadDirectory, files_in, read_record, recorded, with_record
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.progress import SILENT, Reporter, counter
from mtp_extract.report.card import model_card, roundings


@dataclass(frozen=True)
class ExtractionResult:
    """What an extraction or a conversion did."""

    directory: Path
    files: dict[str, int]  # name → size in bytes
    record: dict[str, Any]  # the content of ``extraction.json``
    parameters: int  # how many numbers the drafter has
    integers: int  # how many weights are held as integers with scales; what several share, once
    notes: tuple[str, ...]  # for the user: things worth knowing that are not errors


def prepare(checkpoint: Checkpoint, name: str, plan: WritingPlan) -> Plan:
    """``checkpoint`` as the format called ``name`` will hold it, in the format's own type where ``plan`` names none;
    UnsupportedError where something would be rounded that may not be, or the format cannot hold what was asked for."""
    # Asked of what was read: of a damaged configuration nobody knows the architecture before.
    if (architecture := EVERY[name].architecture) != checkpoint.architecture.name:
        raise UnsupportedError(
            f"The {name} format holds drafters of the architecture {architecture}, and this is one of "
            f"{checkpoint.architecture.name}. Choose another format.",
            remedies=("format",),
        )
    format_ = format_named(name)
    dtype = plan.dtype or EVERY[name].dtypes[0]
    if plan.quantize is not None:
        rules = EVERY[name].rules
        if plan.quantize not in rules:
            raise UnsupportedError(
                f"The {name} format holds no codes that {plan.quantize} makes"
                + (f", but those of {either(rules)}. Choose one of these." if rules else ". Choose another format."),
                remedies=("quantize",) if rules else ("format",),
            )
        checkpoint = _quantize(checkpoint, format_, dtype, plan.quantize)
    planned = format_.plan(checkpoint, dtype)
    return add_codes(planned) if plan.codes else planned


def _quantize(checkpoint: Checkpoint, format_: Format, dtype: str, name: str) -> Checkpoint:
    """``checkpoint`` with every matrix that has no codes rounded by the rule ``name``, where the format then stores it
    as codes.

    Roles that share a weight share its codes.
    """
    rule = RULES[name]
    tensors = dict(checkpoint.tensors)
    rounded = dict[int, Weight]()
    for role in _list_rounded_roles(checkpoint, format_, dtype):
        weight = tensors.get(role.name)
        if weight is None or weight.scheme or not rule.fits(weight):
            continue
        coded = rounded.setdefault(id(weight), rule.round_matrix(weight))
        if format_.store(role, coded, dtype).how == CODES:
            tensors[role.name] = coded
    if not any(weight.rule for weight in tensors.values()):
        raise UnsupportedError(
            f"There is nothing to round by {name} for the {format_.name} format in {dtype}: each matrix has codes, "
            "or the format holds none of this rule for it. Choose another rule or format, or leave it out.",
            remedies=("quantize", "format"),
        )
    return replace(checkpoint, tensors=MappingProxyType(tensors))


def _list_rounded_roles(checkpoint: Checkpoint, format_: Format, dtype: str) -> list[Role]:
    """The matrices that a rule may round: of an ordered head that the format holds, rows of floats are read."""
    roles = shapes_of(checkpoint.config)
    indices = [role for role in roles if role.kind == INDEX]
    has_ordered_head = any(format_.store(role, checkpoint.tensors[role.name], dtype).how == INDICES for role in indices)
    unrounded = ("lm_head", CENTROIDS) if has_ordered_head else ()
    return [role for role in roles if role.kind == MATRIX and role.name not in unrounded]


def write(
    planned: Plan,
    target: Path,
    origin: Mapping[str, Any],
    notes: Iterable[str] = (),
    *,
    overwrite: bool,
    inputs: InputPaths,
    reporter: Reporter = SILENT,
    every_float: bool = True,
) -> ExtractionResult:
    """Write the files that are ``planned`` into the directory ``target``, compare what is read there, and write the
    card and the record.

    Args:
        origin: what the record says of where the weights came from, of a proof and of a training.
        notes: for the user, besides those on how weights are stored.
        overwrite, inputs: as for :func:`~mtp_extract.io.place.staged`.
        reporter: told of the bytes written.
        every_float: whether all floats are made and compared once more than as the bytes of their file, or of each
            weight the first and the last rows.

    Raises:
        OutputError, CheckpointError: it cannot be written, or reads back differently; nothing is left behind.
    """
    rules = [weight.rule for weight in planned.checkpoint.tensors.values() if weight.rule]
    remarks = list(notes)
    if rules:
        remarks.append(f"Codes were made here, by {rules[0]}, of {len(rules)} matrices that had none.")
    with staged(target, overwrite=overwrite, inputs=inputs, listed=recorded) as stage:
        tick = counter(reporter, "writing", sum(tensor.length for file in planned.files for tensor in file.tensors))
        files = {file.name: write_file(stage, file, tick) for file in planned.files}
        _compare_written(planned, stage, every_float)
        record = _build_record(planned, origin, rules[0] if rules else None, files)
        # The card is made of the record, which lists it.
        files[CARD] = write_file(stage, OutputFile(CARD, text=model_card(record, planned.limits)))
        write_file(stage, OutputFile(RECORD, text=json_text(record)))
        read_record(stage)
        sizes = {name: (stage / name).stat().st_size for name in files_in(stage)}
    return ExtractionResult(
        directory=target,
        files=sizes,
        record=record,
        parameters=sum(map(math.prod, shapes_of(planned.checkpoint.config).values())),
        integers=sum(stored_as.how == CODES for stored_as in planned.stored.values()),
        notes=(*remarks, *planned.notes, *planned.limits),
    )


def _build_record(
    planned: Plan, origin: Mapping[str, Any], rule: str | None, files: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of ``extraction.json``, in the order in which it is written."""
    return {
        "format_version": 5,
        "tool": {"name": "mtp-extract", "version": __version__},
        **origin,
        "layout": planned.layout,
        "dtype": planned.dtype,
        "rounded": planned.rounded,
        "rule": rule,
        "geometry": planned.checkpoint.config.as_json(),
        "files": files,
    }


def _compare_written(planned: Plan, stage: Path, every_float: bool) -> None:
    """Read what lies in ``stage`` and compare it with what was ``planned``; CheckpointError where it differs."""
    back = format_named(planned.layout).read(stage)
    require_same(planned, back, every_float=every_float)
    if every_float:
        # Codes that are not those of the floats they lie beside are refused where they are read.
        with_codes(stage, back.tensors)


def convert_checkpoint(
    directory: Path,
    out: str | os.PathLike[str] | None,
    plan: WritingPlan,
    *,
    overwrite: bool = False,
    reporter: Reporter = SILENT,
) -> ExtractionResult:
    """Write the drafter in ``directory`` to ``out`` as ``plan`` says: :func:`mtp_extract.convert` explains it."""
    place, name = with_record(directory), name_of(directory)
    chosen = plan.choose(EVERY[format_of(place).name].architecture)
    target = Path(out if out is not None else f"{Path(name).stem if directory.is_file() else name}-{chosen}")
    to: dict[str, Any] = {"overwrite": overwrite, "inputs": (place,)}
    check_place(target, **to, listed=recorded)
    read = ReadDirectory.of(place)
    planned = prepare(read.checkpoint, chosen, plan)
    notes = [*read.checkpoint.notes, *_note_earlier_rounding(read, planned)]
    return write(planned, target, origin_of(read, planned), notes, **to, reporter=reporter)


def _note_earlier_rounding(read: ReadDirectory, planned: Plan) -> Iterator[str]:
    """A note, where the weights were rounded on the way here to what they would not be rounded to now."""
    before = roundings(*read.record["converted_from"], {**read.record, "rounded": read.lost})
    if lost := ", ".join(word for word in before if word not in planned.rounded):
        yield f"These weights were rounded earlier ({lost}). Extract the bundle in this format to avoid that."


def origin_of(read: ReadDirectory, planned: Plan) -> dict[str, Any]:
    """What the record says of the origin, a proof and a training of what is ``planned``, which was made of what was
    ``read``; nothing of an ordered head that is left out."""
    record = read.record
    carried_over = ["source", "known_as", "shared", "activations", "proof", "not_proven", "tuning"]
    if planned.has(INDICES):
        carried_over.append("ordered_head")
    step = {
        "layout": read.layout,
        "dtype": record["dtype"],
        "rounded": read.lost,
        "rule": record["rule"],
        "version": record["tool"]["version"],
        "files": read.sums,
    }
    carried = {key: record[key] for key in carried_over if key in record}
    return {**carried, "converted_from": [*record["converted_from"], step]}
