"""Measures a running server: speed with and without a drafter, and what came of its drafts.

Answers are streamed. Of one answer, *tokens per second* is the tokens after those of the first text, by the server's
own count, over the time from the first text to the last event; of several, both are added up first. Requests roll: as
soon as one has ended the next is sent, whatever workload it is of. They are cut into windows, which go to server and
baseline in turn, either first every other time, so that drift meets both.

What was drafted, the server says: in its answers, else in its counters, which are everybody's. Where these moved by
other than what was asked here, or by what cannot be, they are left out: nothing is estimated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.evaluate.progress import counter
from mtp_extract.evaluate.prompts import Prompt, prompts_or_shipped
from mtp_extract.io.typed import Tool
from mtp_extract.options import check_values
from mtp_extract.serving.answer import Answer
from mtp_extract.serving.client import Server, load
from mtp_extract.serving.counters import Counters, impossible
from mtp_extract.serving.figures import asked_of, figures
from mtp_extract.serving.page import conclude
from mtp_extract.serving.plan import BenchPlan
from mtp_extract.serving.result import Asked, Benchmark, Parted, Request, Window

_FILLED = 4  # times that a window's requests fill what may be in flight
_SETTINGS = ("max_tokens", "temperature", "concurrency", "repeat", "warm_up", "chat_template")

Chosen = Sequence[tuple[int, int]]
"""Turn and number of the prompt of each request."""


def run_benchmark(plan: BenchPlan) -> Benchmark:
    """Measure what ``plan`` asks for; ``plan.show`` is told after each window of all servers.

    Raises:
        MtpExtractError: a number is out of bounds, prompts cannot be read, or a server does not answer as it should.
    """
    check_values(plan)
    given = prompts_or_shipped(plan.prompts)
    if not plan.chat_template:
        # Asked for before anything is: what is no text cannot be continued.
        given = tuple(replace(prompt, content=prompt.text) for prompt in given)
    # A prompt that repeats another says nothing new, however often it is asked.
    prompts = list({prompt.key: prompt for prompt in reversed(given)}.values())[::-1]
    urls = {"server": plan.url, **({"baseline": plan.baseline} if plan.baseline else {})}
    with ExitStack() as stack:
        servers = {
            side: stack.enter_context(Server(url, model=plan.model, key=plan.key, timeout=plan.timeout))
            for side, url in urls.items()
        }
        for server in servers.values():
            plan.say(f"{server.name}: {server.kind.name}, {plan.warm_up} requests to warm up")
            _ask(server, prompts, [(0, number % len(prompts)) for number in range(plan.warm_up)], plan)
        windows = _ask_in_turn(servers, prompts, plan)
        asked = {side: Asked(s.name, s.kind.name, s.version, s.model) for side, s in servers.items()}
    # What is drawn at random differs by chance.
    compared = plan.baseline is not None and plan.temperature == 0
    names = list(dict.fromkeys(prompt.workload for prompt in prompts))
    return conclude(
        Benchmark(
            tool=Tool("mtp-extract", __version__),
            servers=asked,
            settings={name: getattr(plan, name) for name in _SETTINGS},
            prompts=dict(Counter(prompt.workload for prompt in prompts)),
            repeated=len(given) - len(prompts),
            total=figures(windows, names, compared),
            workloads={name: figures(windows, [name], compared) for name in names},
            parted=_parted(windows) if compared else [],
            windows=windows,
        )
    )


def _ask_in_turn(servers: Mapping[str, Server], prompts: Sequence[Prompt], plan: BenchPlan) -> dict[str, list[Window]]:
    windows: dict[str, list[Window]] = {side: [] for side in servers}
    parts, order = _parts(prompts, plan), list(servers)
    done = counter(plan.show, "asking", len(parts))
    for part in parts:
        for side in order:
            windows[side].append(_window(servers[side], prompts, part, plan))
        order.reverse()
        done()
    return windows


def _parts(prompts: Sequence[Prompt], plan: BenchPlan) -> list[Chosen]:
    """All requests, cut into windows.

    Each has all workloads alike, and enough requests that as many as may be are in flight for most of it. One request
    at a time needs no window: each is its own, and so its counters are.
    """
    sizes, seen, places = Counter(prompt.workload for prompt in prompts), Counter[str](), list[tuple[float, int]]()
    for number, prompt in enumerate(prompts):
        places.append(((seen[prompt.workload] + 0.5) / sizes[prompt.workload], number))
        seen[prompt.workload] += 1
    every = [(turn, number) for turn in range(plan.repeat) for _, number in sorted(places)]
    count = max(1, len(every) // (1 if plan.concurrency == 1 else _FILLED * plan.concurrency))
    return [every[a:b] for a, b in pairwise(len(every) * part // count for part in range(count + 1))]


def _ask(server: Server, prompts: Sequence[Prompt], chosen: Chosen, plan: BenchPlan) -> tuple[list[Answer], float]:
    """The answers in order, and the share of the time in which the client computed."""

    async def ask(at: int) -> Answer:
        content, chat = prompts[chosen[at][1]].content, plan.chat_template
        return await server.answer(content, max_tokens=plan.max_tokens, chat=chat, temperature=plan.temperature)

    async def ask_all() -> tuple[list[Answer], float]:
        begun, computed = time.perf_counter(), time.thread_time()
        answers = await load(ask, len(chosen), plan.concurrency)
        return answers, (time.thread_time() - computed) / (time.perf_counter() - begun)

    return server.run(ask_all())


def _window(server: Server, prompts: Sequence[Prompt], chosen: Chosen, plan: BenchPlan) -> Window:
    before, begun = server.counters(), time.perf_counter()
    answers, busy = _ask(server, prompts, chosen, plan)
    wall = time.perf_counter() - begun
    listed = [answer.tokens for answer in answers]
    tokens = None if None in listed else sum(count for count in listed if count is not None)
    page = server.moved(before, len(answers), tokens) if before is not None else None
    page = page if page is not None and _agrees(page, answers) else None
    wrong = impossible(page, plan.max_tokens, len(answers)) if page is not None else ()
    return Window(
        requests=[
            Request(prompts[number].workload, number, turn, answer)
            for (turn, number), answer in zip(chosen, answers, strict=True)
        ],
        wall_s=wall,
        client_busy=busy,
        page=None if wrong else page,
        # Answers whose tokens cannot be cannot be told apart from others' either.
        disturbed=before is not None and page is None and not any(answer.impossible for answer in answers),
        impossible=list(wrong),
    )


def _agrees(page: Counters, answers: Sequence[Answer]) -> bool:
    """Whether a page tells the drafts that the answers do, where they do: else it tells of other requests."""
    for name in ("drafted", "accepted"):
        told: list[Any] = [getattr(answer.told, name, None) for answer in answers]
        if None not in told and getattr(page, name) not in (None, sum(told)):
            return False
    return True


def _parted(windows: Mapping[str, Sequence[Window]]) -> list[Parted]:
    found: dict[tuple[int, int], Parted] = {}
    baseline = {(one.turn, one.prompt): one.answer.text for one in asked_of(windows["baseline"])}
    for one in asked_of(windows["server"]):
        ours, theirs = one.answer.text, baseline[one.turn, one.prompt]
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((at for at, (x, y) in pairs if x != y), min(len(ours), len(theirs)))
            found.setdefault((one.prompt, at), Parted(one.workload, one.prompt, at))
    return list(found.values())
