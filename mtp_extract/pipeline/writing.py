"""Writes a checkpoint as a directory with record and card, for extracting, converting and tuning; and converts.

The steps: plan how every weight is stored, write into a stage, read back, require the same bits, write card and record.
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
from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.roles import CENTROIDS, INDEX, MATRIX, Role
from mtp_extract.checkpoint.checkpoint import CODES, Checkpoint
from mtp_extract.checkpoint.codes import add_codes, attach_codes
from mtp_extract.checkpoint.files import OutputFile, format_json, write_file
from mtp_extract.checkpoint.format import INDICES, Format, Plan, require_same
from mtp_extract.checkpoint.rounding import RULES
from mtp_extract.checkpoint.weight import Weight
from mtp_extract.errors import UnsupportedError, format_choice
from mtp_extract.formats import ALL_FORMATS, detect_format, load_format
from mtp_extract.io.address import name_checkpoint
from mtp_extract.io.place import InputPaths, check_place, stage_output
from mtp_extract.pipeline.check import (
    CARD,
    RECORD,
    CheckpointDirectory,
    list_directory_files,
    list_recorded_files,
    read_record,
    resolve_place,
)
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.progress import SILENT, Reporter, make_counter
from mtp_extract.report.card import list_roundings, render_model_card


@dataclass(frozen=True)
class ExtractionResult:
    """The result of an extraction or a conversion."""

    directory: Path
    files: dict[str, int]  # name → size in bytes
    record: dict[str, Any]  # the content of ``extraction.json``
    parameters: int  # numbers of the drafter
    integers: int  # how many weights are held as integers with scales; what several share, once
    notes: tuple[str, ...]  # for the user


def prepare(checkpoint: Checkpoint, name: str, plan: WritingPlan) -> Plan:
    """Plan how the format called ``name`` stores ``checkpoint``; UnsupportedError if it cannot do so by ``plan``."""
    # Checked here since only reading the config tells the architecture for sure.
    if (architecture := ALL_FORMATS[name].architecture) != checkpoint.architecture.name:
        raise UnsupportedError(
            f"The {name} format holds drafters of the architecture {architecture}, and this is one of "
            f"{checkpoint.architecture.name}. Choose another format.",
            remedies=("format",),
        )
    format_ = load_format(name)
    dtype = plan.dtype or ALL_FORMATS[name].dtypes[0]
    if plan.quantize is not None:
        rules = ALL_FORMATS[name].rules
        if plan.quantize not in rules:
            raise UnsupportedError(
                f"The {name} format holds no codes that {plan.quantize} makes"
                + (
                    f", but those of {format_choice(rules)}. Choose one of these."
                    if rules
                    else ". Choose another format."
                ),
                remedies=("quantize",) if rules else ("format",),
            )
        checkpoint = _quantize(checkpoint, format_, dtype, plan.quantize)
    planned = format_.plan(checkpoint, dtype)
    return add_codes(planned) if plan.codes else planned


def _quantize(checkpoint: Checkpoint, format_: Format, dtype: str, name: str) -> Checkpoint:
    """Round by the rule ``name`` every matrix without codes that the format then stores as codes."""
    rule = RULES[name]
    tensors = dict(checkpoint.tensors)
    rounded = dict[int, Weight]()
    for role in _list_rounded_roles(checkpoint, format_, dtype):
        weight = tensors.get(role.name)
        if weight is None or weight.scheme or not rule.fits(weight):
            continue
        # Roles that share a weight share its codes.
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
    """List the matrices that a rule may round: not those of an ordered head, of which engines read rows of floats."""
    roles = list_shapes(checkpoint.config)
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
    """Write the ``planned`` files into the directory ``target``, read them back and compare; add card and record.

    Args:
        origin: the record's fields on the origin, a proof and a training.
        notes: for the user, before those on how weights are stored.
        overwrite, inputs: as for :func:`~mtp_extract.io.place.stage_output`.
        reporter: is told the bytes written.
        every_float: compare all floats; if False, only the first and the last rows of each weight.

    Raises:
        OutputError, CheckpointError: it cannot be written, or reads back differently; no file is left behind.
    """
    rules = [weight.rule for weight in planned.checkpoint.tensors.values() if weight.rule]
    remarks = list(notes)
    if rules:
        remarks.append(f"Codes were made here, by {rules[0]}, of {len(rules)} matrices that had none.")
    with stage_output(target, overwrite=overwrite, inputs=inputs, listed=list_recorded_files) as stage:
        tick = make_counter(
            reporter, "writing", sum(tensor.length for file in planned.files for tensor in file.tensors)
        )
        files = {file.name: write_file(stage, file, tick) for file in planned.files}
        _compare_written(planned, stage, every_float)
        record = _build_record(planned, origin, rules[0] if rules else None, files)
        # The card is rendered from the record, which lists the card afterwards.
        files[CARD] = write_file(stage, OutputFile(CARD, text=render_model_card(record, planned.limits)))
        write_file(stage, OutputFile(RECORD, text=format_json(record)))
        read_record(stage)
        sizes = {name: (stage / name).stat().st_size for name in list_directory_files(stage)}
    return ExtractionResult(
        directory=target,
        files=sizes,
        record=record,
        parameters=sum(map(math.prod, list_shapes(planned.checkpoint.config).values())),
        integers=sum(stored_as.how == CODES for stored_as in planned.stored.values()),
        notes=(*remarks, *planned.notes, *planned.limits),
    )


def _build_record(
    planned: Plan, origin: Mapping[str, Any], rule: str | None, files: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the content of ``extraction.json``, in the order of the file."""
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
    """Raise CheckpointError if the checkpoint in ``stage`` differs from what was ``planned``."""
    back = load_format(planned.layout).read(stage)
    require_same(planned, back, every_float=every_float)
    if every_float:
        # Raises if codes do not give the floats that they lie beside.
        attach_codes(stage, back.tensors)


def convert_checkpoint(
    directory: Path,
    out: str | os.PathLike[str] | None,
    plan: WritingPlan,
    *,
    overwrite: bool = False,
    reporter: Reporter = SILENT,
) -> ExtractionResult:
    """Write the drafter in ``directory`` to ``out`` as ``plan`` says; see :func:`mtp_extract.convert`."""
    place = resolve_place(directory)
    name = name_checkpoint(directory)
    chosen = plan.choose(ALL_FORMATS[detect_format(place).name].architecture)
    target = Path(out if out is not None else f"{Path(name).stem if directory.is_file() else name}-{chosen}")
    check_place(target, overwrite=overwrite, inputs=(place,), listed=list_recorded_files)
    read = CheckpointDirectory.of(place)
    planned = prepare(read.checkpoint, chosen, plan)
    notes = [*read.checkpoint.notes, *_note_earlier_rounding(read, planned)]
    origin = describe_origin(read, planned)
    return write(planned, target, origin, notes, overwrite=overwrite, inputs=(place,), reporter=reporter)


def _note_earlier_rounding(read: CheckpointDirectory, planned: Plan) -> Iterator[str]:
    """Yield a note if the weights were rounded before in a way in which they would not be rounded now."""
    earlier = list_roundings(*read.record["converted_from"], {**read.record, "rounded": read.lost})
    if lost := ", ".join(rounding for rounding in earlier if rounding not in planned.rounded):
        yield f"These weights were rounded earlier ({lost}). Extract the bundle in this format to avoid that."


def describe_origin(read: CheckpointDirectory, planned: Plan) -> dict[str, Any]:
    """Return the record's fields on origin, proof and training for what is ``planned`` from the directory ``read``."""
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
