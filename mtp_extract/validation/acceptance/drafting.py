"""What may be drafted a round, as users ask for it. A command looks at it before it loads anything."""

from __future__ import annotations

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.speculate.adaptive import AdaptiveDrafts
from mtp_extract.speculate.trees import Tree

MOST_STEPS = 64
"""Of the drafter, in a round."""

ADAPTIVE = "adaptive"
"""In the place of a tree: a chain whose K is adapted, up to the largest K that is drafted anyway."""

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
