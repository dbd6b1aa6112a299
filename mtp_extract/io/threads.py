"""Work that several threads share, and signals that stop it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from types import FrameType
from typing import NoReturn, TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_signals: list[int] = []


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


def on_all_cores(work: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    """What ``work`` makes of each of ``items``, in order; once one has failed, none is begun any more.

    Raises:
        Interrupted: a signal came, at any time since the program began: what was made is not to be used.
    """
    # It loads logging: for who has several things to do at once.
    from concurrent.futures import ThreadPoolExecutor

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        results = list(pool.map(work, items))
    check_interrupted()
    return results
