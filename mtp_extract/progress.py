"""Who is told how far long work is, and asked whether it is to go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")

BYTES = "bytes"
"""The unit of what is read and written."""


class Reporter:
    """Told of long work. This one shows nothing; a subclass shows what it overrides."""

    def say(self, text: str) -> None:
        """Hear what is begun, in words."""

    def done(self, part: str, number: int, total: int, unit: str = "") -> None:
        """Hear that ``number`` of ``total`` are done of a part of the work; from any thread.

        Args:
            part: what is done, in words.
            unit: what is counted, such as "batch", or BYTES; empty where ``part`` says it.
        """

    def measured(self, result: object) -> None:
        """Hear a result as far as it is there, before what may fail: writing a report, or the end by an error."""

    def is_stopped(self) -> bool:
        """Whether the work is to end early, with what is best so far."""
        return False


SILENT = Reporter()


def counter(reporter: Reporter, part: str, total: int) -> Callable[[int], None]:
    """What adds up the bytes done of ``part``, from any thread, and reports the sum, ``total`` at the most."""
    done = 0
    one_at_a_time = threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with one_at_a_time:
            done += count
            reporter.done(part, min(done, total), total, BYTES)

    return advance


def report_each(items: Sequence[_Item], reporter: Reporter, part: str, unit: str = "batch") -> Iterator[_Item]:
    """``items``, reporting after each of them that so much of ``part`` is done."""
    for number, item in enumerate(items, 1):
        yield item
        reporter.done(part, number, len(items), unit)
