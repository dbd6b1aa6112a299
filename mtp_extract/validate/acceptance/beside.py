"""Drafters of one base side by side: what each is, what a step of it reads, how it drafts on the same texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_extract.architecture.config import DrafterConfig, OrderedHeadConfig
from mtp_extract.evaluate.agreement import WorkloadFigures
from mtp_extract.evaluate.measured import Change
from mtp_extract.evaluate.reads import StepReads, reads_of_a_step
from mtp_extract.formats import format_of
from mtp_extract.pipeline.check import read_record, with_record
from mtp_extract.pipeline.staging import RECORD
from mtp_extract.validate.acceptance.generation import GenerationResult
from mtp_extract.validate.acceptance.pair import PairFacts


@dataclass(frozen=True)
class DrafterFacts:
    """What a drafter is, by its record and its weights.

    Attributes:
        name: as it is called beside the others.
        format: the layout of its directory.
        made: "extracted" from a bundle, "tuned", or "unknown" where no record says.
        mode: how it was tuned; None if it was not.
        ordered_head: None for a dense head.
        reads: in one draft step.
    """

    name: str
    format: str
    made: str
    mode: str | None
    ordered_head: OrderedHeadConfig | None
    reads: StepReads


@dataclass(frozen=True)
class DrafterFigures:
    """How it drafts.

    Attributes:
        agreement: over all texts.
        workloads: the same by workload.
        generation: by name of what was drafted.
        change: in mean accepted length from the first drafter to this one; 0 for the first itself.
        changes: the same by workload.
        pair: what a round of it and the base holds; None where no text was long enough to draft from.
    """

    facts: DrafterFacts
    agreement: WorkloadFigures
    workloads: Mapping[str, WorkloadFigures]
    generation: GenerationResult
    change: Change
    changes: Mapping[str, Change]
    pair: PairFacts | None


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
