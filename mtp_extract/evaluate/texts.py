"""Which texts count, and how many it takes: for whoever makes an interval over texts, or shows that there is none."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

LEAST_TEXTS = 5
"""With fewer, no interval over texts holds the truth as often as it says."""

_TAIL = 48  # tokens: texts that end in as many alike say the same, wherever they came from


def undecided(texts: int) -> str:
    """Why there is no interval over so few ``texts``, in words."""
    return f"not decided: {texts} {'text' if texts == 1 else 'texts'}, at least {LEAST_TEXTS} are needed"


def repeats(texts: Sequence[Sequence[Hashable]]) -> frozenset[int]:
    """Which texts repeat one before them: they are the same, or their last 48 tokens are. They say nothing new."""
    seen: set[tuple[Hashable, ...]] = set()
    found = set()
    for index, text in enumerate(texts):
        tail = tuple(text[-_TAIL:])
        if tail in seen:
            found.add(index)
        seen.add(tail)
    return frozenset(found)


def repeats_note(texts: int, again: int) -> tuple[str, ...]:
    """A note where ``again`` of ``texts`` repeat others; none where none do."""
    if not again:
        return ()
    return (
        f"{texts} texts, {again} of them repeats (the same as another, or the same in their last {_TAIL} tokens), "
        "which are not counted.",
    )
