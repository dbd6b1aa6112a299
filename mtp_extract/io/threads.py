"""Work that several threads share, and work that one thread does in turn."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from itertools import chain
from types import FrameType
from typing import Generic, NoReturn, TypeVar

_T = TypeVar("_T")
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
    """Raise an interruption that has come and was lost.

    Python runs a signal's handler wherever the main thread is. In a finalizer or a callback of a weak reference, what
    it raises is printed and dropped.

    Raises:
        Interrupted: a signal came.
    """
    if _signals:
        raise Interrupted(_signals[0])


Turns = Generator[None, None, _T]
"""Work that stops now and then, and has its result at the end."""


@dataclass(frozen=True)
class Job(Generic[_T]):
    """Work for one of several threads.

    Attributes:
        size: how much work it is, beside others.
        table: equal for jobs that read one table, which one thread does in turn; None for one by itself.
    """

    work: Turns[_T]
    size: int = 0
    table: object = None


def cores() -> int:
    """Threads to compute with."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_turn(jobs: Iterable[Turns[_T]], stop: threading.Event | None = None) -> list[_T]:
    """The results of ``jobs``, done a step of each at a time: what all of them read of one place is read once.

    Args:
        stop: ends them between two steps, without results.
    """
    found: dict[int, _T] = {}

    def finished(index: int, job: Turns[_T]) -> Iterator[None]:
        found[index] = yield from job

    waiting = [finished(index, job) for index, job in enumerate(jobs)]
    unfinished = object()
    while waiting and not (stop is not None and stop.is_set()):
        waiting = [job for job in waiting if next(job, unfinished) is not unfinished]
    return [found[index] for index in sorted(found)]


def on_all_cores(jobs: Iterable[Job[_T]]) -> list[_T]:
    """The results of ``jobs``; an error in one stops all, between two steps.

    Raises:
        Interrupted: a signal came, at any time since the program began: what ``jobs`` made is not to be used.
    """
    given, stop = list(jobs), threading.Event()
    groups: dict[object, list[int]] = defaultdict(list)
    for index, job in enumerate(given):
        groups[index if job.table is None else (job.table,)].append(index)
    # The longest first: it decides when the last thread ends.
    order = sorted(groups.values(), key=lambda group: -sum(given[index].size for index in group))
    futures: list[Future[list[_T]]] = []
    with ThreadPoolExecutor(cores()) as pool:
        try:
            futures.extend(pool.submit(in_turn, [given[index].work for index in group], stop) for group in order)
            wait_for(futures, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    check_interrupted()
    # Where one has failed, others have no results.
    if failed := next(filter(None, (future.exception() for future in futures)), None):
        raise failed
    by_index = dict(zip(chain(*order), chain(*(future.result() for future in futures)), strict=True))
    return [by_index[index] for index in range(len(given))]
