"""Rows that tell clusters apart: better than means where means mislead, and never worse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtp_extract.tune.clusters import Learned, Taught, _batches, _without_best, learn_centroids, ranks

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
    watched = Taught(*planted(1500, 2))
    taught = [Taught(states, cluster)]
    return learn_centroids(taught, means, [watched], top_k=top_k, share=0.995, steps=steps, seed=3), means


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
    taught, watched = [Taught(states[:64], wrong)], [Taught(states, cluster)]
    learned = learn_centroids(taught, means, watched, top_k=None, share=0.995, steps=100, seed=0)
    assert learned.step == 0
    assert learned.done < 100
    torch.testing.assert_close(ranks(states, learned.centroids, cluster), ranks(states, means, cluster))


def test_ranks_count_the_clusters_that_score_higher() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    states = torch.tensor([[2.0, 1.0], [2.0, 1.0], [2.0, 1.0], [0.0, 0.0]])
    assert ranks(states, rows, torch.tensor([0, 1, 2, 1])).tolist() == [1, 2, 0, 0]


def test_states_of_nothing_are_no_error() -> None:
    learned = learn_centroids(
        [Taught(torch.zeros(20, 4), torch.zeros(20, dtype=torch.long))],
        torch.zeros(5, 4),
        [Taught(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))],
        top_k=None,
        share=0.995,
        steps=3,
        seed=0,
    )
    assert bool(torch.isfinite(learned.centroids).all())


def test_what_is_best_on_the_worst_kind_is_kept() -> None:
    """Rows learned from states with wrong labels fit such states, and lose the right ones: the means stay."""
    states, cluster = planted(3000, 1)
    means = torch.stack([states[cluster == number].mean(dim=0) for number in range(CLUSTERS)])
    wrong = Taught(states, (cluster + 1) % CLUSTERS)
    settings = {"top_k": 1, "share": 0.995, "steps": 60, "seed": 0}
    assert learn_centroids([wrong], means, [wrong], **settings).step > 0
    right = Taught(*planted(1500, 2))
    learned = learn_centroids([wrong], means, [wrong, right], **settings)
    kept = float((ranks(right.states, learned.centroids, right.cluster) < 1).double().mean())
    before = float((ranks(right.states, means, right.cluster) < 1).double().mean())
    assert kept > 0.9 * before


def test_only_clusters_beyond_the_best_are_rivals() -> None:
    scores = torch.tensor([[4.0, 3.0, 2.0, 1.0]] * 3)
    found = _without_best(scores, torch.tensor([0, 2, 3]), 2)
    assert found.tolist() == [
        [4.0, -torch.inf, 2.0, 1.0],
        [-torch.inf, -torch.inf, 2.0, 1.0],
        [-torch.inf, -torch.inf, 2.0, 1.0],
    ]


def test_batches_take_as_much_of_each_part_and_lift_what_is_rare() -> None:
    cluster = torch.tensor([0] * 900 + [1] * 100)
    parts = [Taught(torch.zeros(1000, 1), cluster), Taught(torch.ones(5, 1), torch.full((5,), 2))]
    ((states, found),) = _batches(parts, 3, 1, 10_000, torch.Generator().manual_seed(0))
    assert int((found == 2).sum()) == int(states.sum()) == 5000
    # 100 of 1000 by their number, sqrt(100) : sqrt(900) as drawn.
    assert int((found == 1).sum()) == pytest.approx(1250, rel=0.1)
