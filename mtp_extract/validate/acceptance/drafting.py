"""What is drafted a round: a chain or a tree, as it is asked for, and what it is expected to yield.

No tensors at import: a command looks at the trees it is asked for before it does anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.speculate.adaptive import DraftLength
from mtp_extract.speculate.arithmetic import expected_tokens
from mtp_extract.speculate.trees import AutoTree, Tree, best_tree, budget_of, expected_length, parse_tree

if TYPE_CHECKING:
    from mtp_extract.evaluate.agreement import Continuations
    from mtp_extract.speculate.generate import SpeculativeGenerator
    from mtp_extract.speculate.teacher import Ranks

MOST_STEPS = 64
"""Of the drafter, in a round."""

_BEST = "best:"


@dataclass(frozen=True)
class BestTree:
    """The tree of at most ``budget`` drafts that is expected to yield most, by ranks that are still to be measured."""

    budget: int


Wanted = Tree | AutoTree | BestTree
"""A tree, as it is asked for."""


def parse_wanted(text: str) -> tuple[str, Wanted]:
    """What ``text`` asks for, and what to call it: ``best:14``, or as :func:`~mtp_extract.speculate.trees.parse_tree`.

    Raises:
        MtpExtractError: another notation, or too large or too deep a tree.
    """
    if text.startswith(_BEST):
        return text, BestTree(budget_of(text, _BEST))
    tree = parse_tree(text)
    if isinstance(tree, Tree) and tree.depth > MOST_STEPS:
        raise MtpExtractError(
            f"expected a tree of at most {MOST_STEPS} steps, found {tree.depth} in {escape(text)}; make it less deep"
        )
    # A number is the name of a chain.
    return (tree.notation if isinstance(tree, Tree) and text.isdecimal() else text), tree


def steps_to_rank(wanted: Iterable[Wanted], most: int) -> int:
    """Steps to measure ranks of: as deep as fixed trees are, and ``most`` for the best; 0 where none are needed."""
    steps = [0]
    for tree in wanted:
        if isinstance(tree, Tree):
            steps.append(tree.depth)
        elif isinstance(tree, BestTree):
            steps.append(min(tree.budget, most))
    return max(steps)


@dataclass(frozen=True)
class Drafting:
    name: str  # "3" for a chain of three; of a tree what it was asked for as: "4x2x1", "auto:8", "best:14"
    what: int | Tree | AutoTree  # a chain's number of drafts, or a tree
    # mean accepted length by teacher forcing over the same texts: of a chain from agreement, of a tree from the ranks
    # of the base's tokens; None for one that is grown
    expected: float | None
    chosen_on: tuple[int, ...] = ()  # indices of the texts whose ranks chose the tree; empty where none did

    @property
    def drafts(self) -> int:
        """Most that the base verifies a round."""
        return DraftLength(self.what).verified

    @property
    def depth(self) -> int:
        """Most steps of the drafter a round; of a chain, as many as drafts."""
        return DraftLength(self.what).most

    @property
    def tree(self) -> str | None:
        """The tree, so that it can be asked for again; None of a chain."""
        if isinstance(self.what, int):
            return None
        return self.what.notation if isinstance(self.what, Tree) and self.chosen_on else self.name

    @property
    def paths(self) -> tuple[tuple[int, ...], ...] | None:
        """Of a tree of fixed shape, the ranks on the way to each draft; None of any other, and of a chain."""
        return self.what.paths if isinstance(self.what, Tree) else None


def draftings(
    generator: SpeculativeGenerator,
    chains: Sequence[int],
    trees: Mapping[str, Wanted],
    continuations: Continuations,
    conditional: Sequence[float],
    *,
    batch: int,
) -> list[Drafting]:
    """Chains and trees as they will be drafted.

    Ranks, where they are needed, are measured over all texts, after every token. Those of every second text of a
    workload choose the best tree, so that the others show what it yields where it was not chosen.

    Args:
        conditional: acceptance by step of a chain, from agreement over these texts.
    """
    from mtp_extract.evaluate.agreement import measure_ranks

    found = [Drafting(str(drafts), drafts, expected_tokens(conditional[:drafts])) for drafts in chains]
    steps, ranks = steps_to_rank(trees.values(), max(AutoTree.depth, *chains)), None
    if steps:
        ranks = measure_ranks(generator.base, generator.drafter, continuations, steps, batch=batch)
    rows = _choosing(continuations)
    return found + [_drafting_of(name, tree, ranks, rows) for name, tree in trees.items()]


def _drafting_of(name: str, wanted: Wanted, ranks: Ranks | None, choosing: Sequence[int]) -> Drafting:
    if isinstance(wanted, AutoTree):
        return Drafting(name, wanted, None)
    assert ranks is not None
    if isinstance(wanted, Tree):
        return Drafting(name, wanted, expected_length(wanted, ranks.shares(wanted.width)))
    tree = best_tree(ranks.of(choosing).shares(wanted.budget), wanted.budget)
    return Drafting(name, tree, expected_length(tree, ranks.shares(tree.width)), tuple(choosing))


def _choosing(continuations: Continuations) -> list[int]:
    """Every second text of each workload, of those that can be drafted from: they choose, the others are left."""
    usable = set(continuations.usable)
    kept = [[index for index in continuations.of_workload(name) if index in usable] for name in continuations.workloads]
    return sorted(index for rows in kept for index in rows[::2])
