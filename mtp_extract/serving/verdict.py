"""A benchmark for readers: its verdict, findings and notes, and the table of the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from mtp_extract.errors import few, several
from mtp_extract.report.numbers import DASH, mean, number, rate
from mtp_extract.report.page import Table
from mtp_extract.serving.client import Answer
from mtp_extract.serving.result import Benchmark, Side

_COLUMNS = (
    *("workload", "side", "tokens/s", "speedup", "same text", "TTFT ms", "TPOT ms"),
    *("all tokens/s", "acceptance %", "tokens/round"),
)


def conclude(found: Benchmark) -> None:
    """Write its verdict, findings and notes into ``found``."""
    total = found.total
    speeds = (number(s.tokens_per_s.value, ".1f", s.tokens_per_s.ci95) for s in total.sides.values())
    said = [" against ".join(speeds) + " tokens/s"]
    if total.speedup.value is not None:
        said[0] += f", {mean(total.speedup)}×"
    said.append(_drafts_in_words(total.sides["server"]))
    if total.identical is not None:
        said.append(f"the text is the baseline's in {total.identical} of {several(total.compared or 0, 'answer')}")
    found.verdict = f"Measured: {'; '.join(said)}."
    found.findings, found.notes = list(_findings(found)), list(_notes(found))


def _drafts_in_words(server: Side) -> str:
    if server.accepted is None:
        return "the server does not say how many drafts were accepted"
    if server.drafted is None:
        return f"{several(server.accepted, 'draft')} accepted, of how many the server does not say"
    share = f", {rate(server.acceptance)} %" if server.drafted else ""
    return f"{server.accepted} of {several(server.drafted, 'draft')} accepted{share}"


def _findings(found: Benchmark) -> Iterator[str]:
    server, baseline = found.total.sides["server"], found.total.sides.get("baseline")
    if found.ended_early is not None:
        windows = found.windows["server"]
        done = sum(len(window.requests) + len(window.failures) for window in windows)
        yield f"it ended after {several(done, 'prompt')}: {found.ended_early.rstrip('.')}"
    for side, windows in found.windows.items():
        failures = Counter(failure.reason.rstrip(".") for window in windows for failure in window.failures)
        if failures:
            asked = failures.total() + sum(len(window.requests) for window in windows)
            reasons = (f"{reason} ({several(count, 'time')})" for reason, count in failures.most_common())
            failed = f"{failures.total()} of {asked} requests to the {side} failed, and are left out"
            yield f"{failed}: {few(reasons, 3, '; ')}"
    if server.drafted == 0:
        yield "the server drafted nothing: it was started without a drafter, or does not use it"
    if baseline is not None and baseline.drafted:
        yield f"the baseline drafts too ({several(baseline.drafted, 'draft')}): it is none"
    yield from _parting_texts(found)


def _parting_texts(found: Benchmark) -> Iterator[str]:
    """Where texts leave the baseline's, and where only their ends differ."""
    theirs = {one.prompt: one.answer for window in found.windows.get("baseline", ()) for one in window.requests}
    asked = (one for window in found.windows["server"] for one in window.requests if one.leaves_at is not None)
    leaving, ending = list[str](), list[str]()
    for request in sorted(asked, key=lambda one: one.prompt):
        place, answer, other = request.leaves_at or 0, request.answer, theirs[request.prompt]
        shorter, longer = sorted((answer, other), key=lambda one: len(one.text))
        if place < len(shorter.text):
            leaving.append(f"{request.prompt + 1} at character {place + 1}")
        else:
            which = "ends early" if shorter is answer else "goes on after the baseline's end"
            counts = (shorter.tokens, longer.tokens)
            unit = "character" if None in counts else "token"
            at_end, of = (len(shorter.text), len(longer.text)) if None in counts else counts
            ending.append(f"{request.prompt + 1} {which}, at {unit} {at_end} of {of}")
    if leaving:
        yield f"the text leaves the baseline's in prompt {few(leaving, 8)}"
    if ending:
        yield f"the text is the baseline's but for its end: prompt {few(ending, 8, '; ')}"


def _notes(found: Benchmark) -> Iterator[str]:
    for side, server in found.servers.items():
        windows, drafts, name = found.windows[side], found.total.sides[side], f"{server['url']} ({server['kind']})"
        answers = [request.answer for window in windows for request in window.requests]
        if others := sum(window.disturbed for window in windows):
            yield (
                f"{name}: its counters moved by other than these requests {others} of {several(len(windows), 'time')}: "
                "somebody else used it, or it rounds them. Those counts are left out."
            )
        if uncounted := len(answers) - drafts.counted:
            yield f"{name} reports no draft counters for {uncounted} of {several(len(answers), 'answer')}."
        elif drafts.drafted is None or drafts.accepted is None:
            yield f"{name} counts accepted drafts, and not how many it drafted: there is no share."
        if places := drafts.acceptance_by_position:
            yield f"{name}: accepted by position in a round: {', '.join(map(rate, places))} %."
        yield from _without_speed(name, answers, found.settings["max_tokens"])
    if len(sides := dict.fromkeys(f"{server['kind']} {server['model']}" for server in found.servers.values())) > 1:
        yield f"Server and baseline differ in more than the drafter: {' and '.join(sides)}."


def _without_speed(name: str, answers: Sequence[Answer], limit: int) -> Iterator[str]:
    """Why answers have no speed, or another one than their tokens would say."""

    def of_all(chosen: Iterable[bool]) -> str:
        count = sum(chosen)
        return f"{count} of {several(len(answers), 'answer')}" if count else ""

    if some := of_all(one.tokens is None for one in answers):
        yield f"{name} does not say how many tokens {some} had: they have no tokens/s (OpenAI's field is usage)."
    if some := of_all(not one.streamed for one in answers):
        yield f"{name} streamed nothing, and sent a JSON object, for {some}: they have no tokens/s."
    if some := of_all(one.streamed and bool(one.text) and not one.seconds and one.tokens != 1 for one in answers):
        yield f"{name} sent all of the text at once for {some}, as a proxy that buffers does: they have no tokens/s."
    if some := of_all(one.unstreamed for one in answers):
        ends = (
            "Those without a count at their first text have no tokens/s."
            if of_all(one.unstreamed and one.first_tokens is None for one in answers)
            else "These are no part of tokens/s, TPOT and speedup, only of all tokens/s."
        )
        yield f"{name} counted tokens that it did not stream, as of thoughts, in {some}. {ends}"
    if some := of_all((one.tokens or 0) > limit for one in answers):
        yield f"{name} counted one token more than the {limit} that were asked for in {some}."


def table_of(found: Benchmark) -> Table:
    """Speed, latency and drafts, by workload and side."""
    rows = list[tuple[str | int, ...]]()
    for name, of in {**found.workloads, "all": found.total}.items():
        for side, one in of.sides.items():
            same = DASH if of.identical is None else f"{of.identical}/{of.compared}"
            times = (f"{t['mean']:.1f}, {t['p99']:.1f}" if t else DASH for t in (one.ttft_ms, one.tpot_ms))
            compared = (mean(of.speedup), same) if side == "server" else ("", "")
            speed = number(one.tokens_per_s.value, ".1f", one.tokens_per_s.ci95)
            drafts = rate(one.acceptance), mean(one.tokens_per_round)
            rows.append((name, side, speed, *compared, *times, number(one.output_throughput, ".1f"), *drafts))
    return Table("Speed and drafts", _COLUMNS, rows)
