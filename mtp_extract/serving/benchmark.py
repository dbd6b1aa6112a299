"""Measures a running server: speed with and without a drafter, and what came of its drafts.

Requests roll: as soon as one has ended the next is sent, whatever workload it is of. They are cut into windows, which
go to server and baseline in turn, either first every other time, so that drift meets both.

What was drafted, the server says: in its answers, else in its counters, which are everybody's. Where these moved by
other than what was asked here, or by what is impossible, they are left out: nothing is estimated.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise

from mtp_extract.evaluate.progress import counter
from mtp_extract.evaluate.prompts import Prompt, prompts_or_shipped
from mtp_extract.options import check_values
from mtp_extract.serving.client import Question, Server
from mtp_extract.serving.figures import figures, texts_of
from mtp_extract.serving.page import conclude
from mtp_extract.serving.plan import BenchPlan
from mtp_extract.serving.result import Asked, Benchmark, Parted, Request, Window

_FILLED = 4  # times that a window's requests fill what may be in flight
_SETTINGS = ("max_tokens", "temperature", "concurrency", "warm_up", "chat_template")


def run_benchmark(plan: BenchPlan) -> Benchmark:
    """Measure what ``plan`` asks for; ``plan.show`` is told after each window of all servers.

    Raises:
        MtpExtractError: a number is out of bounds, prompts cannot be read, or a server does not answer as it should.
    """
    check_values(plan)
    given = prompts_or_shipped(plan.prompts)
    if not plan.chat_template:
        # Before anything is asked: messages cannot be continued.
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
            server.ask(_questions(plan, [prompts[n % len(prompts)] for n in range(plan.warm_up)]), plan.concurrency)
        windows: dict[str, list[Window]] = {side: [] for side in servers}
        parts, order = _parts(prompts, plan.concurrency), list(servers)
        done = counter(plan.show, "asking", len(parts))
        for part in parts:
            for side in order:
                windows[side].append(_window(servers[side], plan, prompts, part))
            order.reverse()
            done()
    # What is drawn at random differs by chance.
    compared = plan.baseline is not None and plan.temperature == 0
    sizes = Counter(prompt.workload for prompt in prompts)
    return conclude(
        Benchmark(
            servers={side: Asked(s.name, s.kind.name, s.version, s.model) for side, s in servers.items()},
            settings={name: getattr(plan, name) for name in _SETTINGS},
            prompts=dict(sizes),
            repeated=len(given) - len(prompts),
            total=figures(windows, sizes, compared),
            workloads={name: figures(windows, [name], compared) for name in sizes},
            parted=_parted(windows, prompts) if compared else [],
            windows=windows,
        )
    )


def _parts(prompts: Sequence[Prompt], concurrency: int) -> list[list[int]]:
    """The numbers of all prompts, cut into windows.

    Each has all workloads alike, and enough requests that as many as may be are in flight for most of it. One request
    at a time needs no window: each is its own, and so its counters are.
    """
    sizes, seen, places = Counter(prompt.workload for prompt in prompts), Counter[str](), list[float]()
    for prompt in prompts:
        places.append((seen[prompt.workload] + 0.5) / sizes[prompt.workload])
        seen[prompt.workload] += 1
    order = sorted(range(len(prompts)), key=places.__getitem__)
    count = max(1, len(order) // (1 if concurrency == 1 else _FILLED * concurrency))
    return [order[a:b] for a, b in pairwise(len(order) * part // count for part in range(count + 1))]


def _questions(plan: BenchPlan, prompts: Sequence[Prompt]) -> list[Question]:
    more = {"temperature": plan.temperature}
    return [Question(prompt.content, plan.max_tokens, plan.chat_template, more) for prompt in prompts]


def _window(server: Server, plan: BenchPlan, prompts: Sequence[Prompt], part: Sequence[int]) -> Window:
    questions, before = _questions(plan, [prompts[number] for number in part]), server.counters()
    begun, computed = time.perf_counter(), server.computed
    answers = server.ask(questions, plan.concurrency)
    wall, busy = time.perf_counter() - begun, server.computed - computed
    page = server.moved(before, answers, plan.max_tokens)
    requests = [Request(prompts[number].workload, number, one) for number, one in zip(part, answers, strict=True)]
    return Window(requests, wall, busy / wall, page, disturbed=before is not None and page is None)


def _parted(windows: dict[str, list[Window]], prompts: Sequence[Prompt]) -> list[Parted]:
    """Where greedy answers leave the baseline's."""
    found, theirs = [], texts_of(windows["baseline"])
    for number, text in sorted(texts_of(windows["server"]).items()):
        other = theirs[number]
        if text != other:
            at = next((at for at, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), None)
            found.append(Parted(prompts[number].workload, number, min(len(text), len(other)) if at is None else at))
    return found
