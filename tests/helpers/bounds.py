"""Limits on time and memory, so that a hang or a bomb is a failure and not a stuck machine."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["bounded"]

_MEMORY = 1 << 30


class TooLongError(BaseException):
    """Not an Exception: nothing that reads files may catch it."""


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLongError


@contextmanager
def bounded(seconds: int, memory: int = _MEMORY) -> Iterator[None]:
    """Run with at most ``seconds`` of wall time and ``memory`` bytes of address space beyond what is mapped already."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, previous)
