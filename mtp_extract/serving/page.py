"""A benchmark for readers: its verdict, findings and notes, the table of page and terminal, and the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from mtp_extract.errors import few, several
from mtp_extract.evaluate.intervals import LEAST_TEXTS
from mtp_extract.io.place import Inputs, listing, staged
from mtp_extract.report.numbers import DASH, mean, number, rate
from mtp_extract.report.page import Page, Table, write_report
from mtp_extract.serving.result import Benchmark

BENCH_LISTED = listing("bench.json", frozenset({"bench.json", "bench.html"}))
"""Everything that a report of a benchmark consists of, and that may be replaced."""
_MOST_NAMED = 8  # prompts of a workload
_BUSIEST = 0.8  # share of a core from which the client is the limit
_COLUMNS = (
    *("workload", "side", "tokens/s", "speedup", "same text", "TTFT ms", "TPOT ms"),
    *("all tokens/s", "acceptance %", "tokens/round"),
)
_ABOUT = (
    "Tokens/s: as the server counts tokens, from first text to last event, added up over answers. Speedup: the time "
    "that the baseline takes for as many tokens, over the server's. Same text: greedy answers that are the baseline's, "
    "character for character; where two tokens nearly tie, rounding may part them. TTFT: from request to first text; "
    "TPOT: per token after it; the mean, and what 99 % do not exceed. All tokens/s: of all requests together. "
    "Acceptance: of drafts judged, as the server counts. Tokens/round, as served: 1 + accepted / rounds. In brackets: "
    "95 % intervals over texts, or over windows where only these are counted; none with fewer than "
    f"{LEAST_TEXTS}."
)


def write_bench(found: Benchmark, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write ``bench.json`` and its page; names of its files. None of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    sides = (
        f"{side}: {one.url} ({' '.join(filter(None, (one.kind, one.version)))}), model {one.model}"
        for side, one in found.servers.items()
    )
    title, about = (
        f"Benchmark of {found.servers['server'].url}",
        "; ".join((*sides, several(found.total.texts, "prompt"))),
    )
    page = Page(title, about, found.verdict, [table_of(found)], findings=found.findings, notes=found.notes)
    with staged(target, overwrite=overwrite, inputs=inputs, listed=BENCH_LISTED) as stage:
        return write_report(stage, "bench", found, page)


def conclude(found: Benchmark) -> Benchmark:
    """The same with its verdict, findings and notes."""
    said = {"verdict": _verdict(found), "findings": list(_findings(found)), "notes": list(_notes(found))}
    return msgspec.structs.replace(found, **said)


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
        said.append(f"{server.accepted} of {several(server.drafted, 'draft')} accepted{share}")
    if total.identical is not None:
        said.append(f"the text is the baseline's in {total.identical} of {several(total.texts, 'answer')}")
    return f"Measured: {'; '.join(said)}."


def _findings(found: Benchmark) -> Iterator[str]:
    server, baseline = found.total.sides["server"], found.total.sides.get("baseline")
    if server.drafted == 0:
        yield "the server drafted nothing: it was started without a drafter, or does not use it"
    if baseline is not None and baseline.drafted:
        yield f"the baseline drafts too ({several(baseline.drafted, 'draft')}): it is none"
    for name in found.workloads:
        places = [f"{one.prompt + 1} at character {one.character + 1}" for one in found.parted if one.workload == name]
        if places:
            yield f"{name}: the text leaves the baseline's in prompt {few(places, _MOST_NAMED)}"


def _notes(found: Benchmark) -> Iterator[str]:
    if found.repeated:
        asked = sum(found.prompts.values()) + found.repeated
        yield f"{asked} prompts, {found.repeated} of them repeats, which were not asked."
    for side, server in found.servers.items():
        yield from (f"{server.url} ({server.kind}){note}" for note in _notes_of(found, side))
    if len(found.servers) == 1:
        yield "Without a baseline there is nothing to compare speed and text with."
        return
    ours, theirs = ((server.kind, server.version or "", server.model) for server in found.servers.values())
    if ours != theirs:
        yield f"Server and baseline differ in more than the drafter: {' '.join(ours)} and {' '.join(theirs)}."


def _notes_of(found: Benchmark, side: str) -> Iterator[str]:
    """What a server did not report or reports of others too, and where the client held it up."""
    windows, wanted = found.windows[side], found.settings["concurrency"]
    answers = [request.answer for window in windows for request in window.requests]
    if others := sum(window.disturbed for window in windows):
        yield (
            f": its counters moved by more than these requests {others} of {several(len(windows), 'time')}, so "
            "somebody else used it. Those counts are left out, and times are not of these requests alone."
        )
    if uncounted := len(answers) - found.total.sides[side].counted:
        yield f" reports no draft counters for {uncounted} of {several(len(answers), 'answer')}."
    elif side == "server" and not all(of.sides[side].counted for of in found.workloads.values()):
        yield " counts drafts of all requests together: to have them by workload, send one at a time."
    if places := found.total.sides[side].acceptance_by_position:
        yield f": accepted by position in a round: {', '.join(map(rate, places))} %."
    if untold := sum(answer.tokens is None for answer in answers):
        yield f" does not say how many tokens an answer has, {untold} of {several(len(answers), 'time')}."
    if whole := sum(answer.first_s is not None and answer.seconds == 0 for answer in answers):
        yield f": {whole} of {several(len(answers), 'answer')} came in one piece, which shows no time of tokens."
    if (most := max(len(window.requests) for window in windows)) < wanted:
        yield f": at most {most} of {wanted} requests were in flight: give more prompts."
    if slow := [window.client_busy for window in windows if window.client_busy >= _BUSIEST]:
        yield (
            f": the client is the limit in {len(slow)} of {several(len(windows), 'window')}: it computed for up to "
            f"{max(slow):.0%} of the time, so times are longer than the server's. Ask fewer at a time."
        )


def table_of(found: Benchmark) -> Table:
    """Speed, latency and drafts, by workload and side."""
    rows = list[tuple[str | int, ...]]()
    for name, of in {**found.workloads, "all": found.total}.items():
        for side, one in of.sides.items():
            same = DASH if of.identical is None else f"{of.identical}/{of.texts}"
            times = (f"{t.mean:.1f}, {t.p99:.1f}" if t else DASH for t in (one.ttft_ms, one.tpot_ms))
            compared = (mean(of.speedup), same) if side == "server" else ("", "")
            speed = number(one.tokens_per_s.value, ".1f", one.tokens_per_s.ci95)
            drafts = rate(one.acceptance), mean(one.tokens_per_round)
            rows.append((name, side, speed, *compared, *times, number(one.output_throughput, ".1f"), *drafts))
    return Table("Speed and drafts", _COLUMNS, rows, what="By workload, and of all.", about=_ABOUT)
