"""What is drafted a round: a chain or a tree, and how many of its drafts stand after every token of the texts.

No tensors at import: a command looks at the trees it is asked for before it does anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.speculate.arithmetic import expected_tokens
from mtp_extract.speculate.trees import Tree

if TYPE_CHECKING:
    from mtp_extract.evaluate.agreement import Continuations
    from mtp_extract.speculate.loop import SpeculativeGenerator
    from mtp_extract.speculate.teacher import Agreement, Along

MOST_STEPS = 64
"""Of the drafter, in a round."""

Stands = Mapping[tuple[int, int], int]
"""(Text, position of its pending token) → drafts that stand, where a round begins there."""


def parse_wanted(text: str) -> tuple[str, Tree]:
    """The tree that ``text`` asks for, and what to call it.

    Raises:
        MtpExtractError: another notation, or too large or too deep a tree.
    """
    tree = Tree.parse(text)
    if tree.depth > MOST_STEPS:
        raise MtpExtractError(
            f"expected a tree of at most {MOST_STEPS} steps, found {tree.depth} in {escape(text)}; make it less deep"
        )
    # A number alone is the name of a chain.
    return f"tree of {text}" if text.isdecimal() else text, tree


@dataclass(frozen=True)
class Drafting:
    name: str  # "3" for a chain of three; of a tree "4x2x1"
    what: int | Tree  # a chain's number of drafts, or a tree
    expected: float  # mean tokens of a round by teacher forcing, from every position of the same texts
    stands: Stands

    @property
    def drafts(self) -> int:
        """Drafts that the base verifies a round."""
        return self.what if isinstance(self.what, int) else self.what.drafts

    @property
    def depth(self) -> int:
        """Steps of the drafter a round; of a chain, as many as drafts."""
        return self.what if isinstance(self.what, int) else self.what.depth

    @property
    def tree(self) -> str | None:
        """The tree, as it can be asked for; None of a chain."""
        return None if isinstance(self.what, int) else self.name

    @property
    def paths(self) -> tuple[tuple[int, ...], ...] | None:
        """Of a tree, the ranks on the way to each draft; None of a chain."""
        return None if isinstance(self.what, int) else self.what.paths


def draftings(
    generator: SpeculativeGenerator,
    chains: Sequence[int],
    trees: Mapping[str, Tree],
    continuations: Continuations,
    agreement: Agreement,
    *,
    batch: int,
) -> list[Drafting]:
    """Chains and trees, with what ``agreement``, over these texts, says of them. Ranks are measured for trees."""
    from mtp_extract.evaluate.agreement import measure_ranks

    conditional = [agreement.rate("conditional", step).value for step in range(agreement.steps)]
    held = (agreement.drafts == agreement.targets).int().cumprod(1)
    found = [
        Drafting(str(k), k, expected_tokens(conditional[:k]), _stands(agreement, held[:, :k].sum(1).tolist()))
        for k in chains
    ]
    if trees:
        depth = max(tree.depth for tree in trees.values())
        ranks = measure_ranks(generator.base, generator.drafter, continuations, depth, batch=batch)
        found += [_drafting_of(name, tree, ranks) for name, tree in trees.items()]
    return found


def _drafting_of(name: str, tree: Tree, ranks: Along) -> Drafting:
    rows = ranks.values[:, : tree.depth].tolist()
    held = [tree.stands(row) for row in rows]
    whole = [count for count, row in zip(held, rows, strict=True) if row[-1] >= 0]
    return Drafting(name, tree, 1 + sum(whole) / len(whole) if whole else float("nan"), _stands(ranks, held))


def _stands(found: Agreement | Along, held: Sequence[int]) -> Stands:
    return dict(zip(zip(found.text.tolist(), found.anchor.tolist(), strict=True), held, strict=True))
