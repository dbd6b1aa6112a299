"""Clusters of tokens of equal size, and the centroids that tell in which cluster to look.

Clusters are leaves of a tree of cuts, equal by construction and deterministic. A centroid begins at its cluster's mean
and is learned as a classifier of states; what counts is that the right cluster is among those looked into, so it is
trained against those beyond the best few alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mtp_extract.errors import MtpExtractError
from mtp_extract.tuning.train import cosine

_AXIS_FROM = 1 << 14  # vectors that the axis of a cut is found from
_AXIS_STEPS = 12
_BATCH = 2048
_EVALUATIONS = 10
_PATIENCE = 3  # evaluations without a better one after which it ends
_RATE = 1.0  # learning rate times width, for states of a root mean square of 1
_SCALES = tuple(2.0**power for power in range(-10, 3))
_SCALED_ON = 4096
_SCORES_AT_ONCE = 1 << 23

Taught = tuple[Tensor, Tensor]
"""States [N, width], and int64 [N], the cluster where the best token of each lies."""


def balanced_clusters(vectors: Tensor, count: int) -> Tensor:
    """``count`` clusters of neighbours, all of one size: cut in two along the axis of greatest spread, and again.

    Args:
        vectors: F32 [V, width]; ``count`` divides V.

    Returns:
        int64 [V], a permutation: the members of the first cluster in order, then those of the second, …

    Raises:
        MtpExtractError: a vector is not finite.
    """
    if not bool(torch.isfinite(vectors.sum(dim=1)).all()):
        raise MtpExtractError("expected finite weights and states to make clusters of, found others; check the drafter")
    ordering, size, waiting = torch.arange(len(vectors)), len(vectors) // count, [(0, count)]
    while waiting:
        first, clusters = waiting.pop()
        part = ordering[first * size : (first + clusters) * size]
        if clusters == 1:
            part.copy_(part.sort().values)
            continue
        there = vectors[part]
        part.copy_(part[torch.argsort(there @ _axis(there), stable=True)])
        left = clusters // 2
        waiting += [(first, left), (first + left, clusters - left)]
    return ordering


def _axis(vectors: Tensor) -> Tensor:
    """[width], the axis of greatest spread, by a few steps of the power method."""
    some = vectors[:: -(-len(vectors) // _AXIS_FROM)]
    some = some - some.mean(dim=0)
    axis, least = some[some.square().sum(dim=1).argmax()], torch.finfo(some.dtype).tiny
    for _ in range(_AXIS_STEPS):
        # Where all vectors are equal, any axis will do.
        axis = some.T @ (some @ (axis / axis.norm().clamp(min=least)))
    found: Tensor = axis / axis.norm().clamp(min=least)
    return found


def ranks(states: Tensor, centroids: Tensor, cluster: Tensor) -> Tensor:
    """int64 [N]: how many of ``centroids`` [C, width] score higher on each state than that of ``cluster`` int64 [N]."""
    found, rows = [cluster[:0]], max(1, _SCORES_AT_ONCE // len(centroids))
    for part, wanted in zip(torch.split(states, rows), torch.split(cluster, rows), strict=True):
        scores = part.to(centroids) @ centroids.T
        found.append((scores > scores.gather(1, wanted[:, None])).sum(dim=1))
    return torch.cat(found)


def learn_centroids(
    taught: Sequence[Taught],
    means: Tensor,
    watched: Sequence[Taught],
    *,
    share: float,
    steps: int,
    seed: int,
) -> tuple[Tensor, int]:
    """Minimize cross-entropy over clusters; returned is what has to look into the fewest of them.

    The means are among what is compared. In every batch, clusters of few states count more than their number: by its
    square root.

    Args:
        taught: what is learned from, equal parts of every batch.
        means: F32 [C, width], what it starts from.
        watched: kinds of states that nothing is learned from, none of them empty.
        share: of states of each kind whose cluster is to be among those looked into.
        seed: of the choice of states.

    Returns:
        F32 [C, width], the centroids; and the step after which they were the best, 0 for the means themselves.
    """
    random = torch.Generator().manual_seed(seed)
    ((some, wanted),) = _batches(taught, len(means), 1, _SCALED_ON, random)
    size = float(some.square().mean().sqrt()) or 1.0
    means = means / size
    # The factor with which the means' scores are the best distribution over clusters.
    scores = some / size @ means.T
    best = means * min(_SCALES, key=lambda factor: float(cross_entropy(scores * factor, wanted)))
    rows, highest = best.clone().requires_grad_(), _RATE / means.shape[1]
    optimizer = torch.optim.Adam([rows], lr=highest, betas=(0.9, 0.99))

    def score() -> tuple[int, float]:
        # Of the worst kind, how many clusters lose little enough; then the mean log2 of ranks.
        found = [ranks(states / size, rows.detach(), cluster) for states, cluster in watched]
        worst = max(int(rank.sort().values[math.ceil(share * len(rank)) - 1]) + 1 for rank in found)
        return worst, sum(float((rank + 1).double().log2().mean()) for rank in found)

    best_score, best_step, stale, every = score(), 0, 0, max(1, steps // _EVALUATIONS)
    for done, (states, cluster) in enumerate(_batches(taught, len(means), steps, _BATCH, random), 1):
        optimizer.param_groups[0]["lr"] = highest * cosine((done - 1) / steps)
        rivals = without_best(states / size @ rows.T, cluster, 1 << int(math.log2(len(means)) / 2))
        optimizer.zero_grad()
        cross_entropy(rivals, cluster).backward()  # type: ignore[no-untyped-call]  # untyped in torch
        optimizer.step()
        if done % every == 0 or done == steps:
            now, stale = score(), stale + 1
            if now < best_score:
                best, best_score, best_step, stale = rows.detach().clone(), now, done, 0
            if stale >= _PATIENCE:
                break
    return best / size, best_step


def without_best(scores: Tensor, wanted: Tensor, count: int) -> Tensor:
    """``scores`` [N, C] without the ``count`` highest of each row, but with the ``wanted`` one."""
    own = wanted[:, None]
    highest = scores.detach().topk(count, dim=1).indices
    return scores.scatter(1, highest, -torch.inf).scatter(1, own, scores.gather(1, own))


def _batches(
    taught: Sequence[Taught], clusters: int, count: int, size: int, random: torch.Generator
) -> Iterator[Taught]:
    """``count`` batches of states F32 [about ``size``, width] and their clusters, drawn alike from each part."""
    drawn, rows = [], max(1, round(size / len(taught)))
    for _, cluster in taught:
        weights = torch.bincount(cluster, minlength=clusters).double().rsqrt()[cluster]
        drawn.append(torch.multinomial(weights, count * rows, replacement=True, generator=random).view(count, rows))
    for chosen in zip(*drawn, strict=True):
        pairs = list(zip(taught, chosen, strict=True))
        yield (
            torch.cat([states[rows].float() for (states, _), rows in pairs]),
            torch.cat([cluster[rows] for (_, cluster), rows in pairs]),
        )
