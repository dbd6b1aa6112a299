"""What a validation found: the record that ``report.json`` holds, and that the page and the terminal read."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from mtp_extract.evaluation.agreement import Change, Workload
from mtp_extract.io.typed import Count, Record, Tool
from mtp_extract.pipeline.check import Check
from mtp_extract.validation.controls import ControlResult
from mtp_extract.validation.worth import Worth


class RunFacts(Record):
    """When and how it was measured, for whoever measures it again."""

    when: str  #: it began, in UTC
    command: str | None  #: as it was typed, but of paths here the names alone; null where a program asked
    prompts_sha256: str | None  #: of the file of prompts, as `sha256sum` prints it; null where none were read
    versions: dict[str, str]  #: of Python, and of the packages that compute as far as they are installed


class BaseFacts(Record):
    """The base, how it was run, and its times alone, one text at a time."""

    name: str  #: directory or Hub id
    dtype: str  #: it was run in
    devices: list[str]  #: it was run on
    chat_template: bool  #: whether prompts went through it
    timed: Count  #: texts that were generated to take times, with it alone and with every chain and tree
    tokens_per_s: float | None  #: after the first token of each
    forward_ms: float | None  #: one forward over one token


class DrafterFigures(Record):
    """How a drafter drafts for the base."""

    name: str  #: as the report calls it
    tuned: str | None  #: how it was tuned, by its record; null where that says nothing of it
    agreement: Workload  #: over all texts
    workloads: dict[str, Workload]  #: the same by workload
    worth: dict[str, Worth]  #: by what was drafted: `3` a chain of three, `4x2x1` a tree of that shape; chains first
    best: str  #: the chain that is predicted to be worth most
    change: Change  #: in teacher-forced tokens per round from the first drafter to this one; 0 for the first itself
    changes: dict[str, Change]  #: the same by workload


class Validation(Record, kw_only=True):
    """A whole validation. What was not asked for is null, or empty."""

    version: int = 8  #: version of this file
    tool: Tool  #: what wrote it
    run: RunFacts | None = None  #: when and how it was measured
    verdict: str = ""  #: the result in a sentence
    verified: bool = False  #: whether this is the drafter of the file: all needed checks were passed, none failed
    refuted: bool = False  #: whether a check failed
    #: for what it is shown that this is the drafter of the file: `proven` for every input, `measured` for those of
    #: Google's interpreter, `named` where weights were compared alone; null where it was refuted or not checked
    evidence: Literal["proven", "measured", "named"] | None = None
    inputs: Count | None = None  #: that Google's interpreter was given; null where it was not asked
    drafter: str  #: the directory
    source: str | None = None  #: name of the file it was compared with
    base: BaseFacts | None = None  #: the base and how it ran
    settings: dict[str, Any] = field(default_factory=dict)  #: what a second run needs: prompts, lengths, seeds
    notes: list[str] = field(default_factory=list)  #: things worth knowing that are not errors
    checks: list[Check] = field(default_factory=list)  #: against the file
    #: this one, then the one beside it, on the same texts
    drafters: list[DrafterFigures] = field(default_factory=list)
    #: what this drafter reaches with one thing broken at a time
    controls: list[ControlResult] = field(default_factory=list)
    pair: dict[str, Any] | None = None  #: base and drafter as the parts of one model, as in `pair.json`
