"""Trees of drafts of a fixed shape: several drafts for one place, all verified in one forward of the base.

A draft is named by the ranks on the way to it: ``(0,)`` is the drafter's first choice after the pending token,
``(1, 0)`` its first choice after its second.

>>> Tree.parse("2x1").paths
((0,), (1,), (0, 0), (1, 0))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.speculate.numbers import count

if TYPE_CHECKING:  # a command looks at the trees it is asked for before it loads anything
    from torch import Tensor

    from mtp_extract.drafter.protocol import Drafter, DraftState

_MOST_DRAFTS = 1024
_DIGITS = 10


@dataclass(frozen=True)
class Tree:
    """A tree of the same shape in every round.

    Raises:
        MtpExtractError: no draft, one twice, one without its parent, or more than 1024.
    """

    # the ranks on the way to each draft; those nearer to the root first, each after its parent
    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = set(self.paths) | {()}
        if not 1 <= len(self.paths) <= _MOST_DRAFTS or len(known) <= len(self.paths):
            raise MtpExtractError(
                f"expected a tree of 1 to {_MOST_DRAFTS} different drafts, found {len(self.paths)}; as in 4x2x1"
            )
        for path in self.paths:
            for rank in path:
                count("a rank", rank, least=0)
            if path[:-1] not in known:
                raise MtpExtractError(f"expected the parent of draft {path} in the tree, found none; add {path[:-1]}")
        object.__setattr__(self, "paths", tuple(sorted(self.paths, key=lambda path: (len(path), path))))

    @classmethod
    def parse(cls, text: str) -> Tree:
        """``4x2x1``: four drafts after the pending token, two after each of these, one after each of those.

        Raises:
            MtpExtractError: another notation, or too large a tree.
        """
        widths = text.split("x")
        if not all(w.isdecimal() and w.isascii() and len(w) < _DIGITS and int(w) for w in widths):
            raise MtpExtractError(f"expected a tree such as 4x2x1, found {escape(text)}; give drafts after each draft")
        paths: list[tuple[int, ...]] = []
        level: list[tuple[int, ...]] = [()]
        for width in map(int, widths):
            if len(paths) + len(level) * width > _MOST_DRAFTS:
                raise MtpExtractError(
                    f"expected a tree of at most {_MOST_DRAFTS} drafts, found {escape(text)}; make it smaller"
                )
            level = [(*path, rank) for path in level for rank in range(width)]
            paths += level
        return cls(tuple(paths))

    @property
    def drafts(self) -> int:
        """Drafts that the base verifies."""
        return len(self.paths)

    @property
    def depth(self) -> int:
        """Draft steps."""
        return len(self.paths[-1])

    @property
    def width(self) -> int:
        """Of the drafter's choices for one place, how many are looked at."""
        return 1 + max(path[-1] for path in self.paths)

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The root, which is the pending token, and the drafts."""
        return ((), *self.paths)

    @cached_property
    def sees(self) -> list[list[bool]]:
        """[nodes][nodes]: whether the column is the row's node itself, or on the way to it."""
        return [[row[: len(column)] == column for column in self.nodes] for row in self.nodes]

    def to_depth(self, depth: int) -> Tree:
        """What of it lies at most ``depth`` steps from the root; at least 1."""
        return self if depth >= self.depth else Tree(tuple(path for path in self.paths if len(path) <= depth))

    def stands(self, ranks: Sequence[int]) -> int:
        """How many drafts stand where the base's next tokens have these ``ranks`` among the drafter's choices."""
        held = 0
        while held < len(ranks) and tuple(ranks[: held + 1]) in self._known:
            held += 1
        return held

    @cached_property
    def _known(self) -> frozenset[tuple[int, ...]]:
        return frozenset(self.paths)


def grow(drafter: Drafter, state: DraftState, pending: Tensor, tree: Tree) -> list[Tensor]:
    """The pending token int64 [1, 1], and of each step the drafts int64 [1, n], in the order of ``tree.nodes``.

    Args:
        state: of ``drafter``, at the start of a round.
    """
    levels, stepped = [pending], list[tuple[int, ...]]()
    before: list[tuple[int, ...]] = [()]
    for depth in range(1, tree.depth + 1):
        nodes = [path for path in tree.paths if len(path) == depth]
        parents = list(dict.fromkeys(path[:-1] for path in nodes))
        if stepped:
            state = drafter.fork(state, pending.new_tensor([[stepped.index(path[:-1]) for path in parents]]))
        logits, state = drafter.step(state, levels[-1][:, [before.index(path) for path in parents]])
        width = 1 + max(path[-1] for path in nodes)
        best = logits.topk(width, dim=-1).indices if width > 1 else logits.argmax(-1, keepdim=True)
        places = [parents.index(path[:-1]) * width + path[-1] for path in nodes]
        levels.append(best.flatten(1).to(pending.device)[:, places])
        before, stepped = nodes, parents
    return levels


def followed(tree: Tree, tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
    """The nodes on the way that the base goes, the root first.

    Args:
        tokens: of each node.
        choices: the base's own token after each node.
    """
    way = [0]
    while True:
        under = (n for n, path in enumerate(tree.nodes) if path and path[:-1] == tree.nodes[way[-1]])
        found = next((node for node in under if tokens[node] == choices[way[-1]]), None)
        if found is None:
            return way
        way.append(found)
