"""Work that several threads share, and signals that stop it."""

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

# Options of mallopt(3), by the numbers that glibc's malloc.h gives them.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


class Interrupted(BaseException):
    """A signal asked the program to stop; its number is the argument.

    Not KeyboardInterrupt, which typer turns into a bare exit.
    """


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal: leave through the ``finally`` blocks that remove half-written output."""
    _signals.append(number)
    raise Interrupted(number)


def forget_interruptions() -> None:
    """Begin anew: no signal has come."""
    _signals.clear()


def check_interrupted() -> None:
    """Raise an Interrupted that was lost: what a signal's handler raises in a finalizer is printed and dropped."""
    if _signals:
        raise Interrupted(_signals[0])


@cache
def _keep_freed_memory() -> None:
    """Have the C library keep what threads free for what they allocate next.

    glibc gives the arrays of a chunk of a weight back to the system as soon as they are free, and the system clears
    every page of them again for the next chunk: up to half of the time of an insertion. Other C libraries have no such
    options.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # No array of a chunk is larger than the first, and no thread frees as much at once as the second.
        mallopt(_M_MMAP_THRESHOLD, 8 << 20)
        mallopt(_M_TRIM_THRESHOLD, 64 << 20)


def on_all_cores(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """What ``work`` makes of each of ``items``, in order; once one has failed, none is begun any more.

    Raises:
        Interrupted: a signal came, at any time since the program began: what was made is not to be used.
    """
    # It loads logging: for who has several things to do at once.
    from concurrent.futures import ThreadPoolExecutor

    _keep_freed_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        results = list(pool.map(work, items))
    check_interrupted()
    return results
