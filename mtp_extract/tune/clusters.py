"""Clusters of exactly equal size: a tree of cuts, then rounds in which vectors move to nearer means with room.

An ordered head holds its clusters as one list of tokens, cut into equal parts. Both steps give equal parts by
construction, whatever the vectors are, and are deterministic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mtp_extract.errors import MtpExtractError

_AXIS_FROM = 1 << 14  # vectors that the axis of a cut is found from
_AXIS_STEPS = 12
_ROUNDS = 4
_CANDIDATES = 16
_LEAST_GAIN = 0.999  # a round that leaves more than this share of the error is the last
_DISTANCES_AT_ONCE = 1 << 23
_MOST_NAMED = 6


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


def cluster_of(ordering: Tensor, count: int) -> Tensor:
    """int64 [V], the cluster of every vector, of an ``ordering`` [V] that lists ``count`` clusters one by one."""
    found = torch.empty_like(ordering)
    found[ordering] = torch.arange(count).repeat_interleave(len(ordering) // count)
    return found


def means_of(vectors: Tensor, ordering: Tensor, count: int) -> Tensor:
    """[count, width], the mean of each cluster."""
    size = len(ordering) // count
    means = vectors.new_empty(count, vectors.shape[1])
    step = max(1, _DISTANCES_AT_ONCE // (size * vectors.shape[1]))
    for first in range(0, count, step):
        part = ordering[first * size : (first + step) * size]
        means[first : first + step] = vectors[part].view(-1, size, vectors.shape[1]).mean(dim=1)
    return means


def balanced_clusters(vectors: Tensor, count: int, rounds: int = _ROUNDS) -> Tensor:
    """``count`` clusters of neighbours, all of one size.

    Args:
        vectors: F32 [V, width]; ``count`` divides V.
        rounds: at most, in which vectors move.

    Returns:
        int64 [V], a permutation: the members of the first cluster in order, then those of the second, …

    Raises:
        MtpExtractError: ``count`` does not divide V, or a vector is not finite.
    """
    check_count(len(vectors), count)
    if not bool(torch.isfinite(vectors.sum(dim=1)).all()):
        raise MtpExtractError("expected finite weights and states to make clusters of, found others; check the drafter")
    ordering = _tree(vectors, count)
    means = means_of(vectors, ordering, count)
    error = _error(vectors, means, ordering)
    for _ in range(rounds):
        moved = torch.argsort(_nearest_with_room(vectors, means), stable=True)
        means = means_of(vectors, moved, count)
        before, now = error, _error(vectors, means, moved)
        if now >= before:
            break
        ordering, error = moved, now
        if now > _LEAST_GAIN * before:
            break
    return ordering


def _tree(vectors: Tensor, count: int) -> Tensor:
    """Cut in two along the axis of greatest spread, and again, in the ratio of the clusters on each side."""
    ordering, size = torch.arange(len(vectors)), len(vectors) // count
    open_ = [(0, count)]
    while open_:
        first, clusters = open_.pop()
        part = ordering[first * size : (first + clusters) * size]
        if clusters == 1:
            part.copy_(part.sort().values)
            continue
        there = vectors[part]
        part.copy_(part[torch.argsort(there @ _axis(there), stable=True)])
        left = clusters // 2
        open_ += [(first, left), (first + left, clusters - left)]
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


def _error(vectors: Tensor, means: Tensor, ordering: Tensor) -> float:
    """Σ |vector − mean|², less Σ |vector|², which no clusters change: −size · Σ |mean|²."""
    return -len(ordering) / len(means) * float(means.double().square().sum())


def _nearest_with_room(vectors: Tensor, means: Tensor) -> Tensor:
    """int64 [V], a cluster for every vector, all of one size: vectors with most to lose by another are placed first."""
    found = torch.full((len(vectors),), -1)
    room = torch.full((len(means),), len(vectors) // len(means))
    waiting = torch.arange(len(vectors))
    while len(waiting):
        open_ = room.nonzero().squeeze(1)
        costs, candidates = _candidates(vectors, waiting, means[open_])
        _place(found, room, waiting, costs, open_[candidates])
        waiting = waiting[found[waiting] < 0]
    return found


def _candidates(vectors: Tensor, rows: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest ``means`` of ``rows``: half the squared distance but for the vector's own, and which; nearest
    first."""
    half = means.square().sum(dim=1) / 2
    most = min(_CANDIDATES, len(means))
    found = [
        torch.topk(half - vectors[part] @ means.T, most, dim=1, largest=False)
        for part in torch.split(rows, max(1, _DISTANCES_AT_ONCE // len(means)))
    ]
    return torch.cat([part.values for part in found]), torch.cat([part.indices for part in found])


def _place(found: Tensor, room: Tensor, rows: Tensor, costs: Tensor, candidates: Tensor) -> None:
    """Give ``rows`` their best candidate that has room, choice after choice."""
    last = torch.full_like(costs[:, :1], torch.inf)
    losses = torch.cat((costs[:, 1:], last), dim=1) - costs
    waiting = torch.arange(len(rows))
    for choice in range(costs.shape[1]):
        wanted = candidates[waiting, choice]
        bids = waiting[room[wanted] > 0]
        if not len(bids):
            continue
        # By cluster, and in it by what a refusal costs.
        bids = bids[torch.argsort(losses[bids, choice], descending=True, stable=True)]
        bids = bids[torch.argsort(candidates[bids, choice], stable=True)]
        wanted, counts = torch.unique_consecutive(candidates[bids, choice], return_counts=True)
        place = torch.arange(len(bids)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        taken = bids[place < room[wanted].repeat_interleave(counts)]
        found[rows[taken]] = candidates[taken, choice]
        room[wanted] -= torch.minimum(counts, room[wanted])
        waiting = waiting[found[rows[waiting]] < 0]
