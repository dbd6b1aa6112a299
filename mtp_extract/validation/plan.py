"""What a validation measures, as its command and its function are asked for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.extras import require
from mtp_extract.evaluate.progress import Say, Show, silent
from mtp_extract.io.place import PathLike, files_of
from mtp_extract.options import BASE, About, ChatTemplate, Device, Replace, Workloads, check_values, whole_numbers
from mtp_extract.validation.acceptance.drafting import MOST_STEPS, Wanted, parse_wanted

_MOST_SAMPLES = 4096


@dataclass(frozen=True)
class ValidationPlan:
    """What to measure, what becomes of it, and who is told how far it is."""

    directory: Annotated[
        Path | None,
        About("A checkpoint that mtp-extract wrote, or an official assistant; or its id on the Hub.", metavar="DIR"),
    ]
    """None for the sample, which is then extracted first."""
    base: Annotated[str | None, BASE] = None
    beside: Annotated[
        Sequence[Path], About("Another drafter of that base, on the same texts; may be repeated.", metavar="DIR")
    ] = ()
    source: Annotated[
        str | None,
        About("The .litertlm it was extracted from: proof that this is its drafter.", metavar="FILE"),
    ] = None
    """Or a ``.tflite``, or an address."""
    prompts: Workloads = None
    draft_steps: Annotated[
        Sequence[int], About("Drafts a round.", metavar="K,…", least=1, most=MOST_STEPS, parse=whole_numbers)
    ] = (1, 2, 4, 8)
    """Values of K to generate with; the largest is the number of steps of the agreement."""
    trees: Annotated[
        Sequence[str],
        About(
            "Drafts that branch, too: 4x2x1 is four drafts, two after each, one after each of those; or adaptive, a "
            "chain whose length follows acceptance. May be repeated.",
            names=("--tree",),
            metavar="TREE",
        ),
    ] = ()
    device: Device = "auto"
    new_tokens: Annotated[int, About("Most tokens the base adds to a prompt.", least=2)] = 64
    batch: Annotated[int, About("Prompts at a time.", least=1)] = 16
    control_positions: Annotated[
        int | None,
        About(
            "At how many positions drafters that are broken on purpose draft; by default as many as take minutes.",
            metavar="N",
            least=1,
            option=False,
        ),
    ] = None
    """They are spread over all texts."""
    samples: Annotated[int, About("Random inputs for parity.", least=1, option=False)] = 16
    timed: int = 5  # prompts to time
    seed: Annotated[int, About("Of the random inputs.", option=False)] = 0
    chat_template: ChatTemplate = True
    report: Annotated[Path | None, About("Write report.html, report.json and pair.json there.", metavar="DIR")] = None
    overwrite: Replace = False
    say: Say = silent
    show: Show = silent

    @property
    def inputs(self) -> tuple[PathLike | None, ...]:
        """What is read, and so is not replaced."""
        return self.directory, *self.beside, self.source, self.prompts, *files_of(self.base)

    @property
    def wanted(self) -> Mapping[str, Wanted]:
        """The trees by name.

        Raises:
            MtpExtractError: one is none, or too large.
        """
        return dict(map(parse_wanted, self.trees))

    def check(self) -> None:
        """Refuse what cannot be measured, before anything is loaded.

        Raises:
            MtpExtractError: a part or a package is missing, or a number is out of bounds.
        """
        if self.base is None and self.source is None:
            raise MtpExtractError(
                "expected a base, a source or both, found neither; there is nothing to validate against",
                remedies=("base", "source"),
            )
        for given, what in ((self.wanted, "to verify trees of drafts"), (self.beside, "to compare drafters beside")):
            if given and self.base is None:
                raise MtpExtractError(
                    f"expected a base {what}, found none; give the model that is drafted for", remedies=("base",)
                )
        require("torch", *(["transformers"] if self.base is not None else []))
        check_values(self)
        if not self.draft_steps:
            raise MtpExtractError("expected a number of draft steps, found none; give one", remedies=("draft_steps",))
        if not 0 <= self.seed < 1 << 63 or self.samples > _MOST_SAMPLES:
            raise MtpExtractError(f"expected a seed of 0 to 2^63 - 1 and at most {_MOST_SAMPLES} samples")


def sample_plan(plan: ValidationPlan) -> ValidationPlan:
    """``plan`` for the sample that is shipped, with the base it was trained for and, unless given, prompts for that."""
    from mtp_extract.data import sample_base, sample_bundle, sample_prompts

    return replace(
        plan,
        directory=None,
        base=str(sample_base()),
        source=str(sample_bundle()),
        prompts=plan.prompts or sample_prompts(),
        device="cpu",
        batch=32,
    )
