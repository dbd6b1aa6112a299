"""A benchmark for readers: its verdict, findings and notes, the tables of page and terminal, and the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from mtp_extract.errors import few
from mtp_extract.evaluate.texts import LEAST_TEXTS
from mtp_extract.io.place import Inputs, listing, staged
from mtp_extract.report.numbers import DASH, mean, number, rate
from mtp_extract.report.page import Page, Table, write_report
from mtp_extract.serving.figures import asked_of
from mtp_extract.serving.result import Asked, Benchmark, Side

BENCH_LISTED = listing("bench.json", frozenset({"bench.json", "bench.html"}))
"""Everything that a report of a benchmark consists of, and that may be replaced."""
_MOST_NAMED = 8  # prompts of a workload
_BUSIEST = 0.8  # share of a core from which the client is the limit
_BRACKETS = f"In brackets: 95 % intervals, over texts; none with fewer than {LEAST_TEXTS}."


def write_bench(found: Benchmark, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write ``bench.json`` and its page; names of its files. None of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """

    def named(asked: Asked) -> str:
        return f"{asked.url} ({' '.join(filter(None, (asked.kind, asked.version)))}), model {asked.model}"

    page = Page(
        f"Benchmark of {found.servers['server'].url}",
        "; ".join((*(f"{side}: {named(one)}" for side, one in found.servers.items()), f"{found.total.texts} prompts")),
        found.verdict,
        list(tables(found)),
        findings=found.findings,
        notes=found.notes,
    )
    with staged(target, overwrite=overwrite, inputs=inputs, listed=BENCH_LISTED) as stage:
        return write_report(stage, "bench", found, page)


def conclude(found: Benchmark) -> Benchmark:
    """The same with its verdict, findings and notes."""
    return msgspec.structs.replace(
        found, verdict=_verdict(found), findings=list(_findings(found)), notes=list(_notes(found))
    )


def _verdict(found: Benchmark) -> str:
    total, speeds = found.total, [side.tokens_per_s for side in found.total.sides.values()]
    said = [" against ".join(number(speed.value, ".1f", speed.ci95) for speed in speeds) + " tokens/s"]
    if total.speedup.value is not None:
        said[0] += f", {mean(total.speedup)}×"
    server = total.sides["server"]
    if server.drafted is None:
        said.append("the server does not say how many drafts were accepted")
    else:
        share = f", {rate(server.acceptance)} %" if server.drafted else ""
        said.append(f"{server.accepted} of {server.drafted} drafts accepted{share}")
    if total.identical is not None:
        said.append(f"the text is the baseline's in {total.identical} of {total.texts} answers")
    return f"Measured: {'; '.join(said)}."


def _findings(found: Benchmark) -> Iterator[str]:
    server, baseline = found.total.sides["server"], found.total.sides.get("baseline")
    if server.drafted == 0:
        yield "the server drafted nothing: it was started without a drafter, or does not use it"
    if baseline is not None and baseline.drafted:
        yield f"the baseline drafts too ({baseline.drafted} drafts): it is none"
    for name in found.workloads:
        places = [f"{one.prompt + 1} at character {one.character + 1}" for one in found.parted if one.workload == name]
        if places:
            yield f"{name}: the text leaves the baseline's in prompt {few(places, _MOST_NAMED)}"


def _notes(found: Benchmark) -> Iterator[str]:
    if found.repeated:
        asked = sum(found.prompts.values()) + found.repeated
        yield f"{asked} prompts, {found.repeated} of them repeats, which were not asked."
    for side in found.servers:
        yield from _notes_of(found, side)
    if len(found.servers) == 1:
        yield "Without a baseline there is nothing to compare speed and text with."
        return
    ours, theirs = found.servers["server"], found.servers["baseline"]
    if (ours.kind, ours.version) != (theirs.kind, theirs.version):
        kinds = (f"{server.kind} {server.version or ''}" for server in (ours, theirs))
        yield f"Server and baseline differ in more than the drafter: {' and '.join(kinds)}."
    if ours.model != theirs.model:
        yield f"Server and baseline call their models {ours.model} and {theirs.model}."


def _notes_of(found: Benchmark, side: str) -> Iterator[str]:
    """What a server did not report or reports of others too, and where the client held it up."""
    server, windows, wanted = found.servers[side], found.windows[side], found.settings["concurrency"]
    answers, name = [request.answer for request in asked_of(windows)], f"{server.url} ({server.kind})"
    if others := sum(window.disturbed for window in windows):
        yield (
            f"{name}: its counters moved by more than these requests {others} of {len(windows)} times, so somebody "
            "else used it. Those counts are left out, and times are not of these requests alone."
        )
    if uncounted := len(answers) - found.total.sides[side].counted:
        yield f"{name} reports no draft counters for {uncounted} of {len(answers)} answers."
    elif side == "server" and not all(of.sides[side].counted for of in found.workloads.values()):
        yield f"{name} counts drafts of all requests together: to have them by workload, send one at a time."
    if untold := sum(answer.tokens is None for answer in answers):
        yield f"{name} does not say how many tokens an answer has, {untold} of {len(answers)} times."
    if whole := sum(answer.first_s is not None and answer.seconds == 0 for answer in answers):
        yield f"{name}: {whole} of {len(answers)} answers came in one piece, which shows no time of tokens."
    if (most := max(len(window.requests) for window in windows)) < wanted:
        yield f"{name}: at most {most} of {wanted} requests were in flight: give more prompts."
    if slow := [window.client_busy for window in windows if window.client_busy >= _BUSIEST]:
        yield (
            f"{name}: the client is the limit in {len(slow)} of {len(windows)} windows: it computed for up to "
            f"{max(slow):.0%} of the time, so times are longer than the server's. Ask fewer at a time, or from an "
            "idle machine."
        )


def tables(found: Benchmark) -> Iterator[Table]:
    """Speed with latency, and drafts: by workload and side."""
    rows = list[tuple[str | int, ...]]()
    figures = {**found.workloads, "all": found.total}
    for name, of in figures.items():
        for side, one in of.sides.items():
            compared = (mean(of.speedup), f"{of.identical}/{of.texts}" if of.identical is not None else DASH)
            times = [(time.mean, time.p99) if time else (None, None) for time in (one.ttft_ms, one.tpot_ms)]
            rows.append((
                *(name, side, of.texts, number(one.tokens_per_s.value, ".1f", one.tokens_per_s.ci95)),
                *(compared if side == "server" else ("", "")),
                *(number(ms, ".1f") for pair in times for ms in pair),
                number(one.output_throughput, ".1f"),
            ))  # fmt: skip
    yield Table(
        "Speed",
        (
            *("workload", "side", "texts", "tokens/s", "speedup", "same text"),
            *("TTFT ms", "TTFT p99", "TPOT ms", "TPOT p99", "all tokens/s"),
        ),
        rows,
        what="How fast the text of an answer comes, and how long a user waits.",
        about=(
            "Tokens as the server counts them, and times from first text to last event, both added up over all "
            "answers. Speedup: the time that the baseline takes for as many tokens, over the server's. Same text: "
            "greedy answers that are the baseline's, character for character; where two tokens nearly tie, rounding "
            "may part them. TTFT: from request to first text; TPOT: per token after it; means, and what 99 % do not "
            f"exceed. All tokens/s: of all requests together, over the time in which any was under way. {_BRACKETS}"
        ),
    )
    sides = [(name, side, one) for name, of in figures.items() for side, one in of.sides.items() if one.counted]
    drafting = [row for row in sides if row[2].drafted] or [row for row in sides if row[1] == "server"]
    if drafting:
        yield Table(
            "Drafts",
            (
                *("workload", "side", "counted", "accepted", "drafted"),
                *("acceptance %", "rounds", "tokens/round", "by position %"),
            ),
            [(name, side, *_drafts(one)) for name, side, one in drafting],
            what="How many drafts the base takes, as the server counts them.",
            about=(
                "Counted: answers whose drafts are known. Tokens per round, as served: 1 + accepted / rounds. By "
                "position: share of rounds that accept the first draft, the second, and so on. Where the server counts "
                f"only all requests of a window together, intervals are over windows. {_BRACKETS}"
            ),
        )


def _drafts(of: Side) -> tuple[str | int, ...]:
    places = " ".join(map(rate, of.acceptance_by_position or ()))
    accepted, drafted, rounds = (number(count, "d") for count in (of.accepted, of.drafted, of.rounds))
    return of.counted, accepted, drafted, rate(of.acceptance), rounds, mean(of.tokens_per_round), places or DASH
