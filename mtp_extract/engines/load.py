"""Requests to a server as a load: so many at a time, or arriving at a rate; what was in flight, and what held it up."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from mtp_extract.engines.answer import Answer

MOST_AT_A_TIME = 1024
"""Requests in flight at most, whatever the rate."""

_TICK = 0.05  # seconds between looks at how late the client is
_BUSIEST, _LATEST = 0.8, 0.01  # a client is the limit from this share of a core on, or so many seconds late on the mean


@dataclass(frozen=True)
class Client:
    """What the load cost the client itself, and so how far its times are those of the server."""

    busy: float  # share of the time in which its one thread computed
    lag_ms: float  # how late it was on the mean at what it had to do, in milliseconds

    @property
    def limited(self) -> bool:
        """Whether times are the client's rather than the server's."""
        return self.busy >= _BUSIEST or self.lag_ms >= 1e3 * _LATEST


@dataclass(frozen=True)
class Sent:
    """One request."""

    sent_s: float  # when it was sent, in seconds from the first one
    ended_s: float  # when its answer had ended
    answer: Answer


@dataclass(frozen=True)
class Load:
    """Requests that were sent in one go."""

    sent: tuple[Sent, ...]  # in the order of asking
    wall: float  # seconds in which any was under way
    in_flight_max: int
    client: Client

    @property
    def in_flight_mean(self) -> float:
        """Over the time."""
        return sum(one.ended_s - one.sent_s for one in self.sent) / self.wall if self.wall else 0.0


async def load(
    ask: Callable[[int], Awaitable[Answer]], count: int, at_a_time: int, arrivals: Sequence[float] | None = None
) -> Load:
    """Ask ``count`` times: the next one whenever fewer than ``at_a_time`` are in flight. The first error ends it.

    Args:
        ask: sends the request of a number from 0.
        arrivals: of each the time at which it is to be sent, in seconds from the beginning; None for at once.

    Raises:
        MtpExtractError: as ``ask`` does.
    """
    free = asyncio.Semaphore(at_a_time)
    flying = most = 0
    begun, computed = time.perf_counter(), time.thread_time()
    lags: list[float] = []

    async def one(number: int) -> Sent:
        nonlocal flying, most
        async with free:
            flying += 1
            most = max(most, flying)
            sent = time.perf_counter() - begun
            try:
                answer = await ask(number)
            finally:
                flying -= 1
            return Sent(sent, time.perf_counter() - begun, answer)

    async def watch() -> None:
        while True:
            slept = time.perf_counter()
            await asyncio.sleep(_TICK)
            lags.append(time.perf_counter() - slept - _TICK)

    async def all_of_them() -> list[Sent]:
        for number in range(count):
            if arrivals is not None:
                await asyncio.sleep(begun + arrivals[number] - time.perf_counter())
            if any(task.done() and task.exception() for task in tasks):
                break
            tasks.append(asyncio.create_task(one(number)))
        return await asyncio.gather(*tasks)

    tasks: list[asyncio.Task[Sent]] = []
    watching = asyncio.create_task(watch())
    try:
        done = await all_of_them()
    finally:
        for task in (watching, *tasks):
            task.cancel()
        await asyncio.gather(watching, *tasks, return_exceptions=True)
    wall = time.perf_counter() - begun
    client = Client((time.thread_time() - computed) / wall, 1e3 * fmean(lags or [0.0]))
    return Load(tuple(done), wall, most, client)


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """``count`` times of a Poisson process of ``rate`` a second, in seconds, the first one 0."""
    drawn = random.Random(seed)  # noqa: S311 - arrivals are no secret
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] - math.log(1.0 - drawn.random()) / rate)
    return times[:count]
