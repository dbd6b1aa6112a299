"""What a diagnosis found: the record that ``doctor.json`` holds, and that page and terminal read."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import field

from mtp_extract._version import __version__
from mtp_extract.io.typed import Bounds, Count, NotNegative, Positive, Record, Share, Tool

Made = Literal["extracted", "tuned", "unknown"]
Outcome = Literal["does not fit", "not served", "nothing drafted", "in line", "below", "another text", "cannot tell"]


class Diagnosis(Record, kw_only=True):
    """What the doctor found of a drafter, its base and what is served."""

    version: int = 1  #: version of this file
    tool: Tool = field(default_factory=lambda: Tool("mtp-extract", __version__))  #: what wrote it
    verdict: str = ""  #: the result in one sentence
    outcome: Outcome | None = None  #: the same in a word or two
    #: what is to blame: the name of a fault, or `temperature`, `template`; null where nothing is named
    suspect: str | None = None
    #: of a fault: share of draws of texts in which its pattern is 20 times as likely as any other; null for others
    certainty: Share | None = None
    findings: list[str] = field(default_factory=list)  #: what the verdict rests on
    next: list[str] = field(default_factory=list)  #: what to do
    notes: list[str] = field(default_factory=list)  #: what was left out, and what disturbed the measurement
    identity: Identity = field(name="drafter")  #: what the directory holds
    base: str | None = None  #: what it was run beside; null for nothing
    settings: dict[str, Any]  #: what a second run needs
    checks: list[Check] = field(default_factory=list)  #: what has to agree between drafter and base
    engines: list[Engine] = field(default_factory=list)  #: what engines make of the directory
    #: position of the query at which the drafter drafts better, n that of the pending token; null where not measured
    convention: str | None = None
    expected: Rates | None = None  #: drafts in the reference loop; null without a base
    serving: Serving | None = None  #: what is served; null without a server or a log
    text: TextFit | None = None  #: whether the served texts are this base's; null without both
    #: patterns that the counters were held against, likeliest first; empty where none were
    fits: list[Fit] = field(default_factory=list)
    #: faults that change nothing along these texts, and so can be neither named nor excluded
    untold: list[str] = field(default_factory=list)


class Identity(Record):
    name: str  #: of the directory or file
    format: str  #: its layout
    made: Made  #: by its record; `unknown` where it has none, as official ones
    known_as: str | None  #: name of its geometry; null for one that `mappings/geometries.json` does not list
    made_for: str | None  #: the base that its record, its config or its geometry names; null where nothing does


class Check(Record):
    name: str  #: what has to agree
    passed: bool | None  #: null where it may matter and nothing decides it
    found: str  #: what was found


class Engine(Record):
    engine: str  #: its name, with the release whose source was read where that matters
    loads: bool | None  #: null where only its maker can judge
    what: str  #: what it does with the directory


class Rate(Record):
    value: float  #: over all texts
    interval: Bounds | None  #: 95 % over texts; null with too few


class Rates(Record):
    texts: Positive  #: that were counted
    tokens: NotNegative  #: that rounds added
    rounds: NotNegative  #: of drafting and judging
    accepted: NotNegative  #: drafts that stand
    mean_accepted_length: Rate  #: 1 + accepted / rounds
    conditional: list[Rate] | None  #: by step: accepted, of those accepted a step before; null where not told


class Serving(Record):
    name: str  #: of the server, or of the log
    kind: str  #: what it was recognised as
    version: str | None = None  #: as it says
    drafted: Count | None = None  #: drafts that were judged; null where not told
    per_round: NotNegative | None = None  #: drafts a round; null where not told
    acceptance: Share | None = None  #: accepted / drafted; null where not told
    identical: Count | None = None  #: texts that are the baseline's; null without one, or with sampling
    compared: Count = 0  #: of so many
    rates: Rates | None = None  #: along the texts that the reference was run along; null where it tells too little


class TextFit(Record):
    texts: Positive  #: that were looked at
    same: Count  #: of greedy texts, those that are the reference's, character for character
    likeliest: Rate  #: share of their tokens that are the base's argmax
    expected: Share  #: what that should be, at the temperature that was asked for
    at_one: Share | None  #: and at temperature 1; null where not computed
    other_template: Share | None  #: `likeliest` with prompts written the other way; null where not computed
    prompts_alike: Share | None  #: share of the prompts with as many tokens there as here; null where not told


class Fit(Record):
    name: str  #: `sound`, or the name of a fault
    log_likelihood: float  #: of the counters, over all texts
    correlation: Share  #: within a text, of what the pattern does not know: the one that fits best
    support: Share  #: share of draws of texts in which it is 20 times as likely as any other
    gap: Bounds | None  #: served less expected, accepted drafts a token, 95 % over texts; null with too few
