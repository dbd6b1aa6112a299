"""The options of a validation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtp_extract.io.place import PathLike, list_files
from mtp_extract.options import check_bounds, require_that
from mtp_extract.speculate.drafts import AdaptiveDrafts, DraftTree

MOST_STEPS = 64  # draft steps of a round
ADAPTIVE = "adaptive"  # stands for a chain whose K is adapted, up to the largest of ``draft_steps``


@dataclass(frozen=True)
class ValidationPlan:
    """What to measure and where to write it; :func:`~mtp_extract.api.validate` explains each field."""

    directory: Path | None
    base: str | None = None
    beside: Path | None = None
    source: str | None = None
    sample: bool = False
    prompts: Path | None = None
    draft_steps: Sequence[int] = (1, 2, 4, 8)
    trees: Sequence[str] = ()
    device: str = "auto"
    new_tokens: int = 64
    batch: int = 16
    samples: int = 16
    timed: int = 5
    chat_template: bool = True
    report: Path | None = None
    overwrite: bool = False
    command: str | None = None

    def __post_init__(self) -> None:
        """Raise PlanError for a number out of bounds, options that do not go together, or an invalid tree."""
        check_bounds("new_tokens", self.new_tokens, least=3)
        check_bounds("batch", self.batch, least=1)
        check_bounds("samples", self.samples, least=1, most=4096)
        for steps in self.draft_steps:
            check_bounds("draft_steps", steps, least=1, most=MOST_STEPS)
        require_that(len(self.draft_steps) > 0, "a number of draft steps, found none. Give one.", "draft_steps")

        # Options that exclude each other are reported before options that are missing.
        one_drafter = (self.directory is None) == self.sample
        require_that(one_drafter, "either a drafter's directory or the sample. Give one of the two.", "sample")
        sample_alone = not (self.sample and (self.base or self.source))
        excluded = "the sample alone: it brings its own base and source. Leave these out."
        require_that(sample_alone, excluded, "base", "source")
        has_reference = bool(self.sample or self.base or self.source)
        missing = "a base, a source or both, found neither. Give what to validate against."
        require_that(has_reference, missing, "base", "source")

        self._check_trees()

    def _check_trees(self) -> None:
        measured = {"trees": self.drafts_by_name, "another drafter": self.beside, "prompts": self.prompts}
        names = " and ".join(name for name, value in measured.items() if value)
        has_base = self.sample or self.base is not None
        require_that(has_base or not names, f"a base to measure {names} with, found none. Give it.", "base")
        # A number alone names a chain.
        are_trees = not any(text.isdecimal() for text in self.trees)
        number = "a tree such as 4x2x1, found a number alone. Give it two depths, or K as a draft step."
        require_that(are_trees, number, "trees")

    @property
    def inputs(self) -> tuple[PathLike | None, ...]:
        """Files and directories that are read, which a report may not replace."""
        return self.directory, self.beside, self.source, self.prompts, *list_files(self.base)

    @property
    def drafts_by_name(self) -> Mapping[str, DraftTree | AdaptiveDrafts]:
        """Trees and adaptive chain by name; PlanError for an invalid or too large tree."""
        adaptive = AdaptiveDrafts(max(self.draft_steps, default=1))
        return {text: adaptive if text == ADAPTIVE else DraftTree.parse(text) for text in self.trees}

    def adapt_to_sample(self, directory: Path) -> ValidationPlan:
        """Return the plan for the sample, extracted to ``directory``, with its base and, by default, its prompts."""
        from mtp_extract.data import sample_base, sample_bundle, sample_prompts

        return replace(
            self,
            directory=directory,
            sample=False,
            base=str(sample_base()),
            source=str(sample_bundle()),
            prompts=self.prompts or sample_prompts(),
            device="cpu",
            batch=32,
        )
