"""What a diagnosis found, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mtp_extract.doctor.fields import Check, Engine, Fit, Identity, Rate, Rates, TextFit
from mtp_extract.doctor.patterns import Counted, Floats
from mtp_extract.speculate.intervals import Interval, share_interval


@dataclass(frozen=True)
class Serving:
    """What is served, as :class:`fields.Serving <mtp_extract.doctor.fields.Serving>` has it."""

    name: str
    kind: str
    version: str | None = None
    drafted: int | None = None
    per_round: float | None = None
    acceptance: float | None = None
    identical: int | None = None
    compared: int = 0
    rates: Rates | None = None


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


def rate(value: float, interval: Interval | None) -> Rate:
    """As ``doctor.json`` has it."""
    return Rate(value, interval and list(interval))


def rates_of(counted: Counted, steps: int) -> Rates:
    """With intervals over texts; K is ``steps``."""
    whole = _share(counted.accepted / steps, counted.rounds)
    length = rate(counted.mean_accepted_length, whole and whole.scaled(steps, 1.0))
    conditional = None
    if counted.by_step is not None:
        reached = [counted.rounds, *counted.by_step.T]
        intervals = [_share(hits, sizes) for sizes, hits in pairwise(reached)]
        conditional = [*map(rate, counted.conditional or (), intervals)]
    tokens, rounds, accepted = (float(column.sum()) for column in (counted.tokens, counted.rounds, counted.accepted))
    return Rates(len(counted.tokens), tokens, rounds, accepted, length, conditional)


def _share(hits: Floats, sizes: Floats) -> Interval | None:
    # A server that drafts beyond the end of a text may count more than the text has room for.
    return share_interval(np.minimum(hits, sizes).tolist(), sizes.tolist())
