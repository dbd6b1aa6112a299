"""What tuning and making a head both end with: a result that is written if it may be kept, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.tune.corpus import Corpus
from mtp_extract.tune.pair import Pair
from mtp_extract.tune.verdict import Comparisons
from mtp_extract.tune.writing import Describe, write_made


class Target(Protocol):
    """Where a result is to go, as every plan says it."""

    @property
    def out(self) -> Path: ...
    @property
    def force(self) -> bool: ...
    @property
    def overwrite(self) -> bool: ...


@dataclass(frozen=True)
class Outcome:
    directory: Path | None  # what was written; None for nothing
    refused: tuple[str, ...]  # why it was not accepted; empty if it was
    comparisons: Comparisons  # before and after
    corpus: Corpus  # the texts
    record: Mapping[str, Any]  # what ``extraction.json`` says of it
    notes: tuple[str, ...]  # things worth knowing that are not errors


def conclude(
    target: Target,
    pair: Pair,
    corpus: Corpus,
    comparisons: Comparisons,
    refused: tuple[str, ...],
    made: Checkpoint,
    about: Mapping[str, Any],
    describe: Callable[[Mapping[str, Any]], Describe],
    notes: Iterable[str] = (),
) -> Outcome:
    """Write ``made`` if it is not ``refused`` or forced; by the first process, and all wait for it.

    Args:
        about: what the record is to say of how it was made; whether it was accepted is added.
        describe: puts that into the record of the directory.
        notes: besides those on base, texts and workloads.

    Raises:
        OutputError: it cannot be written, or reads back differently; nothing is left behind.
    """
    record = {**about, "accepted": not refused, "refused": list(refused), **comparisons.as_json()}
    keep = target.force or not refused
    if keep and pair.accelerator.is_main_process:
        write_made(
            pair.origin,
            made,
            target.out,
            describe(record),
            overwrite=target.overwrite,
            inputs=pair.setting.inputs,
        )
    pair.accelerator.wait_for_everyone()
    notes = (*pair.loaded.notes, *corpus.notes, *comparisons.notes(), *notes)
    return Outcome(target.out if keep else None, refused, comparisons, corpus, record, notes)
