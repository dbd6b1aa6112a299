"""How often the intervals of ``mtp_extract/speculate/intervals.py`` hold the truth.

    python scripts/interval_coverage.py [REPEATS]

Texts are drawn as the intervals meet them. Each has a rate of its own, of a beta distribution whose mean is the rate
and whose correlation within a text is the ICC, and 20 to 150 positions; for mean accepted lengths, 8 to 64 rounds of
three drafts. Of two drafters on the same texts, the second has 0.95 of the first's rate on the mean: in seven texts of
ten it has just that of the rate there, in the others a rate of its own. *Before* are the intervals that were printed
until these took their place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from mtp_extract.speculate.intervals import difference_bounds, share_bounds, student

__all__ = ["GRID", "KINDS", "rows"]

GRID = tuple(product((5, 10, 20, 50, 100), (0.5, 0.9, 0.98), (0.0, 0.1, 0.4)))
"""Texts, rate, correlation within a text."""

DRAFTS = 3
_WORSE, _ALIKE = 0.95, 0.7

Bounds = tuple[Any, Any]
Drawn = tuple[tuple[Any, ...], float]
"""What an interval is made of, each [repeats, texts], and the truth."""


def _rates(generator: np.random.Generator, shape: tuple[int, int], rate: float, icc: float) -> Any:
    if icc == 0:
        return np.full(shape, rate)
    strength = (1 - icc) / icc
    return generator.beta(rate * strength, (1 - rate) * strength, shape)


def _powers(rate: float, icc: float) -> Any:
    """Means of the rate's powers 1 to DRAFTS: the moments of the beta distribution."""
    strength = (1 - icc) / icc if icc else np.inf
    return np.cumprod([(rate * strength + j) / (strength + j) if icc else rate for j in range(DRAFTS)])


def _pairs(generator: np.random.Generator, shape: tuple[int, int], rate: float, icc: float) -> Any:
    """Rates of both drafters."""
    first, other = (_rates(generator, shape, mean, icc) for mean in (rate, _WORSE * rate))
    return first, np.where(generator.random(shape) < _ALIKE, _WORSE * first, other)


def shares(generator: np.random.Generator, repeats: int, texts: int, rate: float, icc: float) -> Drawn:
    """Hits and positions."""
    sizes = generator.integers(20, 151, (repeats, texts))
    return (generator.binomial(sizes, _rates(generator, sizes.shape, rate, icc)), sizes), rate


def lengths(generator: np.random.Generator, repeats: int, texts: int, rate: float, icc: float) -> Drawn:
    """Accepted drafts over those of a round, and rounds; a draft counts if all before it in its round do."""
    sizes = generator.integers(8, 65, (repeats, texts))
    own = _rates(generator, sizes.shape, rate, icc)
    stand, accepted = sizes, np.zeros(sizes.shape)
    for _ in range(DRAFTS):
        stand = generator.binomial(stand, own)
        accepted += stand
    return (accepted / DRAFTS, sizes), float(_powers(rate, icc).mean())


def differences(generator: np.random.Generator, repeats: int, texts: int, rate: float, icc: float) -> Drawn:
    """Positions that only the second drafter hits, those that only the first hits, and positions."""
    sizes = generator.integers(20, 151, (repeats, texts))
    first, second = _pairs(generator, sizes.shape, rate, icc)
    lost = generator.binomial(sizes, first * (1 - second))
    rest = np.maximum(1 - first * (1 - second), np.finfo(float).tiny)
    gained = generator.binomial(sizes - lost, np.minimum(1, second * (1 - first) / rest))
    return (gained, lost, sizes), -(1 - _WORSE) * rate


def length_differences(generator: np.random.Generator, repeats: int, texts: int, rate: float, icc: float) -> Drawn:
    """Drafts that the second drafter accepts more, and fewer, over those of a round, and rounds."""
    sizes = generator.integers(8, 65, (repeats, texts))
    steps = np.arange(DRAFTS + 1)
    accepted = [
        own[..., None] ** steps * np.where(steps < DRAFTS, 1 - own[..., None], 1)
        for own in _pairs(generator, sizes.shape, rate, icc)
    ]
    joint = (accepted[0][..., :, None] * accepted[1][..., None, :]).reshape(*sizes.shape, -1)
    rounds = generator.multinomial(sizes, joint / joint.sum(-1, keepdims=True))
    more = (steps[None, :] - steps[:, None]).ravel() / DRAFTS
    alike = _ALIKE * _WORSE ** (1 + steps[:DRAFTS]) * _powers(rate, icc) + (1 - _ALIKE) * _powers(_WORSE * rate, icc)
    truth = float((alike - _powers(rate, icc)).mean())
    return (rounds @ np.maximum(more, 0), rounds @ np.maximum(-more, 0), sizes), truth


def _moments(sums: Any, sizes: Any) -> tuple[Any, Any]:
    texts, total = sums.shape[-1], sizes.sum(-1)
    mean = sums.sum(-1) / total
    return mean, ((sums - mean[:, None] * sizes) ** 2).sum(-1) * texts / (texts - 1) / total**2


def ratio_before(sums: Any, sizes: Any) -> Bounds:
    """Student's interval of a ratio, by the variance between texts."""
    mean, variance = _moments(sums, sizes)
    half = student(0.95, sums.shape[-1] - 1) * np.sqrt(variance)
    return mean - half, mean + half


def share_before(hits: Any, sizes: Any) -> Bounds:
    """Wilson's, for as many draws as give that variance; a text each where all or nothing is hit."""
    (share, variance), total = _moments(hits, sizes), sizes.sum(-1)
    spread, square = share * (1 - share), student(0.95, hits.shape[-1] - 1) ** 2
    varied = np.where(variance > 0, variance, 1.0)
    draws = np.where(variance > 0, np.minimum(total, spread / varied), np.where(spread > 0, total, hits.shape[-1]))
    draws = np.maximum(draws, np.finfo(float).tiny)
    centre = (share + square / (2 * draws)) / (1 + square / draws)
    half = np.sqrt(square * (spread / draws + square / (4 * draws**2))) / (1 + square / draws)
    return centre - half, centre + half


def difference_before(gained: Any, lost: Any, sizes: Any) -> Bounds:
    """As of a ratio."""
    return ratio_before(gained - lost, sizes)


KINDS: Mapping[str, tuple[Callable[..., Drawn], Callable[..., Bounds], Callable[..., Bounds], int]] = {
    "share": (shares, share_before, share_bounds, 1),
    "mean accepted length": (lengths, ratio_before, share_bounds, DRAFTS),
    "difference of shares": (differences, difference_before, difference_bounds, 1),
    "difference of mean accepted lengths": (length_differences, difference_before, difference_bounds, DRAFTS),
}
"""Name → how its texts are drawn, its interval before, now, and what its width is to be multiplied by."""


def _coverage(bounds: Bounds, truth: float, factor: int) -> tuple[float, float]:
    """The share of intervals that hold ``truth``, and their mean width."""
    low, high = bounds
    # What is exactly at a bound is held, whatever rounding says.
    held = (low <= truth + 1e-12) & (truth - 1e-12 <= high)
    return float(held.mean()), factor * float((high - low).mean())


class Row(NamedTuple):
    """A setting; how often the intervals hold the truth there, and their mean width, before and now."""

    texts: int
    rate: float
    icc: float
    before: tuple[float, float]
    now: tuple[float, float]


def rows(kind: str, repeats: int) -> Iterator[Row]:
    """A row for each setting, each with a seed of its own."""
    draw, before, now, factor = KINDS[kind]
    for seed, (texts, rate, icc) in enumerate(GRID):
        made, truth = draw(np.random.default_rng(seed), repeats, texts, rate, icc)
        yield Row(texts, rate, icc, *(_coverage(bounds(*made), truth, factor) for bounds in (before, now)))


def main() -> None:
    """Print the tables."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    found = {kind: list(rows(kind, repeats)) for kind in KINDS}
    lowest = (min(row.now[0] for row in made) for made in found.values())
    print("Lowest:", ", ".join(f"{least:.3f} of a {kind}" for kind, least in zip(found, lowest, strict=True)))
    for what, title in enumerate(("How often it holds the truth", "Mean width")):
        print(f"\n### {title}\n\n| texts | rate | ICC | {' | '.join(found)} |\n|{' --- |' * (3 + len(found))}")
        for same in zip(*found.values(), strict=True):
            texts, rate, icc, *_ = same[0]
            pairs = " | ".join(f"{row.before[what]:.3f} → {row.now[what]:.3f}" for row in same)
            print(f"| {texts} | {rate:g} | {icc:g} | {pairs} |")


if __name__ == "__main__":
    main()
