"""What a validation found: the record that ``report.json`` holds, and that the page and the terminal read."""

from __future__ import annotations

from typing import Any

from msgspec import field

from mtp_extract.io.typed import Record, Tool
from mtp_extract.pipeline.check import Check
from mtp_extract.validation.acceptance.controls import ControlResult
from mtp_extract.validation.acceptance.drafters import DrafterFigures
from mtp_extract.validation.acceptance.trivial import TrivialResult
from mtp_extract.validation.parity.interpreter import Parity


class BaseFacts(Record):
    """The base and how it was run."""

    name: str  #: directory or Hub id
    dtype: str  #: it was run in
    devices: list[str]  #: it was run on
    drafter_dtype: str  #: the drafter's
    chat_template: bool  #: whether prompts went through it


class Validation(Record, kw_only=True):
    """A whole validation. What was not asked for is null, or empty."""

    version: int = 4  #: version of this file
    tool: Tool  #: what wrote it
    verdict: str = ""  #: the result in a sentence
    verified: bool = False  #: whether this is the drafter of the file: all needed checks were passed, none failed
    refuted: bool = False  #: whether something was shown to be wrong: a check, or drafts worse than trivial ones
    findings: list[str] = field(default_factory=list)  #: what a reader should not miss, first things first
    drafter: str  #: the directory
    source: str | None = None  #: name of the file it was compared with
    base: BaseFacts | None = None  #: the base and how it ran
    settings: dict[str, Any]  #: what a second run needs: prompts, lengths, seeds
    notes: list[str] = field(default_factory=list)  #: things worth knowing that are not errors
    checks: list[Check] = field(default_factory=list)  #: against the file
    parity: Parity | None = None  #: with Google's interpreter
    #: this one first, then those beside it, on the same texts
    drafters: list[DrafterFigures] = field(default_factory=list)
    #: what drafters that know nothing of the base reach on the same texts
    trivial: list[TrivialResult] = field(default_factory=list)
    #: what this drafter reaches with one thing broken at a time
    controls: list[ControlResult] = field(default_factory=list)
    pair: dict[str, Any] | None = None  #: base and drafter as the parts of one model, as in `pair.json`
