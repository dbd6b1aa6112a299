"""The arithmetic of speculative decoding: what a round yields, what it costs, how many drafts are worth it.

Notation: K drafts a round; ``p[i]`` the probability that draft i is accepted given that all before it were
(the *conditional* acceptance). A round always emits one token more than it accepts: the base's own choice
at the first rejection, or after the last draft.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from mtp_extract.errors import MtpExtractError

__all__ = [
    "Interval",
    "Proportion",
    "best_draft_length",
    "expected_tokens",
    "ratio_interval",
    "share_interval",
    "speedup",
    "student",
    "wilson",
]

Z95 = NormalDist().inv_cdf(0.975)
"""Quantile of the normal distribution that leaves 2.5 % on each side."""


def expected_tokens(conditional: Sequence[float]) -> float:
    """Mean tokens a round from per-step conditional acceptance: 1 + p₁ + p₁p₂ + … + p₁⋯p_K.

    With the same p at every step that is (1 - p^(K+1)) / (1 - p).

    >>> expected_tokens([0.5, 0.5])
    1.75
    >>> round(expected_tokens([0.8] * 3), 3)
    2.952
    """
    total = reached = 1.0
    for rate in conditional:
        # Of what is never reached there is no rate.
        reached = reached and reached * rate
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
    return expected_tokens(conditional) * verify_cost / cost


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


def wilson(successes: int, trials: int, z: float = Z95) -> Interval:
    """The Wilson score interval of a proportion; 95 % by default. [0, 1] when nothing was tried.

    Unlike the normal interval it stays inside [0, 1] and keeps its coverage near the ends. It takes the
    trials as independent; positions of one text are not: :func:`share_interval`.
    """
    if not 0 <= successes <= trials:
        raise MtpExtractError(f"expected successes of 0 to {trials} trials, found {successes}; count them again")
    if trials == 0:
        return Interval(0.0, 1.0)
    return _wilson(successes / trials, trials, z)


def _wilson(rate: float, trials: float, z: float) -> Interval:
    shrink = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    # At the ends a bound is the rate itself, which rounding must not miss.
    return Interval(0.0 if rate == 0 else max(0.0, centre - half), 1.0 if rate == 1 else min(1.0, centre + half))


def student(level: float, freedom: int) -> float:
    """The quantile t of Student's distribution for which ``level`` of it lies within ±t.

    Its distribution function is a finite sum of powers of the cosine of atan(t / √freedom), for whole degrees of
    freedom; it is inverted by halving.

    >>> round(student(0.95, 2), 3), round(student(0.95, 9), 3)
    (4.303, 2.262)
    """

    def within(angle: float) -> float:
        cosine, odd = math.cos(angle), freedom % 2
        term, total = (cosine if odd else 1.0), 0.0
        for k in range(1 + odd, freedom, 2):
            total += term
            term *= cosine * cosine * k / (k + 1)
        if odd:
            return 2 / math.pi * (angle + math.sin(angle) * total)
        return math.sin(angle) * total

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle) < level else (low, middle)
    return math.tan(low) * math.sqrt(freedom)


def ratio_interval(sums: Sequence[float], sizes: Sequence[float], level: float = 0.95) -> Interval | None:
    """The interval of a mean over draws that come in clusters, such as the positions of a text.

    Only clusters are independent. The mean is a ratio of sums over them, its variance that of their residuals, and
    its distribution Student's with one degree of freedom less than there are clusters.

    Args:
        sums: the values of each cluster, added up.
        sizes: how many these were.
        level: share of such intervals that hold the mean.

    Returns:
        None with fewer than two clusters.
    """
    if len(sums) < 2:
        return None
    mean = math.fsum(sums) / math.fsum(sizes)
    half = student(level, len(sums) - 1) * math.sqrt(_variance(sums, sizes))
    return Interval(mean - half, mean + half)


def _variance(sums: Sequence[float], sizes: Sequence[float]) -> float:
    clusters, size = len(sums), math.fsum(sizes)
    mean = math.fsum(sums) / size
    squares = math.fsum((total - mean * count) ** 2 for total, count in zip(sums, sizes, strict=True))
    return squares * clusters / (clusters - 1) / size**2


def share_interval(hits: Sequence[int], sizes: Sequence[int]) -> Interval:
    """The 95 % interval of a proportion over draws that come in clusters.

    Wilson's, with Student's quantile, for as many independent draws as give the variance between clusters. Where all
    is hit, or nothing, they have none; then each cluster counts as one draw.

    Returns:
        [0, 1] with fewer than two clusters.
    """
    kept = [(hit, size) for hit, size in zip(hits, sizes, strict=True) if size]
    if len(kept) < 2:
        return Interval(0.0, 1.0)
    hit, size = (sum(column) for column in zip(*kept, strict=True))
    rate = hit / size
    variance = _variance(*zip(*kept, strict=True))
    draws = min(size, rate * (1 - rate) / variance) if variance else size if 0 < hit < size else len(kept)
    return _wilson(rate, draws, student(0.95, len(kept) - 1))


@dataclass(frozen=True)
class Proportion:
    """``successes`` out of ``trials``."""

    successes: int
    trials: int

    @property
    def value(self) -> float:
        """The ratio; NaN when nothing was tried."""
        return self.successes / self.trials if self.trials else math.nan
