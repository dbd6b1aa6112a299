"""Rows that tell clusters apart: better than means where means mislead, and never worse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtp_extract.tune.centroids import Learned, learn_centroids, ranks

CLUSTERS, WIDTH = 12, 16


def planted(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """States that mean their cluster by small differences along few axes, beneath what all have in common."""
    centres = torch.randn(CLUSTERS, WIDTH, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    cluster = torch.randint(CLUSTERS, (count,), generator=generator)
    states = centres[cluster] + 0.3 * torch.randn(count, WIDTH, generator=generator)
    states *= torch.logspace(0, 2, WIDTH)
    states[:, -1] += 300
    return states, cluster


def learn(states: Tensor, cluster: Tensor, top_k: int | None = None, steps: int = 60) -> tuple[Learned, Tensor]:
    means = torch.stack([states[cluster == number].mean(dim=0) for number in range(CLUSTERS)])
    learned = learn_centroids(states, cluster, means, planted(1500, 2), top_k=top_k, share=0.995, steps=steps, seed=3)
    return learned, means


@pytest.mark.parametrize("top_k", [None, 1])
def test_learned_rows_are_better_than_means(top_k: int | None) -> None:
    learned, means = learn(*planted(3000, 1), top_k)
    states, cluster = planted(3000, 4)
    before, after = (float((ranks(states, rows, cluster) < 1).double().mean()) for rows in (means, learned.centroids))
    assert after > before + 0.1
    assert learned.step > 0


def test_the_same_bytes_for_the_same_seed() -> None:
    first, second = (learn(*planted(500, 1), steps=20)[0] for _ in range(2))
    assert first.centroids.numpy().tobytes() == second.centroids.numpy().tobytes()


def test_means_stay_where_learning_makes_it_worse() -> None:
    """A handful of states with wrong labels teaches nothing."""
    states, cluster = planted(3000, 1)
    means = torch.stack([states[cluster == number].mean(dim=0) for number in range(CLUSTERS)])
    wrong = (cluster[:64] + 1) % CLUSTERS
    learned = learn_centroids(states[:64], wrong, means, (states, cluster), top_k=None, share=0.995, steps=100, seed=0)
    assert learned.step == 0
    assert learned.done < 100
    torch.testing.assert_close(ranks(states, learned.centroids, cluster), ranks(states, means, cluster))


def test_ranks_count_the_clusters_that_score_higher() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    states = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [0.0, 0.0]])
    assert ranks(states, rows, torch.tensor([0, 1, 2, 1])).tolist() == [1, 2, 0, 0]


def test_states_of_nothing_are_no_error() -> None:
    learned = learn_centroids(
        torch.zeros(20, 4),
        torch.zeros(20, dtype=torch.long),
        torch.zeros(5, 4),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)),
        top_k=None,
        share=0.995,
        steps=3,
        seed=0,
    )
    assert bool(torch.isfinite(learned.centroids).all())
