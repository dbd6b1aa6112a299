"""What is drafted a round, and how many of the drafts stand after every token of the texts.

No tensors at import: a command looks at the trees it is asked for before it does anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.speculate.adaptive import AdaptiveDrafts
from mtp_extract.speculate.arithmetic import expected_tokens
from mtp_extract.speculate.trees import Tree

if TYPE_CHECKING:
    from mtp_extract.evaluate.agreement import Continuations
    from mtp_extract.speculate.loop import SpeculativeGenerator
    from mtp_extract.speculate.teacher import Agreement, Along

MOST_STEPS = 64
"""Of the drafter, in a round."""

ADAPTIVE = "adaptive"
"""In the place of a tree: a chain whose K is adapted, up to the largest K that is drafted anyway."""

Stands = Mapping[tuple[int, int], int]
"""(Text, position of its pending token) → drafts that stand, where a round begins there."""


Wanted = Tree | AdaptiveDrafts


def parse_wanted(text: str) -> tuple[str, Wanted]:
    """The tree that ``text`` asks for, or an adapted chain, and what to call it.

    Raises:
        MtpExtractError: another notation, or too large or too deep a tree.
    """
    if text == ADAPTIVE:
        return text, AdaptiveDrafts()
    tree = Tree.parse(text)
    if tree.depth > MOST_STEPS:
        raise MtpExtractError(
            f"expected a tree of at most {MOST_STEPS} steps, found {tree.depth} in {escape(text)}; make it less deep"
        )
    # A number alone is the name of a chain.
    return f"tree of {text}" if text.isdecimal() else text, tree


@dataclass(frozen=True)
class Drafting:
    name: str  # "3" for a chain of three; of a tree "4x2x1"; "adaptive"
    what: int | Wanted  # a chain's number of drafts, or how it is adapted, or a tree
    expected: float  # mean tokens of a round by teacher forcing, from every position of the same texts; NaN for none
    stands: Stands

    @property
    def drafts(self) -> int:
        """Most drafts that the base verifies a round."""
        return self.what.drafts if isinstance(self.what, Tree) else self.depth

    @property
    def depth(self) -> int:
        """Most steps of the drafter a round; of a chain, as many as drafts."""
        if isinstance(self.what, AdaptiveDrafts):
            return self.what.most
        return self.what.depth if isinstance(self.what, Tree) else self.what

    @property
    def tree(self) -> str | None:
        """The tree, or "adaptive", as it can be asked for; None of a chain of one length."""
        return None if isinstance(self.what, int) else self.name

    @property
    def paths(self) -> tuple[tuple[int, ...], ...] | None:
        """Of a tree, the ranks on the way to each draft; None of a chain."""
        return self.what.paths if isinstance(self.what, Tree) else None


def draftings(
    generator: SpeculativeGenerator,
    chains: Sequence[int],
    trees: Mapping[str, Wanted],
    continuations: Continuations,
    agreement: Agreement,
    *,
    batch: int,
) -> list[Drafting]:
    """Chains, then trees and what is adapted, with what ``agreement``, over these texts, says of them.

    Ranks are measured for trees.
    """
    from mtp_extract.evaluate.agreement import measure_ranks

    conditional = [agreement.rate("conditional", step) for step in range(agreement.steps)]
    held = (agreement.drafts == agreement.targets).int().cumprod(1)
    found = [
        Drafting(str(k), k, expected_tokens(conditional[:k]), _stands(agreement, held[:, :k].sum(1).tolist()))
        for k in chains
    ]
    fixed = {name: tree for name, tree in trees.items() if isinstance(tree, Tree)}
    if fixed:
        depth = max(tree.depth for tree in fixed.values())
        ranks = measure_ranks(generator.base, generator.drafter, continuations, depth, batch=batch)
        found += [_drafting_of(name, tree, ranks) for name, tree in fixed.items()]
    if ADAPTIVE in trees:
        most = max(chains)
        adapted = AdaptiveDrafts(most)
        found.append(Drafting(ADAPTIVE, adapted, float("nan"), _stands(agreement, held[:, :most].sum(1).tolist())))
    return found


def _drafting_of(name: str, tree: Tree, ranks: Along) -> Drafting:
    rows = ranks.values[:, : tree.depth].tolist()
    held = [tree.stands(row) for row in rows]
    whole = [count for count, row in zip(held, rows, strict=True) if row[-1] >= 0]
    return Drafting(name, tree, 1 + sum(whole) / len(whole) if whole else float("nan"), _stands(ranks, held))


def _stands(found: Agreement | Along, held: Sequence[int]) -> Stands:
    return dict(zip(zip(found.text.tolist(), found.anchor.tolist(), strict=True), held, strict=True))
