"""Threads that share work: what stops them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mtp_extract.io.threads import Job, Turns, on_all_cores


def test_an_interruption_while_work_is_given_out_stops_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, real = threading.Event(), ThreadPoolExecutor.submit

    def submit(pool: ThreadPoolExecutor, *given: Any) -> Any:
        if begun.is_set():
            raise KeyboardInterrupt
        future = real(pool, *given)
        begun.wait(60)
        return future

    def endless() -> Turns[None]:
        while True:
            begun.set()
            yield

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    jobs: list[Job[None]] = [Job(endless()), Job(endless())]
    with pytest.raises(KeyboardInterrupt):
        on_all_cores(jobs)
