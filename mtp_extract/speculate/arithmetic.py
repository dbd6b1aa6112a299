"""The arithmetic of speculative decoding: what a round yields, what it costs, how many drafts are worth it.

Notation: K drafts a round; ``p[i]`` the probability that draft i is accepted given that all before it were
(the *conditional* acceptance). A round always emits one token more than it accepts: the base's own choice
at the first rejection, or after the last draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "Interval",
    "Proportion",
    "best_draft_length",
    "chi_square",
    "expected_tokens",
    "expected_tokens_by_step",
    "speedup",
    "wilson",
]

_Z95 = 1.959963984540054


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Mean tokens a round, (1 - p^(K+1)) / (1 - p), when every draft is accepted with the same probability.

    The accepted count is geometric, cut at K: 1 + p + p² + … + p^K. 1 when nothing is accepted, K + 1 when
    all is.

    >>> round(expected_tokens(0.8, 3), 3)
    2.952
    """
    return expected_tokens_by_step([acceptance] * drafts)


def expected_tokens_by_step(conditional: Sequence[float]) -> float:
    """Mean tokens a round from per-step conditional acceptance: 1 + p₁ + p₁p₂ + … + p₁⋯p_K.

    >>> expected_tokens_by_step([0.5, 0.5])
    1.75
    """
    total = reached = 1.0
    for rate in conditional:
        reached *= rate
        total += reached
    return total


def speedup(
    conditional: Sequence[float],
    *,
    draft_cost: float,
    verify_cost: float = 1.0,
    verify_cost_per_draft: float = 0.0,
) -> float:
    """Tokens a unit of time with drafting, over tokens a unit of time without.

    A round of K drafts takes ``verify_cost + K · (draft_cost + verify_cost_per_draft)``; plain decoding takes
    ``verify_cost`` a token. Costs share any one unit.

    Args:
        conditional: per-step conditional acceptance; its length is K.
        draft_cost: one step of the drafter.
        verify_cost: one base forward over a single token.
        verify_cost_per_draft: what each further token adds to that forward (small while memory bandwidth
            is the limit).
    """
    cost = verify_cost + len(conditional) * (draft_cost + verify_cost_per_draft)
    return expected_tokens_by_step(conditional) * verify_cost / cost


def best_draft_length(
    conditional: Sequence[float],
    *,
    draft_cost: float,
    verify_cost: float = 1.0,
    verify_cost_per_draft: float = 0.0,
) -> int:
    """The K from 0 to ``len(conditional)`` with the greatest :func:`speedup`; the smallest such K in a tie.

    >>> best_draft_length([0.8] * 8, draft_cost=0.1)
    6
    >>> best_draft_length([0.3] * 8, draft_cost=0.2)
    1
    >>> best_draft_length([0.1] * 8, draft_cost=0.2)
    0
    """

    def gain(drafts: int) -> float:
        return speedup(
            conditional[:drafts],
            draft_cost=draft_cost,
            verify_cost=verify_cost,
            verify_cost_per_draft=verify_cost_per_draft,
        )

    return max(range(len(conditional) + 1), key=lambda drafts: (gain(drafts), -drafts))


@dataclass(frozen=True)
class Interval:
    """A closed interval, ``low <= value <= high``."""

    low: float
    high: float


def wilson(successes: int, trials: int, z: float = _Z95) -> Interval:
    """The Wilson score interval of a proportion; 95 % by default. [0, 1] when nothing was tried.

    Unlike the normal interval it stays inside [0, 1] and keeps its coverage near the ends. It takes the
    trials as independent; draft steps of one text are not quite, so read it as a lower bound on the
    uncertainty.
    """
    if trials == 0:
        return Interval(0.0, 1.0)
    rate, shrink = successes / trials, 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    # At the ends a bound is the rate itself, which rounding must not miss.
    return Interval(
        0.0 if successes == 0 else max(0.0, centre - half),
        1.0 if successes == trials else min(1.0, centre + half),
    )


@dataclass(frozen=True)
class Proportion:
    """``successes`` out of ``trials``."""

    successes: int
    trials: int

    @property
    def value(self) -> float:
        """The ratio; NaN when nothing was tried."""
        return self.successes / self.trials if self.trials else math.nan

    @property
    def interval(self) -> Interval:
        """The 95 % Wilson interval."""
        return wilson(self.successes, self.trials)


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> tuple[float, float]:
    """Pearson's test of counts against probabilities.

    Outcomes of probability 0 must not have been observed, and count for nothing.

    Args:
        observed: how often each outcome was seen.
        expected: probability of each outcome; sums to 1.

    Returns:
        The statistic and the p-value: the chance of one at least as great when the probabilities are
        right. An outcome that cannot happen but did gives (inf, 0.0), no counts at all (0.0, 1.0).
    """
    total = sum(observed)
    if not total:
        return 0.0, 1.0
    if any(count and not share for count, share in zip(observed, expected, strict=True)):
        return math.inf, 0.0
    cells = [(count, share * total) for count, share in zip(observed, expected, strict=True) if share]
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    return statistic, _upper_gamma((len(cells) - 1) / 2, statistic / 2)


def _upper_gamma(a: float, x: float) -> float:
    """The regularized upper incomplete gamma function Q(a, x): a series below a + 1, a fraction above."""
    if a <= 0 or x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    tiny, rounding = 1e-300, 1e-15
    if x < a + 1:
        term = total = 1 / a
        n = a
        while abs(term) > abs(total) * rounding:
            n += 1
            term *= x / n
            total += term
        return 1 - total * scale
    # Modified Lentz evaluation of the continued fraction.
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    value = d
    for i in range(1, 10_000):
        b += 2
        an = -i * (i - a)
        d = 1 / ((an * d + b) or tiny)
        c = (b + an / c) or tiny
        value *= d * c
        if abs(d * c - 1) < rounding:
            break
    return value * scale
