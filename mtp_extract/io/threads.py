"""Share work among threads, and stop it by signals."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable
from functools import cache
from types import FrameType
from typing import NoReturn, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_signals: list[int] = []

# Options of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


class Interrupted(BaseException):
    """A signal, whose number is the argument, asked the program to stop.

    Not KeyboardInterrupt, which typer turns into a bare exit.
    """


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal: raise Interrupted, so that ``finally`` blocks remove half-written output."""
    _signals.append(number)
    raise Interrupted(number)


def forget_interruptions() -> None:
    _signals.clear()


def check_interrupted() -> None:
    """Raise Interrupted if a signal has come: Python drops the exception of a handler that runs in a finalizer."""
    if _signals:
        raise Interrupted(_signals[0])


@cache
def _keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next allocation.

    By default glibc returns the arrays of a weight's chunk to the system, which clears every page again for the next
    chunk: that took up to half of the time of an insertion. Other C libraries have no such options.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # Arrays of a chunk are smaller than the first, and a thread frees less than the second at once.
        mallopt(_M_MMAP_THRESHOLD, 8 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def map_on_all_cores(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """Call ``work`` for each of ``items`` in threads, and return the results in order.

    After an exception no further call is started.

    Raises:
        Interrupted: a signal has come since the program began, so the results may be incomplete.
    """
    # Imported here as it loads logging, which takes time.
    from concurrent.futures import ThreadPoolExecutor

    _keep_freed_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        results = list(pool.map(work, items))
    check_interrupted()
    return results
