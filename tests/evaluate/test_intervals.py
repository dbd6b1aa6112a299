"""Intervals over texts, and what they say where little was seen. How often they hold: test_coverage.py."""

from __future__ import annotations

import doctest
from pathlib import Path

import numpy as np
import pytest

from mtp_extract.errors import MtpExtractError
from mtp_extract.evaluate import intervals
from mtp_extract.evaluate.intervals import (
    Interval,
    difference_bounds,
    difference_interval,
    ratio_bounds,
    ratio_interval,
    share_bounds,
    share_interval,
    student,
)
from mtp_extract.evaluate.texts import LEAST_TEXTS, repeats, repeats_note, undecided

FIGURES = Path(__file__).parents[2] / "docs" / "figures.md"


def test_examples() -> None:
    assert doctest.testmod(intervals).failed == 0


@pytest.mark.parametrize("texts", [5, 10, 20, 50])
def test_a_ratio_that_nothing_bounds(texts: int) -> None:
    """Tokens a second, of texts of unlike speeds and lengths."""
    generator = np.random.default_rng(texts)
    tokens = generator.integers(32, 129, (4000, texts)).astype(float)
    seconds = tokens * np.exp(0.3 * generator.standard_normal(tokens.shape))
    low, high = ratio_bounds(tokens, seconds)
    truth = np.exp(-(0.3**2) / 2)
    assert ((low <= truth) & (truth <= high)).mean() > 0.935
    assert (low > 0).all()


@pytest.mark.parametrize("texts", [5, 20, 100])
def test_seven_controls_are_allowed_for(texts: int) -> None:
    """Seven controls that change nothing on the whole: seldom is even one of them told from the real drafter."""
    generator = np.random.default_rng(texts)
    sizes = generator.integers(20, 61, (1000, texts))
    rates = generator.beta(8 * 0.7, 8 * 0.3, sizes.shape)
    real = generator.random((*sizes.shape, 60)) < rates[..., None]
    counted = np.arange(60) < sizes[..., None]
    misled = np.zeros(1000, dtype=bool)
    for _ in range(7):
        control = generator.random(real.shape) < rates[..., None]
        gained, lost = ((one & ~two & counted).sum(-1) for one, two in ((real, control), (control, real)))
        low, high = difference_bounds(gained, lost, sizes, level=1 - 0.05 / 7)
        misled |= (low > 0) | (high < 0)
    assert misled.mean() < 0.06


def test_one_at_a_time_is_as_many_at_once() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 40, (3, 12))
    hits, lost = generator.binomial(sizes, 0.5), generator.binomial(1, 0.3, sizes.shape)
    hits = np.minimum(hits, sizes - lost)
    for one, many in (
        (share_interval, share_bounds(hits, sizes)),
        (ratio_interval, ratio_bounds(hits + 1, sizes)),
    ):
        extra = 1 if one is ratio_interval else 0
        for row in range(3):
            assert one((hits[row] + extra).tolist(), sizes[row].tolist()) == pytest.approx([b[row] for b in many])
    low, high = difference_bounds(hits, lost, sizes)
    found = difference_interval(hits[1].tolist(), lost[1].tolist(), sizes[1].tolist())
    assert found == pytest.approx((low[1], high[1]))


def test_few_texts_have_none() -> None:
    few, enough = [3.0] * (LEAST_TEXTS - 1), [3.0] * LEAST_TEXTS
    for sizes, there in ((few, False), ([*few, 0.0], False), (enough, True)):
        hits = [size / 3 for size in sizes]
        assert (share_interval(hits, sizes) is not None) == there
        assert (difference_interval(hits, hits, sizes) is not None) == there
        assert (ratio_interval(hits, sizes) is not None) == there
    assert ratio_interval([0.0] * 5, [1.0] * 5) is None
    assert undecided(2) == "not decided: 2 texts, at least 5 are needed"


def test_where_nothing_is_missed_as_much_is_left_open_as_texts_leave() -> None:
    """A text that was not seen may be missed whole: of N that were hit, one in N may be, however long they are."""
    for texts in (5, 20, 100):
        found = share_interval([500] * texts, [500] * texts)
        assert found is not None
        assert found.high == 1
        # Exactly: the share of which N draws in a row are hit one time in forty.
        assert found.low < 0.025 ** (1 / texts) < 1
        assert found == share_interval([9] * texts, [9] * texts)
        missed = share_interval([0] * texts, [9] * texts)
        assert missed == pytest.approx((0, 1 - found.low))
    # As docs/figures.md says of twenty.
    twenty = share_interval([9] * 20, [9] * 20)
    assert twenty is not None
    assert f"reaches down to {100 * twenty.low:.0f} %" in FIGURES.read_text(encoding="utf-8")
    alike = difference_interval([0] * 20, [0] * 20, [500] * 20)
    assert alike is not None
    assert alike.low == -alike.high < -0.1


def test_more_hits_than_draws() -> None:
    for hits in ([2.0] * 5, [-1.0] * 5):
        with pytest.raises(MtpExtractError, match="expected hits of 0 to 1 draws"):
            share_interval(hits, [1.0] * 5)
    with pytest.raises(MtpExtractError, match="expected hits"):
        difference_interval([1.0] * 5, [1.0] * 5, [1.0] * 5)


def test_a_text_counts_once() -> None:
    tail = list(range(100, 148))
    texts = [[1, 2, 3], [1, 2, 3], [9, *tail], [8, 7, *tail], tail[1:], [1, 2], [3, 2, *tail[1:], 0]]
    assert repeats(texts) == {1, 3}
    assert repeats([]) == frozenset()
    assert repeats_note(7, 0) == ()
    (note,) = repeats_note(7, 2)
    assert note.startswith("7 texts, 2 of them repeats")


def test_scaled() -> None:
    assert Interval(0.25, 0.5).scaled(4, 1) == (2, 3)
    assert Interval(0.12345, 0.5).rounded(2) == [0.12, 0.5]


def test_student_against_printed_values() -> None:
    for freedom, t in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (30, 2.0423), (1000, 1.9623)):
        assert student(0.95, freedom) == pytest.approx(t, abs=5e-5)
    assert student(0.99, 5) == pytest.approx(4.0321, abs=5e-5)
