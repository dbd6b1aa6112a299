"""The record of a benchmark, which ``mtp-bench --json`` prints and the terminal shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import field

from mtp_extract._version import __version__
from mtp_extract.io.typed import Count, Figure, NotNegative, Positive, Record, Tool
from mtp_extract.serving.client import Answer
from mtp_extract.serving.counters import Counters


class Side(Record):
    """Figures of one server."""

    tokens: Count | None  #: of all answers, as the server counts
    tokens_per_s: Figure  #: of one answer: tokens after its first text, over the time from that to its end
    output_throughput: NotNegative | None  #: tokens of all over the time; null of a workload asked among others
    ttft_ms: dict[str, float] | None  #: time to first token, from connecting to first text: `mean` and `p99`
    tpot_ms: dict[str, float] | None  #: the same of the time per output token after the first
    counted: Count  #: answers whose drafts were counted; what follows is of these
    drafted: Count | None  #: drafts judged; null where the server does not say how many
    accepted: Count | None  #: of these; where their number is null, all that the server counts
    rounds: Count | None  #: of drafting and judging
    acceptance: Figure  #: accepted / drafted; its interval is over windows where only these are counted
    tokens_per_round: Figure  #: 1 + accepted / rounds; its interval as above
    acceptance_by_position: list[Figure] | None  #: by position in a round: share of rounds that accept the draft there


class Figures(Record):
    """Figures of a workload, or of all."""

    texts: Positive  #: prompts that the server answered
    sides: dict[str, Side]  #: by side: `server`, and `baseline` where there is one
    speedup: Figure  #: time the baseline takes for the server's tokens, text by text, over the server's time
    compared: Count | None  #: answers of prompts that the baseline answered too; null if texts are not compared
    identical: Count | None  #: of these, those that are the baseline's, character for character


class Request(Record):
    """A request and its answer."""

    workload: str  #: of the prompt
    prompt: Count  #: its number, from 0
    answer: Answer  #: what came
    leaves_at: Count | None = None  #: first character that is not the baseline's, from 0; null where there is none


class Failure(Record):
    """A request without a usable answer."""

    workload: str  #: of the prompt
    prompt: Count  #: its number, from 0
    reason: str  #: what went wrong


class Window(Record):
    """Requests that were sent together: as soon as one had ended, the next was sent."""

    requests: list[Request]  #: those that were answered, in the order of asking
    wall_s: NotNegative  #: seconds in which any was under way
    counted: Counters  #: of all its requests: as answers say, else by how much `/metrics` moved for these alone
    disturbed: bool  #: whether somebody else moved `/metrics`, too
    failures: list[Failure] = field(default_factory=list)  #: those that were not


def list_requests(windows: Iterable[Window]) -> list[Request]:
    return [request for window in windows for request in window.requests]


class Benchmark(Record, kw_only=True):
    """A benchmark."""

    version: Literal[6] = 6  #: version of this record
    tool: Tool = field(default_factory=lambda: Tool("mtp-extract", __version__))  #: what made it
    verdict: str = ""  #: the result in one sentence
    findings: list[str] = field(default_factory=list)  #: what a reader should not miss
    notes: list[str] = field(default_factory=list)  #: what was not reported, and what disturbed the measurement
    ended_early: str | None = None  #: what ended it before all prompts were asked; null where nothing did
    servers: dict[str, dict[str, str]]  #: by side (`server`, and `baseline` where there is one): `url`, `kind`, `model`
    settings: dict[str, Any]  #: what a second run needs
    total: Figures  #: over all prompts
    workloads: dict[str, Figures]  #: the same by workload
    windows: dict[str, list[Window]]  #: by side: every request
