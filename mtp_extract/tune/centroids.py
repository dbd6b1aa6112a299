"""Centroids, which tell in which cluster the best token is: learned from states, starting at the clusters' means.

The head looks into the clusters whose centroids score highest on a state. The mean of a cluster's vectors tells that
roughly; a row learned as a classifier of states tells it much better, given enough states a cluster. What counts is
that the right cluster is among those looked into, so it is held against those beyond the best few alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
class Taught:
    """States that are learned from, or watched. N states."""

    states: Tensor  # [N, width]
    cluster: Tensor  # int64 [N], where the best token of each lies
    share: float = 1.0  # of every batch, beside the shares of others


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
    taught: Sequence[Taught],
    means: Tensor,
    watched: Sequence[Taught],
    *,
    top_k: int | None,
    share: float,
    steps: int,
    seed: int,
) -> Learned:
    """Minimize cross-entropy over clusters; what is best where ``watched`` are at their worst is returned.

    The means are among what is compared. In every batch, clusters of few states count more than their number: by its
    square root.

    Args:
        taught: what is learned from.
        means: F32 [C, width], what it starts from.
        watched: kinds of states that nothing is learned from, none of them empty.
        top_k: the number of clusters that will be looked into; None to make that number small.
        share: of states of each kind whose cluster is then to be looked into.
        seed: of the choice of states.
    """
    random = torch.Generator().manual_seed(seed)
    some, wanted = next(_batches(taught, len(means), 1, _SCALED_ON, random))
    size = float(some.square().mean().sqrt()) or 1.0
    start = means / size * _scale(some / size, wanted, means / size)
    rows = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([rows], lr=_RATE / means.shape[1], betas=(0.9, 0.99))
    highest = optimizer.param_groups[0]["lr"]
    beyond = top_k or 1 << int(math.log2(len(means)) / 2)

    def score() -> tuple[float, float]:
        found = [_score(ranks(kind.states / size, rows.detach(), kind.cluster), top_k, share) for kind in watched]
        return max(first for first, _ in found), sum(second for _, second in found)

    best, best_score, best_step, stale, done = start, score(), 0, 0, 0
    every = max(1, steps // _EVALUATIONS)
    for done, (states, cluster) in enumerate(_batches(taught, len(means), steps, _BATCH, random), 1):
        optimizer.param_groups[0]["lr"] = highest * cosine((done - 1) / steps)
        loss = functional.cross_entropy(_without_best((states / size) @ rows.T, cluster, beyond), cluster)
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


def _without_best(scores: Tensor, wanted: Tensor, count: int) -> Tensor:
    """``scores`` [N, C] without the ``count`` highest of each row, but with the ``wanted`` one."""
    own = wanted[:, None]
    highest = scores.detach().topk(count, dim=1).indices
    return scores.scatter(1, highest, -torch.inf).scatter(1, own, scores.gather(1, own))


def _score(rank: Tensor, top_k: int | None, share: float) -> tuple[float, float]:
    """Lower is better: the share that is lost, or how many clusters lose little enough; then the mean log2 of ranks."""
    first = float((rank >= top_k).double().mean()) if top_k is not None else float(_least(rank, share))
    return first, float((rank + 1).double().log2().mean())


def _least(rank: Tensor, share: float) -> int:
    ordered = rank.sort().values
    return int(ordered[math.ceil(share * len(ordered)) - 1]) + 1


def _scale(states: Tensor, wanted: Tensor, means: Tensor) -> float:
    """The factor with which the means' scores are the best distribution over clusters."""
    scores = states @ means.T
    losses = [float(functional.cross_entropy(scores * factor, wanted)) for factor in _SCALES]
    return _SCALES[losses.index(min(losses))]


def _batches(
    taught: Sequence[Taught], clusters: int, count: int, size: int, random: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """``count`` batches of states F32 [about ``size``, width] and their clusters, drawn from each part by its share."""
    total = sum(part.share for part in taught)
    drawn = []
    for part in taught:
        rows = max(1, round(size * part.share / total))
        weights = torch.bincount(part.cluster, minlength=clusters).double().rsqrt()[part.cluster]
        drawn.append(torch.multinomial(weights, count * rows, replacement=True, generator=random).view(count, rows))
    for parts in zip(*drawn, strict=True):
        pairs = list(zip(taught, parts, strict=True))
        yield (
            torch.cat([part.states[chosen].float() for part, chosen in pairs]),
            torch.cat([part.cluster[chosen] for part, chosen in pairs]),
        )
