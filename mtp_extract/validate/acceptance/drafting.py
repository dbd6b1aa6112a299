"""What is drafted a round: a chain or a tree, and what it is expected to yield."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtp_extract.evaluate.agreement import Continuations, measure_ranks
from mtp_extract.speculate.adaptive import DraftLength
from mtp_extract.speculate.arithmetic import expected_tokens
from mtp_extract.speculate.generate import SpeculativeGenerator
from mtp_extract.speculate.teacher import Ranks
from mtp_extract.speculate.trees import AutoTree, Tree, best_tree, expected_length
from mtp_extract.validate.acceptance.wanted import Wanted, steps_to_rank


@dataclass(frozen=True)
class Drafting:
    """What is drafted a round."""

    name: str  # of a chain its number of drafts, of a tree what it was asked for as
    what: int | Tree | AutoTree  # a chain's number of drafts, or a tree
    # mean accepted length: of a chain from agreement, of a tree from ranks; None for one that is grown
    expected: float | None
    chosen_on: tuple[int, ...] = ()  # indices of the texts whose ranks chose the tree; empty where none did

    @property
    def drafts(self) -> int:
        """Most that the base verifies a round."""
        return DraftLength(self.what).verified

    @property
    def depth(self) -> int:
        """Most steps of the drafter a round."""
        return DraftLength(self.what).most

    @property
    def tree(self) -> str | None:
        """The tree, so that it can be asked for again; None of a chain."""
        if isinstance(self.what, int):
            return None
        return self.what.notation if isinstance(self.what, Tree) and self.chosen_on else self.name

    @property
    def paths(self) -> tuple[tuple[int, ...], ...] | None:
        """Of a tree of fixed shape: the ranks on the way to each draft."""
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
        generator: the drafter with its base.
        chains: numbers of drafts.
        trees: by name, what is asked for.
        continuations: the base's own text.
        conditional: acceptance by step of a chain, from agreement over these texts.
        batch: texts at a time.
    """
    found = [Drafting(str(drafts), drafts, expected_tokens(conditional[:drafts])) for drafts in chains]
    steps, ranks = steps_to_rank(trees.values(), max(AutoTree.depth, *chains)), None
    if steps:
        ranks = measure_ranks(generator.base, generator.drafter, continuations, steps, batch=batch)
    rows = _choosing(continuations)
    return found + [_planted(name, tree, ranks, rows) for name, tree in trees.items()]


def _planted(name: str, wanted: Wanted, ranks: Ranks | None, rows: Sequence[int]) -> Drafting:
    if isinstance(wanted, AutoTree):
        return Drafting(name, wanted, None)
    assert ranks is not None
    if isinstance(wanted, Tree):
        return Drafting(name, wanted, _expected(wanted, ranks))
    tree = best_tree(ranks.of(rows).shares(wanted.budget), wanted.budget)
    return Drafting(name, tree, _expected(tree, ranks), tuple(rows))


def _choosing(continuations: Continuations) -> list[int]:
    """Every second text of each workload, of those that can be drafted from: they choose, the others are left."""
    usable = set(continuations.usable)
    kept = [[index for index in continuations.of_workload(name) if index in usable] for name in continuations.workloads]
    return sorted(index for rows in kept for index in rows[::2])


def _expected(tree: Tree, ranks: Ranks) -> float:
    return expected_length(tree, ranks.shares(tree.width))
