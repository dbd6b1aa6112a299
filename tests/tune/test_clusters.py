"""Clusters of equal size: exactly equal, the same every time, and of neighbours."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_extract.errors import MtpExtractError
from mtp_extract.tune.clusters import balanced_clusters, check_count, cluster_of, divisors, means_of


@settings(max_examples=20, deadline=None)
@given(
    count=st.integers(2, 13),
    size=st.integers(2, 9),
    width=st.integers(1, 5),
    distinct=st.integers(1, 200),
    seed=st.integers(0, 99),
)
def test_every_token_once_whatever_the_vectors(count: int, size: int, width: int, distinct: int, seed: int) -> None:
    """Sizes that are no powers of two, vectors that are equal, and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randn(distinct, width, generator=generator)
    kinds[0] = 0
    vectors = kinds[torch.randint(distinct, (count * size,), generator=generator)]
    ordering = balanced_clusters(vectors, count)
    assert ordering.dtype == torch.int64
    assert torch.equal(ordering.sort().values, torch.arange(count * size))
    assert torch.equal(torch.bincount(cluster_of(ordering, count)), torch.full((count,), size))
    assert torch.equal(ordering, balanced_clusters(vectors, count))
    means = means_of(vectors, ordering, count)
    for cluster in range(count):
        members = ordering[cluster * size : (cluster + 1) * size]
        assert torch.equal(members, members.sort().values)
        torch.testing.assert_close(means[cluster], vectors[members].mean(dim=0))


def test_planted_clusters_are_found() -> None:
    """Groups far apart, shuffled: each is one cluster."""
    generator = torch.Generator().manual_seed(0)
    centres = 10 * torch.randn(12, 6, generator=generator)
    group = torch.arange(12).repeat(20)[torch.randperm(240, generator=generator)]
    vectors = centres[group] + 0.1 * torch.randn(240, 6, generator=generator)
    found = cluster_of(balanced_clusters(vectors, 12), 12)
    assert all(len(torch.unique(found[group == number])) == 1 for number in range(12))


def test_rounds_bring_vectors_nearer_to_their_means() -> None:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(600, 8, generator=generator)

    def error(rounds: int) -> float:
        ordering = balanced_clusters(vectors, 20, rounds)
        return float((vectors - means_of(vectors, ordering, 20)[cluster_of(ordering, 20)]).square().sum())

    assert error(4) <= error(1) < 0.95 * error(0)


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
