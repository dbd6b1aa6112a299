"""What a validation found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mtp_extract.evaluate.agreement import WorkloadFigures
from mtp_extract.validate.acceptance.controls import ControlResult
from mtp_extract.validate.acceptance.drafters import DrafterFigures
from mtp_extract.validate.acceptance.generation import GenerationResult
from mtp_extract.validate.acceptance.trivial import TrivialResult
from mtp_extract.validate.identity import NEEDED, Check
from mtp_extract.validate.parity.compare import Parity


@dataclass(frozen=True)
class BaseFacts:
    """The base and how it was run."""

    name: str
    dtype: str
    devices: tuple[str, ...]
    drafter_dtype: str
    chat_template: bool


@dataclass(frozen=True)
class Validation:
    """The result. What was not asked for is None."""

    directory: str  # the checkpoint
    source: str | None  # name of the file it was compared with
    settings: Mapping[str, Any]  # prompts, lengths, seeds: what a second run needs
    base: BaseFacts | None = None
    checks: tuple[Check, ...] = ()  # against the file; empty without one
    parity: Parity | None = None  # with the interpreter
    agreement: WorkloadFigures | None = None  # over all texts
    workloads: Mapping[str, WorkloadFigures] = field(default_factory=dict)  # the same by workload
    trivial: tuple[TrivialResult, ...] = ()  # what drafters that know nothing of the base reach on the same texts
    controls: tuple[ControlResult, ...] = ()  # in the order of the table
    generation: GenerationResult | None = None  # chains and trees
    drafters: tuple[DrafterFigures, ...] = ()  # this one first, then those it is compared with, on the same texts
    notes: tuple[str, ...] = ()  # things worth knowing that are not errors

    @property
    def proven(self) -> bool:
        """Whether this is the drafter of the file: every check that is needed was passed, and none was failed."""
        passed = {check.name for check in self.checks if check.passed}
        return passed.issuperset(NEEDED) and not any(check.passed is False for check in self.checks)

    @property
    def wrong_text(self) -> bool:
        """Whether the loop wrote another text than the base where the base is sure; with any of the drafters."""
        measured = (self.generation, *(drafter.generation for drafter in self.drafters[1:]))
        return any(length.wrong_text for generation in measured if generation for length in generation.lengths)

    @property
    def refuted(self) -> bool:
        """Whether something was shown to be wrong: a check, the loop's text, or drafts worse than trivial ones."""
        worse = any(trivial.better for trivial in self.trivial)
        return self.wrong_text or worse or any(check.passed is False for check in self.checks)
