"""Threads that share work: what stops them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mtp_extract.io.threads import on_all_cores


def test_results_are_in_order_and_an_error_is_raised() -> None:
    assert on_all_cores(str, range(100)) == list(map(str, range(100)))
    with pytest.raises(ZeroDivisionError):
        on_all_cores(lambda item: 1 // (item - 50), range(100))


def test_an_interruption_while_work_is_given_out_stops_what_was_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    done, real = [], ThreadPoolExecutor.submit

    def submit(pool: ThreadPoolExecutor, *given: Any) -> Any:
        if given[1] == 100:
            raise KeyboardInterrupt
        return real(pool, *given)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    held = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        on_all_cores(lambda item: held.wait(0.05) or done.append(item), range(200))
    assert len(done) < 100
