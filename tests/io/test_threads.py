"""Threads that share work: what stops them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mtp_extract.io.threads import run_all


def test_an_interruption_while_work_is_given_out_stops_what_was_begun() -> None:
    stop, ended = threading.Event(), []

    def jobs() -> Iterator[Callable[[], None]]:
        yield lambda: ended.append(stop.wait(60))
        raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool, pytest.raises(KeyboardInterrupt):
        run_all(pool, jobs(), stop.set)
    assert ended in ([], [True])
