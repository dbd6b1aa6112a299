"""Measures a running server: its speed with and without a drafter, and the acceptance of its drafts.

As soon as a request has ended, the next is sent. The requests are divided into windows, which server and baseline get
in turn, each of them first every other time, so that a drift affects both. With concurrency 1, a window is one request.

Draft counts come from the server: from its answers, else from its counters, which all its users share. Counters that
moved by something else than these requests, or by impossible amounts, are left out: nothing is estimated.

*Tokens per second* is the number of tokens after the first text, as the server counts, over the time from that text to
the last event, as in ``vllm bench serve``; for several answers, both are summed first. Thoughts that are counted but
not streamed precede the first text, so they are not included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from mtp_extract.errors import ServerError, format_count
from mtp_extract.evaluation.intervals import IntervalEnds, bound_ratio, bound_share, compute_interval
from mtp_extract.evaluation.prompts import Prompt, read_prompts
from mtp_extract.io.typed import Figure
from mtp_extract.progress import SILENT, Reporter, report_each
from mtp_extract.serving.client import Answer, Server, build_request, sum_counters
from mtp_extract.serving.counters import Counters, sum_counts
from mtp_extract.serving.plan import BenchPlan
from mtp_extract.serving.result import Benchmark, Failure, Figures, Request, Side, Window, list_requests
from mtp_extract.serving.verdict import conclude_benchmark

_SETTINGS = ("max_tokens", "temperature", "concurrency", "warm_up", "chat_template")
_MOST_FAILURES = 8  # in a row, after which the benchmark ends


def run_benchmark(plan: BenchPlan, reporter: Reporter = SILENT) -> Benchmark:
    """Run ``plan``, as :func:`mtp_extract.bench` describes; several failures in a row end it too."""
    all_prompts = read_prompts(plan.prompts, chat_template=plan.chat_template, text_alone=False)
    # Drop repeated prompts, which measure nothing new.
    prompts = list({prompt.key: prompt for prompt in reversed(all_prompts)}.values())[::-1]
    with ExitStack() as stack:
        servers = {
            side: stack.enter_context(Server(url, model=plan.model, key=plan.key))
            for side, url in (("server", plan.url), ("baseline", plan.baseline))
            if url is not None
        }
        questions = [
            build_request(prompt.content, plan.max_tokens, plan.chat_template, temperature=plan.temperature)
            for prompt in prompts
        ]
        run = _Run(plan, prompts, questions, servers, {side: [] for side in servers})
        run.warm_up(reporter)
        try:
            run.ask_all(reporter)
        except BaseException as error:
            if list_requests(run.windows["server"]):
                reporter.report_result(
                    run.build_result(ended_early=str(error) if isinstance(error, Exception) else "interrupted")
                )
            raise
        return run.build_result()


@dataclass(frozen=True)
class _Run:
    plan: BenchPlan
    prompts: Sequence[Prompt]
    questions: Sequence[Mapping[str, Any]]  # the request for each prompt
    servers: Mapping[str, Server]  # by side
    windows: dict[str, list[Window]]  # by side, those measured so far

    def warm_up(self, reporter: Reporter) -> None:
        """Send the first requests without measuring them; an error of one of them ends the benchmark."""
        requests = self.plan.warm_up
        for server in self.servers.values():
            reporter.say(f"{server.name}: {server.kind.name}, {format_count(requests, 'request')} to warm up")
            server.ask(self.questions[:requests], self.plan.concurrency)

    def ask_all(self, reporter: Reporter) -> None:
        """Send every prompt to every server, by window; raise ServerError if all requests, or the last ones, failed."""
        # A window has four times as many requests as may be in flight. It takes every count-th prompt, so that all
        # windows have the same mix of workloads.
        concurrency, size = self.plan.concurrency, len(self.prompts)
        count = max(1, size // (1 if concurrency == 1 else 4 * concurrency))
        parts = [range(part, size, count) for part in range(count)]
        order = list(self.servers)

        for part in report_each(parts, reporter, "asking", "window"):
            for side in order:
                self.windows[side].append(self._ask_window(self.servers[side], part))
                _check_alive(self.windows[side])
            order.reverse()
        for windows in self.windows.values():
            if not list_requests(windows):
                raise ServerError(windows[-1].failures[-1].reason)

    def _ask_window(self, server: Server, part: Sequence[int]) -> Window:
        before = server.read_counters()
        started = time.perf_counter()
        results = server.try_each([self.questions[number] for number in part], self.plan.concurrency)
        seconds = time.perf_counter() - started

        requests = list[Request]()
        failures = list[Failure]()
        for number, result in zip(part, results, strict=True):
            prompt = self.prompts[number]
            if isinstance(result, Answer):
                requests.append(Request(prompt.workload, number, result))
            else:
                failures.append(Failure(prompt.workload, number, str(result)))

        answers = [request.answer for request in requests]
        if not failures:
            counted = server.count_answers(before, answers, self.plan.max_tokens * len(answers))
            return Window(requests, seconds, *counted)
        # Failed requests move the page's counters by an unknown amount: use only the counts in answers.
        return Window(requests, seconds, sum_counters(answers) if answers else Counters(), False, failures)

    def build_result(self, ended_early: str | None = None) -> Benchmark:
        """Return the benchmark of all windows so far."""
        # Sampled texts differ by chance, so only greedy ones are compared.
        is_compared = self.plan.baseline is not None and self.plan.temperature == 0
        if is_compared:
            _compare_texts(self.windows)
        with_answers = {request.workload for request in list_requests(self.windows["server"])}
        names = [name for name in dict.fromkeys(prompt.workload for prompt in self.prompts) if name in with_answers]
        benchmark = Benchmark(
            ended_early=ended_early,
            servers={
                side: {"url": server.name, "kind": server.kind.name, "model": server.model}
                for side, server in self.servers.items()
            },
            settings={name: getattr(self.plan, name) for name in _SETTINGS},
            total=compute_figures(self.windows, names, is_compared),
            workloads={name: compute_figures(self.windows, [name], is_compared) for name in names},
            windows=self.windows,
        )
        conclude_benchmark(benchmark)
        return benchmark


def _check_alive(windows: Sequence[Window]) -> None:
    """Raise the last failure as a ServerError if many requests failed since the last answer."""
    failures = 0
    for window in reversed(windows):
        if window.requests:
            break
        failures += len(window.failures)
    if failures >= _MOST_FAILURES:
        raise ServerError(windows[-1].failures[-1].reason)


def _compare_texts(windows: Mapping[str, Sequence[Window]]) -> None:
    """Set ``leaves_at`` of each request: where its text begins to differ from the baseline's."""
    baseline = {request.prompt: request.answer.text for request in list_requests(windows["baseline"])}
    for request in list_requests(windows["server"]):
        if request.prompt in baseline:
            pairs = enumerate(zip_longest(request.answer.text, baseline[request.prompt]))
            request.leaves_at = next((place for place, (ours, theirs) in pairs if ours != theirs), None)


def compute_figures(windows: Mapping[str, Sequence[Window]], names: Collection[str], compared: bool) -> Figures:
    """Compute the figures of the workloads ``names``, from ``windows`` by side.

    ``compared`` says whether the texts were compared with the baseline's.
    """
    requests = {side: select_requests(of_side, names) for side, of_side in windows.items()}
    in_baseline = {request.prompt for request in requests.get("baseline", ())}
    answered_by_both = [request for request in requests["server"] if request.prompt in in_baseline]
    return Figures(
        texts=len(requests["server"]),
        sides={side: measure_side(of_side, names) for side, of_side in windows.items()},
        speedup=_compute_speedup(_collect_times(requests["server"]), _collect_times(requests.get("baseline", ()))),
        compared=len(answered_by_both) if compared else None,
        identical=sum(request.leaves_at is None for request in answered_by_both) if compared else None,
    )


def _compute_speedup(server: Mapping[int, tuple[int, float]], baseline: Mapping[int, tuple[int, float]]) -> Figure:
    """Return how much faster the server is; arguments are those of :func:`_collect_times`."""
    # Σ seconds that the baseline would take for the server's tokens / Σ seconds of the server
    prompts = sorted(server.keys() & baseline.keys())
    would_take = list[float]()
    took = list[float]()
    for prompt in prompts:
        tokens, seconds = server[prompt]
        baseline_tokens, baseline_seconds = baseline[prompt]
        would_take.append(baseline_seconds / baseline_tokens * tokens)
        took.append(seconds)
    return _compute_figure(bound_ratio, would_take, took, len(prompts))


def select_requests(windows: Sequence[Window], names: Collection[str]) -> list[Request]:
    return [request for request in list_requests(windows) if request.workload in names]


def measure_side(windows: Sequence[Window], names: Collection[str]) -> Side:
    """Compute the figures of one server for the workloads ``names``."""
    requests = select_requests(windows, names)
    is_all = len(requests) == len(list_requests(windows))
    tokens = sum_counts(request.answer.tokens for request in requests)
    wall = sum(window.wall_s for window in windows)

    timed = _collect_times(requests).values()
    counts = [count for count, _ in timed]
    first = [request.answer.first_s for request in requests if request.answer.first_s is not None]
    return Side(
        tokens=tokens,
        tokens_per_s=_compute_figure(bound_ratio, counts, [seconds for _, seconds in timed], sum(counts)),
        output_throughput=tokens / wall if is_all and wall and tokens is not None else None,
        ttft_ms=_compute_latency(first),
        tpot_ms=_compute_latency([seconds / count for count, seconds in timed]),
        **_summarize_drafts(windows, names),
    )


def _summarize_drafts(windows: Sequence[Window], names: Collection[str]) -> dict[str, Any]:
    """Return the fields of a Side about drafts; each ratio uses only the windows that count both of its terms."""
    units = list(filter(None, (_find_counters(window, names) for window in windows)))
    judged = [unit for unit in units if unit.drafted is not None]
    in_rounds = [unit for unit in units if unit.rounds]
    drafted = [unit.drafted or 0 for unit in judged]
    accepted = [unit.accepted or 0 for unit in judged]

    all_accepted = sum(accepted) if judged else sum_counts(unit.accepted for unit in units)
    has_positions = in_rounds and all(unit.positions and unit.rounds is not None for unit in units)
    return {
        "counted": sum(unit.requests or 0 for unit in units),
        "drafted": sum(drafted) if judged else None,
        "accepted": all_accepted if units else None,
        "rounds": sum(unit.rounds or 0 for unit in in_rounds) if in_rounds else None,
        "acceptance": _compute_figure(bound_share, accepted, drafted, sum(drafted)),
        "tokens_per_round": _compute_tokens_per_round(in_rounds, is_bounded=len(judged) == len(units)),
        "acceptance_by_position": _compute_acceptance_by_position(in_rounds) if has_positions else None,
    }


def _compute_tokens_per_round(units: Sequence[Counters], *, is_bounded: bool) -> Figure:
    """Return 1 + accepted / rounds of ``units``, which have rounds.

    It has an interval only if ``is_bounded``, which means that all drafts are counted.
    """
    rounds = [unit.rounds or 1 for unit in units]
    accepted = [unit.accepted or 0 for unit in units]
    # The most drafts that a round may accept, for the interval: the highest mean of drafts per round of any window.
    most = [-(-max(unit.drafted or 0, hits) // size) for unit, hits, size in zip(units, accepted, rounds, strict=True)]
    length = _compute_figure(bound_share, accepted, rounds, sum(rounds), scale=max(most, default=1) or 1, least=1)
    return length if is_bounded else Figure(length.value, length.n)


def _compute_acceptance_by_position(units: Sequence[Counters]) -> list[Figure]:
    """Return accepted drafts / rounds by position, of ``units`` that have rounds and positions."""
    rounds = [unit.rounds or 0 for unit in units]
    by_position = zip_longest(*(unit.positions or () for unit in units), fillvalue=0)
    return [_compute_figure(bound_share, hits, rounds, sum(rounds)) for hits in by_position]


def _find_counters(window: Window, names: Collection[str]) -> Counters | None:
    """Return the counters of the workloads ``names`` in ``window``; None if their drafts are not counted."""
    requests = select_requests([window], names)
    # The page's counters cannot be divided between workloads.
    is_all = len(requests) == len(window.requests)
    counters = window.counted if is_all else sum_counters([request.answer for request in requests])
    return counters if requests and counters.accepted is not None else None


def _compute_figure(
    bounds: Callable[..., IntervalEnds],
    sums: Sequence[float],
    sizes: Sequence[float],
    n: int,
    scale: int = 1,
    least: int = 0,
) -> Figure:
    """Return ``least`` + Σ ``sums`` / Σ ``sizes``; for a share, each sum is at most ``scale`` times its size."""
    interval = compute_interval(bounds, [value / scale for value in sums], sizes)
    value = least + sum(sums) / sum(sizes) if sum(sizes) else None
    return Figure(value, n, list(interval.rescale(scale, least)) if interval else None)


def _collect_times(requests: Sequence[Request]) -> dict[int, tuple[int, float]]:
    """Return by prompt the tokens after the first text, and their seconds, if these are measurable."""
    pairs = {request.prompt: (request.answer.timed_tokens or 0, request.answer.seconds) for request in requests}
    return {prompt: pair for prompt, pair in pairs.items() if min(pair) > 0}


def _compute_latency(seconds: Sequence[float]) -> dict[str, float] | None:
    values = 1e3 * np.array(seconds)
    return {"mean": float(values.mean()), "p99": float(np.percentile(values, 99))} if seconds else None
