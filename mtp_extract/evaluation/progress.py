"""How far a long measurement is, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

Say = Callable[[str], None]
"""Called with what is begun, in words."""

Show = Callable[[str, int, int], None]
"""Called after each batch: what is being done, in words; batches done; batches in all."""


def silent(*what: object) -> None:
    """Nobody asked to be told."""


def counter(show: Show, part: str, total: int) -> Callable[[], None]:
    """What to call after each batch of ``part``, of which there are ``total``."""
    done = count(1)
    return lambda: show(part, next(done), total)
