"""What a diagnosis found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mtp_extract.doctor.fields import Check, Engine, Identity
from mtp_extract.doctor.likelihood import Fit
from mtp_extract.doctor.patterns import Counted, Floats
from mtp_extract.speculate.intervals import Interval, share_interval


@dataclass(frozen=True)
class Rate:
    value: float
    interval: Interval | None  # 95 % over texts; None with too few


@dataclass(frozen=True)
class Rates:
    """Drafts along some texts."""

    texts: int
    tokens: float  # that rounds added
    rounds: float
    accepted: float
    mean_accepted_length: Rate
    conditional: tuple[Rate, ...] | None  # by step; None where a server does not tell


@dataclass(frozen=True)
class TextFit:
    """Whether the server's texts are what the base here would write."""

    texts: int
    same: int  # texts that are the reference's own, character for character; greedy alone
    likeliest: Rate  # share of tokens that are the base's argmax
    expected: float  # of them, at the temperature that was asked for; 1 for greedy
    at_one: float | None  # and at temperature 1; None where that was not computed
    other_template: float | None  # ``likeliest`` with prompts written the other way; None where there is none
    prompts_alike: float | None  # share of prompts with as many tokens there as here; None where none is told


@dataclass(frozen=True)
class Serving:
    """What is served."""

    name: str  # of the server, or of the log
    kind: str
    version: str | None = None
    drafted: int | None = None  # drafts that were judged; None where it does not tell
    per_round: float | None = None  # drafts a round
    acceptance: float | None = None  # accepted / drafted
    identical: int | None = None  # texts that are the baseline's; None without one, or with sampling
    compared: int = 0  # of so many
    rates: Rates | None = None  # along the texts that the reference was run along; None where it tells too little


@dataclass(frozen=True)
class Diagnosis:
    identity: Identity
    settings: Mapping[str, Any]  # what a second run needs
    engines: tuple[Engine, ...]
    serving: Serving | None  # None without a server or a log
    base: str | None = None  # None without one; then there is nothing of what follows
    checks: tuple[Check, ...] = ()
    convention: str | None = None  # position of the query at which the drafter drafts better; None where it has none
    expected: Rates | None = None  # in the reference
    text: TextFit | None = None
    fits: tuple[Fit, ...] = ()  # likeliest first; empty where no counters were held against patterns
    untold: tuple[str, ...] = ()  # faults that change nothing along these texts
    notes: tuple[str, ...] = ()


def rates_of(counted: Counted, steps: int) -> Rates:
    """With intervals over texts; K is ``steps``."""
    whole = _share(counted.accepted / steps, counted.rounds)
    length = Rate(counted.mean_accepted_length, whole and whole.scaled(steps, 1.0))
    conditional = None
    if counted.by_step is not None:
        reached = [counted.rounds, *counted.by_step.T]
        intervals = [_share(hits, sizes) for sizes, hits in pairwise(reached)]
        conditional = tuple(map(Rate, counted.conditional or (), intervals))
    tokens, rounds, accepted = (float(column.sum()) for column in (counted.tokens, counted.rounds, counted.accepted))
    return Rates(len(counted.tokens), tokens, rounds, accepted, length, conditional)


def _share(hits: Floats, sizes: Floats) -> Interval | None:
    # A server that drafts beyond the end of a text may count more than the text has room for.
    return share_interval(np.minimum(hits, sizes).tolist(), sizes.tolist())
