"""Centroids, which tell in which cluster the best token is: learned from states, starting at the clusters' means.

The head looks into the clusters whose centroids score highest on a state. The mean of a cluster's vectors tells that
roughly; a row learned as a classifier of states tells it much better, given enough states a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mtp_extract.tune.recipe import cosine

_BATCH = 2048
_EVALUATIONS = 10
_PATIENCE = 3  # evaluations without a better one after which it ends
_RATE = 1.0  # learning rate times width, for states of a root mean square of 1
_SCALES = tuple(2.0**power for power in range(-10, 3))
_SCALED_ON = 4096
_SCORES_AT_ONCE = 1 << 23


@dataclass(frozen=True)
class Learned:
    """What was learned in ``done`` steps."""

    centroids: Tensor  # F32 [C, width]
    step: int  # after which they were the best; 0 for the means themselves
    done: int


def ranks(states: Tensor, centroids: Tensor, cluster: Tensor) -> Tensor:
    """int64 [N]: how many clusters score higher on a state than the one it is to be found in.

    Args:
        states: [N, width].
        centroids: [C, width].
        cluster: int64 [N].
    """
    found = []
    rows = max(1, _SCORES_AT_ONCE // len(centroids))
    for part, wanted in zip(torch.split(states, rows), torch.split(cluster, rows), strict=True):
        scores = part.to(centroids) @ centroids.T
        found.append((scores > scores.gather(1, wanted[:, None])).sum(dim=1))
    return torch.cat(found) if found else cluster.new_empty(0)


def learn_centroids(
    states: Tensor,
    cluster: Tensor,
    means: Tensor,
    watched: tuple[Tensor, Tensor],
    *,
    top_k: int | None,
    share: float,
    steps: int,
    seed: int,
) -> Learned:
    """Minimize cross-entropy over clusters; what is best on ``watched``, the means included, is returned.

    Args:
        states: [N, width].
        cluster: int64 [N], where the best token of each lies.
        means: F32 [C, width], what it starts from.
        watched: states and clusters that nothing is learned from.
        top_k: the number of clusters that will be looked into; None to make that number small.
        share: of states whose cluster is then to be looked into.
        seed: of the order of states.
    """
    size = float(states[:: max(1, len(states) // _SCALED_ON)].float().square().mean().sqrt()) or 1.0
    start = means / size * _scale(states, cluster, means, size)
    rows = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([rows], lr=_RATE / means.shape[1], betas=(0.9, 0.99))
    highest = optimizer.param_groups[0]["lr"]

    def score() -> tuple[float, float]:
        return _score(ranks(watched[0] / size, rows.detach(), watched[1]), top_k, share)

    best, best_score, best_step, stale, done = start, score(), 0, 0, 0
    every = max(1, steps // _EVALUATIONS)
    for done, chosen in enumerate(_batches(len(states), steps, seed), 1):
        optimizer.param_groups[0]["lr"] = highest * cosine((done - 1) / steps)
        loss = functional.cross_entropy((states[chosen].float() / size) @ rows.T, cluster[chosen])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        if done % every == 0 or done == steps:
            now = score()
            stale += 1
            if now < best_score:
                best, best_score, best_step, stale = rows.detach().clone(), now, done, 0
            if stale >= _PATIENCE:
                break
    return Learned(best / size, best_step, done)


def _score(rank: Tensor, top_k: int | None, share: float) -> tuple[float, float]:
    """Lower is better: the share that is lost, or how many clusters lose little enough; then the mean log2 of ranks."""
    first = float((rank >= top_k).double().mean()) if top_k is not None else float(_least(rank, share))
    return first, float((rank + 1).double().log2().mean())


def _least(rank: Tensor, share: float) -> int:
    ordered = rank.sort().values
    return int(ordered[math.ceil(share * len(ordered)) - 1]) + 1


def _scale(states: Tensor, cluster: Tensor, means: Tensor, size: float) -> float:
    """The factor with which the means' scores are the best distribution over clusters."""
    step = max(1, len(states) // _SCALED_ON)
    scores = (states[::step].float() / size) @ (means / size).T
    wanted = cluster[::step]
    losses = [float(functional.cross_entropy(scores * factor, wanted)) for factor in _SCALES]
    return _SCALES[losses.index(min(losses))]


def _batches(count: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Indices of ``steps`` batches, shuffled anew in every epoch."""
    generator = torch.Generator().manual_seed(seed)
    batch = min(_BATCH, count)
    left = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(left) < batch:
            left = torch.randperm(count, generator=generator)
        yield left[:batch]
        left = left[batch:]
