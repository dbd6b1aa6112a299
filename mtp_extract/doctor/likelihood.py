"""Which of several patterns a server's counters are most like, text by text, and how surely.

Of a text, the drafts that stand at a step, of those that stood at the step before (of rounds, at the first), are taken
to be beta-binomial: with the mean that a pattern expects there, and a correlation for what no pattern knows: rounding,
another order of sums, another text's K and V. Where a server tells no steps, the same is said of all accepted drafts,
of the tokens that rounds added. The correlation of each pattern is the one that makes the counters most likely, so that
a pattern is not refused for being a little off everywhere. Whether the best one would be the best on other texts, too,
is asked of the texts themselves: drawn again, with replacement, the share of draws in which it is twenty times as
likely as any other is its *support*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mtp_extract.doctor.fields import Fit
from mtp_extract.doctor.patterns import Counted, Floats
from mtp_extract.speculate.intervals import Interval, student
from mtp_extract.speculate.texts import LEAST_TEXTS

SOUND = "sound"
"""Name of the pattern of a drafter as it is."""

_CORRELATIONS = (0.001, 0.003, 0.01, 0.03, 0.06, 0.1, 0.2, 0.3)
_LEAST_CHANCE = 0.002  # of a draft, whatever a pattern says
_DRAWS = 2000
_LEAD = math.log(20)  # by which the log-likelihood of the best is to be ahead in a draw
_SEED = 20


def compare(served: Counted, expected: Mapping[str, Counted]) -> list[Fit]:
    """Every pattern of ``expected``, likeliest first; all over the same texts."""
    scored = {name: _scores(served, pattern) for name, pattern in expected.items()}
    table = np.array([scores for scores, _ in scored.values()])  # [patterns, texts]
    texts = table.shape[1]
    drawn = np.random.default_rng(_SEED).multinomial(texts, np.full(texts, 1 / texts), size=_DRAWS)
    totals = drawn @ table.T
    best = totals.argmax(1)
    # A pattern and its twin win no draw.
    others = np.where(np.arange(len(table)) == best[:, None], -np.inf, totals).max(1)
    clear = totals.max(1) - others >= _LEAD
    support = np.bincount(best[clear], minlength=len(table)) / _DRAWS
    fits = [
        Fit(name, float(table[row].sum()), scored[name][1], float(support[row]), apart and list(apart))
        for row, name in enumerate(expected)
        for apart in (gap(served, expected[name]),)
    ]
    return sorted(fits, key=lambda fit: fit.log_likelihood, reverse=True)


def gap(served: Counted, expected: Counted) -> Interval | None:
    """Served less expected, in accepted drafts a token: 95 % over texts, as independent differences.

    Not by :func:`~mtp_extract.speculate.intervals.difference_interval`: these differences are no draws, and where a
    server does exactly what is expected of it they are 0.
    """
    sizes, apart = served.tokens, served.accepted - expected.accepted
    texts = len(sizes)
    if texts < LEAST_TEXTS:
        return None
    mean = float(apart.sum() / sizes.sum())
    error = float(np.sqrt(((apart - mean * sizes) ** 2).sum() * texts / (texts - 1)) / sizes.sum())
    half = student(0.95, texts - 1) * error
    return Interval(mean - half, mean + half)


def _scores(served: Counted, pattern: Counted) -> tuple[Floats, float]:
    """Log-likelihood by text, and the correlation that makes their sum the largest."""
    hits, sizes, means = _columns(served, pattern)
    found = [_beta_binomial(hits, sizes, means, correlation).sum(0) for correlation in _CORRELATIONS]
    most = max(range(len(found)), key=lambda at: float(found[at].sum()))
    return found[most], _CORRELATIONS[most]


def _columns(served: Counted, pattern: Counted) -> tuple[Floats, Floats, Floats]:
    """Hits, sizes and the pattern's means, each [steps or 1, texts]."""
    if served.by_step is None or pattern.by_step is None:
        columns = [(served.accepted, served.tokens, pattern.accepted, pattern.tokens)]
    else:
        told = _reached(served.rounds, served.by_step)
        expects = _reached(pattern.rounds, pattern.by_step)
        columns = [(told[i + 1], told[i], expects[i + 1], expects[i]) for i in range(min(len(told), len(expects)) - 1)]
    hits, sizes, means = zip(*((h, np.maximum(s, h), _mean(a, b)) for h, s, a, b in columns), strict=True)
    return np.array(hits), np.array(sizes), np.array(means)


def _reached(rounds: Floats, by_step: Floats) -> Sequence[Floats]:
    return [rounds, *by_step.T]


def _mean(hits: Floats, sizes: Floats) -> Floats:
    """By text, drawn towards that of all texts as if one more draw had been that."""
    whole = hits.sum() / sizes.sum() if sizes.sum() else 0.0
    means: Floats = np.clip((hits + whole) / (sizes + 1), _LEAST_CHANCE, 1 - _LEAST_CHANCE)
    return means


def _beta_binomial(hits: Floats, sizes: Floats, means: Floats, correlation: float) -> Floats:
    """Logarithm of its probability, element by element."""
    scale = (1 - correlation) / correlation
    k, n, a, b = (torch.from_numpy(np.asarray(x)) for x in (hits, sizes, means * scale, (1 - means) * scale))

    def beta(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.lgamma(x) + torch.lgamma(y) - torch.lgamma(x + y)

    choices = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    found: Floats = (choices + beta(k + a, n - k + b) - beta(a, b)).numpy()
    return found
