"""The report of a benchmark: ``bench.json``, its page, and the tables that page and terminal show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.bench import fields
from mtp_extract.bench.fields import Figures, Side
from mtp_extract.bench.run import Benchmark
from mtp_extract.io.place import Inputs, listing, staged
from mtp_extract.io.typed import fill
from mtp_extract.report.numbers import DASH, number, percent
from mtp_extract.report.page import Page, Table, plain_json
from mtp_extract.report.page import write_report as write_page
from mtp_extract.speculate.texts import LEAST_TEXTS

BENCH_LISTED = listing("bench.json", frozenset({"bench.json", "bench.html"}))
"""Everything that a report of a benchmark consists of, and that may be replaced."""
_VERSION = 2
_NOT_TOLD = "not told"
_MOST_NAMED = 8  # prompts of a workload
_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}


def write_bench(found: Benchmark, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write the report; names of its files. None of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    report = as_json(found)
    with staged(target, overwrite=overwrite, inputs=inputs, listed=BENCH_LISTED) as stage:
        return write_page(stage, "bench", report, page_of(report))


def page_of(report: Mapping[str, Any]) -> Page:
    """The page of a ``bench.json``."""
    servers = [f"{side}: {_named(server)}" for side, server in _sides(report).items()]
    about = f"{'; '.join(servers)}; {report['total']['texts']} prompts"
    title, shown = f"Benchmark of {report['servers']['server']['url']}", list(tables(report))
    return Page(title, about, report["verdict"], shown, findings=report["findings"], notes=report["notes"])


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
        rate = f", {percent(server.acceptance, server.acceptance_ci95)} %" if server.drafted else ""
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
    return _NOT_TOLD if side.tokens_per_s is None else number(side.tokens_per_s, ".1f", side.tokens_per_s_ci95)


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of a ``bench.json``: what was measured with what, speed, drafts."""
    servers = _sides(report)
    named = {side: _named(server) for side, server in servers.items()}
    settings = {
        name.replace("_", " "): _words(value) for name, value in report["settings"].items() if value is not None
    }
    rows = [*named.items(), *settings.items()]
    yield Table("Setting", ("", ""), rows, what="What was asked, and what a second run needs.", folded=True)
    workloads = {**report["workloads"], "all": report["total"]}
    yield _speed(workloads, "baseline" in servers)
    yield _throughput(report["total"], list(servers))
    yield _latency(workloads, list(servers))
    if any(of[side]["counted"] for of in workloads.values() for side in servers):
        drafting = [side for side in servers if any(of[side]["drafted"] for of in workloads.values())]
        yield _drafts(workloads, drafting or ["server"])


def _words(value: Any) -> str:
    """A setting: numbers by name, or one."""
    return ", ".join(f"{name} {item}" for name, item in value.items()) if isinstance(value, Mapping) else str(value)


def _speed(workloads: Mapping[str, Any], beside: bool) -> Table:
    def compared(of: Mapping[str, Any]) -> tuple[str, str, str]:
        base = of["baseline"]
        same = f"{of['identical']}/{of['compared']}" if of["compared"] else DASH
        speed = number(of["speedup"], ".2f", of["speedup_ci95"])
        return number(base["tokens_per_s"], ".1f", base["tokens_per_s_ci95"]), speed, same

    return Table(
        "Speed",
        ("workload", "texts", "tokens/s", *(("baseline tokens/s", "speedup", "same text") if beside else ())),
        [
            (
                name,
                of["texts"],
                number(of["server"]["tokens_per_s"], ".1f", of["server"]["tokens_per_s_ci95"]),
                *(compared(of) if beside else ()),
            )
            for name, of in workloads.items()
        ],
        what="How fast the text of an answer comes, with the drafter and without.",
        about=(
            "Tokens as the server counts them, and times from first text to last event, both added up over all "
            "answers. Speedup: the time that the baseline takes for as many tokens, over the server's. Same text: "
            "greedy answers that are the baseline's, character for character; where two tokens nearly tie, rounding "
            f"may part them. In brackets: 95 % intervals, over texts; none with fewer than {LEAST_TEXTS}."
        ),
    )


def _throughput(total: Mapping[str, Any], sides: list[str]) -> Table:
    return Table(
        "Throughput",
        ("side", "requests", "requests/s", "output tokens/s", "good requests/s"),
        [
            (
                side,
                total[side]["requests"],
                number(total[side]["request_throughput"], ".2f"),
                number(total[side]["output_throughput"], ".1f"),
                number(total[side]["request_goodput"], ".2f"),
            )
            for side in sides
        ],
        what="What the server does in all, over the time in which requests were under way.",
    )


def _latency(workloads: Mapping[str, Any], sides: list[str]) -> Table:
    def cells(of: Mapping[str, Any]) -> Iterator[str]:
        for found in (of[f"{name}_ms"] for name in _LATENCIES):
            yield number(found["mean"], ".1f", found["ci95"]) if found else DASH
            yield from (number(found[name], ".1f") if found else DASH for name in ("median", "p99"))

    columns = [
        column for name in _LATENCIES.values() for column in (f"{name} ms mean", f"{name} median", f"{name} p99")
    ]
    return Table(
        "Latency",
        ("workload", "side", *columns),
        [(name, side, *cells(of[side])) for name, of in workloads.items() for side in sides],
        what="How long a user waits, as vllm bench serve has it; a drafter's server sends several tokens in one text.",
        about=(
            "TTFT: time to first token, from request to first text. TPOT: time per output token of an answer, after "
            "its first text. ITL: between two texts, each of one or several tokens. E2EL: from request to the end of "
            "the answer."
        ),
        folded=True,
    )


def _drafts(workloads: Mapping[str, Any], sides: list[str]) -> Table:
    def length(of: Mapping[str, Any]) -> str:
        known = of["mean_accepted_length"] if of["rounds"] else None
        return number(known, ".2f", of["mean_accepted_length_ci95"])

    return Table(
        "Drafts",
        (
            "workload",
            "side",
            "answers counted",
            "accepted",
            "drafted",
            "acceptance %",
            "rounds",
            "served tokens per round",
        ),
        [
            (
                name,
                side,
                of[side]["counted"],
                *(number(of[side][key], "d") for key in ("accepted", "drafted")),
                percent(of[side]["acceptance"], of[side]["acceptance_ci95"]),
                number(of[side]["rounds"], "d"),
                length(of[side]),
            )
            for name, of in workloads.items()
            for side in sides
        ],
        what="How many drafts the base takes, as the server counts them.",
        about=(
            "Served tokens per round: 1 + accepted / rounds. In brackets: 95 % intervals, over texts; over windows "
            f"of requests where the server tells these alone apart; none with fewer than {LEAST_TEXTS}."
        ),
    )
