"""Trees as they are asked for. No tensors here: a command looks at them before it does anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.speculate.trees import AutoTree, Tree, budget_of, parse_tree

_BEST = "best:"
_MOST_STEPS = 64


@dataclass(frozen=True)
class BestTree:
    """The tree of at most ``budget`` drafts that is expected to yield most, by ranks that are still to be measured."""

    budget: int


Wanted = Tree | AutoTree | BestTree
"""A tree, as it is asked for."""


def parse_wanted(text: str) -> tuple[str, Wanted]:
    """What ``text`` asks for, and what to call it: ``best:14``, or as :func:`~mtp_extract.speculate.parse_tree` has it.

    Raises:
        MtpExtractError: another notation, or too large or too deep a tree.
    """
    if text.startswith(_BEST):
        return text, BestTree(budget_of(text, _BEST))
    tree = parse_tree(text)
    if isinstance(tree, Tree) and tree.depth > _MOST_STEPS:
        raise MtpExtractError(
            f"expected a tree of at most {_MOST_STEPS} steps, found {tree.depth} in {escape(text)}; make it less deep"
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
