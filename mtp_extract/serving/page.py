"""A benchmark for readers: its verdict, findings and notes, the tables of page and terminal, and the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from mtp_extract.errors import few
from mtp_extract.evaluate.texts import LEAST_TEXTS
from mtp_extract.io.place import Inputs, listing, staged
from mtp_extract.report.numbers import DASH, mean, number, percent, rate
from mtp_extract.report.page import Page, Table, write_report
from mtp_extract.serving.figures import asked_of, counts
from mtp_extract.serving.result import Asked, Benchmark, Figures, Side

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
    about = f"{'; '.join(f'{side}: {_named(asked)}' for side, asked in found.servers.items())}; "
    page = Page(
        f"Benchmark of {found.servers['server'].url}",
        f"{about}{found.total.texts} prompts",
        found.verdict,
        list(tables(found)),
        findings=found.findings,
        notes=found.notes,
    )
    with staged(target, overwrite=overwrite, inputs=inputs, listed=BENCH_LISTED) as stage:
        return write_report(stage, "bench", found, page)


def conclude(found: Benchmark) -> Benchmark:
    """The same with its verdict, findings and notes."""
    verdict, findings, notes = _verdict(found.total), list(_findings(found)), list(_notes(found))
    return msgspec.structs.replace(found, verdict=verdict, findings=findings, notes=notes)


def _verdict(total: Figures) -> str:
    server, baseline = total.sides["server"], total.sides.get("baseline")
    speed = f"{_speed(server)} tokens/s"
    if baseline is not None:
        speed += f" against {_speed(baseline)}"
        if total.speedup.value is not None:
            speed += f", {mean(total.speedup)}×"
    drafts = "drafts are not told"
    if server.drafted is not None:
        share = f", {rate(server.acceptance)} %" if server.drafted else ""
        drafts = f"{server.accepted} of {server.drafted} drafts accepted{share}"
    same = f"; the text is the baseline's in {total.identical} of {total.compared} answers" if total.compared else ""
    return f"Measured: {speed}; {drafts}{same}."


def _speed(side: Side) -> str:
    found = side.tokens_per_s
    return "not told" if found.value is None else number(found.value, ".1f", found.ci95)


def _named(asked: Asked) -> str:
    version = f" {asked.version}" if asked.version else ""
    return f"{asked.url} ({asked.kind}{version}), model {asked.model}"


def _findings(found: Benchmark) -> Iterator[str]:
    server, baseline = found.total.sides["server"], found.total.sides.get("baseline")
    if server.drafted == 0:
        yield "the server drafted nothing: it was started without a drafter, or does not use it"
    if baseline is not None and baseline.drafted:
        yield f"the baseline drafts too ({baseline.drafted} drafts): it is none"
    for side, asked in found.servers.items():
        said = [text for window in found.windows[side] for text in window.impossible]
        said += [text for request in asked_of(found.windows[side]) for text in request.answer.impossible]
        if said:
            yield f"{asked.url} tells what cannot be, {len(said)} times, left out of all figures: {said[0]}"
    for name in found.workloads:
        places = [f"{one.prompt + 1} at character {one.character + 1}" for one in found.parted if one.workload == name]
        if places:
            yield f"{name}: the text leaves the baseline's in prompt {few(places, _MOST_NAMED)}"


def _notes(found: Benchmark) -> Iterator[str]:
    if found.repeated:
        asked = sum(found.prompts.values()) + found.repeated
        yield f"{asked} prompts, {found.repeated} of them repeats, which were not asked."
    for side in found.servers:
        yield from _untold(found, side)
        yield from _in_flight(found, side)
    if len(found.servers) == 1:
        yield "Without a baseline there is nothing to compare speed and text with."
        return
    ours, theirs = found.servers["server"], found.servers["baseline"]
    if (ours.kind, ours.version) != (theirs.kind, theirs.version):
        kinds = (f"{server.kind} {server.version or ''}" for server in (ours, theirs))
        yield f"Server and baseline differ in more than the drafter: {' and '.join(kinds)}."
    if ours.model != theirs.model:
        yield f"Server and baseline call their models {ours.model} and {theirs.model}."


def _untold(found: Benchmark, side: str) -> Iterator[str]:
    """What a server did not tell, or tells of others too."""
    server, windows = found.servers[side], found.windows[side]
    answers = [request.answer for request in asked_of(windows)]
    others = sum(window.disturbed for window in windows)
    if others:
        yield (
            f"{server.url}: its counters moved by other than these requests {others} of {len(windows)} times, so "
            "somebody else used it; then they were left out, and times are not of these requests alone."
        )
    uncounted = sum(len(window.requests) for window in windows if not counts(window, None, "drafted"))
    if uncounted:
        yield f"{server.url} ({server.kind}): drafts are not told for {uncounted} of {len(answers)} answers."
    elif side == "server" and any(of.sides[side].counted == 0 for of in found.workloads.values()):
        yield (
            f"{server.url} ({server.kind}) tells drafts of all requests together: of a workload they are known where "
            "requests are sent one at a time, or where its answers tell them."
        )
    untold = sum(answer.tokens is None and not answer.impossible for answer in answers)
    if untold:
        yield f"{server.url}: how many tokens an answer has is not told for {untold} of {len(answers)}."
    whole = sum(answer.first_s is not None and answer.seconds == 0 for answer in answers)
    if whole:
        yield f"{server.url}: {whole} of {len(answers)} answers came in one piece, which tells no time of tokens."


def _in_flight(found: Benchmark, side: str) -> Iterator[str]:
    """Where fewer were in flight than asked for, and where the client held them up."""
    windows, wanted, url = found.windows[side], found.settings["concurrency"], found.servers[side].url
    most = min(wanted, max(len(window.requests) for window in windows))
    if wanted > 1:
        flown = sum(request.answer.whole_s for request in asked_of(windows)) / sum(window.wall_s for window in windows)
        more = f", of {wanted} wanted: give more prompts, or ask them more often" if most < wanted else ""
        yield f"{url}: {flown:.1f} requests were in flight on the mean, {most} at most{more}."
    slow = [window.client_busy for window in windows if window.client_busy >= _BUSIEST]
    if slow:
        yield (
            f"{url}: the client is the limit in {len(slow)} of {len(windows)} windows: it computed for up to "
            f"{max(slow):.0%} of the time. Times there are longer than the server's. Ask fewer at a time, or from an "
            "idle machine."
        )


def tables(found: Benchmark) -> Iterator[Table]:
    """Speed with latency, and drafts: by workload and side."""
    figures = {**found.workloads, "all": found.total}
    yield Table(
        "Speed",
        (
            *("workload", "side", "texts", "tokens/s", "speedup", "same text"),
            *("TTFT ms", "TTFT p99", "TPOT ms", "TPOT p99", "all tokens/s"),
        ),
        [(name, side, *_speed_row(of, side)) for name, of in figures.items() for side in found.servers],
        what="How fast the text of an answer comes, and how long a user waits.",
        about=(
            "Tokens as the server counts them, and times from first text to last event, both added up over all "
            "answers. Speedup: the time that the baseline takes for as many tokens, over the server's. Same text: "
            "greedy answers that are the baseline's, character for character; where two tokens nearly tie, rounding "
            "may part them. TTFT: from request to first text; TPOT: per token after it; means, and what 99 % do not "
            f"exceed. All tokens/s: of all requests together, over the time in which any was under way. {_BRACKETS}"
        ),
    )
    sides = [(name, side, of.sides[side]) for name, of in figures.items() for side in found.servers]
    if any(of.counted for _, _, of in sides):
        yield _drafts([row for row in sides if row[2].drafted] or [row for row in sides if row[1] == "server"])


def _speed_row(of: Figures, side: str) -> tuple[str | int, ...]:
    one, ours = of.sides[side], side == "server"
    times = [(time.mean, time.p99) if time else (None, None) for time in (one.ttft_ms, one.tpot_ms)]
    return (
        of.texts,
        number(one.tokens_per_s.value, ".1f", one.tokens_per_s.ci95),
        mean(of.speedup) if ours else "",
        (f"{of.identical}/{of.compared}" if of.compared else DASH) if ours else "",
        *(number(ms, ".1f") for pair in times for ms in pair),
        number(one.output_throughput, ".1f"),
    )


def _drafts(rows: list[tuple[str, str, Side]]) -> Table:
    return Table(
        "Drafts",
        (
            "workload",
            "side",
            "counted",
            "accepted",
            "drafted",
            "acceptance %",
            "rounds",
            "tokens/round",
            "by position %",
        ),
        [
            (
                name,
                side,
                of.counted,
                *(number(count, "d") for count in (of.accepted, of.drafted)),
                rate(of.acceptance),
                number(of.rounds, "d"),
                mean(of.tokens_per_round),
                " ".join(percent(share) for share in of.acceptance_by_position or ()) or DASH,
            )
            for name, side, of in rows
        ],
        what="How many drafts the base takes, as the server counts them.",
        about=(
            "Counted: answers whose drafts are known. Tokens per round, as served: 1 + accepted / rounds. By position: "
            "share of rounds that accept the first draft, the second, and so on. Where the server tells only windows "
            f"of requests apart, intervals are over these. {_BRACKETS}"
        ),
    )
