"""Measures a running server: speed with and without a drafter, and what came of its drafts.

How speed is computed. Answers are streamed. Of one answer, *tokens per second* is the tokens after those of the first
text, by the server's own count, over the time from the first text to the last event. Of several, both are added up
first. *Throughput* is all tokens over the time in which requests were under way. Groups of as many requests as may
run at a time are sent to server and baseline in turn, either first every other time, so that drift meets both.

What was drafted, the server says: in its answers, else in its counters, which are everybody's. Where these moved by
other than what was asked here, they are left out: nothing is estimated. So is what cannot be of what was asked.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, TypeVar

from msgspec import convert

from mtp_extract.bench.fields import Figures, Settings, Side
from mtp_extract.bench.plan import BenchPlan
from mtp_extract.engines.answer import Answer
from mtp_extract.engines.kinds import Counters, impossible
from mtp_extract.engines.server import Server
from mtp_extract.evaluate.prompts import Prompt, prompts_or_shipped
from mtp_extract.io.typed import fill
from mtp_extract.options import check_values
from mtp_extract.speculate.intervals import Interval, ratio_interval, share_interval

T = TypeVar("T")
Say = Callable[[str], None]

_SETTLING_TIME = 2.0  # seconds that counters may trail behind answers
_POLL_INTERVAL = 0.05  # seconds between looks at them


@dataclass(frozen=True)
class Group:
    """Requests of one workload that were sent together."""

    workload: str
    prompts: tuple[int, ...]  # their numbers
    turn: int  # 0 is the first time they were asked
    answers: tuple[Answer, ...]  # one a prompt
    wall: float  # seconds in which they were under way
    page: Counters | None  # by how much the server's counters moved; None if it has none, or if others moved them
    disturbed: bool  # whether others did
    impossible: tuple[str, ...] = ()  # by how much the counters moved, where that cannot be of what was asked

    def by_text(self, name: str) -> list[tuple[int, Counters]]:
        """Counters of what is independent here: each text, or the group, if only its page tells ``name``."""
        told = [answer.told or Counters() for answer in self.answers]
        if all(getattr(counters, name) is not None for counters in told):
            return list(zip(self.prompts, told, strict=True))
        page, whole = self.page, reduce(add, told)
        if page is None or getattr(page, name) is None:
            return []
        # Where both tell of drafts and differ, the page tells of something else, or rounds what it writes.
        if any(
            None not in (a, b) and a != b for a, b in ((page.drafted, whole.drafted), (page.accepted, whole.accepted))
        ):
            return []
        accepted = whole.accepted if page.accepted is None else page.accepted
        return [(self.prompts[0], Counters(rounds=page.rounds, drafted=page.drafted, accepted=accepted))]


@dataclass(frozen=True)
class Benchmark:
    """The result."""

    servers: Mapping[str, Server]  # by side: ``server``, and ``baseline`` where there is one
    settings: Mapping[str, Any]  # what a second run needs
    groups: Mapping[str, tuple[Group, ...]]  # by side, all that was asked, in order
    workloads: Mapping[str, Figures]
    total: Figures
    differences: tuple[tuple[str, int, int], ...]
    """Workload, number of the prompt and first other character of each answer that is not the baseline's."""
    repeats: int = 0  # prompts that repeat one before them, and were not asked


def run_benchmark(plan: BenchPlan, say: Say = lambda line: None) -> Benchmark:
    """Measure what ``plan`` asks for.

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
        return replace(_measure(plan, prompts, say, stack), repeats=len(given) - len(prompts))


def _measure(plan: BenchPlan, prompts: Sequence[Prompt], say: Say, stack: ExitStack) -> Benchmark:
    urls = {"server": plan.url, **({"baseline": plan.baseline} if plan.baseline else {})}
    servers = {
        side: stack.enter_context(Server(url, model=plan.model, key=plan.key, timeout=plan.timeout))
        for side, url in urls.items()
    }
    for server in servers.values():
        say(f"{server.name}: {server.kind.name}, {plan.warm_up} requests to warm up")
        for number in range(plan.warm_up):
            _ask(server, prompts[number % len(prompts)], plan)
    found: dict[str, list[Group]] = {side: [] for side in servers}
    names = list(dict.fromkeys(prompt.workload for prompt in prompts))
    order = list(servers)
    for turn in range(plan.repeat):
        for name in names:
            say(f"{name}, turn {turn + 1} of {plan.repeat}")
            indices = [index for index, prompt in enumerate(prompts) if prompt.workload == name]
            for begin in range(0, len(indices), plan.concurrency):
                chosen = tuple(indices[begin : begin + plan.concurrency])
                for side in order:
                    found[side].append(_group(servers[side], prompts, chosen, turn, plan))
                order.reverse()
    groups = {side: tuple(done) for side, done in found.items()}
    pairs = _pairs(groups) if plan.temperature == 0 else []
    return Benchmark(
        servers=servers,
        settings=fill(Settings, plan, prompts=dict(Counter(prompt.workload for prompt in prompts))),
        groups=groups,
        workloads={name: _figures(groups, pairs, {name}) for name in names},
        total=_figures(groups, pairs, set(names)),
        differences=tuple((name, index, _first_difference(a, b)) for name, index, a, b in pairs if a != b),
    )


def _ask(server: Server, prompt: Prompt, plan: BenchPlan) -> Answer:
    return server.ask(prompt.content, max_tokens=plan.max_tokens, chat=plan.chat_template, temperature=plan.temperature)


def _group(server: Server, prompts: Sequence[Prompt], chosen: tuple[int, ...], turn: int, plan: BenchPlan) -> Group:
    before = server.counters()
    begun = time.perf_counter()
    answers = together([lambda index=index: _ask(server, prompts[index], plan) for index in chosen])  # type: ignore[misc]
    wall = time.perf_counter() - begun
    asked = Counters(requests=len(answers), tokens=_total(answer.tokens for answer in answers))
    page = _counters_since(before, server, asked) if before is not None else None
    same = page is not None and _is_of(page, asked)
    wrong = impossible(page, plan.max_tokens, len(answers)) if page is not None and same else ()
    # Answers whose tokens cannot be cannot be told apart from others' either.
    disturbed = page is not None and not same and not any(answer.impossible for answer in answers)
    kept = page if same and not wrong else None
    return Group(prompts[chosen[0]].workload, chosen, turn, tuple(answers), wall, kept, disturbed, wrong)


def together(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """The results of ``tasks``, all under way at once; the first error ends it."""
    if len(tasks) == 1:
        return [tasks[0]()]
    done: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()

    def work(number: int) -> None:
        try:
            done.put((number, tasks[number](), None))
        except BaseException as error:  # noqa: BLE001 - raised again below, where somebody waits for it
            done.put((number, None, error))

    for number in range(len(tasks)):
        # Daemons: whoever is told to stop does not wait for answers.
        threading.Thread(target=work, args=(number,), daemon=True).start()
    results: dict[int, Any] = {}
    while len(results) < len(tasks):
        number, result, error = done.get()
        if error is not None:
            raise error
        results[number] = result
    return [results[number] for number in range(len(tasks))]


def _counters_since(before: Counters, server: Server, asked: Counters) -> Counters | None:
    """By how much the counters of ``server`` moved; they may trail behind the answers."""
    deadline = time.monotonic() + _SETTLING_TIME
    while (after := server.counters()) is not None:
        moved = after - before
        if _is_of(moved, asked) or time.monotonic() > deadline:
            return moved
        time.sleep(_POLL_INTERVAL)
    return None


def _is_of(moved: Counters, asked: Counters) -> bool:
    """Whether counters moved by what was asked, in requests, or in tokens where these are not counted; and up."""
    name = "tokens" if moved.requests is None else "requests"
    same = getattr(moved, name) is not None and getattr(moved, name) == getattr(asked, name)
    return same and 0 <= (moved.accepted or 0) <= (moved.drafted or 0) and (moved.rounds or 0) >= 0


def _total(values: Iterable[int | None]) -> int | None:
    listed = list(values)
    return None if None in listed else sum(value for value in listed if value is not None)


def _pairs(groups: Mapping[str, Sequence[Group]]) -> list[tuple[str, int, str, str]]:
    """Workload, number of the prompt, the server's text and the baseline's."""
    both = zip(groups["server"], groups.get("baseline", ()), strict="baseline" in groups)
    return [
        (ours.workload, index, a.text, b.text)
        for ours, theirs in both
        for index, a, b in zip(ours.prompts, ours.answers, theirs.answers, strict=True)
    ]


def _first_difference(a: str, b: str) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _figures(
    groups: Mapping[str, Sequence[Group]], pairs: Sequence[tuple[str, int, str, str]], names: set[str]
) -> Figures:
    chosen = {side: [group for group in done if group.workload in names] for side, done in groups.items()}
    speeds = {side: _speeds(done) for side, done in chosen.items()}
    compared = [ours == theirs for name, _, ours, theirs in pairs if name in names]
    both = sorted(set.intersection(*(set(speed) for speed in speeds.values()))) if len(speeds) > 1 else []
    fast, slow = speeds["server"], speeds.get("baseline", {})
    would_take = [slow[index][1] / slow[index][0] * fast[index][0] for index in both]
    takes = [fast[index][1] for index in both]
    figures = {
        "texts": len({index for group in chosen["server"] for index in group.prompts}),
        "server": _side(chosen["server"]),
        "baseline": _side(chosen["baseline"]) if "baseline" in chosen else None,
        "speedup": sum(would_take) / sum(takes) if both else None,
        "speedup_ci95": ratio_interval(would_take, takes),
        "identical": sum(compared) if compared else None,
        "compared": len(compared),
    }
    return convert(figures, Figures)


def _speeds(groups: Iterable[Group]) -> dict[int, tuple[int, float]]:
    """By prompt: tokens after those of the first text, and seconds; of answers that took measurable time for them."""
    return _summed(
        (index, answer.tokens - answer.first_tokens, answer.seconds)
        for group in groups
        for index, answer in zip(group.prompts, group.answers, strict=True)
        if answer.tokens is not None and answer.tokens > answer.first_tokens and answer.seconds > 0
    )


def _side(groups: Sequence[Group]) -> Side:
    answers = [answer for group in groups for answer in group.answers]
    indices = [index for group in groups for index in group.prompts]
    tokens = _total(answer.tokens for answer in answers)
    after, seconds = _columns(_speeds(groups))
    rate = sum(after) / sum(seconds) if seconds else None
    firsts = _columns(
        _summed(
            (index, answer.first_s * 1e3, 1)
            for index, answer in zip(indices, answers, strict=True)
            if answer.first_s is not None
        )
    )
    told = [answer.told for answer in answers if answer.told and answer.told.tokens and answer.told.ms]
    own = sum(counters.ms or 0.0 for counters in told)
    drafts = _clusters(groups, "drafted", "accepted")
    lengths = _clusters(groups, "rounds", "accepted")
    drafted, accepted = (sum(column) for column in drafts) if drafts[0] else (None, None)
    rounds = sum(lengths[0]) if lengths[0] else None
    emitted = [a + b for a, b in zip(*lengths, strict=True)]
    counted = sum(len(group.answers) for group in groups if group.by_text("drafted"))
    figures = {
        "tokens": tokens,
        "seconds": sum(answer.seconds for answer in answers),
        "tokens_per_s": rate,
        "tokens_per_s_ci95": ratio_interval(after, seconds),
        "throughput": tokens / sum(group.wall for group in groups) if tokens is not None else None,
        "first_token_ms": sum(firsts[0]) / sum(firsts[1]) if firsts[0] else None,
        "first_token_ms_ci95": ratio_interval(*firsts),
        "inter_token_ms": 1e3 / rate if rate else None,
        "server_tokens_per_s": 1e3 * sum((c.tokens or 1) - 1 for c in told) / own if own else None,
        "counted": counted,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted if drafted and accepted is not None else None,
        "acceptance_ci95": _share(drafts[1], drafts[0], groups),
        "rounds": rounds,
        "mean_accepted_length": sum(emitted) / rounds if rounds else None,
        "mean_accepted_length_ci95": _length_interval(groups),
    }
    return convert(figures, Side)


def _length_interval(groups: Sequence[Group]) -> Interval | None:
    """Of 1 + accepted / rounds, where no round accepts more than rounds drafted on the mean of any group."""
    rounds, accepted = _clusters(groups, "rounds", "accepted")
    most = max(map(_most_drafts, groups), default=0)
    if not most:
        return None
    found = _share([count / most for count in accepted], rounds, groups)
    return found and found.scaled(most, 1.0)


def _most_drafts(group: Group) -> int:
    """Drafts a round of it, rounded up."""
    drafted, rounds = (
        sum(getattr(counters, name) for _, counters in group.by_text(name)) for name in ("drafted", "rounds")
    )
    return math.ceil(drafted / rounds) if rounds else 0


def _share(hits: Sequence[float], sizes: Sequence[float], groups: Sequence[Group]) -> Interval | None:
    """The interval of a share; asking the same again draws no more."""
    turns = len({group.turn for group in groups})
    return share_interval([hit / turns for hit in hits], [size / turns for size in sizes])


def _clusters(groups: Iterable[Group], first: str, second: str) -> tuple[list[int], list[int]]:
    """Two counters by what is independent."""
    return _columns(
        _summed(
            (index, getattr(counters, first), getattr(counters, second))
            for group in groups
            for index, counters in group.by_text(first)
            if getattr(counters, second) is not None
        )
    )


def _summed(rows: Iterable[tuple[int, Any, Any]]) -> dict[int, tuple[Any, Any]]:
    """By prompt, the two values of all rows added up: a text and its repeats are one."""
    found: dict[int, tuple[Any, Any]] = {}
    for index, a, b in rows:
        x, y = found.get(index, (0, 0))
        found[index] = (x + a, y + b)
    return found


def _columns(found: Mapping[int, tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [a for a, _ in found.values()], [b for _, b in found.values()]
