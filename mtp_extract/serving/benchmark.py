"""Measures a running server: speed with and without a drafter, and what came of its drafts.

Requests roll: as soon as one has ended the next is sent, whatever workload it is of. They are cut into windows, which
go to server and baseline in turn, either first every other time, so that drift meets both.

What was drafted, the server says: in its answers, else in its counters, which are everybody's. Where these moved by
other than what was asked here, or by what is impossible, they are left out: nothing is estimated.

Of one answer, *tokens per second* is the tokens after those of the first text, by the server's own count, over the time
from the first text to the last event; of several, both are added up first.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise, zip_longest

import numpy as np

from mtp_extract.errors import several
from mtp_extract.evaluation.intervals import Interval, over_texts, ratio_bounds, share_bounds
from mtp_extract.evaluation.progress import counted
from mtp_extract.evaluation.prompts import Prompt, prompts_or_shipped
from mtp_extract.io.typed import Figure
from mtp_extract.options import check_values
from mtp_extract.serving.client import Question, Server, counted_in
from mtp_extract.serving.counters import Counters, total
from mtp_extract.serving.plan import BenchPlan
from mtp_extract.serving.result import Asked, Benchmark, Figures, Latency, Request, Side, Window
from mtp_extract.serving.verdict import conclude

_FILLED = 4  # times that a window's requests fill what may be in flight
_SETTINGS = ("max_tokens", "temperature", "concurrency", "warm_up", "chat_template")


def run_benchmark(plan: BenchPlan) -> Benchmark:
    """Measure what ``plan`` asks for; ``plan.show`` is told after each window of all servers.

    Raises:
        MtpExtractError: a number is out of bounds, prompts cannot be read, or a server does not answer as it should.
    """
    check_values(plan)
    given = prompts_or_shipped(plan.prompts, chat_template=plan.chat_template)
    # A prompt that repeats another says nothing new, however often it is asked.
    prompts = list({prompt.key: prompt for prompt in reversed(given)}.values())[::-1]
    with ExitStack() as stack:
        servers = {
            side: stack.enter_context(Server(url, model=plan.model, key=plan.key, timeout=plan.timeout))
            for side, url in (("server", plan.url), ("baseline", plan.baseline))
            if url is not None
        }
        for server in servers.values():
            plan.say(f"{server.name}: {server.kind.name}, {several(plan.warm_up, 'request')} to warm up")
            warming = [prompts[number % len(prompts)] for number in range(plan.warm_up)]
            server.ask(_questions(plan, warming), plan.concurrency)
        windows: dict[str, list[Window]] = {side: [] for side in servers}
        parts, order = _parts(prompts, plan.concurrency), list(servers)
        for part in counted(parts, plan.show, "asking"):
            for side in order:
                windows[side].append(_window(servers[side], plan, prompts, part))
            order.reverse()
    # What is drawn at random differs by chance.
    if compared := plan.baseline is not None and plan.temperature == 0:
        theirs = {one.prompt: one.answer.text for window in windows["baseline"] for one in window.requests}
        for request in (one for window in windows["server"] for one in window.requests):
            pairs = zip_longest(request.answer.text, theirs[request.prompt])
            request.leaves_at = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    sizes = Counter(prompt.workload for prompt in prompts)
    found = Benchmark(
        servers={side: Asked(s.name, s.kind.name, s.version, s.model) for side, s in servers.items()},
        settings={name: getattr(plan, name) for name in _SETTINGS},
        prompts=dict(sizes),
        repeated=len(given) - len(prompts),
        total=figures(windows, sizes, compared),
        workloads={name: figures(windows, [name], compared) for name in sizes},
        windows=windows,
    )
    conclude(found)
    return found


def _parts(prompts: Sequence[Prompt], concurrency: int) -> list[list[int]]:
    """The numbers of all prompts, cut into windows.

    Each has all workloads alike, and enough requests that as many as may be are in flight for most of it. One request
    at a time needs no window: each is its own, and so its counters are.
    """
    sizes, seen = Counter(prompt.workload for prompt in prompts), Counter[str]()
    places = list[float]()  # of each prompt among those of its workload, from 0 to 1
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
    begun = time.perf_counter()
    answers = server.ask(questions, plan.concurrency)
    wall = time.perf_counter() - begun
    counted, disturbed = server.counted(before, answers, plan.max_tokens * len(answers))
    requests = [Request(prompts[number].workload, number, one) for number, one in zip(part, answers, strict=True)]
    return Window(requests, wall, counted, disturbed)


def figures(windows: Mapping[str, Sequence[Window]], names: Collection[str], compared: bool) -> Figures:
    """Of the workloads ``names``.

    Args:
        windows: by side, all that was asked.
        compared: whether texts were compared with those of the baseline.
    """
    asked = {side: [one for w in done for one in w.requests if one.workload in names] for side, done in windows.items()}
    fast, slow = (_timed(asked.get(side, ())) for side in ("server", "baseline"))
    both = sorted(fast.keys() & slow.keys())
    would_take = [slow[prompt][1] / slow[prompt][0] * fast[prompt][0] for prompt in both]
    takes = [fast[prompt][1] for prompt in both]
    return Figures(
        texts=len(asked["server"]),
        sides={side: side_of(done, names) for side, done in windows.items()},
        speedup=_ratio(would_take, takes, len(both), over_texts(ratio_bounds, would_take, takes)),
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
    in_rounds = [one for one in units if one.rounds is not None]
    made, stood = [one.rounds or 0 for one in in_rounds], [one.accepted or 0 for one in in_rounds]
    # No round accepts more than rounds drafted on the mean of any window.
    most = max((-(-(one.drafted or 0) // one.rounds) for one in in_rounds if one.rounds), default=0)
    length = over_texts(share_bounds, [count / most for count in stood], made) if most else None
    written = [a + b for a, b in zip(made, stood, strict=True)]
    return Side(
        tokens=tokens,
        tokens_per_s=_ratio(after, seconds, sum(after), over_texts(ratio_bounds, after, seconds)),
        output_throughput=tokens / wall if whole and wall and tokens is not None else None,
        ttft_ms=_latency([one.answer.first_s for one in asked if one.answer.first_s is not None]),
        tpot_ms=_latency([time / tokens for tokens, time in timed]),
        counted=sum(one.requests or 0 for one in units),
        drafted=sum(drafted) if units else None,
        accepted=sum(accepted) if units else None,
        rounds=sum(made) if in_rounds else None,
        acceptance=_ratio(accepted, drafted, sum(drafted), over_texts(share_bounds, accepted, drafted)),
        tokens_per_round=_ratio(written, made, sum(made), length and length.scaled(most, 1.0)),
        acceptance_by_position=_by_position(units),
    )


def _ratio(sums: Sequence[float], sizes: Sequence[float], count: int, interval: Interval | None) -> Figure:
    return Figure(sum(sums) / sum(sizes) if sum(sizes) else None, count, list(interval) if interval else None)


def _timed(asked: Sequence[Request]) -> dict[int, tuple[int, float]]:
    """By prompt: tokens after those of the first text, and seconds; none of an answer that took no measurable time."""
    found = {one.prompt: ((one.answer.tokens or 0) - one.answer.first_tokens, one.answer.seconds) for one in asked}
    return {prompt: pair for prompt, pair in found.items() if min(pair) > 0}


def _latency(seconds: Sequence[float]) -> Latency | None:
    values = 1e3 * np.array(seconds)
    return Latency(float(values.mean()), float(np.percentile(values, 99))) if seconds else None


def _by_position(counted: Sequence[Counters]) -> list[Figure] | None:
    """Accepted drafts by position, over rounds; None unless all are known, and no position has more than rounds."""
    made = [one.rounds or 0 for one in counted]
    places = [list(column) for column in zip_longest(*(one.positions or () for one in counted), fillvalue=0)]
    known = all(one.positions and one.rounds is not None for one in counted)
    if not known or any(not 0 <= a <= b for hits in places for a, b in zip(hits, made, strict=True)):
        return None
    return [_ratio(hits, made, sum(made), over_texts(share_bounds, hits, made)) for hits in places] or None
