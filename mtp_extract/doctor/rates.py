"""Rates of drafts over texts, as a diagnosis has them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mtp_extract.doctor.fields import Rate, Rates
from mtp_extract.doctor.patterns import Counted, Floats
from mtp_extract.speculate.intervals import Interval, share_interval


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
