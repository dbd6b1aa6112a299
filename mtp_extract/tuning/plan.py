"""What a training is asked to do: a drafter, its base, the text, and how it is trained."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec import Meta

from mtp_extract.io.place import PathLike, check_place, files_of
from mtp_extract.options import BASE, Device, Overwrite, ServedModel, check_values

ORDERED, EAGLE3 = "ordered", "eagle3"
"""The modes that make a head."""

_STEPS = {"norms": 500, "qat": 500, "float": 500, ORDERED: 600, EAGLE3: 300}


@dataclass(frozen=True)
class TuningPlan:
    """A drafter, its base, the text, and how it is trained; each field says what it means to a user."""

    directory: Annotated[
        Path | None,
        typer.Argument(help="The drafter: extracted, an official assistant, or a head; or its Hub id.", metavar="DIR"),
    ]
    """None where a new EAGLE-3 head is to be made."""
    base: Annotated[str, BASE]
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Where the result goes; by default DIR-tuned or MODEL-eagle3.", metavar="DIR"),
    ] = None
    work: Annotated[
        Path | None, typer.Option(help="Keep text, state and log here, to resume; by default OUT.work.", metavar="DIR")
    ] = None
    mode: Annotated[
        Literal["norms", "qat", "float", "ordered", "eagle3"],
        typer.Option(
            help="What to train. norms: norms and layer scalars. qat: also the codes, on the stored grid. float: every "
            "weight. ordered: a head that scores clusters of tokens first. eagle3: a new head; leave DIR out."
        ),
    ] = "norms"
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts of your workload, as .txt or .jsonl; by default ours.", metavar="FILE")
    ] = None
    text: Annotated[
        Path | None,
        typer.Option(help="Texts by people instead, or prompts with answers, in the same forms.", metavar="FILE"),
    ] = None
    text_from: Annotated[
        str | None,
        typer.Option(help="A server that has the base and writes its texts: http://HOST:PORT.", metavar="URL"),
    ] = None
    text_model: ServedModel = None
    text_key: str | None = field(default=None, repr=False)
    """That server's key, where it wants one."""
    new_tokens: Annotated[int, typer.Option(help="Most tokens of each of the base's texts.", min=2, metavar="N")] = 256
    temperature: Annotated[
        float,
        typer.Option(help="Temperature of serving and of the base's text; 0 is greedy.", min=0, max=100, metavar="X"),
    ] = 0.0
    chat_template: Annotated[bool, typer.Option(help="Put prompts into the base's chat format.")] = True
    draft_steps: Annotated[int, typer.Option(help="Drafts a round to train for.", min=1, metavar="N")] = 3
    objective: Literal["mixed", "ce", "kl", "tv"] = "mixed"
    """ce for greedy serving alone, tv or kl for sampled alone; mixed (ce and tv) for both."""
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps; by default 500, eagle3 300, ordered 600.", min=1, metavar="N")
    ] = None
    batch: Annotated[int, typer.Option(help="Texts a step, of all processes together.", min=1, metavar="N")] = 16
    learning_rate: Annotated[
        float | None, typer.Option(help="Rate; by default the mode's own, by width.", min=0, metavar="X")
    ] = None
    draft_vocab: Annotated[
        int, typer.Option(help="Tokens that an eagle3 head can propose, the most frequent ones.", min=1, metavar="N")
    ] = 32000
    seed: Annotated[int, Meta(ge=0)] = 0
    """The same seed, texts and machine give the same bytes."""
    device: Device = "auto"
    force: Annotated[bool, typer.Option("--force", help="Save the result even if it is not better.")] = False
    overwrite: Overwrite = False

    @property
    def target(self) -> Path:
        """Where the result goes."""
        name = Path(self.base) if self.directory is None else self.directory
        return self.out or Path(f"{name.resolve().name}-{EAGLE3 if self.directory is None else 'tuned'}")

    @property
    def kept_in(self) -> Path:
        """Where text, state and log are."""
        return self.work or self.target.with_name(f"{self.target.name}.work")

    @property
    def optimizer_steps(self) -> int:
        """``steps``, or the mode's own number of them."""
        return self.steps or _STEPS[self.mode]

    @property
    def inputs(self) -> tuple[PathLike | None, ...]:
        """What is read, and so is not replaced."""
        return self.directory, *files_of(self.base), self.prompts, self.text

    @property
    def recipe(self) -> dict[str, object]:
        """How it is trained, for the record."""
        fields = ("draft_steps", "batch", "objective", "temperature", "learning_rate", "seed")
        return {name: getattr(self, name) for name in fields} | {"steps": self.optimizer_steps}

    def check(self) -> None:
        """Check what can be checked before anything is loaded.

        Raises:
            MtpExtractError: a number is out of range, two things exclude each other, or ``out`` holds something else.
            ValueError: no such mode or objective.
        """
        from mtp_extract.pipeline.check import recorded

        check_values(self)
        # Of several processes the first writes. A check holds the place, and two at once would be in each other's way.
        if os.environ.get("RANK", "0") == "0":
            check_place(self.target, overwrite=self.overwrite, inputs=self.inputs, listed=recorded)

    def wrong(self) -> Iterator[tuple[str, ...]]:
        """What was expected, and what to change."""
        place, work = (Path(os.path.realpath(path)) for path in (self.target, self.kept_in))
        if place in (work, *work.parents):
            yield "a place of its own for the result, found text and state kept there. Choose another.", "out", "work"
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        if self.batch < processes:
            yield f"a batch of at least {processes}, one text a process, found {self.batch}. Raise it.", "batch"
        if self.mode == ORDERED and processes > 1:
            yield f"one process to make an ordered head, found {processes}. Start only one.", "mode"
        if (self.directory is None) != (self.mode == EAGLE3):
            yield "either a drafter's directory or the mode eagle3, which makes a new one. Give one of the two.", "mode"
        if self.mode != EAGLE3 and self.draft_vocab != TuningPlan.draft_vocab:
            yield "draft_vocab with the mode eagle3 alone. Leave it out.", "draft_vocab"
        if self.text_model and not self.text_from:
            yield "text_model with text_from alone. Leave it out.", "text_model"
        if self.text and (self.prompts or self.text_from):
            yield "texts by people alone, found prompts or a server too. Leave one out.", "text", "prompts", "text_from"
        if self.text and self.temperature:
            yield "the base's own text for sampled serving, found people's. Give prompts.", "prompts", "temperature=0"
        if self.new_tokens < self.draft_steps + 2:
            yield f"new_tokens of at least {self.draft_steps + 2}, found {self.new_tokens}. Raise it.", "new_tokens"
        if self.learning_rate is not None and not 0 < self.learning_rate < math.inf:
            yield f"a learning rate above 0, found {self.learning_rate}. Leave it out.", "learning_rate"
