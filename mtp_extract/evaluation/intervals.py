"""Intervals over texts: of a share, of the difference of two drafters on the same texts, of a ratio.

Positions of a text go together, texts are independent: each text is one cluster of draws. Where texts are few, or
nearly all drafts stand, ordinary intervals hold the truth far less often than they claim. These hold it in 93 % of
measurements or more, from five texts on (``docs/figures.md``); with fewer there is none.

*Events* are texts in which the rarer of two outcomes is seen, each weighted by how much: Kish's effective number
(Σf)² / Σf² of the counts f. Where there are few, the correlation within texts cannot be told from them, so it is drawn
towards 1, where a whole text goes one way, and the quantile is that of as few degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mtp_extract.errors import several

LEAST_TEXTS = 5  # with fewer, no interval over texts holds the truth as often as it says
_TAIL = 48  # tokens: texts that end in as many alike say the same, wherever they came from
_BASE_FREEDOM = 5  # degrees of freedom without any event
_ROUNDING = 1e-9  # of a text's draws: what sums of fractions may leave of nothing

FloatArray = NDArray[np.float64]
IntervalEnds = tuple[FloatArray, FloatArray]  # low and high ends


class Interval(NamedTuple):
    """A closed interval, ``low <= value <= high``."""

    low: float
    high: float

    def scaled(self, factor: float, offset: float = 0.0) -> Interval:
        """Of ``offset + factor · value``, for a positive ``factor``."""
        return Interval(offset + factor * self.low, offset + factor * self.high)


def undecided(texts: int) -> str:
    """Why there is no interval over so few ``texts``, in words."""
    return f"not decided: {several(texts, 'text')}, at least {LEAST_TEXTS} are needed"


def find_repeats(texts: Sequence[Sequence[Hashable]]) -> frozenset[int]:
    """Which texts repeat one before them: they are the same, or their last 48 tokens are. They say nothing new."""
    tails = [tuple(text[-_TAIL:]) for text in texts]
    first = {tail: index for index, tail in reversed(list(enumerate(tails)))}
    return frozenset(index for index, tail in enumerate(tails) if first[tail] != index)


def over_texts(
    bounds: Callable[..., IntervalEnds], *columns: ArrayLike, text: ArrayLike | None = None, level: float = 0.95
) -> Interval | None:
    """The interval, over texts, of a share, a difference or a ratio, which holds the truth ``level`` of the time.

    Args:
        bounds: :func:`share_bounds`, :func:`bound_difference` or :func:`ratio_bounds`.
        columns: what ``bounds`` takes, a number of each text; a text without any of the last, its draws, is left out.
        text: where columns have a number of each position instead, the text that it belongs to.

    Returns:
        None with fewer than :data:`LEAST_TEXTS` texts, where a text alone has all of either sum of a ratio, or where
        one has more hits than draws, or fewer than none.
    """
    table = np.stack([np.asarray(column, np.float64) for column in columns])
    if text is not None:
        rows = np.unique(text, return_inverse=True)[1]
        table = np.stack([np.bincount(rows, column) for column in table])
    table = table[:, table[-1] > 0]
    # More hits than draws, or fewer than none.
    *hits, draws = table
    impossible = np.abs(2 * sum(hits) - draws) > (1 + 2 * _ROUNDING) * draws
    if len(draws) < LEAST_TEXTS or (bounds is not ratio_bounds and impossible.any()):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = map(float, bounds(*table, level=level))
    return Interval(low, high) if math.isfinite(high) else None


def share_bounds(
    hits: FloatArray, sizes: FloatArray, events: FloatArray | None = None, *, level: float = 0.95
) -> IntervalEnds:
    """Of a share of draws, Σ hits / Σ sizes, by Wilson; a mean of values between 0 and K is K times a share.

    A share of N draws in texts of n each with the correlation ρ within them varies as one of
    1 / ((1 - ρ) / N + ρ Σ n² / N²) independent draws. ρ is that of the residuals, drawn towards 1 where events are few.

    Of each text, [..., texts], the hits, whole or not, and draws; events, [...], by default of these hits.
    """
    events = _count_events(hits, sizes) if events is None else events
    share = hits.sum(-1) / sizes.sum(-1)
    draws = _count_independent_draws(hits, sizes, events)
    t = _choose_quantiles(level, sizes.shape[-1], events)

    # Wilson (1927, *Journal of the American Statistical Association* 22), with Student's quantile t in place of the
    # normal one: (p + t² / 2N ± t · √(p (1 - p) / N + t² / 4N²)) / (1 + t² / N).
    shrink = 1 + t**2 / draws
    centre = (share + t**2 / (2 * draws)) / shrink
    half = t / shrink * np.sqrt(share * (1 - share) / draws + t**2 / (4 * draws**2))

    # At the ends a bound is the share itself, which rounding must not miss.
    low = np.where(share <= 0, 0.0, np.clip(centre - half, 0.0, share))
    return low, np.where(share >= 1, 1.0, np.clip(centre + half, share, 1.0))


def _count_independent_draws(hits: FloatArray, sizes: FloatArray, events: FloatArray) -> FloatArray:
    """How many independent draws say as much of the share as all draws do: N over Kish's design effect."""
    texts = sizes.shape[-1]
    total = sizes.sum(-1)
    share = hits.sum(-1) / total

    # The variance of the share, as texts differ: Σ (hits - share · size)² · T / (T - 1) / N².
    residuals = ((hits - share[..., None] * sizes) ** 2).sum(-1)
    variance = residuals * texts / (texts - 1) / total**2

    # In units of share · (1 - share) it is 1 / N with ρ = 0, Σ n² / N² with ρ = 1, and linear in ρ between.
    unit = share * (1 - share)
    independent = 1 / total
    by_text = (sizes**2).sum(-1) / total**2
    relative = np.where(unit > 0, variance / np.where(unit > 0, unit, 1.0), independent)
    room = by_text - independent
    correlation = np.clip((relative - independent) / np.where(room > 0, room, 1.0), 0.0, 1.0)

    # ρ cannot be told from few events: it is drawn towards 1.
    correlation += (1 - correlation) / (1 + events**1.5)
    draws: FloatArray = 1 / ((1 - correlation) * independent + correlation * by_text)
    return draws


def bound_difference(gained: FloatArray, lost: FloatArray, sizes: FloatArray, *, level: float = 0.95) -> IntervalEnds:
    """Of the difference of two shares of the same draws, Σ (gained - lost) / Σ sizes: only one of them hits these.

    The intervals of both, put together as by Zou and Donner (2008, *Statistics in Medicine* 27). That both go up in the
    same texts would make the difference surer; it is left out, being seen too badly in few texts.
    """
    total = sizes.sum(-1)
    up = gained.sum(-1) / total
    down = lost.sum(-1) / total
    # All that differ tell whether texts differ as a whole.
    events = _count_events(gained + lost, sizes)
    up_low, up_high = share_bounds(gained, sizes, events, level=level)
    down_low, down_high = share_bounds(lost, sizes, events, level=level)
    correlation = np.minimum(0.0, _correlate(gained - up[..., None] * sizes, lost - down[..., None] * sizes))

    # Half widths a and b of two intervals with the correlation ρ make one of √(a² + b² - 2 ρ a b).
    def combine(a: FloatArray, b: FloatArray) -> FloatArray:
        width: FloatArray = np.sqrt(a**2 + b**2 - 2 * correlation * a * b)
        return width

    return up - down - combine(up - up_low, down_high - down), up - down + combine(up_high - up, down - down_low)


def _correlate(first: FloatArray, second: FloatArray) -> FloatArray:
    """How far two residuals, [..., texts], go together over texts."""
    scale = np.sqrt((first**2).sum(-1) * (second**2).sum(-1))
    correlation: FloatArray = (first * second).sum(-1) / np.where(scale > 0, scale, 1.0)
    return correlation


def ratio_bounds(sums: FloatArray, sizes: FloatArray, *, level: float = 0.95) -> IntervalEnds:
    """Of a ratio of positive sums that nothing bounds, such as tokens over seconds: of its logarithm, by leaving out a
    text at a time. Numerator and denominator take a degree of freedom each."""
    texts = sums.shape[-1]
    total = sums.sum(-1, keepdims=True)
    size = sizes.sum(-1, keepdims=True)
    spread = np.log((total - sums) / (size - sizes)).var(-1) * (texts - 1)
    ratio = (total / size)[..., 0]
    half = student_quantile(level, texts - 2) * np.sqrt(spread)
    return ratio * np.exp(-half), ratio * np.exp(half)


def _count_events(hits: FloatArray, sizes: FloatArray) -> FloatArray:
    """Events of the outcome that has fewer, hits or misses."""
    counts = np.stack((hits, sizes - hits)).astype(np.float64)
    counts[counts <= _ROUNDING * sizes] = 0.0
    squares = (counts**2).sum(-1)
    events: FloatArray = (counts.sum(-1) ** 2 / np.where(squares > 0, squares, 1.0)).min(0)
    return events


def _choose_quantiles(level: float, texts: int, events: FloatArray) -> FloatArray:
    """Student's, of as many degrees of freedom as there are events and a few more, but fewer than texts."""
    freedom = np.minimum(texts - 1, _BASE_FREEDOM + np.floor(events))
    of_each = np.vectorize(lambda degrees: student_quantile(level, int(degrees)), otypes=[np.float64])
    quantiles: FloatArray = of_each(freedom)
    return quantiles


@lru_cache(maxsize=4096)
def student_quantile(level: float, freedom: int) -> float:
    """The t for which ``level`` of Student's distribution lies within ±t, by halving a sum of powers of a cosine."""
    odd = freedom % 2
    low = 0.0
    high = math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        term = math.cos(angle) if odd else 1.0
        total = 0.0
        for k in range(1 + odd, freedom, 2):
            total += term
            term *= math.cos(angle) ** 2 * k / (k + 1)
        within = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
        if within < level:
            low = angle
        else:
            high = angle
    return math.tan(low) * math.sqrt(freedom)
