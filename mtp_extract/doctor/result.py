"""What a diagnosis found: the record that ``mtp-doctor --json`` prints, and that the terminal reads."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from mtp_extract._version import __version__
from mtp_extract.io.typed import Count, Figure, NotNegative, Positive, Record, Share, Tool

Outcome = Literal["does not fit", "not served", "nothing drafted", "in line", "below", "another text", "cannot tell"]


class Identity(Record):
    """The drafter."""

    name: str  #: of its directory or file
    format: str  #: its layout
    made_for: str | None  #: the base that its record, its config or its geometry names; null where nothing does


class Check(Record):
    """Something in which drafter and base have to agree."""

    name: str  #: what it is
    passed: bool | None  #: null where it may matter and nothing decides it
    found: str  #: what was found


class Rates(Record):
    """Drafts along some texts."""

    texts: Positive  #: that were counted
    rounds: NotNegative  #: of drafting and verifying
    accepted: NotNegative  #: drafts
    tokens_per_round: Figure  #: 1 + accepted / rounds
    steps: list[Figure] | None  #: by step: accepted, of those accepted a step before; null where not reported


class Serving(Record):
    """A server."""

    name: str  #: its URL, without login and query
    kind: str  #: what it was recognised as
    drafted: Count | None = None  #: drafts that were verified; null where not reported
    per_round: NotNegative | None = None  #: drafts a round; null where not reported


class TextFit(Record):
    """Whether the served texts are the base's own."""

    texts: Positive  #: that were looked at
    likeliest: Figure  #: share of their tokens that are the base's argmax, which all should be
    prompts_alike: Share | None  #: share of the prompts that the server read as they are here; null where not reported


class Fit(Record):
    """How well the counters are what a drafter with one thing broken would come to."""

    name: str  #: `sound`, or the name of a fault
    log_likelihood: float  #: of the counters, over all texts
    behind: float  #: log-likelihood of a text by which the likeliest is ahead, on the mean
    behind_at_least: float | None  #: the same, at least, 95 % over texts; null with too few
    missing: Figure  #: accepted drafts of a token that were expected and not served


class Diagnosis(Record, kw_only=True):
    """What the doctor found of a drafter, its base and what is served."""

    version: Literal[4] = 4  #: version of this record
    tool: Tool = field(default_factory=lambda: Tool("mtp-extract", __version__))  #: what made it
    verdict: str = ""  #: the result in one sentence
    outcome: Outcome | None = None  #: the same in a word or two
    suspect: str | None = None  #: what is to blame: the name of a fault, or `template`; null where nothing is named
    findings: list[str] = field(default_factory=list)  #: what the verdict rests on
    next: list[str] = field(default_factory=list)  #: what to do
    notes: list[str] = field(default_factory=list)  #: what was left out, and what disturbed the measurement
    drafter: Identity  #: what the directory holds
    base: str  #: what it was run beside
    settings: dict[str, Any]  #: what a second run needs
    checks: list[Check] = field(default_factory=list)  #: what has to agree between drafter and base
    #: position of the query at which the drafter drafts better, n that of the pending token; null where not measured
    convention: str | None = None
    serving: Serving | None = None  #: what serves the pair; null without a server
    text: TextFit | None = None  #: whether the served texts are this base's; null without a server
    expected: Rates | None = None  #: of the reference along these texts; null where the pair does not fit
    served: Rates | None = None  #: by the server's counters along these texts; null where it reports too little
    #: what the counters were compared with, likeliest first; empty where they were not
    fits: list[Fit] = field(default_factory=list)
