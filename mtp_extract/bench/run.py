"""Measures a running server: speed with and without a drafter, and what came of its drafts.

How speed is computed. Answers are streamed. Of one answer, *tokens per second* is the tokens after those of the first
text, by the server's own count, over the time from the first text to the last event. Of several, both are added up
first. *Throughput* is all tokens over the time in which requests were under way. Requests roll: as soon as one has
ended the next is sent, whatever workload it is of. They are cut into windows, which go to server and baseline in turn,
either first every other time, so that drift meets both.

What was drafted, the server says: in its answers, else in its counters, which are everybody's. Where these moved by
other than what was asked here, they are left out: nothing is estimated. So is what cannot be of what was asked. And
counters tell of a whole window: which of its workloads they are of, nobody knows.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mtp_extract.bench.fields import Figures, Settings
from mtp_extract.bench.figures import figures
from mtp_extract.bench.plan import BenchPlan
from mtp_extract.bench.windows import Asked, Window, total
from mtp_extract.engines.answer import Answer
from mtp_extract.engines.kinds import Counters, impossible
from mtp_extract.engines.load import MOST_AT_A_TIME, load, poisson
from mtp_extract.engines.server import Server
from mtp_extract.evaluate.progress import Say, Show, counter, silent
from mtp_extract.evaluate.prompts import Prompt, prompts_or_shipped
from mtp_extract.io.typed import fill
from mtp_extract.options import check_values

_FILLED = 4  # times that a window's requests fill what may be in flight
_ASKING = "asking"
_MOST_TURNS = 20  # where an interval is to get narrower


@dataclass(frozen=True)
class Benchmark:
    """The result."""

    servers: Mapping[str, Server]  # by side: ``server``, and ``baseline`` where there is one
    settings: Mapping[str, Any]  # what a second run needs
    windows: Mapping[str, tuple[Window, ...]]  # by side, all that was asked, in order
    workloads: Mapping[str, Figures]
    total: Figures
    differences: tuple[tuple[str, int, int], ...]
    """Workload, number of the prompt and first other character of each answer that is not the baseline's."""
    repeats: int = 0  # prompts that repeat one before them, and were not asked


def run_benchmark(plan: BenchPlan, say: Say = silent, show: Show = silent) -> Benchmark:
    """Measure what ``plan`` asks for; ``show`` is told after each window of both servers.

    Raises:
        MtpExtractError: a number is out of bounds, prompts cannot be read, or a server does not answer as it should.
    """
    check_values(plan)
    given = prompts_or_shipped(plan.prompts)
    if not plan.chat_template:
        # Asked for before anything is: what is no text cannot be continued.
        given = tuple(replace(prompt, content=prompt.text) for prompt in given)
    # A prompt that repeats another says nothing new, however often it is asked.
    firsts: dict[str, Prompt] = {}
    for prompt in given:
        firsts.setdefault(prompt.key, prompt)
    prompts = list(firsts.values())
    with ExitStack() as stack:
        return replace(_measure(plan, prompts, say, show, stack), repeats=len(given) - len(prompts))


def _measure(plan: BenchPlan, prompts: Sequence[Prompt], say: Say, show: Show, stack: ExitStack) -> Benchmark:
    urls = {"server": plan.url, **({"baseline": plan.baseline} if plan.baseline else {})}
    servers = {
        side: stack.enter_context(Server(url, model=plan.model, key=plan.key, timeout=plan.timeout))
        for side, url in urls.items()
    }
    for server in servers.values():
        say(f"{server.name}: {server.kind.name}, {plan.warm_up} requests to warm up")
        if plan.warm_up:
            _warm(server, prompts, plan)
    begun = time.perf_counter()
    found: dict[str, list[Window]] = {side: [] for side in servers}
    order = list(servers)
    parts, turns_at_once = _parts(prompts, plan)
    done = counter(show, _ASKING, len(parts) * -(-plan.repeat // turns_at_once))
    turns = 0
    while turns < plan.repeat or _goes_on(plan, turns, found):
        several = range(turns, turns + min(turns_at_once, max(1, plan.repeat - turns)))
        for part in parts:
            chosen = [(turn, index) for turn in several for index in part]
            for side in order:
                found[side].append(_window(servers[side], prompts, chosen, plan, len(found[side]), begun))
            order.reverse()
            done()
        turns += len(several)
    windows = {side: tuple(done) for side, done in found.items()}
    pairs = _pairs(windows) if plan.temperature == 0 else []
    names = list(dict.fromkeys(prompt.workload for prompt in prompts))
    counted = dict(Counter(prompt.workload for prompt in prompts))
    return Benchmark(
        servers=servers,
        settings=fill(Settings, plan, prompts=counted, repeat=turns),
        windows=windows,
        workloads={name: figures(windows, pairs, {name}, plan.goodput) for name in names},
        total=figures(windows, pairs, set(names), plan.goodput),
        differences=tuple((name, index, _first_difference(a, b)) for name, index, a, b in pairs if a != b),
    )


def _warm(server: Server, prompts: Sequence[Prompt], plan: BenchPlan) -> None:
    server.run(load(lambda at: _ask(server, prompts[at % len(prompts)], plan), plan.warm_up, plan.concurrency))


def _parts(prompts: Sequence[Prompt], plan: BenchPlan) -> tuple[list[list[int]], int]:
    """The prompts' numbers, cut into windows; and how many turns are in one.

    Each has all workloads alike, and enough requests that as many as may be are in flight for most of it. One request
    at a time needs no window: each is its own, and so its counters are.
    """
    if plan.rate is None and plan.concurrency == 1:
        return [[index] for index in _mixed(prompts)], 1
    wanted = _FILLED * plan.concurrency
    count = max(1, len(prompts) // wanted) if plan.rate is None else 1
    mixed = _mixed(prompts)
    bounds = [len(mixed) * part // count for part in range(count + 1)]
    return [mixed[a:b] for a, b in pairwise(bounds)], max(1, -(-wanted // len(prompts)))


def _mixed(prompts: Sequence[Prompt]) -> list[int]:
    """Their numbers, so that any stretch has as much of each workload as all of them."""
    sizes, seen = Counter(prompt.workload for prompt in prompts), Counter[str]()
    places = []
    for index, prompt in enumerate(prompts):
        places.append(((seen[prompt.workload] + 0.5) / sizes[prompt.workload], index))
        seen[prompt.workload] += 1
    return [index for _, index in sorted(places)]


def _goes_on(plan: BenchPlan, turns: int, found: Mapping[str, Sequence[Window]]) -> bool:
    """Whether the interval of the main figure, the speedup or else tokens per second, is to get narrower still."""
    if plan.until is None or turns >= max(plan.repeat, _MOST_TURNS):
        return False
    width = figures(found, [], {asked.workload for window in found["server"] for asked in window.asked}).width
    return width is not None and width > plan.until


async def _ask(server: Server, prompt: Prompt, plan: BenchPlan) -> Answer:
    return await server.answer(
        prompt.content, max_tokens=plan.max_tokens, chat=plan.chat_template, temperature=plan.temperature
    )


def _window(
    server: Server,
    prompts: Sequence[Prompt],
    chosen: Sequence[tuple[int, int]],
    plan: BenchPlan,
    number: int,
    begun: float,
) -> Window:
    before = server.counters()
    arrivals = None if plan.rate is None else poisson(plan.rate, len(chosen), number)
    most = plan.concurrency if plan.rate is None else MOST_AT_A_TIME
    begun_s = time.perf_counter() - begun
    done = server.run(load(lambda at: _ask(server, prompts[chosen[at][1]], plan), len(chosen), most, arrivals))
    answers = [sent.answer for sent in done.sent]
    of_all = Counters(requests=len(answers), tokens=total(answer.tokens for answer in answers))
    page = server.moved(before, of_all) if before is not None else None
    same = page is not None and page.is_of(of_all)
    wrong = impossible(page, plan.max_tokens, len(answers)) if page is not None and same else ()
    return Window(
        asked=tuple(
            Asked(prompts[index].workload, index, turn, sent.sent_s, sent.ended_s, sent.answer)
            for (turn, index), sent in zip(chosen, done.sent, strict=True)
        ),
        begun_s=begun_s,
        wall=done.wall,
        in_flight_mean=done.in_flight_mean,
        in_flight_max=done.in_flight_max,
        client=done.client,
        page=page if same and not wrong else None,
        # Answers whose tokens cannot be cannot be told apart from others' either.
        disturbed=page is not None and not same and not any(answer.impossible for answer in answers),
        impossible=wrong,
    )


def _pairs(windows: Mapping[str, Iterable[Window]]) -> list[tuple[str, int, str, str]]:
    """Workload, number of the prompt, the server's text and the baseline's."""
    theirs = {
        (asked.turn, asked.prompt): asked.answer.text
        for window in windows.get("baseline", ())
        for asked in window.asked
    }
    return [
        (asked.workload, asked.prompt, asked.answer.text, theirs[asked.turn, asked.prompt])
        for window in windows["server"]
        for asked in window.asked
        if theirs
    ]


def _first_difference(a: str, b: str) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
