"""Rows that tell clusters apart: better than means where means mislead, and never worse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtp_extract.errors import MtpExtractError
from mtp_extract.tuning.clusters import Taught, balanced_clusters, learn_centroids, ranks, without_best

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


def learn(states: Tensor, cluster: Tensor, steps: int = 60) -> tuple[Tensor, int, Tensor]:
    means = torch.stack([states[cluster == number].mean(dim=0) for number in range(CLUSTERS)])
    watched, taught = [planted(1500, 2)], [(states, cluster)]
    return *learn_centroids(taught, means, watched, share=0.995, steps=steps, seed=3), means


def test_learned_rows_are_better_than_means() -> None:
    centroids, step, means = learn(*planted(3000, 1))
    states, cluster = planted(3000, 4)
    before, after = (float((ranks(states, rows, cluster) < 1).double().mean()) for rows in (means, centroids))
    assert after > before + 0.1
    assert step > 0


def test_the_same_bytes_for_the_same_seed() -> None:
    first, second = (learn(*planted(500, 1), steps=20)[0] for _ in range(2))
    assert first.numpy().tobytes() == second.numpy().tobytes()


def test_means_stay_where_learning_makes_it_worse() -> None:
    """A handful of states with wrong labels teaches nothing."""
    states, cluster = planted(3000, 1)
    means = torch.stack([states[cluster == number].mean(dim=0) for number in range(CLUSTERS)])
    wrong = (cluster[:64] + 1) % CLUSTERS
    taught, watched = [(states[:64], wrong)], [(states, cluster)]
    centroids, step = learn_centroids(taught, means, watched, share=0.995, steps=100, seed=0)
    assert step == 0
    torch.testing.assert_close(ranks(states, centroids, cluster), ranks(states, means, cluster))


def test_ranks_count_the_clusters_that_score_higher() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    states = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [0.0, 0.0]])
    assert ranks(states, rows, torch.tensor([0, 1, 2, 1])).tolist() == [1, 2, 0, 0]


def test_states_of_nothing_are_no_error() -> None:
    nothing: list[Taught] = [(torch.zeros(20, 4), torch.zeros(20, dtype=torch.long))]
    found, _ = learn_centroids(nothing, torch.zeros(5, 4), nothing, share=0.995, steps=3, seed=0)
    assert bool(torch.isfinite(found).all())


def test_what_is_best_on_the_worst_kind_is_kept() -> None:
    """Rows learned from states with wrong labels fit such states; what is kept serves the right ones too."""
    states, cluster = planted(3000, 1)
    means = torch.stack([states[cluster == number].mean(dim=0) for number in range(CLUSTERS)])
    wrong, right = (states, (cluster + 1) % CLUSTERS), planted(1500, 2)
    settings = {"share": 0.5, "steps": 60, "seed": 0}
    alone, step = learn_centroids([wrong], means, [wrong], **settings)
    both, _ = learn_centroids([wrong], means, [wrong, right], **settings)

    def worst(rows: Tensor) -> float:
        return max(float(ranks(kind, rows, cluster).double().median()) for kind, cluster in (wrong, right))

    assert step > 0
    assert worst(both) <= min(worst(means), worst(alone))


def test_only_clusters_beyond_the_best_are_rivals() -> None:
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 3)
    found = without_best(scores, torch.tensor([0, 2, 3]), 2)
    assert found.tolist() == [
        [4.0, -torch.inf, 2.0, 1.0],
        [-torch.inf, -torch.inf, 2.0, 1.0],
        [-torch.inf, -torch.inf, 2.0, 1.0],
    ]


def test_what_is_not_finite_is_refused() -> None:
    for bad in (torch.nan, torch.inf):
        vectors = torch.randn(12, 3)
        vectors[7, 1] = bad
        with pytest.raises(MtpExtractError, match="finite"):
            balanced_clusters(vectors, 3)
