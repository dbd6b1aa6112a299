"""Drafters of one base: what each is, what a step of it reads, and how it drafts on the same texts."""

from __future__ import annotations

from pathlib import Path

from mtp_extract.architecture.config import DrafterConfig, OrderedHeadConfig
from mtp_extract.evaluate.agreement import Continuations, Workload, figures
from mtp_extract.evaluate.measured import Change, compare, of_agreement
from mtp_extract.evaluate.reads import Reads, reads_of_a_step
from mtp_extract.formats import format_of
from mtp_extract.io.typed import Record
from mtp_extract.pipeline.check import read_record, with_record
from mtp_extract.pipeline.staging import RECORD
from mtp_extract.speculate.teacher import Agreement
from mtp_extract.validation.acceptance.worth import GenerationResult


class DrafterFacts(Record):
    """What a drafter is, by its record and its weights."""

    name: str  #: as the report calls it
    format: str  #: the layout of its directory
    made: str  #: `extracted` from a bundle, `tuned`, or `unknown` where no record says
    mode: str | None  #: how it was tuned; null if it was not
    ordered_head: OrderedHeadConfig | None  #: null for a dense head
    reads: Reads  #: in one draft step


class DrafterFigures(Record):
    """How a drafter drafts for the base."""

    facts: DrafterFacts  #: what it is
    agreement: Workload  #: over all texts
    workloads: dict[str, Workload]  #: the same by workload
    generation: GenerationResult  #: by name of what was drafted
    change: Change  #: in teacher-forced tokens per round from the first drafter to this one; 0 for the first itself
    changes: dict[str, Change]  #: the same by workload


def facts_of(directory: Path, name: str) -> DrafterFacts:
    """What the checkpoint in ``directory`` is.

    Raises:
        CheckpointError: it is damaged, or holds no drafter.
    """
    place = with_record(directory)
    record = read_record(place) if (place / RECORD).is_file() else {}
    layout, tuning = format_of(directory), record.get("tuning") or {}
    checkpoint = layout.read(directory)
    extracted = record.get("source", {}).get("kind") not in (None, "checkpoint")
    return DrafterFacts(
        name,
        layout.name,
        "tuned" if tuning else "extracted" if extracted else "unknown",
        str(tuning["mode"]) if "mode" in tuning else None,
        checkpoint.config.ordered_head if isinstance(checkpoint.config, DrafterConfig) else None,
        reads_of_a_step(layout.name, checkpoint),
    )


def figures_of(
    facts: DrafterFacts, written: Continuations, agreement: Agreement, first: Agreement, generation: GenerationResult
) -> DrafterFigures:
    """How a drafter drafts, by its ``agreement`` with the texts ``written``, compared with the ``first`` drafter's."""
    parts = {name: written.of_workload(name) for name in written.workloads}
    before, after = of_agreement(first), of_agreement(agreement)
    return DrafterFigures(
        facts,
        figures(agreement),
        {name: figures(agreement, rows) for name, rows in parts.items()},
        generation,
        compare(before, after),
        {name: compare(before.of(rows), after.of(rows)) for name, rows in parts.items()},
    )
