"""Trees of drafts of a fixed shape: several drafts for one place, all verified in one forward of the base.

A chain is a tree with one draft for each place. Nodes are numbered level by level, the pending token first; those after
one node, the likeliest first.

>>> DraftTree.parse("2x1").parents
[-1, 0, 0, 1, 2]
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from mtp_extract.errors import MtpExtractError, PlanError, escape

_MOST_DRAFTS = 1024


@dataclass(frozen=True)
class DraftTree:
    """A tree of the same shape in every round."""

    widths: tuple[int, ...]  # of each step, the drafts after every draft of the step before; none drafts nothing

    @classmethod
    def parse(cls, text: str) -> DraftTree:
        """``4x2x1``: four drafts after the pending token, two after each of these, one after each of those.

        Raises:
            PlanError: another notation, or too large a tree.
        """
        is_tree = re.fullmatch("[1-9][0-9]{,3}(x[1-9][0-9]{,3}){,63}", text)
        tree = cls(tuple(map(int, text.split("x"))) if is_tree else ())
        if not 0 < tree.drafts <= _MOST_DRAFTS:
            what = f"a tree such as 4x2x1, of at most {_MOST_DRAFTS} drafts, found {escape(text)}"
            raise PlanError(f"expected {what}. Give drafts after each draft.")
        return tree

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
        return max(self.widths, default=1)

    @cached_property
    def parents(self) -> list[int]:
        """Of every node, the node it comes after; -1 of the pending token."""
        parents = [-1]
        level = range(1)
        for width in self.widths:
            parents += [node for node in level for _ in range(width)]
            level = range(level.stop, len(parents))
        return parents

    @cached_property
    def sees(self) -> list[list[bool]]:
        """[nodes][nodes]: whether the column's node is the row's node itself, or an ancestor of it."""
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            rows.append([*rows[parent]] if node else [False] * len(self.parents))
            rows[node][node] = True
        return rows

    def require_tokens(self, vocabulary: int) -> None:
        """Raise MtpExtractError where a base with so many tokens has fewer choices for a place than this tree holds."""
        if self.width > vocabulary:
            raise MtpExtractError(
                f"expected at most {vocabulary} drafts for one place, as many as the base has tokens, found "
                f"{self.width}; make the tree narrower",
                remedies=("trees",),
            )

    def to_depth(self, depth: int) -> DraftTree:
        """The part that lies at most ``depth`` steps from the root."""
        return self if depth >= self.depth else DraftTree(self.widths[:depth])

    def stands(self, ranks: Sequence[int]) -> int:
        """How many drafts stand where the base's next tokens have these ``ranks`` among the drafter's choices."""
        in_tree = (0 <= rank < width for rank, width in zip(ranks, self.widths, strict=False))
        return sum(1 for _ in takewhile(bool, in_tree))

    def followed(self, tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
        """The accepted path of nodes, the root first, by each node's token and the base's choice after it."""
        path = [0]
        for node, parent in enumerate(self.parents):
            if parent == path[-1] and tokens[node] == choices[parent]:
                path.append(node)
        return path
