"""What a validation found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtp_extract.pipeline.check import Check
from mtp_extract.pipeline.identity import NEEDED
from mtp_extract.validate.acceptance.controls import ControlResult
from mtp_extract.validate.acceptance.drafters import DrafterFigures
from mtp_extract.validate.acceptance.trivial import TrivialResult
from mtp_extract.validate.parity.interpreter import Parity


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
    trivial: tuple[TrivialResult, ...] = ()  # what drafters that know nothing of the base reach on the same texts
    controls: tuple[ControlResult, ...] = ()  # in the order of the table
    drafters: tuple[DrafterFigures, ...] = ()  # this one first, then those beside it; empty without a base
    notes: tuple[str, ...] = ()  # things worth knowing that are not errors

    @property
    def proven(self) -> bool:
        """Whether this is the drafter of the file: every check that is needed was passed, and none was failed."""
        passed = {check.name for check in self.checks if check.passed}
        return passed.issuperset(NEEDED) and not any(check.passed is False for check in self.checks)

    @property
    def wrong_text(self) -> bool:
        """Whether the loop wrote another text than the base where the base is sure; with any of the drafters."""
        return any(length.wrong_text for drafter in self.drafters for length in drafter.generation.lengths)

    @property
    def refuted(self) -> bool:
        """Whether something was shown to be wrong: a check, the loop's text, or drafts worse than trivial ones."""
        worse = any(trivial.better for trivial in self.trivial)
        return self.wrong_text or worse or any(check.passed is False for check in self.checks)
