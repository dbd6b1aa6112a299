"""The formulas against simulation, published tables and other implementations."""

from __future__ import annotations

import doctest
import math

import pytest

from mtp_extract.speculate import adaptive, trees
from mtp_extract.speculate.adaptive import best_draft_length, expected_tokens


def test_examples() -> None:
    assert doctest.testmod(adaptive).failed == doctest.testmod(trees).failed == 0


@pytest.mark.parametrize(
    ("drafts", "acceptance", "tokens"),
    [(1, 0.8, 1.80), (2, 0.8, 2.44), (3, 0.8, 2.95), (4, 0.8, 3.36), (3, 0.5, 1.88), (3, 0.9, 3.44)],
)
def test_table_of_expected_tokens(drafts: int, acceptance: float, tokens: float) -> None:
    assert expected_tokens([acceptance] * drafts) == pytest.approx(tokens, abs=0.006)
    assert expected_tokens([acceptance] * drafts) == pytest.approx((1 - acceptance ** (drafts + 1)) / (1 - acceptance))


def test_best_draft_length() -> None:
    assert best_draft_length([0.95, 0.9, 0.4, 0.9], draft_cost=0.3) == 2
    assert best_draft_length([0.9] * 6, draft_cost=0) == 6
    assert best_draft_length([0.9] * 6, draft_cost=2.0) == 0


def test_ends() -> None:
    assert expected_tokens([0.0] * 5) == 1
    assert expected_tokens([1.0] * 5) == 6
    assert expected_tokens([]) == 1
    assert expected_tokens([0.0, math.nan]) == 1, "no rate where nothing came to it"
    assert expected_tokens([0.5, 0.0, math.nan]) == 1.5
    assert math.isnan(expected_tokens([0.5, math.nan]))
