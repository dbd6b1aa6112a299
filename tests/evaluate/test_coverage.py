"""Intervals contain the truth as often as they say, by simulation.

Each text has a rate of its own, of a beta distribution whose mean is the rate and whose correlation within a text is
the ICC, and 20 to 150 positions; for tokens per round, 8 to 64 rounds of three drafts. Of two drafters on the same
texts, the second has 0.95 of the first's rate on the mean: in seven texts of ten just that of the rate there, in the
others a rate of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from mtp_extract.evaluate.intervals import difference_bounds, share_bounds

REPEATS = 2000
GRID = tuple(product((5, 10, 20, 50, 100), (0.5, 0.9, 0.98), (0.0, 0.1, 0.4)))
"""Texts, rate, correlation within a text."""
DRAFTS, WORSE, ALIKE = 3, 0.95, 0.7
Drawn = tuple[tuple[Any, ...], float]
"""What an interval is made of, each [repeats, texts], and the truth."""


def rates(generator: np.random.Generator, shape: tuple[int, int], rate: float, icc: float) -> Any:
    if icc == 0:
        return np.full(shape, rate)
    strength = (1 - icc) / icc
    return generator.beta(rate * strength, (1 - rate) * strength, shape)


def powers(rate: float, icc: float) -> Any:
    """Means of the rate's powers 1 to DRAFTS: the moments of the beta distribution."""
    strength = (1 - icc) / icc if icc else np.inf
    return np.cumprod([(rate * strength + j) / (strength + j) if icc else rate for j in range(DRAFTS)])


def pairs(generator: np.random.Generator, shape: tuple[int, int], rate: float, icc: float) -> Any:
    """Rates of both drafters."""
    first, other = (rates(generator, shape, mean, icc) for mean in (rate, WORSE * rate))
    return first, np.where(generator.random(shape) < ALIKE, WORSE * first, other)


def shares(generator: np.random.Generator, texts: int, rate: float, icc: float) -> Drawn:
    """Hits and positions."""
    sizes = generator.integers(20, 151, (REPEATS, texts))
    return (generator.binomial(sizes, rates(generator, sizes.shape, rate, icc)), sizes), rate


def lengths(generator: np.random.Generator, texts: int, rate: float, icc: float) -> Drawn:
    """Accepted drafts over those of a round, and rounds; a draft counts if all before it in its round do."""
    sizes = generator.integers(8, 65, (REPEATS, texts))
    own = rates(generator, sizes.shape, rate, icc)
    stand, accepted = sizes, np.zeros(sizes.shape)
    for _ in range(DRAFTS):
        stand = generator.binomial(stand, own)
        accepted += stand
    return (accepted / DRAFTS, sizes), float(powers(rate, icc).mean())


def differences(generator: np.random.Generator, texts: int, rate: float, icc: float) -> Drawn:
    """Positions that only the second drafter hits, those that only the first hits, and positions."""
    sizes = generator.integers(20, 151, (REPEATS, texts))
    first, second = pairs(generator, sizes.shape, rate, icc)
    lost = generator.binomial(sizes, first * (1 - second))
    rest = np.maximum(1 - first * (1 - second), np.finfo(float).tiny)
    gained = generator.binomial(sizes - lost, np.minimum(1, second * (1 - first) / rest))
    return (gained, lost, sizes), -(1 - WORSE) * rate


def length_differences(generator: np.random.Generator, texts: int, rate: float, icc: float) -> Drawn:
    """Drafts that the second drafter accepts more, and fewer, over those of a round, and rounds."""
    sizes = generator.integers(8, 65, (REPEATS, texts))
    steps = np.arange(DRAFTS + 1)
    accepted = [
        own[..., None] ** steps * np.where(steps < DRAFTS, 1 - own[..., None], 1)
        for own in pairs(generator, sizes.shape, rate, icc)
    ]
    joint = (accepted[0][..., :, None] * accepted[1][..., None, :]).reshape(*sizes.shape, -1)
    rounds = generator.multinomial(sizes, joint / joint.sum(-1, keepdims=True))
    more = (steps[None, :] - steps[:, None]).ravel() / DRAFTS
    alike = ALIKE * WORSE ** (1 + steps[:DRAFTS]) * powers(rate, icc) + (1 - ALIKE) * powers(WORSE * rate, icc)
    truth = float((alike - powers(rate, icc)).mean())
    return (rounds @ np.maximum(more, 0), rounds @ np.maximum(-more, 0), sizes), truth


@pytest.mark.parametrize(
    ("draw", "bounds"),
    [
        (shares, share_bounds),
        (lengths, share_bounds),
        (differences, difference_bounds),
        (length_differences, difference_bounds),
    ],
)
def test_intervals_contain_the_truth(draw: Callable[..., Drawn], bounds: Callable[..., tuple[Any, Any]]) -> None:
    """In 93 % of measurements at least, in each of 45 settings; and they shrink with texts."""
    widths = {}
    for seed, (texts, rate, icc) in enumerate(GRID):
        made, truth = draw(np.random.default_rng(seed), texts, rate, icc)
        low, high = bounds(*made)
        # What is exactly at a bound is inside, whatever rounding says.
        inside = (low <= truth + 1e-12) & (truth - 1e-12 <= high)
        assert inside.mean() >= 0.93, (texts, rate, icc)
        widths[texts, rate, icc] = float((high - low).mean())
    for rate, icc in product((0.5, 0.9, 0.98), (0.0, 0.1, 0.4)):
        assert widths[100, rate, icc] < 0.5 * widths[10, rate, icc]
