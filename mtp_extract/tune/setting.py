"""What tuning and making a head both ask for: a drafter, its base, and the text they are trained on."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mtp_extract.errors import MtpExtractError, OutputError, escape
from mtp_extract.io.place import PathLike, check_place, files_of
from mtp_extract.pipeline.staging import recorded


def check_least(plan: object, least: Mapping[str, int]) -> None:
    """Refuse numbers of ``plan`` below the bound in ``least``, by name of the field; None is no number.

    Raises:
        MtpExtractError: one is.
    """
    for name, bound in least.items():
        value = getattr(plan, name)
        if value is not None and value < bound:
            raise MtpExtractError(f"expected {name} of at least {bound}, found {value}; raise it", remedies=(name,))


@dataclass(frozen=True)
class Setting:
    """A drafter with its base, and the text they are trained and measured on.

    Attributes:
        directory: the checkpoint; None where a new EAGLE-3 head is to be made.
        base: directory or Hub id of the base model.
        work: where text, state and log are kept: a run that was stopped goes on from there.
        prompts: file of prompts; None for the shipped ones.
        text: file of texts by people, to train on instead of the base's own.
        new_tokens: most tokens of each continuation.
        temperature: of serving: the base writes, and drafts are judged, at it.
        chat_template: apply it where there is one.
        draft_steps: K, drafts a round.
        batch: texts a step, of all processes together.
        seed: of everything random.
        device: see :func:`~mtp_extract.evaluate.base_model.load_base`.
    """

    directory: Path | None
    base: str
    work: Path
    prompts: Path | None = None
    text: Path | None = None
    new_tokens: int = 256
    temperature: float = 0.0
    chat_template: bool = True
    draft_steps: int = 3
    batch: int = 16
    seed: int = 0
    device: str = "auto"

    @property
    def inputs(self) -> tuple[PathLike | None, ...]:
        """What is read, and so is not replaced."""
        return self.directory, *files_of(self.base), self.prompts, self.text

    def check_out(self, out: Path, overwrite: bool) -> None:
        """Whether the result may be written to ``out``.

        Raises:
            OutputError: it may not.
        """
        place, work = (Path(os.path.realpath(path)) for path in (out, self.work))
        if place in (work, *work.parents):
            raise OutputError(
                f"{escape(out)}: expected a place of its own for the result, found that text and state are kept there. "
                "Choose another place for one of the two.",
                remedies=("out", "work"),
            )
        check_place(out, overwrite=overwrite, inputs=self.inputs, listed=recorded)

    def check(self) -> None:
        """What can be said before anything is loaded.

        Raises:
            MtpExtractError: a number is out of range, or two things exclude each other.
        """
        if self.prompts is not None and self.text is not None:
            raise MtpExtractError("expected prompts or texts, found both; leave one out", remedies=("prompts", "text"))
        if self.text is not None and self.temperature:
            raise MtpExtractError(
                "expected text of the base itself for sampled serving, found text by people, which has another "
                "distribution; give prompts",
                remedies=("prompts", "temperature=0"),
            )
        check_least(self, {"draft_steps": 1, "batch": 1, "new_tokens": self.draft_steps + 2, "seed": 0})
        if not 0 <= self.temperature < math.inf:
            raise MtpExtractError(
                f"expected a temperature of at least 0, found {self.temperature}; 0 is greedy",
                remedies=("temperature",),
            )
