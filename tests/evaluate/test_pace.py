"""How far a measurement is, by a clock that the test holds."""

from __future__ import annotations

import pytest

from mtp_extract.evaluate.pace import Pace, Status, duration


def test_time_left() -> None:
    now, shown = 0.0, list[Status]()
    pace = Pace({"text": 4, "drafts": 4, "both": 8}, shown.append, {"both": "text"}, lambda: now)

    def batch(part: str, seconds: float) -> float | None:
        nonlocal now
        now += seconds
        pace.done(part)
        return shown[-1].seconds_left

    assert batch("text", 10) is None, "nothing is known of the drafts"
    pace.expect("drafts", 4 * 7)
    assert batch("text", 20) == 2 * 15 + 4 * 7 + 8 * 15
    assert shown[-1] == Status("text", 2, 16, 178.0)
    pace.finish("text")
    assert batch("drafts", 3) == 3 * 3 + 8 * 15
    now += 1000
    pace.begin()
    assert batch("drafts", 5) == 2 * 4 + 8 * 15
    pace.finish("drafts")
    for done in range(1, 9):
        assert batch("both", 2) == 2 * (8 - done)
    assert batch("both", 2) == 0 and shown[-1].done == shown[-1].total == 13


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (185, "3 min 5 s"), (4800, "1 h 20 min")]
)
def test_duration(seconds: float, words: str) -> None:
    assert duration(seconds) == words
