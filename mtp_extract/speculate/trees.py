"""Trees of drafts: their shapes, what one is expected to yield, and which is best. No tensors here.

A tree drafts several tokens for one place, so that the base's own is more often among them, and the base verifies all
of them in one forward. A draft is named by the ranks on the way to it: ``(0,)`` is the drafter's first choice after
the pending token, ``(1, 0)`` its first choice after its second.

>>> Tree.parse("2x1").paths
((0,), (1,), (0, 0), (1, 0))
>>> round(expected_length(Tree.parse("2x1"), [[0.7, 0.1], [0.6]]), 2)
2.28
>>> best_tree([[0.7, 0.2], [0.6, 0.1]], 3).paths
((0,), (1,), (0, 0))
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.speculate.numbers import count

_MOST_DRAFTS = 1024
_AUTO, _PATHS = "auto:", "paths:"
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
        if not all(_is_number(width, least=1) for width in widths):
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
    def notation(self) -> str:
        """``paths:`` and the ways down to the leaves, as :func:`parse_tree` reads it.

        >>> Tree(((0,), (1,), (0, 0))).notation
        'paths:1,0.0'
        """
        inner = {path[:-1] for path in self.paths}
        return _PATHS + ",".join(".".join(map(str, path)) for path in self.paths if path not in inner)

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
    def parents(self) -> tuple[int, ...]:
        """Of each node, the index of its parent; the root is its own."""
        index = {path: place for place, path in enumerate(self.nodes)}
        return tuple(index[path[:-1]] for path in self.nodes)

    def to_depth(self, depth: int) -> Tree:
        """What of it lies at most ``depth`` steps from the root; at least 1."""
        return self if depth >= self.depth else Tree(tuple(path for path in self.paths if len(path) <= depth))


@dataclass(frozen=True)
class AutoTree:
    """A tree grown anew in every round, where the drafter is confident.

    The value of a draft is the product of the drafter's probabilities on the way to it, at the temperature of the base
    (:data:`~mtp_extract.speculate.growing.SURE` when it is greedy). Of all drafts that could be made, the ``budget``
    with the greatest values are verified; with the limits below, of those within them.
    """

    budget: int = 8  # drafts that the base verifies
    depth: int = 8  # most draft steps
    width: int = 8  # most drafts a step goes on from

    def __post_init__(self) -> None:
        for name in ("budget", "depth", "width"):
            count(name, getattr(self, name), least=1)
        if self.budget > _MOST_DRAFTS:
            raise MtpExtractError(f"expected a budget of at most {_MOST_DRAFTS} drafts, found {self.budget}; lower it")

    @property
    def drafts(self) -> int:
        """Most drafts that the base verifies: the budget, where the limits leave so many."""
        return min(self.budget, sum(self.widths(self.depth)))

    def widths(self, depth: int) -> list[int]:
        """Drafts at each of the first ``depth`` steps that can be among the best.

        A draft at step d has d - 1 ancestors, and each is worth more than it.
        """
        return [min(self.width, self.budget - step) for step in range(min(depth, self.depth, self.budget))]


def parse_tree(text: str) -> Tree | AutoTree:
    """``4x2x1``; ``auto:8`` for a tree of eight drafts that is grown by the drafter's confidence; or the ways down to
    the leaves of any tree, ``paths:1,0.0``.

    Raises:
        MtpExtractError: another notation, or too large a tree.
    """
    if text.startswith(_AUTO):
        return AutoTree(budget_of(text, _AUTO))
    if text.startswith(_PATHS):
        leaves = [path.split(".") for path in text.removeprefix(_PATHS).split(",")]
        if not all(len(path) <= _MOST_DRAFTS and all(map(_is_number, path)) for path in leaves):
            raise MtpExtractError(f"expected a tree such as {_PATHS}1,0.0, found {escape(text)}; give ranks")
        paths = [tuple(map(int, path)) for path in leaves]
        return Tree(tuple({path[:depth] for path in paths for depth in range(1, len(path) + 1)}))
    return Tree.parse(text)


def budget_of(text: str, kind: str) -> int:
    """The number of drafts after ``kind``, as in ``auto:8``.

    Raises:
        MtpExtractError: there is none, or too large a one.
    """
    budget = text.removeprefix(kind)
    if not (_is_number(budget, least=1) and int(budget) <= _MOST_DRAFTS):
        raise MtpExtractError(
            f"expected a tree such as {kind}8, found {escape(text)}; give a number of drafts, 1 to {_MOST_DRAFTS}"
        )
    return int(budget)


def _is_number(text: str, least: int = 0) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < _DIGITS and int(text) >= least


def _share(shares: Sequence[Sequence[float]], path: Sequence[int]) -> float:
    """The chance that the base's token is the last of ``path``, given those before it are the base's."""
    at = shares[len(path) - 1] if len(path) <= len(shares) else ()
    return at[path[-1]] if path[-1] < len(at) else 0.0


def expected_length(tree: Tree, shares: Sequence[Sequence[float]]) -> float:
    """Mean tokens a round: 1, and for each draft the chance that it and all before it are the base's.

    Args:
        shares: by step, then rank: how often the base's token has that rank, given that all before it were drafted.
            What was not measured counts as never.
    """
    reached: dict[tuple[int, ...], float] = {(): 1.0}
    for path in tree.paths:
        reached[path] = reached[path[:-1]] * _share(shares, path)
    return math.fsum(reached.values())


def best_tree(shares: Sequence[Sequence[float]], budget: int, depth: int | None = None) -> Tree:
    """The tree of at most ``budget`` drafts with the greatest :func:`expected_length`.

    A draft is never more likely to be reached than its parent, so taking the likeliest that can be added next, again
    and again, finds it. Drafts that are never the base's are left out, but for one.

    >>> best_tree([[0.9, 0.05], [0.8, 0.1]], 2).paths
    ((0,), (0, 0))

    Args:
        shares: as of :func:`expected_length`.
        budget: drafts, at least 1.
        depth: most steps; None takes as many as were measured.
    """
    count("budget", budget, least=1)
    deepest = len(shares) if depth is None else min(depth, len(shares))
    waiting: list[tuple[float, int, tuple[int, ...]]] = []
    chosen: list[tuple[int, ...]] = []

    def offer(parent: tuple[int, ...], reached: float) -> None:
        if len(parent) < deepest:
            for rank, share in enumerate(shares[len(parent)]):
                path = (*parent, rank)
                heapq.heappush(waiting, (-reached * share, len(path), path))

    offer((), 1.0)
    while waiting and len(chosen) < budget:
        negative, _, path = heapq.heappop(waiting)
        if chosen and not negative:
            break
        chosen.append(path)
        offer(path, -negative)
    return Tree(tuple(chosen))


def rank_shares(rounds: Iterable[tuple[Sequence[int], int]], width: int) -> list[list[float]]:
    """How often the base's token had each rank, by step, in rounds that drafted a wide tree.

    Args:
        rounds: of each, the ranks of the drafts that were accepted, and the steps that were drafted.

    Returns:
        By step, then rank: of the rounds that reached and drafted the step, the share; as long as any round was.
    """
    reached: list[int] = []
    held: list[list[int]] = []
    for ranks, drafted in rounds:
        while len(reached) < drafted:
            reached.append(0)
            held.append([0] * width)
        for step in range(min(drafted, len(ranks) + 1)):
            reached[step] += 1
            if step < len(ranks) and ranks[step] < width:
                held[step][ranks[step]] += 1
    return [[n / tried if tried else 0.0 for n in row] for tried, row in zip(reached, held, strict=True)]
