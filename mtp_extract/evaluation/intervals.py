"""Intervals over texts: of a share, of the difference of two drafters on the same texts, of a ratio.

Positions of a text go together, texts are independent: each text is one cluster of draws. With few texts, or where
nearly all drafts stand, what was seen says too little of texts that were not, and the ordinary intervals hold the truth
far less often than they claim. These hold it in 93 % of measurements or more, from five texts on, as
``docs/figures.md`` shows; with fewer there is no interval.

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

from mtp_extract.errors import MtpExtractError, several

LEAST_TEXTS = 5
"""With fewer, no interval over texts holds the truth as often as it says."""

_TAIL = 48  # tokens: texts that end in as many alike say the same, wherever they came from
_FREE = 5  # degrees of freedom without any event
_ROUNDING = 1e-9  # of a text's draws: what sums of fractions may leave of nothing

Floats = NDArray[np.float64]
Bounds = tuple[Floats, Floats]
"""Low and high ends."""


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


def over_texts(bounds: Callable[..., Bounds], *columns: Sequence[float], level: float = 0.95) -> Interval | None:
    """The interval, over texts, of a share, a difference or a ratio.

    Args:
        bounds: :func:`share_bounds`, :func:`difference_bounds` or :func:`ratio_bounds`.
        columns: as ``bounds`` takes them, a number of each text; the last are its draws, and a text without any says
            nothing.
        level: share of such intervals that hold the truth.

    Returns:
        None with fewer than :data:`LEAST_TEXTS` texts, and where a text alone has all of either sum of a ratio.

    Raises:
        MtpExtractError: a text of a share or a difference has more hits than draws, or fewer than none.
    """
    table = np.array(columns, dtype=np.float64)
    table = table[:, table[-1] > 0]
    if table.shape[1] < LEAST_TEXTS:
        return None
    total, draws = table[:-1].sum(0), table[-1]
    if bounds is not ratio_bounds and (wrong := np.abs(2 * total - draws) > (1 + 2 * _ROUNDING) * draws).any():
        raise MtpExtractError(
            f"expected hits of 0 to {draws[wrong][0]:g} draws, found {total[wrong][0]:g}; count them again"
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = map(float, bounds(*table, level=level))
    return Interval(low, high) if math.isfinite(high) else None


def share_bounds(hits: ArrayLike, sizes: ArrayLike, *, level: float = 0.95) -> Bounds:
    """Of a share of draws, Σ hits / Σ sizes; a mean of values between 0 and K is K times a share.

    Of many shares at once, as :func:`difference_bounds` and :func:`ratio_bounds` are of many differences and ratios.

    Args:
        hits: [..., texts], of each text, 0 to its size; whole or not.
        sizes: [..., texts], its draws, all positive.
    """
    hits, sizes = np.asarray(hits, np.float64), np.asarray(sizes, np.float64)
    return _wilson(hits, sizes, _events(hits, sizes), level)


def difference_bounds(gained: ArrayLike, lost: ArrayLike, sizes: ArrayLike, *, level: float = 0.95) -> Bounds:
    """Of the difference of two shares of the same draws: Σ (gained - lost) / Σ sizes.

    The second alone hits the draws ``gained``, the first alone those ``lost``. The intervals of both shares, put
    together as by Zou and Donner (2008, *Statistics in Medicine* 27). That both go up in the same texts would make the
    difference surer; it is left out, being seen too badly in few texts.
    """
    gained, lost, sizes = (np.asarray(column, np.float64) for column in (gained, lost, sizes))
    total = sizes.sum(-1)
    up, down = gained.sum(-1) / total, lost.sum(-1) / total
    # All that differ tell whether texts differ as a whole.
    events = _events(gained + lost, sizes)
    up_low, up_high = _wilson(gained, sizes, events, level)
    down_low, down_high = _wilson(lost, sizes, events, level)
    apart_up, apart_down = gained - up[..., None] * sizes, lost - down[..., None] * sizes
    scale = np.sqrt((apart_up**2).sum(-1) * (apart_down**2).sum(-1))
    together = np.minimum(0.0, (apart_up * apart_down).sum(-1) / np.where(scale > 0, scale, 1.0))

    def joined(first: Floats, second: Floats) -> Floats:
        found: Floats = np.sqrt(first**2 + second**2 - 2 * together * first * second)
        return found

    return up - down - joined(up - up_low, down_high - down), up - down + joined(up_high - up, down - down_low)


def ratio_bounds(sums: ArrayLike, sizes: ArrayLike, *, level: float = 0.95) -> Bounds:
    """Of a ratio of positive sums that nothing bounds, such as tokens over seconds.

    By leaving out a text at a time, of the logarithm; numerator and denominator take a degree of freedom each.
    """
    sums, sizes = np.asarray(sums, np.float64), np.asarray(sizes, np.float64)
    texts = sums.shape[-1]
    total, size = sums.sum(-1, keepdims=True), sizes.sum(-1, keepdims=True)
    spread = np.log((total - sums) / (size - sizes)).var(-1) * (texts - 1)
    ratio, half = (total / size)[..., 0], student(level, texts - 2) * np.sqrt(spread)
    return ratio * np.exp(-half), ratio * np.exp(half)


def _events(hits: Floats, sizes: Floats) -> Floats:
    """Events of the outcome that has fewer, hits or misses."""
    counts = np.stack((hits, sizes - hits))
    counts[counts <= _ROUNDING * sizes] = 0.0
    squares = (counts**2).sum(-1)
    events: Floats = (counts.sum(-1) ** 2 / np.where(squares > 0, squares, 1.0)).min(0)
    return events


def _wilson(hits: Floats, sizes: Floats, events: Floats, level: float) -> Bounds:
    """Wilson's interval for as many independent draws as have the variance that is seen between texts.

    A share of N draws in texts of n each with the correlation ρ within them varies as one of
    1 / ((1 - ρ) / N + ρ Σ n² / N²) independent draws. ρ is that of the residuals, drawn towards 1 where events are few.
    """
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


@lru_cache(maxsize=4096)
def student(level: float, freedom: int) -> float:
    """The quantile t of Student's distribution for which ``level`` of it lies within ±t.

    Its distribution function is a finite sum of powers of the cosine of atan(t / √freedom), for whole degrees of
    freedom; it is inverted by halving.

    >>> round(student(0.95, 2), 3), round(student(0.95, 9), 3)
    (4.303, 2.262)
    """
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
