"""A benchmark for readers: its verdict, findings and notes, and the table of the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from mtp_extract.errors import few, several
from mtp_extract.report.numbers import DASH, mean, number, rate
from mtp_extract.report.page import Table
from mtp_extract.serving.result import Benchmark

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
    server = total.sides["server"]
    if server.drafted is None:
        said.append("the server does not say how many drafts were accepted")
    else:
        share = f", {rate(server.acceptance)} %" if server.drafted else ""
        said.append(f"{server.accepted} of {several(server.drafted, 'draft')} accepted{share}")
    if total.identical is not None:
        said.append(f"the text is the baseline's in {total.identical} of {several(total.texts, 'answer')}")
    found.verdict = f"Measured: {'; '.join(said)}."
    found.findings, found.notes = list(_findings(found)), list(_notes(found))


def _findings(found: Benchmark) -> Iterator[str]:
    server, baseline = found.total.sides["server"], found.total.sides.get("baseline")
    if server.drafted == 0:
        yield "the server drafted nothing: it was started without a drafter, or does not use it"
    if baseline is not None and baseline.drafted:
        yield f"the baseline drafts too ({several(baseline.drafted, 'draft')}): it is none"
    asked = sorted((one for window in found.windows["server"] for one in window.requests), key=lambda one: one.prompt)
    if places := [f"{one.prompt + 1} at character {one.leaves_at + 1}" for one in asked if one.leaves_at is not None]:
        yield f"the text leaves the baseline's in prompt {few(places, 8)}"


def _notes(found: Benchmark) -> Iterator[str]:
    for side, server in found.servers.items():
        windows, drafts, name = found.windows[side], found.total.sides[side], f"{server['url']} ({server['kind']})"
        if others := sum(window.disturbed for window in windows):
            yield (
                f"{name}: its counters moved by other than these requests {others} of {several(len(windows), 'time')}: "
                "somebody else used it, or it rounds them. Those counts are left out."
            )
        if uncounted := found.total.texts - drafts.counted:
            yield f"{name} reports no draft counters for {uncounted} of {several(found.total.texts, 'answer')}."
        if places := drafts.acceptance_by_position:
            yield f"{name}: accepted by position in a round: {', '.join(map(rate, places))} %."
    if len(sides := dict.fromkeys(f"{server['kind']} {server['model']}" for server in found.servers.values())) > 1:
        yield f"Server and baseline differ in more than the drafter: {' and '.join(sides)}."


def table_of(found: Benchmark) -> Table:
    """Speed, latency and drafts, by workload and side."""
    rows = list[tuple[str | int, ...]]()
    for name, of in {**found.workloads, "all": found.total}.items():
        for side, one in of.sides.items():
            same = DASH if of.identical is None else f"{of.identical}/{of.texts}"
            times = (f"{t['mean']:.1f}, {t['p99']:.1f}" if t else DASH for t in (one.ttft_ms, one.tpot_ms))
            compared = (mean(of.speedup), same) if side == "server" else ("", "")
            speed = number(one.tokens_per_s.value, ".1f", one.tokens_per_s.ci95)
            drafts = rate(one.acceptance), mean(one.tokens_per_round)
            rows.append((name, side, speed, *compared, *times, number(one.output_throughput, ".1f"), *drafts))
    return Table("Speed and drafts", _COLUMNS, rows)
