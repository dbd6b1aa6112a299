"""Intervals over texts: they contain the truth as often as they say, by simulation; and say what little was seen.

Each simulated text has a rate of its own, of a beta distribution whose mean is the rate and whose correlation within a
text is the ICC, and 20 to 150 positions; for tokens per round, 8 to 64 rounds of three drafts. Of two drafters on the
same texts, the second has 0.95 of the first's rate on the mean: in seven texts of ten just that of the rate there, in
the others a rate of its own.
"""

from __future__ import annotations

import doctest
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_extract.evaluation import intervals
from mtp_extract.evaluation.intervals import (
    LEAST_TEXTS,
    Interval,
    bound_difference,
    bound_ratio,
    bound_share,
    compute_interval,
    compute_student_quantile,
    explain_undecided,
    find_repeats,
)

FIGURES = Path(__file__).parents[2] / "docs" / "figures.md"
REPEATS = 2000
GRID = tuple(product((5, 10, 20, 50, 100), (0.5, 0.9, 0.98), (0.0, 0.1, 0.4)))
"""Texts, rate, correlation within a text."""
DRAFTS, WORSE, ALIKE = 3, 0.95, 0.7
Drawn = tuple[tuple[Any, ...], float]
"""What an interval is made of, each [repeats, texts], and the truth."""


def draw_rates(generator: np.random.Generator, shape: tuple[int, int], rate: float, icc: float) -> Any:
    strength = (1 - icc) / icc if icc else np.inf
    return generator.beta(rate * strength, (1 - rate) * strength, shape) if icc else np.full(shape, rate)


def draw_shares(generator: np.random.Generator, texts: int, rate: float, icc: float) -> Drawn:
    """Hits and positions."""
    sizes = generator.integers(20, 151, (REPEATS, texts))
    return (generator.binomial(sizes, draw_rates(generator, sizes.shape, rate, icc)), sizes), rate


def draw_lengths(generator: np.random.Generator, texts: int, rate: float, icc: float) -> Drawn:
    """Accepted drafts over those of a round, and rounds; a draft counts if all before it in its round do."""
    sizes = generator.integers(8, 65, (REPEATS, texts))
    own = draw_rates(generator, sizes.shape, rate, icc)
    stand, accepted = sizes, np.zeros(sizes.shape)
    for _ in range(DRAFTS):
        stand = generator.binomial(stand, own)
        accepted += stand
    # Means of the rate's powers: the moments of the beta distribution.
    strength = (1 - icc) / icc if icc else 1e12
    moments = np.cumprod([(rate * strength + power) / (strength + power) for power in range(DRAFTS)])
    return (accepted / DRAFTS, sizes), float(moments.mean())


def draw_differences(generator: np.random.Generator, texts: int, rate: float, icc: float) -> Drawn:
    """Positions that only the second drafter hits, those that only the first hits, and positions."""
    sizes = generator.integers(20, 151, (REPEATS, texts))
    first, other = (draw_rates(generator, sizes.shape, mean, icc) for mean in (rate, WORSE * rate))
    second = np.where(generator.random(sizes.shape) < ALIKE, WORSE * first, other)
    lost = generator.binomial(sizes, first * (1 - second))
    rest = np.maximum(1 - first * (1 - second), np.finfo(float).tiny)
    gained = generator.binomial(sizes - lost, np.minimum(1, second * (1 - first) / rest))
    return (gained, lost, sizes), -(1 - WORSE) * rate


@pytest.mark.parametrize(
    ("draw", "bounds"),
    [(draw_shares, bound_share), (draw_lengths, bound_share), (draw_differences, bound_difference)],
)
def test_intervals_contain_the_truth(draw: Callable[..., Drawn], bounds: Callable[..., tuple[Any, Any]]) -> None:
    """In 93 % of measurements at least, in each of 45 settings; and they shrink with texts."""
    widths = {}
    for seed, (texts, rate, icc) in enumerate(GRID):
        drawn, truth = draw(np.random.default_rng(seed), texts, rate, icc)
        low, high = bounds(*drawn)
        # What is exactly at a bound is inside, whatever rounding says.
        inside = (low <= truth + 1e-12) & (truth - 1e-12 <= high)
        assert inside.mean() >= 0.93, (texts, rate, icc)
        widths[texts, rate, icc] = float((high - low).mean())
        if texts == GRID[-1][0]:
            assert widths[texts, rate, icc] < 0.5 * widths[10, rate, icc]


@pytest.mark.parametrize("texts", [5, 10, 20, 50])
def test_a_ratio_that_nothing_bounds(texts: int) -> None:
    """Tokens a second, of texts of unlike speeds and lengths."""
    generator = np.random.default_rng(texts)
    tokens = generator.integers(32, 129, (4000, texts)).astype(float)
    low, high = bound_ratio(tokens, tokens * np.exp(0.3 * generator.standard_normal(tokens.shape)))
    truth = np.exp(-(0.3**2) / 2)
    assert ((low <= truth) & (truth <= high)).mean() > 0.935
    assert (low > 0).all()


def test_an_interval_is_scaled() -> None:
    assert Interval(0.25, 0.5).rescale(4, 1) == (2, 3)


def test_few_texts_have_none() -> None:
    few, enough = [3.0] * (LEAST_TEXTS - 1), [3.0] * LEAST_TEXTS
    for sizes, has_interval in ((few, False), ([*few, 0.0], False), (enough, True)):
        hits = [size / 3 for size in sizes]
        assert (compute_interval(bound_share, hits, sizes) is not None) == has_interval
        assert (compute_interval(bound_difference, hits, hits, sizes) is not None) == has_interval
        assert (compute_interval(bound_ratio, hits, sizes) is not None) == has_interval
    assert compute_interval(bound_ratio, [0.0] * 5, [1.0] * 5) is None
    assert explain_undecided(2) == "not decided: 2 texts, at least 5 are needed"


def test_where_nothing_is_missed_as_much_is_left_open_as_texts_leave() -> None:
    """A text that was not seen may be missed whole: of N that were hit, one in N may be, however long they are."""
    for texts in (5, 20, 100):
        found = compute_interval(bound_share, [500] * texts, [500] * texts)
        assert found is not None and found.high == 1
        # Exactly: the share of which N draws in a row are hit one time in forty.
        assert found.low < 0.025 ** (1 / texts) < 1
        assert found == compute_interval(bound_share, [9] * texts, [9] * texts)
        assert compute_interval(bound_share, [0] * texts, [9] * texts) == pytest.approx((0, 1 - found.low))
        if texts == 20:
            assert f"reaches down to {100 * found.low:.0f} %" in FIGURES.read_text(encoding="utf-8")
    alike, surer = (
        compute_interval(bound_difference, [0] * 20, [0] * 20, [500] * 20, level=level) for level in (0.95, 0.99)
    )
    assert alike and surer and surer.low < alike.low == -alike.high < -0.1


def test_more_hits_than_draws() -> None:
    """Or fewer than none, in one of the texts: they were counted wrong, and there is no interval."""
    for hits in ([2.0, 0, 0, 0, 1], [-1.0, 1, 1, 1, 1]):
        assert compute_interval(bound_share, hits, [1.0] * 5) is None
    assert compute_interval(bound_difference, [1.0] * 5, [1.0] * 5, [1.0] * 5) is None


def test_a_text_counts_once() -> None:
    tail = list(range(100, 148))
    texts = [[1, 2, 3], [1, 2, 3], [9, *tail], [8, 7, *tail], tail[1:], [1, 2], [3, 2, *tail[1:], 0]]
    assert find_repeats(texts) == {1, 3}
    assert find_repeats([]) == frozenset()


def test_student_against_printed_values() -> None:
    for freedom, t in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (30, 2.0423), (1000, 1.9623)):
        assert compute_student_quantile(0.95, freedom) == pytest.approx(t, abs=5e-5)
    assert compute_student_quantile(0.99, 5) == pytest.approx(4.0321, abs=5e-5)
    assert doctest.testmod(intervals).failed == 0
