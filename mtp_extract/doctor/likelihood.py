"""What a server's counters are most like: the drafter as it is, or with one thing broken; text by text, and how surely.

Of a text, the drafts that stand at a step, of those that stood at the step before (of rounds, at the first), are taken
to be binomial, with the share that is expected there. Where a server tells no steps, the same is said of all accepted
drafts, of the tokens that rounds added. Drafts of a text go together, and texts are independent: so how surely one is
ahead of another is asked of the texts, by the mean of its lead and what this varies by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from mtp_extract.doctor.counts import Counts, Floats
from mtp_extract.doctor.result import Fit
from mtp_extract.evaluate.intervals import student
from mtp_extract.evaluate.texts import LEAST_TEXTS
from mtp_extract.io.typed import Figure

SOUND = "sound"
"""Name of the drafter as it is."""

_LEAST_CHANCE = 0.002  # of a draft, whatever is expected


def compare(served: Counts, expected: Mapping[str, Counts]) -> list[Fit]:
    """How well each of ``expected`` fits, likeliest first; all over the same texts."""
    scores = {name: _scores(served, counts) for name, counts in expected.items()}
    names = sorted(scores, key=lambda name: -scores[name].sum())
    fits = []
    for name in names:
        lead = scores[names[0]] - scores[name]
        missing = _mean(expected[name].accepted - served.accepted, served.tokens)
        fits.append(Fit(name, float(scores[name].sum()), float(lead.mean()), _at_least(lead), missing))
    return fits


def sure(fits: list[Fit], texts: int) -> bool:
    """Whether the likeliest is so against every other: at 95 % over texts, its lead is at least 20 times."""
    leads = [fit.behind_at_least for fit in fits[1:]]
    return all(lead is not None and lead * texts >= math.log(20) for lead in leads)


def _at_least(lead: Floats) -> float | None:
    """What the mean of ``lead`` is at least, 95 % over texts; None with too few."""
    texts = len(lead)
    if texts < LEAST_TEXTS:
        return None
    # One end of an interval that has 5 % on either side.
    return float(lead.mean() - student(0.90, texts - 1) * lead.std(ddof=1) / math.sqrt(texts))


def _mean(values: Floats, sizes: Floats) -> Figure:
    """Σ values / Σ sizes, 95 % over texts.

    Not by :func:`~mtp_extract.evaluate.intervals.difference_interval`: these are no draws, and where a server does
    exactly what is expected of it they are 0.
    """
    texts, mean = len(sizes), float(values.sum() / sizes.sum())
    if texts < LEAST_TEXTS:
        return Figure(mean, texts)
    error = float(np.sqrt(((values - mean * sizes) ** 2).sum() * texts / (texts - 1)) / sizes.sum())
    half = student(0.95, texts - 1) * error
    return Figure(mean, texts, [mean - half, mean + half])


def _scores(served: Counts, expected: Counts) -> Floats:
    """Log-likelihood of each text."""
    by_step = served.by_step is not None and expected.by_step is not None
    told, expects = (one.reached if by_step else [one.tokens, one.accepted] for one in (served, expected))
    total = np.zeros(len(served.tokens))
    for (size, hits), (among, stand) in zip(pairwise(told), pairwise(expects), strict=True):
        # The expected share of a text is drawn towards that of all texts, as if one more draw had been that.
        whole = stand.sum() / among.sum() if among.sum() else 0.0
        mean = np.clip((stand + whole) / (among + 1), _LEAST_CHANCE, 1 - _LEAST_CHANCE)
        total += hits * np.log(mean) + (np.maximum(size, hits) - hits) * np.log(1 - mean)
    return total
