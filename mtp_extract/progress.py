"""Report the progress of long work, and ask whether to end it early."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")

BYTES = "bytes"
"""The unit of what is read and written."""


class Reporter:
    """Receives the progress of long work. This class shows nothing; a subclass overrides what it wants to show."""

    def say(self, text: str) -> None:
        """Receive in words what begins."""

    def report_progress(self, part: str, number: int, total: int, unit: str = "") -> None:
        """Receive that ``number`` of ``total`` are done; called from any thread.

        Args:
            part: the part of the work, in words.
            unit: what is counted, such as "batch", or BYTES; empty if ``part`` says it.
        """

    def report_result(self, result: object) -> None:
        """Receive a result that is not complete or not yet written, in case the work ends with an error."""

    def is_stopped(self) -> bool:
        """Return whether the work is to end early, with the best result so far."""
        return False


SILENT = Reporter()


def make_counter(reporter: Reporter, part: str, total: int) -> Callable[[int], None]:
    """Make a function that any thread calls with bytes done, and that reports their sum, at most ``total``."""
    done = 0
    one_at_a_time = threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with one_at_a_time:
            done += count
            reporter.report_progress(part, min(done, total), total, BYTES)

    return advance


def report_each(items: Sequence[_Item], reporter: Reporter, part: str, unit: str = "batch") -> Iterator[_Item]:
    """Yield ``items``, and report after each how many of them are done."""
    for number, item in enumerate(items, 1):
        yield item
        reporter.report_progress(part, number, len(items), unit)
