"""Clusters of tokens of equal size, and the centroids that tell in which cluster to look.

Clusters are leaves of a tree of cuts, equal by construction and deterministic. A centroid begins at its cluster's mean
and is learned as a classifier of states; what counts is that the right cluster is among those looked into, so it is
trained against those beyond the best few alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mtp_extract.errors import MtpExtractError
from mtp_extract.tune.train import cosine

_AXIS_FROM = 1 << 14  # vectors that the axis of a cut is found from
_AXIS_STEPS = 12
_MOST_NAMED = 6
_BATCH = 2048
_EVALUATIONS = 10
_PATIENCE = 3  # evaluations without a better one after which it ends
_RATE = 1.0  # learning rate times width, for states of a root mean square of 1
_SCALES = tuple(2.0**power for power in range(-10, 3))
_SCALED_ON = 4096
_SCORES_AT_ONCE = 1 << 23


def divisors(vocabulary: int) -> list[int]:
    """Divisors of ``vocabulary`` but 1 and itself, in order: the possible numbers of clusters of equal size."""
    small = [number for number in range(2, math.isqrt(vocabulary) + 1) if vocabulary % number == 0]
    return sorted({*small, *(vocabulary // number for number in small)})


def check_count(vocabulary: int, count: int) -> None:
    """Refuse a number of clusters that are not of equal size.

    Raises:
        MtpExtractError: ``count`` does not divide ``vocabulary``; says what would.
    """
    if 1 < count < vocabulary and vocabulary % count == 0:
        return
    near = sorted(sorted(divisors(vocabulary), key=lambda fit: (abs(fit - count), fit))[:_MOST_NAMED])
    raise MtpExtractError(
        f"expected a number of centroids that divides the vocabulary of {vocabulary}, found {count}; "
        + (f"use {' or '.join(map(str, near))}" if near else "nothing but 1 and itself does"),
        remedies=("centroids",),
    )


def balanced_clusters(vectors: Tensor, count: int) -> Tensor:
    """``count`` clusters of neighbours, all of one size: cut in two along the axis of greatest spread, and again.

    Args:
        vectors: F32 [V, width]; ``count`` divides V.

    Returns:
        int64 [V], a permutation: the members of the first cluster in order, then those of the second, …

    Raises:
        MtpExtractError: ``count`` does not divide V, or a vector is not finite.
    """
    check_count(len(vectors), count)
    if not bool(torch.isfinite(vectors.sum(dim=1)).all()):
        raise MtpExtractError("expected finite weights and states to make clusters of, found others; check the drafter")
    ordering, size = torch.arange(len(vectors)), len(vectors) // count
    waiting = [(0, count)]
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
    axis = some[some.square().sum(dim=1).argmax()]
    for _ in range(_AXIS_STEPS):
        # Where all vectors are equal, any axis will do.
        axis = some.T @ (some @ (axis / axis.norm().clamp(min=torch.finfo(axis.dtype).tiny)))
    found: Tensor = axis / axis.norm().clamp(min=torch.finfo(axis.dtype).tiny)
    return found


def cluster_of(ordering: Tensor, count: int) -> Tensor:
    """int64 [V], the cluster of every vector, of an ``ordering`` [V] that lists ``count`` clusters one by one."""
    found = torch.empty_like(ordering)
    found[ordering] = torch.arange(count).repeat_interleave(len(ordering) // count)
    return found


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


@dataclass(frozen=True)
class Taught:
    """States that are learned from, or watched. N states."""

    states: Tensor  # [N, width]
    cluster: Tensor  # int64 [N], where the best token of each lies


@dataclass(frozen=True)
class Learned:
    """What was learned in ``done`` steps."""

    centroids: Tensor  # F32 [C, width]
    step: int  # after which they were the best; 0 for the means themselves
    done: int


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
        taught: what is learned from, equal parts of every batch.
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
    beyond = top_k or 1 << int(math.log2(len(means)) / 2)
    rows, highest = start.clone().requires_grad_(), _RATE / means.shape[1]
    optimizer = torch.optim.Adam([rows], lr=highest, betas=(0.9, 0.99))

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
            now, stale = score(), stale + 1
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
    least = int(rank.sort().values[math.ceil(share * len(rank)) - 1]) + 1
    first = float(least) if top_k is None else float((rank >= top_k).double().mean())
    return first, float((rank + 1).double().log2().mean())


def _scale(states: Tensor, wanted: Tensor, means: Tensor) -> float:
    """The factor with which the means' scores are the best distribution over clusters."""
    scores = states @ means.T
    losses = [float(functional.cross_entropy(scores * factor, wanted)) for factor in _SCALES]
    return _SCALES[losses.index(min(losses))]


def _batches(
    taught: Sequence[Taught], clusters: int, count: int, size: int, random: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """``count`` batches of states F32 [about ``size``, width] and their clusters, drawn alike from each part."""
    drawn, rows = [], max(1, round(size / len(taught)))
    for part in taught:
        weights = torch.bincount(part.cluster, minlength=clusters).double().rsqrt()[part.cluster]
        drawn.append(torch.multinomial(weights, count * rows, replacement=True, generator=random).view(count, rows))
    for chosen in zip(*drawn, strict=True):
        pairs = list(zip(taught, chosen, strict=True))
        yield (
            torch.cat([part.states[rows].float() for part, rows in pairs]),
            torch.cat([part.cluster[rows] for part, rows in pairs]),
        )
