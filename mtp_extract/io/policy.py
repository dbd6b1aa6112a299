"""How patient to be with a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime

__all__ = ["Policy", "Progress", "retry_after"]

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True)
class Policy:
    """Limits of one download. Times in seconds.

    Attributes:
        connect_timeout: to open a connection.
        read_timeout: between two pieces of an answer; None for the Hub's own setting
            (``HF_HUB_DOWNLOAD_TIMEOUT``).
        failures: how often a request may fail before giving up; a request that brought ``forgiven_bytes``
            sets the count back.
        first_failures: the same before the server has answered at all: who has no network learns it soon.
        backoff: wait after the first failure; doubled after each further one, up to ``longest_backoff``.
        longest_wait: the most that a ``Retry-After`` is obeyed; a server that wants more ends the run.
        slow_window, slow_bytes: an answer that brings fewer bytes in a window counts as failed.
        sleep, clock: for tests.
    """

    connect_timeout: float = 10.0
    read_timeout: float | None = None
    failures: int = 5
    first_failures: int = 2
    backoff: float = 0.5
    longest_backoff: float = 8.0
    longest_wait: float = 120.0
    slow_window: float = 15.0
    slow_bytes: int = 32 << 10
    slow_failures: int = 2
    forgiven_bytes: int = 1 << 20
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def wait(self, failures: int) -> float:
        """Seconds to wait after failure number ``failures``."""
        return min(self.longest_backoff, self.backoff * 2.0 ** (failures - 1))


def retry_after(value: str | None) -> float | None:
    """Seconds that a ``Retry-After`` header asks for, a number or a date; None if it cannot be read."""
    if value is None:
        return None
    if value.strip().isdigit():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=timezone.utc)
    return max(0.0, (date - datetime.now(timezone.utc)).total_seconds())
