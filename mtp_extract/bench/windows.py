"""Windows of requests, as they were asked and answered; and their counters by what is independent."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from mtp_extract.engines.answer import Answer
from mtp_extract.engines.kinds import Counters
from mtp_extract.engines.load import Client


@dataclass(frozen=True)
class Asked:
    """One request."""

    workload: str
    prompt: int  # its number
    turn: int  # 0 is the first time it was asked
    sent_s: float  # seconds from the window's beginning
    ended_s: float  # the same
    answer: Answer


@dataclass(frozen=True)
class Window:
    """Requests that were sent in one go, the next whenever one had ended."""

    asked: tuple[Asked, ...]  # in the order of asking
    begun_s: float  # seconds from the beginning of the measurement
    wall: float | None  # seconds in which they were under way; None of a part
    in_flight_mean: float
    in_flight_max: int
    client: Client
    page: Counters | None  # by how much the server's counters moved; None if it has none, or if others moved them
    disturbed: bool  # whether others did
    impossible: tuple[str, ...] = ()  # by how much the counters moved, where that cannot be of what was asked

    def of(self, workloads: Collection[str]) -> Window:
        """The part that was asked of these; what is known of the whole alone is None there."""
        chosen = tuple(asked for asked in self.asked if asked.workload in workloads)
        if len(chosen) == len(self.asked):
            return self
        return replace(self, asked=chosen, wall=None, page=None)

    def by_text(self, name: str) -> list[tuple[int, Counters]]:
        """Counters of what is independent here: each text, or the window, if only its page tells ``name``."""
        told = [asked.answer.told or Counters() for asked in self.asked]
        if all(getattr(counters, name) is not None for counters in told):
            return [(asked.prompt, counters) for asked, counters in zip(self.asked, told, strict=True)]
        page, whole = self.page, reduce(add, told)
        if page is None or getattr(page, name) is None:
            return []
        # Where both tell of drafts and differ, the page tells of something else, or rounds what it writes.
        if any(
            None not in (a, b) and a != b for a, b in ((page.drafted, whole.drafted), (page.accepted, whole.accepted))
        ):
            return []
        accepted = whole.accepted if page.accepted is None else page.accepted
        return [(self.asked[0].prompt, Counters(rounds=page.rounds, drafted=page.drafted, accepted=accepted))]


def total(values: Iterable[int | None]) -> int | None:
    """Their sum; None where one is not told."""
    listed = list(values)
    return None if None in listed else sum(value for value in listed if value is not None)
