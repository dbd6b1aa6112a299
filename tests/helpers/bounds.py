"""Limits on work and memory, so that a hang or a bomb is a failure and not a stuck machine.

Work is counted in CPU time, of all threads of the process: a busy machine makes a test wait, and waiting is free.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

HANG = 1800
"""Seconds after which another process that neither works nor ends is given up. Work is never what takes so long."""


class TooLongError(BaseException):
    """Not an Exception: nothing that reads files may catch it."""


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLongError


@contextmanager
def bounded(cpu_seconds: float, memory: int = 1 << 30) -> Iterator[None]:
    """Run with at most so much CPU time, and ``memory`` bytes of address space beyond what is mapped already.

    For the main thread of any process, a pool's workers included. Bounds nest; what an inner one spends does not count
    against the outer one.

    Raises:
        TooLongError: the CPU time is spent.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGPROF, _too_long)
    outer = signal.setitimer(signal.ITIMER_PROF, 0)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory, before[1]))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, previous)
        signal.setitimer(signal.ITIMER_PROF, *outer)


def cpu_limit(seconds: int) -> Callable[[], None]:
    """For ``preexec_fn``: the new process is killed when it has spent so much CPU time."""
    return partial(resource.setrlimit, resource.RLIMIT_CPU, (seconds, seconds))


SPIN = "while True: pass"
