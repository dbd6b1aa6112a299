"""What ``doctor.json`` holds, field by field. A field is called as in the results, from which it is taken."""

from __future__ import annotations

from typing import Literal

from msgspec import field

from mtp_extract.io.typed import Bounds, Count, NotNegative, Positive, Record, Share, Tool

Made = Literal["extracted", "tuned", "unknown"]
Outcome = Literal["does not fit", "not served", "nothing drafted", "in line", "below", "another text", "cannot tell"]


class Doctor(Record):
    version: Literal[1]  #: version of this file: 1
    tool: Tool  #: what wrote it
    verdict: str  #: the result in one sentence
    outcome: Outcome  #: the same in a word or two
    #: what is to blame: the name of a fault, or `temperature`, `template`; null where nothing is named
    suspect: str | None
    #: of a fault: share of draws of texts in which its pattern is 20 times as likely as any other; null for others
    certainty: Share | None
    findings: list[str]  #: what the verdict rests on
    next: list[str]  #: what to do
    notes: list[str]  #: what was left out, and what disturbed the measurement
    identity: Identity = field(name="drafter")  #: what the directory holds
    base: str | None  #: what it was run beside; null for nothing
    settings: Settings  #: what a second run needs
    checks: list[Check]  #: what has to agree between drafter and base; empty without a base
    engines: list[Engine]  #: what engines make of the directory
    #: position of the query at which the drafter drafts better, n that of the pending token; null where not measured
    convention: str | None
    expected: Rates | None  #: drafts in the reference loop; null without a base
    serving: Serving | None  #: what is served; null without a server or a log
    text: TextFit | None  #: whether the served texts are this base's; null without both
    fits: list[Fit]  #: patterns that the counters were held against, likeliest first; empty where none were
    untold: list[str]  #: faults that change nothing along these texts, and so can be neither named nor excluded


class Identity(Record):
    name: str  #: of the directory or file
    format: str  #: its layout
    made: Made  #: by its record; `unknown` where it has none, as official ones
    known_as: str | None  #: name of its geometry; null for one that `mappings/geometries.json` does not list
    made_for: str | None  #: the base that its record, its config or its geometry names; null where nothing does


class Settings(Record, forbid_unknown_fields=True):
    max_tokens: Positive  #: most tokens of an answer
    temperature: NotNegative  #: 0 is greedy
    drawn: bool  #: whether drafts are drawn at that temperature
    chat_template: bool  #: whether prompts are chats
    prompts: Positive  #: how many were asked
    drafts: Positive  #: K, drafts a round
    drafts_known: bool  #: whether it was asked for, or the server's counters say so; else it is a guess


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
    version: str | None  #: as it says
    drafted: Count | None  #: drafts that were judged; null where not told
    per_round: NotNegative | None  #: drafts a round; null where not told
    acceptance: Share | None  #: accepted / drafted; null where not told
    identical: Count | None  #: texts that are the baseline's; null without one, or with sampling
    compared: Count  #: of so many
    rates: Rates | None  #: along the texts that the reference was run along; null where it tells too little


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
