"""Clusters of equal size: exactly equal, the same every time, and of neighbours."""

from __future__ import annotations

import pytest
import torch

from mtp_extract.errors import MtpExtractError
from mtp_extract.tune.clusters import balanced_clusters, check_count, divisors


def test_numbers_that_do_not_divide_are_refused_with_those_that_do() -> None:
    with pytest.raises(MtpExtractError, match=r"vocabulary of 262144, found 2000; use .*1024 or 2048"):
        check_count(262144, 2000)
    with pytest.raises(MtpExtractError, match="nothing but 1 and itself does"):
        check_count(13, 5)
    for count in (1, 40):
        with pytest.raises(MtpExtractError, match="divides the vocabulary of 40"):
            check_count(40, count)
    assert divisors(36) == [2, 3, 4, 6, 9, 12, 18]


def test_what_is_not_finite_is_refused() -> None:
    for bad in (torch.nan, torch.inf):
        vectors = torch.randn(12, 3)
        vectors[7, 1] = bad
        with pytest.raises(MtpExtractError, match="finite"):
            balanced_clusters(vectors, 3)
