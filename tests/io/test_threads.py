"""Threads that share work: what stops them."""

from __future__ import annotations

import pytest

from mtp_extract.io.threads import on_all_cores


def test_results_are_in_order_and_an_error_is_raised() -> None:
    """Of what was given out, what has not begun by then never does."""
    assert on_all_cores(str, range(100)) == list(map(str, range(100)))
    begun = []
    with pytest.raises(ZeroDivisionError):
        on_all_cores(lambda item: begun.append(item) or 1 // (item - 50), range(100_000))
    assert len(begun) < 100_000
