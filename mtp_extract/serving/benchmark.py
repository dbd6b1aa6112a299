"""Measures a running server: speed with and without a drafter, and what came of its drafts.

Requests roll: as soon as one has ended the next is sent. They are cut into windows, which go to server and baseline in
turn, either first every other time, so that drift meets both. One request at a time is a window of its own.

What was drafted, the server says: in its answers, else in its counters, which are everybody's. Where these moved by
other than what was asked here, or by what is impossible, they are left out: nothing is estimated.

Of one answer, *tokens per second* is the tokens after the first, by the server's own count, over the time from the
first text to the last event, as ``vllm bench serve`` has it; of several, both are added up first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest

import numpy as np

from mtp_extract.errors import several
from mtp_extract.evaluation.intervals import Bounds, over_texts, ratio_bounds, share_bounds
from mtp_extract.evaluation.progress import counted
from mtp_extract.evaluation.prompts import read_prompts
from mtp_extract.io.typed import Figure
from mtp_extract.options import check_values
from mtp_extract.serving.client import Server, counted_in, question
from mtp_extract.serving.counters import Counters, total
from mtp_extract.serving.plan import BenchPlan
from mtp_extract.serving.result import Benchmark, Figures, Request, Side, Window
from mtp_extract.serving.verdict import conclude

_SETTINGS = ("max_tokens", "temperature", "concurrency", "warm_up", "chat_template")


def run_benchmark(plan: BenchPlan) -> Benchmark:
    """Measure what ``plan`` asks for; ``plan.show`` is told after each window of all servers.

    Raises:
        MtpExtractError: a number is out of bounds, prompts cannot be read, or a server does not answer as it should.
    """
    check_values(plan)
    given = read_prompts(plan.prompts, chat_template=plan.chat_template, text_alone=False)
    # A prompt that repeats another says nothing new, however often it is asked.
    prompts = list({prompt.key: prompt for prompt in reversed(given)}.values())[::-1]
    drawn = {"temperature": plan.temperature}
    questions = [question(prompt.content, plan.max_tokens, plan.chat_template, **drawn) for prompt in prompts]
    with ExitStack() as stack:
        servers = {
            side: stack.enter_context(Server(url, model=plan.model, key=plan.key))
            for side, url in (("server", plan.url), ("baseline", plan.baseline))
            if url is not None
        }
        for server in servers.values():
            plan.say(f"{server.name}: {server.kind.name}, {several(plan.warm_up, 'request')} to warm up")
            server.ask(questions[: plan.warm_up], plan.concurrency)
        windows: dict[str, list[Window]] = {side: [] for side in servers}
        # A window fills what may be in flight four times, with all workloads alike: it takes every so many-th prompt.
        count = max(1, len(prompts) // (1 if plan.concurrency == 1 else 4 * plan.concurrency))
        parts, order = [range(part, len(prompts), count) for part in range(count)], list(servers)
        for part in counted(parts, plan.show, "asking"):
            for side in order:
                server = servers[side]
                before, begun = server.counters(), time.perf_counter()
                answers = server.ask([questions[number] for number in part], plan.concurrency)
                wall = time.perf_counter() - begun
                asked = [Request(prompts[n].workload, n, answer) for n, answer in zip(part, answers, strict=True)]
                moved = server.counted(before, answers, plan.max_tokens * len(answers))
                windows[side].append(Window(asked, wall, *moved))
            order.reverse()
    # What is drawn at random differs by chance.
    if compared := plan.baseline is not None and plan.temperature == 0:
        theirs = {one.prompt: one.answer.text for window in windows["baseline"] for one in window.requests}
        for request in (one for window in windows["server"] for one in window.requests):
            pairs = zip_longest(request.answer.text, theirs[request.prompt])
            request.leaves_at = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    names = dict.fromkeys(prompt.workload for prompt in prompts)
    found = Benchmark(
        servers={side: {"url": s.name, "kind": s.kind.name, "model": s.model} for side, s in servers.items()},
        settings={name: getattr(plan, name) for name in _SETTINGS},
        total=figures(windows, names, compared),
        workloads={name: figures(windows, [name], compared) for name in names},
        windows=windows,
    )
    conclude(found)
    return found


def figures(windows: Mapping[str, Sequence[Window]], names: Collection[str], compared: bool) -> Figures:
    """Of the workloads ``names`` in all ``windows`` by side; ``compared``: whether texts were, with the baseline's."""
    asked = {side: [one for w in done for one in w.requests if one.workload in names] for side, done in windows.items()}
    fast, slow = (_timed(asked.get(side, ())) for side in ("server", "baseline"))
    both = sorted(fast.keys() & slow.keys())
    would_take = [slow[prompt][1] / slow[prompt][0] * fast[prompt][0] for prompt in both]
    return Figures(
        texts=len(asked["server"]),
        sides={side: side_of(done, names) for side, done in windows.items()},
        speedup=_figure(ratio_bounds, would_take, [fast[prompt][1] for prompt in both], len(both)),
        identical=sum(one.leaves_at is None for one in asked["server"]) if compared else None,
    )


def side_of(windows: Sequence[Window], names: Collection[str]) -> Side:
    """What one server did for the workloads ``names``."""
    asked, units = list[Request](), list[Counters]()  # what came of the drafts, by window that says it
    for window in windows:
        own = [one for one in window.requests if one.workload in names]
        # A page says nothing of one workload among several.
        counted = window.counted if len(own) == len(window.requests) else counted_in([one.answer for one in own])
        units += [counted] if own and counted.accepted is not None else []
        asked += own
    whole = len(asked) == sum(len(window.requests) for window in windows)
    tokens, wall = total(one.answer.tokens for one in asked), sum(window.wall_s for window in windows)
    timed = list(_timed(asked).values())
    after, seconds = [tokens for tokens, _ in timed], [time for _, time in timed]
    drafted, accepted = [one.drafted or 0 for one in units], [one.accepted or 0 for one in units]
    in_rounds = [one for one in units if one.rounds]
    made, stood = [one.rounds or 0 for one in in_rounds], [one.accepted or 0 for one in in_rounds]
    # No round accepts more than rounds drafted on the mean of any window.
    most = max((-(-(one.drafted or 0) // (one.rounds or 1)) for one in in_rounds), default=1)
    places = zip_longest(*(one.positions or () for one in in_rounds), fillvalue=0)
    placed = in_rounds and all(one.positions and one.rounds is not None for one in units)
    return Side(
        tokens=tokens,
        tokens_per_s=_figure(ratio_bounds, after, seconds, sum(after)),
        output_throughput=tokens / wall if whole and wall and tokens is not None else None,
        ttft_ms=_latency([one.answer.first_s for one in asked if one.answer.first_s is not None]),
        tpot_ms=_latency([time / tokens for tokens, time in timed]),
        counted=sum(one.requests or 0 for one in units),
        drafted=sum(drafted) if units else None,
        accepted=sum(accepted) if units else None,
        rounds=sum(made) if in_rounds else None,
        acceptance=_figure(share_bounds, accepted, drafted, sum(drafted)),
        tokens_per_round=_figure(share_bounds, stood, made, sum(made), scale=max(most, 1), least=1),
        acceptance_by_position=[_figure(share_bounds, hits, made, sum(made)) for hits in places] if placed else None,
    )


def _figure(
    bounds: Callable[..., Bounds], sums: Sequence[float], sizes: Sequence[float], n: int, scale: int = 1, least: int = 0
) -> Figure:
    """``least`` + Σ ``sums`` / Σ ``sizes``; of a share, what a size may have is ``scale``."""
    interval = over_texts(bounds, [one / scale for one in sums], sizes)
    value = least + sum(sums) / sum(sizes) if sum(sizes) else None
    return Figure(value, n, list(interval.scaled(scale, least)) if interval else None)


def _timed(asked: Sequence[Request]) -> dict[int, tuple[int, float]]:
    """By prompt: tokens after the first, and seconds; none of an answer that took no measurable time."""
    found = {one.prompt: ((one.answer.tokens or 0) - 1, one.answer.seconds) for one in asked}
    return {prompt: pair for prompt, pair in found.items() if min(pair) > 0}


def _latency(seconds: Sequence[float]) -> dict[str, float] | None:
    values = 1e3 * np.array(seconds)
    return {"mean": float(values.mean()), "p99": float(np.percentile(values, 99))} if seconds else None
