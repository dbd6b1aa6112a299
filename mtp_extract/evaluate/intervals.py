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
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate.texts import LEAST_TEXTS

_FREE = 5  # degrees of freedom without any event
_ROUNDING = 1e-9  # of a text's draws: what sums of fractions may leave of nothing

Floats = NDArray[np.float64]


class Interval(NamedTuple):
    """A closed interval, ``low <= value <= high``."""

    low: float
    high: float

    def scaled(self, factor: float, offset: float = 0.0) -> Interval:
        """Of ``offset + factor · value``, for a positive ``factor``."""
        return Interval(offset + factor * self.low, offset + factor * self.high)

    def rounded(self, digits: int) -> list[float]:
        """As a record has it."""
        return [round(self.low, digits), round(self.high, digits)]


def share_interval(hits: Sequence[float], sizes: Sequence[float], *, level: float = 0.95) -> Interval | None:
    """The interval of a share of draws: Σ hits / Σ sizes, over texts.

    A mean of values between 0 and K is K times a share: so of accepted drafts.

    Args:
        hits: of each text, 0 to its size; whole or not.
        sizes: draws of each text; one without any says nothing.
        level: share of such intervals that hold the truth.

    Returns:
        None with fewer than :data:`LEAST_TEXTS` texts.

    Raises:
        MtpExtractError: a text has more hits than draws, or fewer than none.
    """
    return _over_texts(share_bounds, (hits,), sizes, level)


def difference_interval(
    gained: Sequence[float], lost: Sequence[float], sizes: Sequence[float], *, level: float = 0.95
) -> Interval | None:
    """The interval of the difference of two shares of the same draws: Σ (gained - lost) / Σ sizes, over texts.

    Args:
        gained: of each text, draws that only the second hits.
        lost: those that only the first hits.
        sizes, level: as of :func:`share_interval`, as what is returned and raised.
    """
    return _over_texts(difference_bounds, (gained, lost), sizes, level)


def ratio_interval(sums: Sequence[float], sizes: Sequence[float], *, level: float = 0.95) -> Interval | None:
    """The interval of a ratio of positive sums over texts that nothing bounds, such as tokens over seconds.

    Returns:
        None with fewer than :data:`LEAST_TEXTS` texts, or where a text alone has all of either sum.
    """
    totals = np.array((sums, sizes), dtype=np.float64)
    if any(column.sum() <= column.max(initial=0) for column in totals):
        return None
    return _over_texts(ratio_bounds, (sums,), sizes, level, bounded=False)


def _over_texts(
    bounds: Callable[..., tuple[Floats, Floats]],
    hits: Sequence[Sequence[float]],
    sizes: Sequence[float],
    level: float,
    bounded: bool = True,
) -> Interval | None:
    """The ``bounds`` over texts that have any draws, each with no more ``hits`` than draws where they are bounded."""
    columns = np.array((*hits, sizes), dtype=np.float64)
    columns = columns[:, columns[-1] > 0]
    if columns.shape[1] < LEAST_TEXTS:
        return None
    total, draws = columns[:-1].sum(0), columns[-1]
    slack = _ROUNDING * draws
    if bounded and (wrong := (total < -slack) | (total > draws + slack)).any():
        raise MtpExtractError(
            f"expected hits of 0 to {draws[wrong][0]:g} draws, found {total[wrong][0]:g}; count them again"
        )
    low, high = bounds(*columns, level=level)
    return Interval(float(low), float(high))


def share_bounds(hits: ArrayLike, sizes: ArrayLike, *, level: float = 0.95) -> tuple[Floats, Floats]:
    """Low and high of many shares at once: ``hits`` and ``sizes`` [..., texts], all sizes positive."""
    hits, sizes = np.asarray(hits, np.float64), np.asarray(sizes, np.float64)
    return _wilson(hits, sizes, _rarer(hits, sizes), level)


def difference_bounds(
    gained: ArrayLike, lost: ArrayLike, sizes: ArrayLike, *, level: float = 0.95
) -> tuple[Floats, Floats]:
    """Low and high of many differences at once; arrays as of :func:`share_bounds`.

    The intervals of both shares, put together as by Zou and Donner (2008, *Statistics in Medicine* 27). That both go up
    in the same texts would make the difference surer; it is left out, being seen too badly in few texts.
    """
    gained, lost, sizes = (np.asarray(column, np.float64) for column in (gained, lost, sizes))
    total = sizes.sum(-1)
    # All that differ tell whether texts differ as a whole.
    events = _rarer(gained + lost, sizes)
    up, down = gained.sum(-1) / total, lost.sum(-1) / total
    up_low, up_high = _wilson(gained, sizes, events, level)
    down_low, down_high = _wilson(lost, sizes, events, level)
    apart_up, apart_down = gained - up[..., None] * sizes, lost - down[..., None] * sizes
    scale = np.sqrt((apart_up**2).sum(-1) * (apart_down**2).sum(-1))
    together = np.minimum(0.0, (apart_up * apart_down).sum(-1) / np.where(scale > 0, scale, 1.0))
    return (
        up - down - _joined(up - up_low, down_high - down, together),
        up - down + _joined(up_high - up, down - down_low, together),
    )


def _joined(first: Floats, second: Floats, correlation: Floats) -> Floats:
    joined: Floats = np.sqrt(first**2 + second**2 - 2 * correlation * first * second)
    return joined


def ratio_bounds(sums: ArrayLike, sizes: ArrayLike, *, level: float = 0.95) -> tuple[Floats, Floats]:
    """Low and high of many ratios at once; arrays as of :func:`share_bounds`.

    By leaving out a text at a time, of the logarithm; numerator and denominator take a degree of freedom each.
    """
    sums, sizes = np.asarray(sums, np.float64), np.asarray(sizes, np.float64)
    texts = sums.shape[-1]
    total, size = sums.sum(-1, keepdims=True), sizes.sum(-1, keepdims=True)
    without = np.log((total - sums) / (size - sizes))
    variance = ((without - without.mean(-1, keepdims=True)) ** 2).sum(-1) * (texts - 1) / texts
    ratio, half = (total / size)[..., 0], student(level, texts - 2) * np.sqrt(variance)
    return ratio * np.exp(-half), ratio * np.exp(half)


def _rarer(hits: Floats, sizes: Floats) -> Floats:
    """Events of the outcome that has fewer, hits or misses."""
    return np.minimum(_events(hits, sizes), _events(sizes - hits, sizes))


def _events(counts: Floats, sizes: Floats) -> Floats:
    counts = np.where(counts > _ROUNDING * sizes, counts, 0.0)
    squares = (counts**2).sum(-1)
    events: Floats = counts.sum(-1) ** 2 / np.where(squares > 0, squares, 1.0)
    return events


def _wilson(hits: Floats, sizes: Floats, events: Floats, level: float) -> tuple[Floats, Floats]:
    """Wilson's interval for as many independent draws as have the variance that is seen between texts.

    A share of N draws in texts of n each with the correlation ρ within them varies as one of
    1 / ((1 - ρ) / N + ρ Σ n² / N²) independent draws. ρ is that of the residuals, drawn towards 1 where events are few.
    """
    texts, total = sizes.shape[-1], sizes.sum(-1)
    share = hits.sum(-1) / total
    residuals = ((hits - share[..., None] * sizes) ** 2).sum(-1)
    variance = residuals * texts / (texts - 1) / total**2
    single, whole = 1 / total, (sizes**2).sum(-1) / total**2
    spread = share * (1 - share)
    seen = np.where(spread > 0, variance / np.where(spread > 0, spread, 1.0), single)
    room = whole - single
    correlation = np.clip((seen - single) / np.where(room > 0, room, 1.0), 0.0, 1.0)
    unseen = 1 / (1 + events**1.5)
    correlation += (1 - correlation) * unseen
    draws = 1 / ((1 - correlation) * single + correlation * whole)
    quantile = _quantiles(level, np.minimum(texts - 1, _FREE + np.floor(events)))
    shrink = 1 + quantile**2 / draws
    centre = (share + quantile**2 / (2 * draws)) / shrink
    half = quantile / shrink * np.sqrt(spread / draws + quantile**2 / (4 * draws**2))
    # At the ends a bound is the share itself, which rounding must not miss.
    low = np.where(share <= 0, 0.0, np.clip(centre - half, 0.0, share))
    return low, np.where(share >= 1, 1.0, np.clip(centre + half, share, 1.0))


def _quantiles(level: float, freedom: Floats) -> Floats:
    known, index = np.unique(freedom, return_inverse=True)
    found: Floats = np.array([student(level, int(one)) for one in known])[index].reshape(freedom.shape)
    return found


@lru_cache(maxsize=4096)
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
