"""Drafting: from a state of the drafter to the drafts of a round, as a chain or as a tree.

Nothing here depends on the value of a tensor in Python: also a tree that is grown by confidence has a fixed number of
drafts and of steps, and where they hang is an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp_extract.drafter.protocol import Drafter, DraftState
from mtp_extract.speculate.trees import AutoTree, Tree

SURE = 0.75
"""The least temperature at which confidence is read.

A base that says its likeliest token says the drafter's first choice more often than it would draw it. Over the 100
prompts that are shipped, on an untuned INT4 drafter, ``auto:8`` yields 4.31 tokens a round at 1, 4.37 at 0.75 and 4.30
at 0.5, a chain of eight 4.09; at 1 the chain is ahead in prose, at 0.75 in no workload.
"""


@dataclass(frozen=True)
class Nodes:
    """A tree for every sequence: the pending token at index 0, then the drafts, parents before their children.

    Where all sequences have the same shape, ``depth``, ``parent``, ``rank`` and ``sees`` have a batch of one.
    """

    tokens: Tensor  # int64 [batch, nodes]
    depth: Tensor  # int64 [batch, nodes], steps from the root
    parent: Tensor  # int64 [batch, nodes]; the root's is the root
    rank: Tensor  # int64 [batch, nodes], the place of the draft among those of its parent, by the drafter's probability
    sees: Tensor  # bool [batch, nodes, nodes]: the column is the row's node itself, or on the way to it

    @classmethod
    def root(cls, pending: Tensor) -> Nodes:
        """The pending tokens [batch] alone."""
        nothing = torch.zeros_like(pending[:1, None])
        return cls(pending[:, None], nothing, nothing, nothing, torch.ones_like(nothing, dtype=torch.bool)[..., None])


@dataclass(frozen=True)
class _Level:
    inner: Tensor | None  # int64, which drafts of the level before have children; None: all
    # int64, of each of these, where its own parent stood among those stepped before; None: in order
    parents: Tensor | None
    most: int  # children of one draft, by rank
    # int64, of each draft of this level, its place in [those stepped, ranks], flat; None: all, in order
    picked: Tensor | None


class FixedTree:
    """A tree's shape as tensors on the device of the tokens, made once."""

    def __init__(self, tree: Tree, device: torch.device) -> None:
        def upload(numbers: Sequence[int]) -> Tensor:
            return torch.tensor(list(numbers), device=device)

        def index(numbers: Sequence[int], of: int) -> Tensor | None:
            return None if list(numbers) == list(range(of)) else upload(numbers)

        nodes = tree.nodes
        self.depth, self.parent = upload([len(path) for path in nodes])[None], upload(tree.parents)[None]
        self.rank = upload([path[-1] if path else 0 for path in nodes])[None]
        self.sees = torch.tensor([[row[: len(column)] == column for column in nodes] for row in nodes], device=device)[
            None
        ]
        self.levels: list[_Level] = []
        before: list[tuple[int, ...]] = [()]
        stepped: list[tuple[int, ...]] = []
        for depth in range(1, tree.depth + 1):
            level = [path for path in nodes if len(path) == depth]
            inner = sorted({path[:-1] for path in level}, key=before.index)
            most = 1 + max(path[-1] for path in level)
            picked = [inner.index(path[:-1]) * most + path[-1] for path in level]
            self.levels.append(
                _Level(
                    index([before.index(path) for path in inner], len(before)),
                    index([stepped.index(path[:-1]) for path in inner], len(stepped)) if stepped else None,
                    most,
                    index(picked, most * len(inner)),
                )
            )
            before, stepped = level, inner


def grow_fixed(drafter: Drafter, state: DraftState, pending: Tensor, tree: FixedTree) -> Nodes:
    """The drafter's likeliest tokens from the ``state`` at the start of a round, after ``pending`` int64 [batch]."""
    tokens = level = pending[:, None]
    parts = [tokens]
    for at in tree.levels:
        stepped = level if at.inner is None else level[:, at.inner]
        if at.parents is not None:
            state = drafter.fork(state, at.parents.expand(len(pending), -1))
        logits, state = drafter.step(state, stepped)
        best = (logits.topk(at.most, dim=-1).indices if at.most > 1 else logits.argmax(-1, keepdim=True)).flatten(1)
        level = (best if at.picked is None else best[:, at.picked.to(best.device)]).to(pending.device)
        parts.append(level)
    return Nodes(torch.cat(parts, dim=1), tree.depth, tree.parent, tree.rank, tree.sees)


def grow_by_confidence(
    drafter: Drafter, state: DraftState, pending: Tensor, tree: AutoTree, widths: Sequence[int], temperature: float
) -> Nodes:
    """The drafts of the greatest values, as :class:`~mtp_extract.speculate.trees.AutoTree` has it.

    Args:
        pending: int64 [batch].
        widths: drafts at each step, :meth:`AutoTree.widths`.
        temperature: at which the base's tokens are drawn; below :data:`SURE` it counts as that.
    """
    batch, device = len(pending), pending.device
    level, value = pending[:, None], torch.zeros(batch, 1, dtype=torch.float64, device=device)
    root = torch.zeros_like(level)
    found = [(level, torch.full_like(value, torch.inf), root, root, root)]
    first, parents = 0, None
    for depth, width in enumerate(widths, start=1):
        if parents is not None:
            state = drafter.fork(state, parents)
        logits, state = drafter.step(state, level)
        scores = logits.float() / max(temperature, SURE)
        top = scores.topk(min(width, scores.shape[-1]), dim=-1)
        # A draft is worth less than its parent, if ever so little, so that it is never taken without it; and however
        # unlikely it is, one below it is worth less again.
        certain = (top.values - scores.logsumexp(-1, keepdim=True)).double().clamp(-1e4, -1e-9).to(device)
        values = (value[..., None] + certain).flatten(1)
        value, kept = values.topk(min(width, values.shape[1]), dim=-1)
        parents, rank = kept // top.values.shape[-1], kept % top.values.shape[-1]
        level = top.indices.to(device).flatten(1).gather(1, kept)
        found.append((level, value, first + parents, rank, torch.full_like(level, depth)))
        first += found[-2][0].shape[1]
    tokens, values, parent, rank, depths = (torch.cat(part, dim=1) for part in zip(*found, strict=True))
    nodes = 1 + min(tree.budget, tokens.shape[1] - 1)
    chosen = values.topk(nodes, dim=-1).indices.sort(dim=-1).values
    place = torch.zeros_like(tokens).scatter_(1, chosen, torch.arange(nodes, device=device).expand(batch, -1))
    parent = place.gather(1, parent.gather(1, chosen))
    return Nodes(
        tokens.gather(1, chosen), depths.gather(1, chosen), parent, rank.gather(1, chosen), _sees(parent, len(widths))
    )


def _sees(parent: Tensor, depth: int) -> Tensor:
    """bool [batch, nodes, nodes], from parents [batch, nodes] in trees of at most ``depth`` steps."""
    batch, nodes = parent.shape
    step = torch.zeros(batch, nodes, nodes, device=parent.device).scatter_(2, parent[..., None], 1.0)
    step = step + torch.eye(nodes, device=parent.device)
    for _ in range((depth - 1).bit_length()):
        # Whoever sees a node sees what that one sees: twice as far each time.
        step = ((step @ step) > 0).float()
    return step > 0
