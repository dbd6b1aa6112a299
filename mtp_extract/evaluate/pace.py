"""How far a long measurement is, and how long it will take at the pace so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """After a batch."""

    part: str  # what is being done, in words
    done: int  # batches of all parts
    total: int  # likewise
    seconds_left: float | None  # of all parts; None while one of them cannot be told


@dataclass
class _Part:
    batches: int
    done: int = 0
    seconds: float = 0.0
    expected: float | None = None  # seconds a batch, before one was measured


class Pace:
    """The batches of each part of a measurement: how many are done, and the time that they took.

    Args:
        batches: by part, how many there are.
        show: told after each batch.
        like: parts whose batches are taken to last as long as those of another part, until one was measured.
        clock: seconds, from anywhere.
    """

    def __init__(
        self,
        batches: Mapping[str, int],
        show: Callable[[Status], None],
        like: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._parts = {name: _Part(count) for name, count in batches.items()}
        self._show, self._like, self._clock = show, like, clock
        self._last = clock()

    def expect(self, part: str, seconds: float) -> None:
        """What all of ``part`` will take, until a batch of it was measured."""
        self._parts[part].expected = seconds / max(self._parts[part].batches, 1)

    def begin(self) -> None:
        """What was done up to here belongs to no batch."""
        self._last = self._clock()

    def done(self, part: str) -> None:
        """One batch more."""
        now, own = self._clock(), self._parts[part]
        own.seconds, own.done = own.seconds + now - self._last, own.done + 1
        own.batches = max(own.batches, own.done)
        self._last = now
        parts = self._parts.values()
        self._show(Status(part, sum(p.done for p in parts), sum(p.batches for p in parts), self.seconds_left))

    def finish(self, part: str) -> None:
        """There are no more batches of ``part`` than were done."""
        self._parts[part].batches = self._parts[part].done

    @property
    def seconds_left(self) -> float | None:
        """Of all parts; None while one of them cannot be told."""
        left = 0.0
        for name, part in self._parts.items():
            pace = self._seconds_a_batch(name)
            if pace is None and part.batches > part.done:
                return None
            left += (pace or 0.0) * (part.batches - part.done)
        return left

    def _seconds_a_batch(self, name: str) -> float | None:
        part = self._parts[name]
        if part.done:
            return part.seconds / part.done
        if part.expected is not None:
            return part.expected
        return self._seconds_a_batch(self._like[name]) if name in self._like else None


def silent(what: object) -> None:
    """Nobody asked to be told."""


def duration(seconds: float) -> str:
    """For people: 1 h 20 min, 3 min 5 s, 12 s."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
