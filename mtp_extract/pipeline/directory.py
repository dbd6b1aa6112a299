"""From a checkpoint to a directory with its record and its card: what extracting and converting have in common."""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.architecture.roles import CENTROIDS, shapes_of
from mtp_extract.checkpoint import record
from mtp_extract.checkpoint.checkpoint import CODES, INDICES, Checkpoint, Format, Holding
from mtp_extract.checkpoint.codes import plan_codes
from mtp_extract.checkpoint.holdings import holdings_of, notes_of, require_exact
from mtp_extract.checkpoint.planned import OutputFile, json_text
from mtp_extract.checkpoint.record_fields import FORMAT_VERSION, check_extraction
from mtp_extract.checkpoint.rounding import round_matrices, rounding_of
from mtp_extract.errors import OutputError, UnsupportedError, either, escape
from mtp_extract.formats import EVERY, format_named, variant_for
from mtp_extract.io.place import Inputs, staged
from mtp_extract.io.source import Progress, counter
from mtp_extract.pipeline.check import changed_card, files_in
from mtp_extract.pipeline.plan import WritingPlan
from mtp_extract.pipeline.staging import CARD, RECORD, recorded, write_file
from mtp_extract.report.card import model_card

_ORDERED = ("lm_head", CENTROIDS)


@dataclass(frozen=True)
class ExtractionResult:
    """What an extraction or a conversion did."""

    directory: Path
    files: dict[str, int]
    """Name → size in bytes."""
    record: dict[str, Any]
    """The content of ``extraction.json``."""
    parameters: int
    """How many numbers the drafter has."""
    notes: tuple[str, ...]
    """For the user: things worth knowing that are not errors."""


@dataclass(frozen=True)
class Choice:
    """How a checkpoint is to be written, as :func:`~mtp_extract.pipeline.extraction.extract` explains it."""

    format: Format
    dtype: str
    codes: bool = False
    exact: bool = False
    quantize: str | None = None
    overwrite: bool = False
    tokenizer: Path | None = None

    @classmethod
    def of(cls, name: str | None, plan: WritingPlan, *, overwrite: bool) -> Choice:
        """What ``plan`` asks of the format called ``name``; in the format's own type where it names none.

        Where ``name`` is None, the engine decides.

        Raises:
            ValueError: the format cannot be written so.
            UnsupportedError: rounding and exactness at once.
        """
        name = plan.choose(name)
        if plan.exact and plan.quantize:
            raise UnsupportedError(
                f"Rounding by {plan.quantize} is not exact. Leave one of the two out.", remedies=("exact", "quantize")
            )
        return cls(
            format_named(variant_for(name, plan.engine)),
            plan.dtype or EVERY[name].dtypes[0],
            plan.codes,
            plan.exact,
            plan.quantize,
            overwrite,
            plan.tokenizer,
        )

    def prepare(self, checkpoint: Checkpoint) -> Prepared:
        """``checkpoint`` as it is to be written, and how every weight will be held.

        Raises:
            UnsupportedError: something would be rounded that may not be, or the format cannot hold what was asked for.
        """
        if EVERY[self.format.name].architecture != checkpoint.architecture:
            raise UnsupportedError(
                f"The {self.format.name} format holds drafters of the architecture "
                f"{EVERY[self.format.name].architecture}, and this is one of {checkpoint.architecture}. Choose "
                "another format.",
                remedies=("format",),
            )
        checkpoint = replace(checkpoint, tokenizer=self.tokenizer)
        holdings = holdings_of(self.format, checkpoint, self.dtype)
        if self.quantize is not None:
            # Of an ordered head, rows of floats are read.
            ordered = Prepared(self, checkpoint, holdings).holds_ordered_head
            checkpoint = self._rounded(checkpoint, self.quantize, _ORDERED if ordered else ())
            holdings = holdings_of(self.format, checkpoint, self.dtype)
        if self.exact:
            require_exact(holdings, self.format.name)
        return Prepared(self, checkpoint, holdings)

    def _rounded(self, checkpoint: Checkpoint, rule: str, leave: Container[str]) -> Checkpoint:
        name, rules = self.format.name, EVERY[self.format.name].rules
        if rule not in rules:
            raise UnsupportedError(
                f"The {name} format holds no codes that {rule} makes"
                + (f", but those of {either(rules)}. Choose one of these." if rules else ". Choose another format."),
                remedies=("quantize",) if rules else ("format",),
            )
        rounded = round_matrices(checkpoint, rule, leave)
        holdings = holdings_of(self.format, rounded, self.dtype)
        refused = {
            role: holdings[role].why
            for role, tensor in rounded.tensors.items()
            if rounding_of(tensor) and holdings[role].kept != CODES
        }
        made = sum(rounding_of(tensor) is not None for tensor in rounded.tensors.values())
        if len(refused) == made:
            why = next(iter(refused.values()))
            raise UnsupportedError(
                f"The {name} format, written as {self.dtype}, cannot hold what {rule} makes: {why}. Choose "
                "another rule or format.",
                remedies=("quantize", "format"),
            )
        # What is not held as codes is better left as the floats it was.
        return replace(
            rounded,
            tensors=MappingProxyType(
                {role: (checkpoint if role in refused else rounded).tensors[role] for role in rounded.tensors}
            ),
        )


@dataclass(frozen=True)
class Prepared:
    """What is to be written, and how."""

    choice: Choice
    checkpoint: Checkpoint
    holdings: Mapping[str, Holding]
    """By role."""

    @property
    def holds_ordered_head(self) -> bool:
        """Whether there is an ordered head in what is written."""
        return any(holding.kept == INDICES for holding in self.holdings.values())

    def notes(self) -> tuple[str, ...]:
        """What a user should know of how weights are held."""
        made = record.made_codes(self.checkpoint)
        if made is None:
            return notes_of(self.holdings)
        return (
            f"Codes were made here, by {made['rule']}, of {made['matrices']} matrices that had none: at worst "
            f"{made['rms']:.2g} of a matrix's range off (rms), {made['largest']:.2g} at one place.",
            *notes_of(self.holdings),
        )


@dataclass(frozen=True)
class Staged:
    """A directory that is written, but for its card and record."""

    directory: Path
    written: Checkpoint
    """Read back from it."""
    weights: OutputFile
    """The planned file with the weights."""
    files: dict[str, dict[str, Any]]
    """By name, the record's entry of every file."""


@contextmanager
def staging(
    prepared: Prepared, target: Path, *, inputs: Inputs, progress: Progress = lambda done, total: None
) -> Iterator[Staged]:
    """What was prepared, written and read back; it takes the name ``target`` when the block ends well.

    The block checks it and ends with :func:`finish`.

    Args:
        inputs: what is read, and so is not replaced.
        progress: called with bytes done and bytes in all, from worker threads.

    Raises:
        OutputError: it cannot be written, or reads back differently; nothing is left behind, as when the block fails.
    """
    choice = prepared.choice
    weights, *documents = choice.format.plan(prepared.checkpoint, choice.dtype)
    files = [weights, *(plan_codes(weights) if choice.codes else ()), *documents]
    with staged(target, overwrite=choice.overwrite, inputs=inputs, listed=recorded) as directory:
        tick = counter(progress, sum(t.length for file in files for t in file.tensors))
        written = {file.name: write_file(directory, file, tick) for file in files}
        yield Staged(directory, choice.format.read(directory), weights, written)


def finish(
    prepared: Prepared, staged: Staged, record: dict[str, Any], target: Path, notes: Iterable[str] = ()
) -> ExtractionResult:
    """Write the card and ``record`` into a staged directory that is to be ``target``.

    Args:
        notes: for the user, besides those on how weights are held.

    Raises:
        OutputError: they cannot be written, or read back differently.
    """
    changed = changed_card(target) is not None
    replaced = [f"{escape(target)}: its card had been changed by hand, and was replaced."] if changed else []
    # The card is made of the record, which lists it.
    record["files"][CARD] = write_file(staged.directory, OutputFile(CARD, text=model_card(record)))
    text = json_text(record)
    try:
        check_extraction(json.loads(text))
    except ValueError as error:
        raise OutputError(
            f"{escape(target / RECORD)}: expected a record that can be read again, found {escape(error)}. Nothing was "
            "written; please report it."
        ) from error
    write_file(staged.directory, OutputFile(RECORD, text=text))
    return ExtractionResult(
        directory=target,
        files={name: (staged.directory / name).stat().st_size for name in files_in(staged.directory)},
        record=record,
        parameters=sum(map(math.prod, shapes_of(prepared.checkpoint.config).values())),
        notes=(*notes, *prepared.notes(), *staged.weights.notes, *replaced),
    )


def record_of(
    prepared: Prepared,
    staged: Staged,
    *,
    origin: Mapping[str, Any],
    proof: Mapping[str, Any] | None,
    converted_from: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The record of what was staged.

    Args:
        origin: where it came from, as :func:`mtp_extract.checkpoint.record.of_bundle` has it.
    """
    choice, checkpoint = prepared.choice, prepared.checkpoint
    counts = {key: count for key, count in origin["counts"].items() if key != "held"}
    return {
        "format_version": FORMAT_VERSION,
        "tool": {"name": "mtp-extract", "version": __version__},
        "source": origin["source"],
        "converted_from": list(converted_from),
        "known_as": origin["known_as"],
        "layout": choice.format.name,
        "dtype": choice.dtype,
        "rounded": record.rounded(checkpoint, prepared.holdings, staged.files),
        "made_codes": record.made_codes(checkpoint),
        "geometry": checkpoint.config.as_json(),
        "files": staged.files,
        "counts": {"held": record.held(staged.weights, prepared.holdings), **counts},
        "shared": origin["shared"],
        "activations": origin["activations"],
        "notes": list(staged.weights.notes),
        "proof": proof,
    }
