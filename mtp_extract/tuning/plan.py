"""The arguments of a tuning."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from mtp_extract.io.place import PathLike, check_place, list_files
from mtp_extract.options import check_bounds, check_choice, require_that

Mode = Literal["norms", "qat", "float", "ordered", "eagle3"]
Objective = Literal["mixed", "ce", "kl", "tv"]

ORDERED, EAGLE3 = "ordered", "eagle3"
"""The modes that make a new head."""

_STEPS = {"norms": 500, "qat": 500, "float": 500, ORDERED: 600, EAGLE3: 300}


@dataclass(frozen=True)
class TuningPlan:
    """The arguments of :func:`~mtp_extract.api.tune`, which explains them."""

    directory: Path | None
    base: str
    out: Path | None = None
    work: Path | None = None
    mode: Mode = "norms"
    prompts: Path | None = None
    text: Path | None = None
    text_from: str | None = None
    text_model: str | None = None
    text_key: str | None = field(default=None, repr=False)
    new_tokens: int = 256
    temperature: float = 0.0
    chat_template: bool = True
    draft_steps: int = 3
    objective: Objective = "mixed"
    steps: int | None = None
    batch: int = 16
    learning_rate: float | None = None
    draft_vocab: int = 32000
    seed: int = 0
    device: str = "auto"
    force: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        """Raise PlanError if a value is not allowed, or two arguments exclude each other."""
        check_choice("mode", self.mode, get_args(Mode))
        check_choice("objective", self.objective, get_args(Objective))
        check_bounds("temperature", self.temperature, least=0, most=100)
        check_bounds("learning_rate", self.learning_rate, least=0)
        check_bounds("seed", self.seed, least=0)
        for name in ("draft_steps", "steps", "batch", "draft_vocab"):
            check_bounds(name, getattr(self, name), least=1)
        check_bounds("new_tokens", self.new_tokens, least=2)
        self._check_places()
        self._check_processes()
        self._check_mode()
        self._check_text()

    @property
    def target(self) -> Path:
        """The directory that the result is written to."""
        name = Path(self.base) if self.directory is None else self.directory
        return self.out or Path(f"{name.resolve().name}-{EAGLE3 if self.directory is None else 'tuned'}")

    @property
    def kept_in(self) -> Path:
        """The folder of text, training state and log."""
        return self.work or self.target.with_name(f"{self.target.name}.work")

    @property
    def optimizer_steps(self) -> int:
        """``steps``, or the default of the mode."""
        return self.steps or _STEPS[self.mode]

    @property
    def inputs(self) -> tuple[PathLike | None, ...]:
        """The files that are read, and must not be overwritten."""
        return self.directory, *list_files(self.base), self.prompts, self.text

    @property
    def recipe(self) -> dict[str, object]:
        """The training parameters, for the record."""
        fields = ("draft_steps", "batch", "objective", "temperature", "learning_rate", "seed")
        return {name: getattr(self, name) for name in fields} | {"steps": self.optimizer_steps}

    def check(self) -> None:
        """Raise MtpExtractError if ``out`` holds other files or cannot be written; called before anything is loaded."""
        from mtp_extract.pipeline.check import list_recorded_files

        # Only the first process writes, and the check locks the place: a second one at the same time would fail.
        if os.environ.get("RANK", "0") == "0":
            check_place(self.target, overwrite=self.overwrite, inputs=self.inputs, listed=list_recorded_files)

    def _check_places(self) -> None:
        place, work = (Path(os.path.realpath(path)) for path in (self.target, self.kept_in))
        shared = "a place of its own for the result, found text and state kept there. Choose another."
        require_that(place not in (work, *work.parents), shared, "out", "work")

    def _check_processes(self) -> None:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        too_few = f"a batch of at least {processes}, one text a process, found {self.batch}. Raise it."
        require_that(self.batch >= processes, too_few, "batch")
        several = f"one process to make an ordered head, found {processes}. Start only one."
        require_that(self.mode != ORDERED or processes == 1, several, "mode")

    def _check_mode(self) -> None:
        makes_new = self.mode == EAGLE3
        both = "either a drafter's directory or the mode eagle3, which makes a new one. Give one of the two."
        require_that((self.directory is None) == makes_new, both, "mode")
        is_default = self.draft_vocab == TuningPlan.draft_vocab
        require_that(makes_new or is_default, "draft_vocab with the mode eagle3 alone. Leave it out.", "draft_vocab")

    def _check_text(self) -> None:
        named_alone = self.text_model and not self.text_from
        require_that(not named_alone, "text_model with text_from alone. Leave it out.", "text_model")
        twice = self.text and (self.prompts or self.text_from)
        more = "texts by people alone, found prompts or a server too. Leave one out."
        require_that(not twice, more, "text", "prompts", "text_from")
        sampled = "the base's own text for sampled serving, found people's. Give prompts."
        require_that(not (self.text and self.temperature), sampled, "prompts", "temperature=0")
        least = self.draft_steps + 2
        short = f"new_tokens of at least {least}, found {self.new_tokens}. Raise it."
        require_that(self.new_tokens >= least, short, "new_tokens")
        rate = self.learning_rate
        none = f"a learning rate above 0, found {rate}. Leave it out."
        require_that(rate is None or 0 < rate < math.inf, none, "learning_rate")
