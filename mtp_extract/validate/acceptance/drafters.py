"""Drafters of one base: what each is, what a step of it reads, and how it drafts on the same texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_extract.architecture.config import DrafterConfig, OrderedHeadConfig
from mtp_extract.drafter.load import Network
from mtp_extract.evaluate.agreement import Continuations, Workload, figures
from mtp_extract.evaluate.measured import Change, compare, of_agreement
from mtp_extract.evaluate.reads import Reads, reads_of_a_step
from mtp_extract.formats import format_of
from mtp_extract.pipeline.check import read_record, with_record
from mtp_extract.pipeline.staging import RECORD
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.teacher import Agreement
from mtp_extract.validate.acceptance.drafting import Wanted, draftings
from mtp_extract.validate.acceptance.generation import GenerationResult, measure_generation


@dataclass(frozen=True)
class DrafterFacts:
    """What a drafter is, by its record and its weights."""

    name: str  # as the report calls it
    format: str  # the layout of its directory
    made: str  # "extracted" from a bundle, "tuned", or "unknown" where no record says
    mode: str | None  # how it was tuned; None if it was not
    ordered_head: OrderedHeadConfig | None  # None for a dense head
    reads: Reads  # in one draft step


@dataclass(frozen=True)
class DrafterFigures:
    facts: DrafterFacts  # what it is
    agreement: Workload  # over all texts
    workloads: Mapping[str, Workload]  # the same by workload
    generation: GenerationResult  # by name of what was drafted
    change: Change  # in teacher-forced tokens per round from the first drafter to this one; 0 for the first itself
    changes: Mapping[str, Change]  # the same by workload


def facts_of(directory: Path, name: str) -> DrafterFacts:
    """What the checkpoint in ``directory`` is.

    Raises:
        CheckpointError: it is damaged, or holds no drafter.
    """
    place = with_record(directory)
    record = read_record(place) if (place / RECORD).is_file() else {}
    layout = format_of(directory)
    checkpoint = layout.read(directory)
    tuning = record.get("tuning") or {}
    return DrafterFacts(
        name,
        layout.name,
        _made(record),
        str(tuning["mode"]) if "mode" in tuning else None,
        checkpoint.config.ordered_head if isinstance(checkpoint.config, DrafterConfig) else None,
        reads_of_a_step(layout.name, checkpoint),
    )


def _made(record: Mapping[str, Any]) -> str:
    if record.get("tuning"):
        return "tuned"
    return "unknown" if record.get("source", {}).get("kind") in (None, "checkpoint") else "extracted"


def measure_drafter(
    facts: DrafterFacts,
    drafter: Network,
    generator: SpeculativeGenerator,
    written: Continuations,
    agreement: Agreement,
    first: Agreement,
    *,
    chains: Sequence[int],
    trees: Mapping[str, Wanted],
    batch: int,
    new_tokens: int,
    timed: int,
    done: Callable[[], None] = lambda: None,
) -> DrafterFigures:
    """How a drafter drafts.

    Args:
        agreement: of this drafter with the text of ``written``.
        first: of the drafter that this one is compared with.
        done: called after each drafting with which texts were generated.
    """
    overall, parts = figures(agreement), {name: written.of_workload(name) for name in written.workloads}
    planned = draftings(generator, chains, trees, written, agreement, batch=batch)
    before, after = of_agreement(first), of_agreement(agreement)
    return DrafterFigures(
        facts,
        overall,
        {name: figures(agreement, rows) for name, rows in parts.items()},
        measure_generation(generator, written, planned, new_tokens=new_tokens, timed=timed, done=done),
        compare(before, after),
        {name: compare(before.of(rows), after.of(rows)) for name, rows in parts.items()},
    )
