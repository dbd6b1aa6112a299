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
_FREE = 5  # degrees of freedom without any event
_ROUNDING = 1e-9  # of a text's draws: what sums of fractions may leave of nothing

Floats = NDArray[np.float64]
Bounds = tuple[Floats, Floats]  # low and high ends


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


def repeats(texts: Sequence[Sequence[Hashable]]) -> frozenset[int]:
    """Which texts repeat one before them: they are the same, or their last 48 tokens are. They say nothing new."""
    tails = [tuple(text[-_TAIL:]) for text in texts]
    first = {tail: index for index, tail in reversed(list(enumerate(tails)))}
    return frozenset(index for index, tail in enumerate(tails) if first[tail] != index)


def over_texts(
    bounds: Callable[..., Bounds], *columns: ArrayLike, text: ArrayLike | None = None, level: float = 0.95
) -> Interval | None:
    """The interval, over texts, of a share, a difference or a ratio, which holds the truth ``level`` of the time.

    Args:
        bounds: :func:`share_bounds`, :func:`delta_bounds` or :func:`ratio_bounds`.
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
    odd = np.abs(2 * table[:-1].sum(0) - table[-1]) > (1 + 2 * _ROUNDING) * table[-1]
    if table.shape[1] < LEAST_TEXTS or (bounds is not ratio_bounds and odd.any()):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = map(float, bounds(*table, level=level))
    return Interval(low, high) if math.isfinite(high) else None


def share_bounds(hits: Floats, sizes: Floats, events: Floats | None = None, *, level: float = 0.95) -> Bounds:
    """Of a share of draws, Σ hits / Σ sizes, by Wilson; a mean of values between 0 and K is K times a share.

    A share of N draws in texts of n each with the correlation ρ within them varies as one of
    1 / ((1 - ρ) / N + ρ Σ n² / N²) independent draws. ρ is that of the residuals, drawn towards 1 where events are few.

    Of each text, [..., texts], the hits, whole or not, and draws; events, [...], by default of these hits.
    """
    events = _events(hits, sizes) if events is None else events
    texts, total = sizes.shape[-1], sizes.sum(-1)
    share = hits.sum(-1) / total
    residuals = ((hits - share[..., None] * sizes) ** 2).sum(-1)
    variance = residuals * texts / (texts - 1) / total**2
    single, whole = 1 / total, (sizes**2).sum(-1) / total**2
    spread, room = share * (1 - share), whole - single
    seen = np.where(spread > 0, variance / np.where(spread > 0, spread, 1.0), single)
    correlation = np.clip((seen - single) / np.where(room > 0, room, 1.0), 0.0, 1.0)
    correlation += (1 - correlation) / (1 + events**1.5)
    draws = 1 / ((1 - correlation) * single + correlation * whole)
    freedom = np.minimum(texts - 1, _FREE + np.floor(events))
    quantile = np.vectorize(lambda one: student(level, int(one)), otypes=[np.float64])(freedom)
    shrink = 1 + quantile**2 / draws
    centre = (share + quantile**2 / (2 * draws)) / shrink
    half = quantile / shrink * np.sqrt(spread / draws + quantile**2 / (4 * draws**2))
    # At the ends a bound is the share itself, which rounding must not miss.
    low = np.where(share <= 0, 0.0, np.clip(centre - half, 0.0, share))
    return low, np.where(share >= 1, 1.0, np.clip(centre + half, share, 1.0))


def delta_bounds(gained: Floats, lost: Floats, sizes: Floats, *, level: float = 0.95) -> Bounds:
    """Of the difference of two shares of the same draws, Σ (gained - lost) / Σ sizes: only one of them hits these.

    The intervals of both, put together as by Zou and Donner (2008, *Statistics in Medicine* 27). That both go up in the
    same texts would make the difference surer; it is left out, being seen too badly in few texts.
    """
    total = sizes.sum(-1)
    up, down = gained.sum(-1) / total, lost.sum(-1) / total
    # All that differ tell whether texts differ as a whole.
    events = _events(gained + lost, sizes)
    up_low, up_high = share_bounds(gained, sizes, events, level=level)
    down_low, down_high = share_bounds(lost, sizes, events, level=level)
    apart_up, apart_down = gained - up[..., None] * sizes, lost - down[..., None] * sizes
    scale = np.sqrt((apart_up**2).sum(-1) * (apart_down**2).sum(-1))
    together = np.minimum(0.0, (apart_up * apart_down).sum(-1) / np.where(scale > 0, scale, 1.0))
    below, above = (
        np.sqrt(first**2 + second**2 - 2 * together * first * second)
        for first, second in ((up - up_low, down_high - down), (up_high - up, down - down_low))
    )
    return up - down - below, up - down + above


def ratio_bounds(sums: Floats, sizes: Floats, *, level: float = 0.95) -> Bounds:
    """Of a ratio of positive sums that nothing bounds, such as tokens over seconds: of its logarithm, by leaving out a
    text at a time. Numerator and denominator take a degree of freedom each."""
    texts = sums.shape[-1]
    total, size = sums.sum(-1, keepdims=True), sizes.sum(-1, keepdims=True)
    spread = np.log((total - sums) / (size - sizes)).var(-1) * (texts - 1)
    ratio, half = (total / size)[..., 0], student(level, texts - 2) * np.sqrt(spread)
    return ratio * np.exp(-half), ratio * np.exp(half)


def _events(hits: Floats, sizes: Floats) -> Floats:
    """Events of the outcome that has fewer, hits or misses."""
    counts = np.stack((hits, sizes - hits)).astype(np.float64)
    counts[counts <= _ROUNDING * sizes] = 0.0
    squares = (counts**2).sum(-1)
    events: Floats = (counts.sum(-1) ** 2 / np.where(squares > 0, squares, 1.0)).min(0)
    return events


@lru_cache(maxsize=4096)
def student(level: float, freedom: int) -> float:
    """The t for which ``level`` of Student's distribution lies within ±t, by halving a sum of powers of a cosine."""
    odd, (low, high) = freedom % 2, (0.0, math.pi / 2)
    for _ in range(60):
        angle = (low + high) / 2
        term, total = (math.cos(angle) if odd else 1.0), 0.0
        for k in range(1 + odd, freedom, 2):
            total += term
            term *= math.cos(angle) ** 2 * k / (k + 1)
        within = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
        low, high = (angle, high) if within < level else (low, angle)
    return math.tan(low) * math.sqrt(freedom)
