"""How far a long measurement is, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")

Say = Callable[[str], None]  # called with what is begun, in words
Show = Callable[[str, int, int], None]  # called after each batch: what is done, in words; batches done; batches in all


def silent(*what: object) -> None:
    """Reports nothing."""


def report_each(items: Sequence[_Item], show: Show, part: str) -> Iterator[_Item]:
    """``items``, telling ``show`` after each of them that so much of ``part`` is done."""
    for number, item in enumerate(items, 1):
        yield item
        show(part, number, len(items))
