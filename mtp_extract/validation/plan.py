"""What a validation measures, as its command and its function are asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Meta

from mtp_extract.evaluation.extras import require
from mtp_extract.evaluation.progress import Say, Show, silent
from mtp_extract.io.place import PathLike, files_of
from mtp_extract.options import BASE, ChatTemplate, Device, Replace, Workloads, check_values, whole_numbers
from mtp_extract.speculate.adaptive import AdaptiveDrafts
from mtp_extract.speculate.trees import DraftTree

MOST_STEPS = 64
"""Of the drafter, in a round."""

ADAPTIVE = "adaptive"
"""In the place of a tree: a chain whose K is adapted, up to the largest K that is drafted anyway."""


@dataclass(frozen=True)
class ValidationPlan:
    """What to measure, what becomes of it, and who is told how far it is."""

    directory: Annotated[
        Path | None,
        typer.Argument(
            help="A checkpoint that mtp-extract wrote, or an official assistant; or its id on the Hub.", metavar="DIR"
        ),
    ]
    base: Annotated[str | None, BASE] = None
    beside: Annotated[
        Path | None, typer.Option(help="Another drafter of that base, to measure on the same texts.", metavar="DIR")
    ] = None
    source: Annotated[
        str | None,
        typer.Option(help="The .litertlm it was extracted from, to prove that this is its drafter.", metavar="FILE"),
    ] = None
    """Or a ``.tflite``, or an address."""
    sample: Annotated[bool, typer.Option("--sample", help="Validate the sample that comes with mtp-extract.")] = False
    """It is extracted first, and brings its base, its source and, unless given, prompts."""
    prompts: Workloads = None
    draft_steps: Annotated[
        Sequence[int],
        typer.Option(help="Numbers of drafts a round.", metavar="K,…", min=1, max=MOST_STEPS, parser=whole_numbers),
    ] = (1, 2, 4, 8)
    """Values of K to generate with; the largest is the number of steps of the agreement."""
    trees: Annotated[
        Sequence[str],
        typer.Option(
            "--tree",
            help="Tree of drafts to measure too: 4x2x1 is four drafts, two after each, one after each of those; or "
            "adaptive, a chain whose length follows acceptance. May be repeated.",
            metavar="TREE",
        ),
    ] = ()
    device: Device = "auto"
    new_tokens: Annotated[int, typer.Option(help="Most tokens the base adds to a prompt.", min=3, metavar="N")] = 64
    batch: Annotated[int, typer.Option(help="Prompts at a time.", min=1, metavar="N")] = 16
    samples: Annotated[int, Meta(ge=1, le=4096)] = 16
    """Random inputs for parity."""
    timed: int = 5  # prompts to time
    chat_template: ChatTemplate = True
    report: Annotated[
        Path | None, typer.Option(help="Write report.html, report.json and pair.json there.", metavar="DIR")
    ] = None
    overwrite: Replace = False
    command: str | None = None
    """How it was asked for, as the report says it."""
    say: Say = silent
    show: Show = silent
    rescue: Callable[[Any], None] = silent
    """Told the Validation as far as it came, where an error or a signal ends it."""

    @property
    def inputs(self) -> tuple[PathLike | None, ...]:
        """What is read, and so is not replaced."""
        return self.directory, self.beside, self.source, self.prompts, *files_of(self.base)

    @property
    def wanted(self) -> Mapping[str, DraftTree | AdaptiveDrafts]:
        """The trees, and the chain that is adapted, by what to call them.

        Raises:
            MtpExtractError: one is none, or too large.
        """
        adaptive = AdaptiveDrafts(max(self.draft_steps, default=1))
        return {text: adaptive if text == ADAPTIVE else DraftTree.parse(text) for text in self.trees}

    def wrong(self) -> Iterator[tuple[str, ...]]:
        """What was expected, and what to change."""
        measured = {"trees": self.wanted, "another drafter": self.beside, "prompts": self.prompts}
        names = [name for name, value in measured.items() if value]
        if (self.directory is None) != self.sample:
            yield "either a drafter's directory or the sample. Give one of the two.", "sample"
        if self.sample and (self.base or self.source):
            yield "the sample alone: it brings its own base and source. Leave these out.", "base", "source"
        if not (self.sample or self.base or self.source):
            yield "a base, a source or both, found neither. Give what to validate against.", "base", "source"
        if names and not (self.sample or self.base):
            yield f"a base to measure {' and '.join(names)} with, found none. Give it.", "base"
        if any(text.isdecimal() for text in self.trees):  # it is the name of a chain
            yield "a tree such as 4x2x1, found a number alone. Give it two depths, or K as a draft step.", "trees"
        if not self.draft_steps:
            yield "a number of draft steps, found none. Give one.", "draft_steps"

    def check(self) -> None:
        """Refuse what cannot be measured, before anything is loaded.

        Raises:
            MtpExtractError: a part or a package is missing, or a number is out of bounds.
        """
        check_values(self)
        require("torch", *(["transformers"] if self.sample or self.base else []))

    def resolved(self) -> ValidationPlan:
        """The plan; of the sample with the base it was trained for and, unless given, prompts for that."""
        if not self.sample:
            return self
        from mtp_extract.data import sample_base, sample_bundle, sample_prompts

        base = str(sample_base())
        source = str(sample_bundle())
        prompts = self.prompts or sample_prompts()
        return replace(self, base=base, source=source, prompts=prompts, sample=False, device="cpu", batch=32)
