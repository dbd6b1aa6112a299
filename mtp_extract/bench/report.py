"""The report of a benchmark: ``bench.json``, two pages, and the tables that pages and terminal show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.bench import fields
from mtp_extract.bench.fields import Figures, Side
from mtp_extract.bench.pictures import PICTURES, drawings
from mtp_extract.bench.run import Benchmark
from mtp_extract.io.place import Inputs, listing, staged
from mtp_extract.io.typed import fill
from mtp_extract.report.columns import DASH, Cell, Column, Row, Table, decimal, item, number, percent, share
from mtp_extract.report.columns import named as by_name
from mtp_extract.report.page import TOKENS_A_ROUND, Headline, Page, measured, pages_of, plain_json, within
from mtp_extract.report.tables import words
from mtp_extract.report.web import write_pages
from mtp_extract.speculate.texts import LEAST_TEXTS

BENCH_LISTED = listing("bench.json", pages_of("bench", PICTURES))
"""Everything that a report of a benchmark consists of, and that may be replaced."""
_VERSION = 2
_SETTING = "What was asked, and what a second run needs."
_NOT_TOLD = "not told"
_MOST_NAMED = 8  # prompts of a workload


def write_bench(found: Benchmark, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write the report; names of its files. None of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    report = as_json(found)
    with staged(target, overwrite=overwrite, inputs=inputs, listed=BENCH_LISTED) as stage:
        return write_pages(page_of(report), stage, "bench")


def page_of(report: Mapping[str, Any]) -> Page:
    """The page of a ``bench.json``."""
    servers = [f"{side}: {_named(server)}" for side, server in _sides(report).items()]
    about = f"{'; '.join(servers)}; {report['total']['texts']} prompts"
    title, shown = f"Benchmark of {report['servers']['server']['url']}", list(tables(report))
    return Page(title, about, report, headlines(report), shown, PICTURES, drawings())


def headlines(report: Mapping[str, Any]) -> list[Headline]:
    """The large figures of its head: speed, speedup, tokens a round, texts that stay."""
    total, asked = report["total"], report["settings"]
    server, baseline = total["server"], total["baseline"]
    load = f"{asked['rate']:g} requests a second" if asked["rate"] else f"{asked['concurrency']} in flight"
    speed, speedup, length = (
        within(of[f"{name}_ci95"], form)
        for of, name, form in (
            (server, "tokens_per_s", ".1f"),
            (total, "speedup", ".2f"),
            (server, "mean_accepted_length", ".2f"),
        )
    )
    untimed, alone = "no answer tells the time of its tokens", "no baseline was asked"
    untold = "the server drafted nothing" if server["drafted"] == 0 else "the server does not tell its rounds"
    same = None if total["identical"] is None else f"{total['identical']} of {total['compared']}"
    drawn = "answers were drawn, at a temperature" if baseline else alone
    of_one, over = (
        "Of one answer, from its first text on.",
        "The baseline's time for as many tokens, over the server's.",
    )
    stays = "Answers that are the baseline's, letter for letter; where tokens nearly tie, rounding may part them."
    return [
        measured("Tokens a second", server["tokens_per_s"], "{:.1f}", f"{speed}; {load}", untimed, of_one),
        measured("Speedup", total["speedup"], "{:.2f}×", speedup, untimed if baseline else alone, over),
        measured("Tokens a round", server["mean_accepted_length"], "{:.2f}", length, untold, TOKENS_A_ROUND),
        measured("Same text", same, "{}", "greedy answers beside the baseline's", drawn, stays),
    ]


def _sides(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {side: report["servers"][side] for side in ("server", "baseline") if report["servers"][side]}


def _named(server: Mapping[str, Any]) -> str:
    version = f" {server['version']}" if server["version"] else ""
    return f"{server['url']} ({server['kind']}{version}), model {server['model']}"


def as_json(found: Benchmark) -> dict[str, Any]:
    """``bench.json``: only JSON's own types, None for what was not told."""
    servers = {side: fill(fields.Server, server, kind=server.kind.name) for side, server in found.servers.items()}
    report: dict[str, Any] = plain_json(
        fill(
            fields.Bench,
            found,
            version=_VERSION,
            tool={"name": "mtp-extract", "version": __version__},
            verdict=_verdict(found.total),
            findings=_findings(found),
            notes=list(_notes(found)),
            servers={"baseline": None, **servers},
            windows={"baseline": None, **found.windows},
        )
    )
    return report


def _verdict(total: Figures) -> str:
    server, baseline = total.server, total.baseline
    speed = f"{_rate(server)} tokens/s"
    if baseline is not None:
        speed += f" against {_rate(baseline)}"
        if total.speedup is not None:
            speed += f", {number(total.speedup, '.2f', total.speedup_ci95, unit='×')}"
    drafts = "drafts are not told"
    if server.drafted is not None:
        rate = f", {share(server.acceptance, server.acceptance_ci95)} %" if server.drafted else ""
        drafts = f"{server.accepted} of {server.drafted} drafts accepted{rate}"
    same = ""
    if total.identical is not None:
        same = f"; the text is the baseline's in {total.identical} of {total.compared} answers"
    return f"Measured: {speed}; {drafts}{same}."


def _findings(found: Benchmark) -> list[str]:
    listed = []
    server, baseline = found.total.server, found.total.baseline
    if server.drafted == 0:
        listed.append("the server drafted nothing: it was started without a drafter, or does not use it")
    if baseline is not None and baseline.drafted:
        listed.append(f"the baseline drafts too ({baseline.drafted} drafts): it is none")
    for side, asked in found.servers.items():
        windows = found.windows[side]
        answers = [asked.answer for window in windows for asked in window.asked]
        said = [
            *chain.from_iterable(w.impossible for w in windows),
            *chain.from_iterable(a.impossible for a in answers),
        ]
        if said:
            listed.append(f"{asked.name} tells what cannot be, {len(said)} times, left out of all figures: {said[0]}")
    for name in found.workloads:
        places = dict.fromkeys(
            f"{index + 1} at character {at + 1}" for of, index, at in found.differences if of == name
        )
        if places:
            more = f" and {len(places) - _MOST_NAMED} more" if len(places) > _MOST_NAMED else ""
            named = ", ".join(list(places)[:_MOST_NAMED])
            listed.append(f"{name}: the text leaves the baseline's in prompt {named}{more}")
    return listed


def _notes(found: Benchmark) -> Iterator[str]:
    if found.repeats:
        asked = sum(found.settings["prompts"].values())
        yield f"{asked + found.repeats} prompts, {found.repeats} of them repeats, which were not asked."
    for side, server in found.servers.items():
        windows = found.windows[side]
        answers = [asked.answer for window in windows for asked in window.asked]
        others = sum(window.disturbed for window in windows)
        if others:
            yield (
                f"{server.name}: its counters moved by other than these requests {others} of {len(windows)} times, so "
                "somebody else used it; then they were left out, and times are not of these requests alone."
            )
        uncounted = sum(len(window.asked) for window in windows if not window.by_text("drafted"))
        if uncounted:
            yield f"{server.name} ({server.kind.name}): drafts are not told for {uncounted} of {len(answers)} answers."
        elif any(of.server.counted == 0 for of in found.workloads.values()) and side == "server":
            yield (
                f"{server.name} ({server.kind.name}) tells drafts of all requests together: of a workload they are "
                "known where requests are sent one at a time, or where its answers tell them."
            )
        untold = sum(answer.tokens is None and not answer.impossible for answer in answers)
        if untold:
            yield f"{server.name}: how many tokens an answer has is not told for {untold} of {len(answers)}."
        whole = sum(bool(answer.text) and answer.seconds == 0 for answer in answers)
        if whole:
            yield f"{server.name}: {whole} of {len(answers)} answers came in one piece, which tells no time of tokens."
        yield from _in_flight(found, side)
    if len(found.servers) > 1:
        ours, theirs = (found.servers[side] for side in ("server", "baseline"))
        if (ours.kind, ours.version) != (theirs.kind, theirs.version):
            yield (
                f"Server and baseline differ in more than the drafter: {ours.kind.name} {ours.version or ''} and "
                f"{theirs.kind.name} {theirs.version or ''}."
            )
        if ours.model != theirs.model:
            yield f"Server and baseline call their models {ours.model} and {theirs.model}."
    else:
        yield "Without a baseline there is nothing to compare speed and text with."


def _in_flight(found: Benchmark, side: str) -> Iterator[str]:
    """Where fewer were in flight than asked for, and where the client held them up."""
    windows, settings, name = found.windows[side], found.settings, found.servers[side].name
    most = max(window.in_flight_max for window in windows)
    mean = sum(window.in_flight_mean * (window.wall or 0) for window in windows) / sum(w.wall or 0 for w in windows)
    if settings["rate"] is not None or settings["concurrency"] > 1:
        few = ""
        if settings["rate"] is None and most < settings["concurrency"]:
            few = f", of {settings['concurrency']} wanted: give more prompts, or ask them more often"
        yield f"{name}: {mean:.1f} requests were in flight on the mean, {most} at most{few}."
    slow = [window.client for window in windows if window.client.limited]
    if slow:
        yield (
            f"{name}: the client is the limit in {len(slow)} of {len(windows)} windows: it computed for up to "
            f"{max(c.busy for c in slow):.0%} of the time, and was up to {max(c.lag_ms for c in slow):.1f} ms late. "
            "Times there are longer than the server's. Ask fewer at a time, or from an idle machine."
        )


def _rate(side: Side) -> str:
    return number(side.tokens_per_s, ".1f", side.tokens_per_s_ci95, none=_NOT_TOLD)


def _mean_length(row: Row) -> str:
    mean = decimal("mean_accepted_length", ".2f", "mean_accepted_length_ci95")
    return str(mean(row)) if row["rounds"] else "–"


_SPEED: Sequence[Column] = (
    ("workload", item("name")),
    ("texts", item("texts")),
    ("tokens/s", decimal("server.tokens_per_s", ".1f", "server.tokens_per_s_ci95")),
)
_BESIDE: Sequence[Column] = (
    ("baseline tokens/s", decimal("baseline.tokens_per_s", ".1f", "baseline.tokens_per_s_ci95")),
    ("speedup", decimal("speedup", ".2f", "speedup_ci95")),
    ("same text", lambda row: f"{row['identical']}/{row['compared']}" if row["compared"] else DASH),
)
"""Of a server, and beside a baseline."""

_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def _latency(name: str, path: str, interval: str = "") -> Cell:
    """Of a row, a number of its latency; a dash where there is none."""
    cell = decimal(path, ".1f", interval)
    return lambda row: cell(row[name]) if row[name] else DASH


_LATENCY: Sequence[Column] = (
    ("workload", item("workload")),
    ("side", item("side")),
    *(
        column
        for name, shown in _LATENCIES.items()
        for column in (
            (f"{shown} ms mean", _latency(f"{name}_ms", "mean", "ci95")),
            (f"{shown} median", _latency(f"{name}_ms", "median")),
            (f"{shown} p99", _latency(f"{name}_ms", "p99")),
        )
    ),
)

_THROUGHPUT: Sequence[Column] = (
    ("side", item("side")),
    ("requests", item("requests")),
    ("request throughput (req/s)", decimal("request_throughput", ".2f")),
    ("output token throughput (tok/s)", decimal("output_throughput", ".1f")),
    ("request goodput (req/s)", decimal("request_goodput", ".2f")),
)

_DRAFTS: Sequence[Column] = (
    ("workload", item("workload")),
    ("side", item("side")),
    ("answers counted", item("counted")),
    ("accepted", decimal("accepted", "d")),
    ("drafted", decimal("drafted", "d")),
    ("acceptance %", percent("acceptance", "acceptance_ci95")),
    ("rounds", decimal("rounds", "d")),
    ("mean length", _mean_length),
)


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of a ``bench.json``: what was measured with what, speed, drafts."""
    servers = _sides(report)
    named = {side: _named(server) for side, server in servers.items()}
    settings = {name.replace("_", " "): words(value) for name, value in report["settings"].items() if value is not None}
    yield Table(title="Setting", columns=("", ""), rows=(*named.items(), *settings.items()), what=_SETTING)
    workloads = {**report["workloads"], "all": report["total"]}
    rows = [{**of[side], "workload": name, "side": side} for name, of in workloads.items() for side in servers]
    yield Table.of(
        "Speed",
        (*_SPEED, *(_BESIDE if "baseline" in servers else ())),
        by_name(workloads),
        what="How fast the text of an answer comes, with the drafter and without.",
        about=(
            "Tokens as the server counts them, and times, both added up over all answers. Same text: greedy answers "
            "that are the baseline's, character for character; where two tokens nearly tie, rounding may part them. In "
            f"brackets: 95 % intervals, over texts; none with fewer than {LEAST_TEXTS}."
        ),
        figures=("speed_by_workload",),
        first=True,
    )
    yield Table.of(
        "Throughput",
        _THROUGHPUT,
        [row for row in rows if row["workload"] == "all"],
        what="What the server does in all, over the time in which requests were under way.",
        figures=("over_time",),
    )
    yield Table.of(
        "Latency",
        _LATENCY,
        rows,
        what="How long a user waits, as vllm bench serve has it; a drafter's server sends several tokens in one text.",
    )
    drafting = [side for side in servers if any(row["drafted"] for row in rows if row["side"] == side)]
    if not any(row["counted"] for row in rows):
        return
    yield Table.of(
        "Drafts",
        _DRAFTS if len(drafting) > 1 else [column for column in _DRAFTS if column[0] != "side"],
        [row for row in rows if row["side"] in (drafting or ["server"])],
        what="How many drafts the base takes, as the server counts them.",
        about=(
            "Mean length: 1 + accepted / rounds. In brackets: 95 % intervals, over texts; over windows of requests "
            f"where the server tells these alone apart; none with fewer than {LEAST_TEXTS}."
        ),
        figures=("acceptance_by_workload", "acceptance_by_position"),
        first=True,
    )
