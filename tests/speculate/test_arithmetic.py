"""The formulas against simulation, published tables and other implementations."""

from __future__ import annotations

import doctest
import math
import random

import pytest
from helpers.chi_square import chi_square

from mtp_extract.errors import MtpExtractError
from mtp_extract.speculate import (
    Interval,
    Proportion,
    arithmetic,
    best_draft_length,
    expected_tokens,
    ratio_interval,
    share_interval,
    speedup,
    wilson,
)
from mtp_extract.speculate.arithmetic import student


def test_examples() -> None:
    assert doctest.testmod(arithmetic).failed == 0


@pytest.mark.parametrize(
    ("drafts", "acceptance", "tokens"),
    [(1, 0.8, 1.80), (2, 0.8, 2.44), (3, 0.8, 2.95), (4, 0.8, 3.36), (3, 0.5, 1.88), (3, 0.9, 3.44)],
)
def test_table_of_expected_tokens(drafts: int, acceptance: float, tokens: float) -> None:
    assert expected_tokens([acceptance] * drafts) == pytest.approx(tokens, abs=0.006)
    assert expected_tokens([acceptance] * drafts) == pytest.approx((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


def test_ends() -> None:
    assert expected_tokens([0.0] * 5) == 1
    assert expected_tokens([1.0] * 5) == 6
    assert expected_tokens([]) == 1
    assert expected_tokens([0.0, math.nan]) == 1, "no rate where nothing came to it"
    assert expected_tokens([0.5, 0.0, math.nan]) == 1.5
    assert math.isnan(expected_tokens([0.5, math.nan]))


def test_conditional_rates_by_simulation() -> None:
    rates = [0.9, 0.5, 0.7]
    numbers = random.Random(0)
    total = 0
    for _ in range(200_000):
        accepted = next((i for i, rate in enumerate(rates) if numbers.random() >= rate), len(rates))
        total += accepted + 1
    assert total / 200_000 == pytest.approx(expected_tokens(rates), abs=0.01)


def test_best_draft_length_is_the_best() -> None:
    rates = [0.95, 0.9, 0.4, 0.9, 0.9, 0.9]
    for cost in (0.01, 0.1, 0.3, 1.0):
        gains = [speedup(rates[:k], draft_cost=cost) for k in range(len(rates) + 1)]
        assert best_draft_length(rates, draft_cost=cost) == gains.index(max(gains))
    assert best_draft_length([0.9] * 6, draft_cost=0) == 6
    assert best_draft_length([0.9] * 6, draft_cost=0.0, verify_cost_per_draft=2.0) == 0
    # Costs are relative: the unit does not matter.
    assert best_draft_length(rates, draft_cost=3, verify_cost=10) == best_draft_length(rates, draft_cost=0.3)


def test_speedup_without_drafts_is_one() -> None:
    assert speedup([], draft_cost=0.3, verify_cost=7.0) == 1.0
    assert speedup([1.0], draft_cost=0.25) == pytest.approx(2 / 1.25)


def test_wilson_against_the_quadratic_it_solves() -> None:
    z = 1.959963984540054
    for successes, trials in ((0, 10), (3, 10), (10, 10), (660, 1000)):
        interval = wilson(successes, trials)
        for bound in (interval.low, interval.high):
            gap = successes / trials - bound
            assert gap * gap == pytest.approx(z * z * bound * (1 - bound) / trials, abs=1e-12)
        assert 0 <= interval.low <= successes / trials <= interval.high <= 1
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0, 1)
    for successes, trials in ((5, 3), (-1, 3), (0, -1)):
        with pytest.raises(MtpExtractError, match="expected successes"):
            wilson(successes, trials)


def test_wilson_covers() -> None:
    numbers = random.Random(1)
    covered = 0
    for _ in range(4000):
        hits = sum(numbers.random() < 0.85 for _ in range(60))
        interval = wilson(hits, 60)
        covered += interval.low <= 0.85 <= interval.high
    assert 0.93 < covered / 4000 < 0.98


def test_student_against_printed_values() -> None:
    for freedom, t in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (30, 2.0423), (1000, 1.9623)):
        assert student(0.95, freedom) == pytest.approx(t, abs=5e-5)
    assert student(0.99, 5) == pytest.approx(4.0321, abs=5e-5)


def draws(numbers: random.Random, texts: int, rate: float) -> tuple[list[int], list[int]]:
    """Hits and positions of texts, each with a rate of its own about ``rate``."""
    sizes = [numbers.randint(20, 60) for _ in range(texts)]
    own = [numbers.betavariate(8 * rate, 8 * (1 - rate)) for _ in range(texts)]
    return [sum(numbers.random() < p for _ in range(n)) for p, n in zip(own, sizes, strict=True)], sizes


@pytest.mark.parametrize("texts", [3, 10, 100])
def test_intervals_over_texts_cover(texts: int) -> None:
    """Positions of a text go together: an interval over positions would hold the rate in about half of the cases."""
    numbers = random.Random(texts)
    rounds, covered = 500, {"share": 0, "mean": 0, "positions": 0}
    for _ in range(rounds):
        hits, sizes = draws(numbers, texts, 0.7)
        mean = ratio_interval(hits, sizes)
        assert mean is not None
        found = {
            "share": share_interval(hits, sizes),
            "mean": mean,
            "positions": wilson(sum(hits), sum(sizes)),
        }
        for name, interval in found.items():
            covered[name] += interval.low <= 0.7 <= interval.high
    assert 0.92 < covered["share"] / rounds < 0.985
    assert 0.92 < covered["mean"] / rounds < 0.985
    assert covered["positions"] / rounds < 0.75


@pytest.mark.parametrize("texts", [3, 10, 100])
def test_seven_controls_are_allowed_for(texts: int) -> None:
    """Seven controls that change nothing on the whole: seldom is even one of them told from the real drafter."""
    numbers = random.Random(7 * texts)
    rounds, misled = 300, 0
    for _ in range(rounds):
        sizes = [numbers.randint(20, 60) for _ in range(texts)]
        shared = [numbers.gauss(0, 3) for _ in sizes]
        gaps = [[numbers.gauss(0, 2) + common for common in shared] for _ in range(7)]
        found = [ratio_interval(gap, sizes, 1 - 0.05 / 7) for gap in gaps]
        misled += any(interval is not None and not interval.low <= 0 <= interval.high for interval in found)
    assert misled / rounds < 0.075


def test_shares_at_the_ends() -> None:
    assert share_interval([30], [40]) == Interval(0.0, 1.0)
    assert share_interval([30, 0], [40, 0]) == Interval(0.0, 1.0)
    # All hit in every text: twenty texts are twenty draws, however long.
    assert share_interval([500] * 20, [500] * 20) == wilson(20, 20, student(0.95, 19))
    assert share_interval([5] * 20, [10] * 20) == wilson(100, 200, student(0.95, 19))
    assert ratio_interval([1.0], [2]) is None


def test_proportion() -> None:
    assert Proportion(3, 4).value == 0.75
    assert math.isnan(Proportion(0, 0).value)


@pytest.mark.parametrize(
    ("observed", "p"), [([60, 40], 0.0455), ([50, 50], 1.0), ([30, 20, 10], 0.0067), ([12, 8, 10, 10], 0.8495)]
)
def test_chi_square_of_the_tests(observed: list[int], p: float) -> None:
    """The yardstick of the sampling tests, against printed values."""
    assert chi_square(observed, [1 / len(observed)] * len(observed))[1] == pytest.approx(p, abs=5e-5)


def test_chi_square_impossible_outcome() -> None:
    assert chi_square([10, 1], [1.0, 0.0]) == (math.inf, 0.0)
    assert chi_square([10, 10, 0], [0.5, 0.5, 0.0])[1] == 1.0
