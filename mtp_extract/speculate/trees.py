"""Trees of drafts of a fixed shape: several drafts for one place, all verified in one forward of the base.

A node is numbered level by level, the pending token first. A draft is named by the ranks on the way to it: ``(1, 0)``
is the drafter's first choice after its second choice after the pending token.

>>> Tree.parse("2x1").nodes
{(): 0, (0,): 1, (1,): 2, (0, 0): 3, (1, 0): 4}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product, takewhile
from typing import TYPE_CHECKING

from mtp_extract.errors import MtpExtractError, escape

if TYPE_CHECKING:  # a command looks at the trees it is asked for before it loads anything
    from torch import Tensor

    from mtp_extract.drafter.protocol import Drafter, DraftState

_MOST_DRAFTS = 1024
_DIGITS = 10


@dataclass(frozen=True)
class Tree:
    """A tree of the same shape in every round.

    Raises:
        MtpExtractError: no draft, or more than 1024.
    """

    widths: tuple[int, ...]  # of each step, the drafts after every draft of the step before

    def __post_init__(self) -> None:
        if not 0 < self.depth <= _MOST_DRAFTS or min(self.widths) < 1 or self.drafts > _MOST_DRAFTS:
            raise MtpExtractError(
                f"expected a tree of at most {_MOST_DRAFTS} drafts, found "
                f"{escape('x'.join(map(str, self.widths)))}; make it smaller, as in 4x2x1"
            )

    @classmethod
    def parse(cls, text: str) -> Tree:
        """``4x2x1``: four drafts after the pending token, two after each of these, one after each of those.

        Raises:
            MtpExtractError: another notation, or too large a tree.
        """
        widths = text.split("x")
        if not all(w.isdecimal() and w.isascii() and len(w) < _DIGITS and int(w) for w in widths):
            raise MtpExtractError(f"expected a tree such as 4x2x1, found {escape(text)}; give drafts after each draft")
        return cls(tuple(map(int, widths)))

    @property
    def drafts(self) -> int:
        """Drafts that the base verifies."""
        return sum(math.prod(self.widths[:depth]) for depth in range(1, self.depth + 1))

    @property
    def depth(self) -> int:
        """Draft steps."""
        return len(self.widths)

    @property
    def width(self) -> int:
        """Of the drafter's choices for one place, how many are looked at."""
        return max(self.widths)

    @cached_property
    def nodes(self) -> dict[tuple[int, ...], int]:
        """The number of each node, by the ranks on the way to it."""
        levels = (product(*map(range, self.widths[:depth])) for depth in range(self.depth + 1))
        return {path: number for number, path in enumerate(chain.from_iterable(levels))}

    @cached_property
    def sees(self) -> list[list[bool]]:
        """[nodes][nodes]: whether the column is the row's node itself, or on the way to it."""
        return [[row[: len(column)] == column for column in self.nodes] for row in self.nodes]

    def to_depth(self, depth: int) -> Tree:
        """The part that lies at most ``depth`` steps from the root; at least 1."""
        return Tree(self.widths[:depth])

    def stands(self, ranks: Sequence[int]) -> int:
        """How many drafts stand where the base's next tokens have these ``ranks`` among the drafter's choices."""
        held = takewhile(lambda pair: 0 <= pair[0] < pair[1], zip(ranks, self.widths, strict=False))
        return sum(1 for _ in held)

    def followed(self, tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
        """The nodes on the way that the base goes, the root first.

        Args:
            tokens: of each node.
            choices: the base's own token after each node.
        """
        way, path = [0], tuple[int, ...]()
        for width in self.widths:
            children = ((*path, rank) for rank in range(width))
            found = next((child for child in children if tokens[self.nodes[child]] == choices[way[-1]]), None)
            if found is None:
                break
            way, path = [*way, self.nodes[found]], found
        return way


def grow(drafter: Drafter, state: DraftState, pending: Tensor, tree: Tree) -> Tensor:
    """The tokens of the tree's nodes, int64 [1, nodes].

    Args:
        state: of ``drafter``, at the start of a round.
        pending: int64 [1, 1].
    """
    import torch

    levels = [pending]
    for depth, width in enumerate(tree.widths, 1):
        logits, state = drafter.step(state, levels[-1])
        best = logits.topk(width, dim=-1).indices if width > 1 else logits.argmax(-1, keepdim=True)
        levels.append(best.flatten(1).to(pending.device))
        if depth < tree.depth:
            state = drafter.fork(state, pending.new_tensor([[n // width for n in range(levels[-1].shape[1])]]))
    return torch.cat(levels, dim=1)
