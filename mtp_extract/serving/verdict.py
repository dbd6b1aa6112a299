"""Describes a benchmark: its verdict, findings and notes, and the table for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from mtp_extract.errors import format_count, list_few
from mtp_extract.report.numbers import DASH, format_mean, format_number, format_rate
from mtp_extract.report.page import ReportTable
from mtp_extract.serving.client import Answer
from mtp_extract.serving.result import Benchmark, Side, Window, list_requests

_SPEED_COLUMNS = ("tokens/s", "speedup", "same text", "TTFT ms", "TPOT ms", "all tokens/s")
_DRAFT_COLUMNS = ("acceptance %", "tokens/round")

_UNCOUNTED = "does not say how many tokens {} had: they have no tokens/s (OpenAI's field is usage)."
_NOT_STREAMED = "streamed nothing, and sent a JSON object, for {}: they have no tokens/s."
_BUFFERED = "sent all of the text at once for {}, as a proxy that buffers does: they have no tokens/s."
_THOUGHTS = "counted tokens that it did not stream, as of thoughts, in {}."
_BEYOND = "counted one token more than the {limit} that were asked for in {}."


def conclude_benchmark(benchmark: Benchmark) -> None:
    """Write the verdict, the findings and the notes into ``benchmark``."""
    total = benchmark.total
    speeds = " against ".join(_format_speed(side) for side in total.sides.values())
    speedup = "" if total.speedup.value is None else f", {format_mean(total.speedup)}×"
    parts = [f"{speeds} tokens/s{speedup}", _describe_drafts(total.sides["server"])]
    if total.identical is not None:
        parts.append(
            f"the text is the baseline's in {total.identical} of {format_count(total.compared or 0, 'answer')}"
        )

    benchmark.verdict = f"Measured: {'; '.join(parts)}."
    benchmark.findings = list(_list_findings(benchmark))
    benchmark.notes = list(_list_notes(benchmark))


def _format_speed(side: Side) -> str:
    return format_number(side.tokens_per_s.value, ".1f", side.tokens_per_s.ci95)


def _describe_drafts(server: Side) -> str:
    if server.accepted is None:
        return "the server does not say how many drafts were accepted"
    if server.drafted is None:
        return f"{format_count(server.accepted, 'draft')} accepted, of how many the server does not say"
    share = f", {format_rate(server.acceptance)} %" if server.drafted else ""
    return f"{server.accepted} of {format_count(server.drafted, 'draft')} accepted{share}"


def _list_findings(benchmark: Benchmark) -> Iterator[str]:
    server = benchmark.total.sides["server"]
    baseline = benchmark.total.sides.get("baseline")
    if benchmark.ended_early is not None:
        windows = benchmark.windows["server"]
        done = sum(len(window.requests) + len(window.failures) for window in windows)
        yield f"it ended after {format_count(done, 'prompt')}: {benchmark.ended_early.rstrip('.')}"
    for side, windows in benchmark.windows.items():
        yield from _describe_failures(side, windows)
    if server.drafted == 0:
        yield "the server drafted nothing: it was started without a drafter, or does not use it"
    if baseline is not None and baseline.drafted:
        yield f"the baseline drafts too ({format_count(baseline.drafted, 'draft')}): it is none"
    yield from _describe_text_differences(benchmark)


def _describe_failures(side: str, windows: Sequence[Window]) -> Iterator[str]:
    failures = Counter(failure.reason.rstrip(".") for window in windows for failure in window.failures)
    if failures:
        sent = failures.total() + len(list_requests(windows))
        reasons = (f"{reason} ({format_count(count, 'time')})" for reason, count in failures.most_common())
        failed = f"{failures.total()} of {sent} requests to the {side} failed, and are left out"
        yield f"{failed}: {list_few(reasons, 3, '; ')}"


def _describe_text_differences(benchmark: Benchmark) -> Iterator[str]:
    """Yield in which prompts the text differs from the baseline's, and in which only the length differs."""
    baseline = {request.prompt: request.answer for request in list_requests(benchmark.windows.get("baseline", ()))}
    leaving = list[str]()
    ending = list[str]()
    for request in sorted(list_requests(benchmark.windows["server"]), key=lambda request: request.prompt):
        place = request.leaves_at
        if place is None:
            continue
        expected = baseline[request.prompt]
        if place < min(len(request.answer.text), len(expected.text)):
            leaving.append(f"{request.prompt + 1} at character {place + 1}")
        else:
            ending.append(f"{request.prompt + 1} {_describe_end(request.answer, expected)}")
    if leaving:
        yield f"the text leaves the baseline's in prompt {list_few(leaving, 8)}"
    if ending:
        yield f"the text is the baseline's but for its end: prompt {list_few(ending, 8, '; ')}"


def _describe_end(answer: Answer, baseline: Answer) -> str:
    """Describe where the shorter of two texts ends, of which one begins with the other."""
    is_shorter = len(answer.text) <= len(baseline.text)
    shorter, longer = (answer, baseline) if is_shorter else (baseline, answer)
    which = "ends early" if is_shorter else "goes on after the baseline's end"
    if shorter.tokens is None or longer.tokens is None:
        return f"{which}, at character {len(shorter.text)} of {len(longer.text)}"
    return f"{which}, at token {shorter.tokens} of {longer.tokens}"


def _list_notes(benchmark: Benchmark) -> Iterator[str]:
    servers = benchmark.servers
    for side, server in servers.items():
        name = f"{server['url']} ({server['kind']})"
        windows = benchmark.windows[side]
        answers = [request.answer for request in list_requests(windows)]
        yield from _list_counting_notes(name, windows, benchmark.total.sides[side], len(answers))
        yield from _explain_missing_speeds(name, answers, benchmark.settings["max_tokens"])
    models = dict.fromkeys(f"{server['kind']} {server['model']}" for server in servers.values())
    if len(models) > 1:
        yield f"Server and baseline differ in more than the drafter: {' and '.join(models)}."


def _list_counting_notes(name: str, windows: Sequence[Window], side: Side, answers: int) -> Iterator[str]:
    """Yield the counts that the server ``name`` lacks, and its acceptance by position."""
    if disturbed := sum(window.disturbed for window in windows):
        times = f"{disturbed} of {format_count(len(windows), 'time')}"
        yield (
            f"{name}: its counters moved by other than these requests {times}: somebody else used it, or it rounds "
            "them. Those counts are left out."
        )
    if uncounted := answers - side.counted:
        yield f"{name} reports no draft counters for {uncounted} of {format_count(answers, 'answer')}."
    elif side.drafted is None or side.accepted is None:
        yield f"{name} counts accepted drafts, and not how many it drafted: there is no share."
    if rates := side.acceptance_by_position:
        yield f"{name}: accepted by position in a round: {', '.join(map(format_rate, rates))} %."


def _explain_missing_speeds(name: str, answers: Sequence[Answer], limit: int) -> Iterator[str]:
    """Yield why answers have no speed, or one that does not include all their tokens."""
    thoughts = "These are no part of tokens/s, TPOT and speedup, only of all tokens/s."
    if any(answer.unstreamed and answer.first_tokens is None for answer in answers):
        thoughts = "Those without a count at their first text have no tokens/s."
    # The sentence, and whether an answer is concerned.
    reasons: tuple[tuple[str, Callable[[Answer], bool]], ...] = (
        (_UNCOUNTED, lambda answer: answer.tokens is None),
        (_NOT_STREAMED, lambda answer: not answer.streamed),
        (_BUFFERED, lambda answer: answer.streamed and bool(answer.text) and not answer.seconds and answer.tokens != 1),
        (f"{_THOUGHTS} {thoughts}", lambda answer: answer.unstreamed),
        (_BEYOND, lambda answer: (answer.tokens or 0) > limit),
    )
    for sentence, is_concerned in reasons:
        if count := sum(map(is_concerned, answers)):
            concerned = f"{count} of {format_count(len(answers), 'answer')}"
            yield f"{name} {sentence.format(concerned, limit=limit)}"


def build_benchmark_table(benchmark: Benchmark) -> ReportTable:
    """Return the table of speed, latency and drafts, by workload and side."""
    rows = list[tuple[str | int, ...]]()
    for name, figures in {**benchmark.workloads, "all": benchmark.total}.items():
        same_text = DASH if figures.identical is None else f"{figures.identical}/{figures.compared}"
        for side_name, side in figures.sides.items():
            compared = (format_mean(figures.speedup), same_text) if side_name == "server" else ("", "")
            latencies = (_format_latency(side.ttft_ms), _format_latency(side.tpot_ms))
            drafts = (format_rate(side.acceptance), format_mean(side.tokens_per_round))
            throughput = format_number(side.output_throughput, ".1f")
            rows.append((name, side_name, _format_speed(side), *compared, *latencies, throughput, *drafts))
    return ReportTable("Speed and drafts", ("workload", "side", *_SPEED_COLUMNS, *_DRAFT_COLUMNS), rows)


def _format_latency(milliseconds: Mapping[str, float] | None) -> str:
    return f"{milliseconds['mean']:.1f}, {milliseconds['p99']:.1f}" if milliseconds else DASH
