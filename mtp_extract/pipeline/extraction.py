"""Extraction: bundle → checkpoint → directory. What converting shares is in :mod:`mtp_extract.pipeline.writing`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from mtp_extract.bundle import BundledDrafter, ModelFile, name_file_in_errors, open_bundle
from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.checkpoint.format import Plan
from mtp_extract.checkpoint.record import describe_origin_of_bundle, flatten_provenance
from mtp_extract.checkpoint.weight import BundleWeight, build_constant_weight
from mtp_extract.errors import SourceError, escape
from mtp_extract.formats import ALL_FORMATS
from mtp_extract.io.opening import Named
from mtp_extract.io.place import check_place
from mtp_extract.io.source import Source
from mtp_extract.litertlm.holes import find_missing_rows, find_zero_pages
from mtp_extract.litertlm.published import find_published_bundle
from mtp_extract.litertlm.quantized import QuantizedTensor
from mtp_extract.pipeline.check import list_recorded_files
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.pipeline.unproven import read_unproven, suggest_unproven
from mtp_extract.pipeline.writing import ExtractionResult, prepare, write
from mtp_extract.progress import SILENT, Reporter
from mtp_extract.proof.grids import describe_rounding, list_rounded_tensors
from mtp_extract.proof.proof import Proof, describe_proof, prove


def choose_directory(source: str | os.PathLike[str]) -> Path:
    """Return the default directory of a result: ``NAME-mtp-drafter`` in the current directory."""
    name = re.sub(r"(\.litertlm|\.tflite)?([@?].*)?$", "", os.fspath(source).rstrip("/").rpartition("/")[2])
    return Path(f"{name or 'model'}-mtp-drafter")


def build_checkpoint(drafter: BundledDrafter) -> Checkpoint:
    """Return the drafter of a bundle as a checkpoint; its weights are read when they are used.

    Raises:
        UnsupportedError, FormatError: the quantization of a weight is not supported, or damaged.
    """
    roles = drafter.structure.roles
    tensors = {
        role.role: build_constant_weight(role.shape) if role.tensor is None else BundleWeight(drafter.model, role)
        for role in roles
    }
    activations = MappingProxyType({role.role: (role.input, role.output) for role in roles if len(role.shape) == 2})
    return Checkpoint(drafter.config, MappingProxyType(tensors), "f32", activations=activations)


def extract_drafter(
    source: Named | Source | ModelFile,
    out: str | os.PathLike[str] | None,
    plan: WritingPlan,
    *,
    overwrite: bool = False,
    sliding_window: int | None = None,
    unproven: bool = False,
    section: int | None = None,
    signature: str | None = None,
    reporter: Reporter = SILENT,
) -> ExtractionResult:
    """Extract the drafter of ``source`` into the directory ``out``; see :func:`mtp_extract.extract`."""
    name = plan.choose()
    # os.path.isdir does not raise for an impossible name, which is refused on opening.
    if isinstance(source, (str, os.PathLike)) and os.path.isdir(source):
        raise SourceError(
            f"{escape(source)}: expected a bundle, found a directory. To write a checkpoint in another format, use "
            "`mtp-convert`."
        )
    with (
        nullcontext(source)
        if isinstance(source, ModelFile)
        else open_bundle(source, reporter=reporter, section=section, signature=signature)
    ) as opened:
        target = Path(out) if out is not None else choose_directory(opened.source.name)
        inputs = (opened.source.path,)
        check_place(target, overwrite=overwrite, inputs=inputs, listed=list_recorded_files)
        opened.prefetch()
        if unproven:
            with name_file_in_errors(opened.source.name):
                drafter, proof = read_unproven(opened, sliding_window, prove_drafter)
            require_complete(drafter)
        else:
            with suggest_unproven(opened):
                drafter, proof = opened.read_drafter(sliding_window), None
        with name_file_in_errors(opened.source.name):
            original = build_checkpoint(drafter)
        origin = describe_origin_of_bundle(drafter, original)
        planned = prepare(replace(original, provenance=flatten_provenance(origin["source"])), name, plan)
        # The proof comes before a byte is written. Written files are then compared with this checkpoint: all bytes,
        # all codes and some rows of floats, since computing all floats again takes as long as the proof.
        if proof is None and not drafter.not_proven:
            with suggest_unproven(opened):
                proof = prove_checkpoint(drafter, original)
        origin |= {"converted_from": [], "proof": None if proof is None else describe_proof(proof)}
        if drafter.not_proven:
            origin["not_proven"] = list(drafter.not_proven)
        return write(
            planned,
            target,
            origin,
            _list_notes(drafter, planned),
            overwrite=overwrite,
            inputs=inputs,
            reporter=reporter,
            every_float=False,
        )


def prove_drafter(drafter: BundledDrafter) -> Proof:
    """Prove that the checkpoint of ``drafter`` computes what its graph computes; see :func:`prove_checkpoint`."""
    return prove_checkpoint(drafter, build_checkpoint(drafter))


def prove_checkpoint(drafter: BundledDrafter, checkpoint: Checkpoint) -> Proof:
    """Prove that ``checkpoint`` computes what the graph of ``drafter`` computes.

    Raises:
        ProofError: they compute different functions.
        UnsupportedError: the graph has an operator that no drafter has.
        SourceError: a part of the file was not downloaded.
    """
    require_complete(drafter)
    # Damaged numbers may overflow; the results are then unequal, which is a ProofError.
    tensors = checkpoint.complete().tensors
    with np.errstate(over="ignore", invalid="ignore"):
        return prove(drafter.graph, drafter.structure, checkpoint.mtp, tensors.__getitem__)


def require_complete(drafter: BundledDrafter) -> None:
    """Raise SourceError if rows of a matrix are zero against their scales: a part was not downloaded."""
    source = drafter.opened.source
    if drafter.opened.skeleton or (source.path is None and find_published_bundle(source)):
        # A skeleton has no weights, and ranges of a published file that the Hub serves are complete.
        return
    for role, constant in _list_stored_matrices(drafter):
        if rows := find_missing_rows(constant):
            raise SourceError(
                f"{source.name}: rows {rows.start} to {rows.stop - 1} of {role} ({constant.tensor.label}) hold zeros "
                "where their scales say that there are numbers, or have scales of 0: not downloaded completely? Fetch "
                "the file again, and compare its SHA-256 with the publisher's."
            )


def _list_stored_matrices(drafter: BundledDrafter) -> Iterator[tuple[str, QuantizedTensor]]:
    for role in drafter.structure.roles:
        if len(role.shape) == 2 and role.tensor is not None:
            yield role.role, QuantizedTensor.of(drafter.model, role.tensor)


def _list_notes(drafter: BundledDrafter, planned: Plan) -> Iterator[str]:
    yield from drafter.opened.remarks
    for role, constant in _list_stored_matrices(drafter):
        zeros = 0 if constant.storage.by_rows else sum(end - begin for begin, end in find_zero_pages(constant.location))
        if zeros:
            yield (
                f"{role} holds {zeros:,} bytes of zeros in whole pages. If they were not meant, the file was not "
                "downloaded completely."
            )
    for role, others in drafter.names.contradicted.items():
        yield f"The name of {role}'s constant is that of {' or '.join(others)}; the graph decides."
    if rounded := describe_rounding(list_rounded_tensors(drafter.graph, drafter.structure)):
        # A format with static scales notes itself which of them it stores.
        ends = "." if ALL_FORMATS[planned.layout].activations else "; the checkpoint computes in floats."
        yield rounded + ends
