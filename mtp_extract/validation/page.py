"""A validation as its reader sees it: large figures, tables and pictures; and the directory that it is written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtp_extract.evaluate.texts import LEAST_TEXTS
from mtp_extract.io.place import Inputs, staged
from mtp_extract.io.typed import Figure
from mtp_extract.report import figures
from mtp_extract.report.files import PAIR, REPORT_LISTED
from mtp_extract.report.numbers import DASH, mean, number, percent, rate, signed, within
from mtp_extract.report.page import NOT_MEASURED, Headline, Page, Table, as_json, write_report
from mtp_extract.validation.acceptance.drafters import DrafterFigures
from mtp_extract.validation.acceptance.worth import Worth
from mtp_extract.validation.result import Validation
from mtp_extract.validation.verdict import drafts_of, why

_BRACKETS = f"In brackets: 95 % intervals, over texts; none with fewer than {LEAST_TEXTS}."
_FORCED = "teacher-forced tokens per round"


def write_validation(found: Validation, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write ``report.html``, ``report.json`` and, with a base, ``pair.json``; their names.

    Nothing is written unless all is, and none of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    with staged(target, overwrite=overwrite, inputs=inputs, listed=REPORT_LISTED) as stage:
        if found.pair is not None:
            (stage / PAIR).write_bytes(as_json(found.pair))
        return write_report(stage, "report", found, page_of(found))


def page_of(found: Validation) -> Page:
    """The page; without pictures where matplotlib is missing."""
    base, drawn = found.base, find_spec("matplotlib") is not None
    parts = [f"beside {base.name}, in {base.dtype} on {', '.join(base.devices)}"] if base else []
    about = "; ".join([*parts, *([f"against {found.source}"] if found.source else [])])
    notes = [*found.notes, *([] if drawn else ["Nothing is drawn: matplotlib is missing; the extra validate has it."])]
    return Page(
        title=f"Validation of {found.drafter}",
        about=about[:1].upper() + about[1:],
        verdict=found.verdict,
        headlines=[_standing(found), *_measured(found)],
        tables=list(tables(found, drawn=drawn)),
        findings=found.findings,
        notes=notes,
    )


def _standing(found: Validation) -> Headline:
    """Is it the file's drafter?"""
    passed, failed, left = ([c.name for c in found.checks if c.passed is answer] for answer in (True, False, None))
    of, means = "compared with no file", "Verified: its weights, settings and outputs are those of the file."
    if found.checks:
        of = f"{len(passed)} of {len(found.checks)} checks against {found.source} passed"
    if left:
        of += f", not checked: {', '.join(left)}"
    if found.refuted:
        of = f"{of}, refuted: {', '.join(failed)}" if failed else f"by what it drafts; {of}"
        return Headline("Verdict", "Refuted", of, means, "bad")
    return Headline("Verdict", *(("Verified", of, means, "good") if found.verified else ("Not verified", of, means)))


def _measured(found: Validation) -> Iterator[Headline]:
    """Of the best chain tokens per round and speedup; and whether text stays."""
    length, speed, same = DASH, DASH, DASH
    length_of = speed_of = same_of = "it was run beside no base"
    whole = False
    if found.drafters and found.base is not None:
        generation = found.drafters[0].generation
        best, times = generation.worth[generation.best], not generation.disturbed
        name, tokens = drafts_of(generation.best, best), best.tokens_per_round
        length, length_of = number(tokens.value, ".2f"), f"{name}; {within(tokens.ci95)}"
        speed = number(best.measured_speedup if times else None, ".2f", unit="×")
        speed_of = f"{name}; {generation.timed} texts, one at a time, on {', '.join(found.base.devices)}; no interval"
        if speed == DASH:
            speed_of = "no text was timed" if times else "something else used the machine meanwhile"
        which, worst = min(generation.worth.items(), key=lambda item: item[1].same_text)
        whole = worst.same_text == worst.prompts
        drafted = "whatever is drafted" if whole else f"{drafts_of(which, worst)}, the worst"
        same, same_of = f"{worst.same_text} of {worst.prompts}", f"greedy, in {found.base.dtype}; {drafted}"
        if not best.rounds:
            length_of, same, same_of = "no text left anything to draft", DASH, "no round drafted anything"
    for name, value, of, means in (
        ("Tokens per round", length, length_of, "Drafts that stand, and the base's own token; 1 without a drafter."),
        ("Speedup", speed, speed_of, "Tokens a second with the drafter, over the base alone."),
        ("Same text", same, same_of, "Texts that are what the base alone writes, to the last token."),
    ):
        if value == DASH:
            yield Headline(name, NOT_MEASURED, of, means, "none")
        else:
            yield Headline(name, value, of, means, "good" if name == "Same text" and whole else "")


def tables(found: Validation, *, drawn: bool = False) -> Iterator[Table]:
    """The tables in the order in which they are read; ``drawn`` with their pictures."""
    if found.drafters:
        yield worth(found.drafters, drawn)
        yield _by_step(found.drafters, drawn)
        yield _by_workload(found.drafters, drawn)
        yield _costs(found.drafters)
    if found.checks:
        yield checks(found)
    if found.controls or found.trivial:
        yield controls(found, drawn)
    yield Table("Setting", ("", ""), [*_setting(found)], "What a second run needs.", folded=True)


def worth(drafters: list[DrafterFigures], drawn: bool = False) -> Table:
    """What drafting is worth: every chain and tree of every drafter."""
    rows, first = _drafted(drafters), drafters[0].generation
    bars: list[tuple[str, figures.Point, str]] = [("the base alone", (1.0, None), "1")]
    for name, found in rows:
        length, speed = found.tokens_per_round, found.measured_speedup
        if length.value is not None:
            said = f"{length.value:.2f}" + ("" if speed is None else f", {speed:.2f}×")
            bars.append((name, (length.value, length.ci95), said))
    best, shown = rows[[*first.worth].index(first.best)][0], drawn and len(bars) > 1
    speed, forward = rows[0][1].base_tokens_per_s, first.base_ms
    return Table(
        "What drafting is worth",
        ("drafts", "tokens per round", "speedup", "predicted", "same text"),
        [
            (
                name,
                mean(found.tokens_per_round),
                number(found.measured_speedup, ".2f", unit="×"),
                number(found.predicted_speedup, ".2f", unit="×"),
                f"{found.same_text}/{found.prompts}",
            )
            for name, found in rows
        ],
        what="Tokens that one forward of the base yields, and how much sooner text is there.",
        about=(
            "Tokens per round, of the loop along all texts: drafts that stand, and the base's own token. Speedup: "
            f"tokens a second of {first.timed} texts, one at a time, over the base alone; predicted: by tokens per "
            "round and the times of a round's drafts, its verification and the base's forward. Same text: of these, "
            f"those that the base alone writes so. The base alone: {number(speed, '.1f')} tokens a second, "
            f"{number(forward, '.2f')} ms a forward. A chain drafts each token after the one before; the drafts of a "
            f"tree branch. {_BRACKETS}"
        ),
        picture=figures.bars(bars, best, "tokens per round, and the speedup") if shown else "",
    )


def _drafted(drafters: list[DrafterFigures]) -> list[tuple[str, Worth]]:
    """All that was drafted, and what to call it."""
    return [
        ((f"{drafter.facts.name}: " if len(drafters) > 1 else "") + drafts_of(name, found), found)
        for drafter in drafters
        for name, found in drafter.generation.worth.items()
    ]


def _by_step(drafters: list[DrafterFigures], drawn: bool) -> Table:
    steps = drafters[0].agreement.steps
    columns, rows = ["draft step", "positions", "top-1 %", "top-5 %", "accepted %"], list[Sequence[str | int]]()
    if len(drafters) > 1:
        curves = {d.facts.name: [step.conditional for step in d.agreement.steps] for d in drafters}
        columns = ["draft step", *(f"{name}: accepted %" for name in curves)]
        rows += ((at + 1, *(rate(curve[at]) for curve in curves.values())) for at in range(len(steps)))
    else:
        names = {"top5": "top-5", "conditional": "accepted", "top1": "top-1"}
        curves = {shown: [getattr(step, name) for step in steps] for name, shown in names.items()}
        rows += ((step.step, step.top1.n, *map(rate, (step.top1, step.top5, step.conditional))) for step in steps)
    return Table(
        "Acceptance by draft step",
        columns,
        rows,
        what="How often each draft of a round is what the base says, at every position of the base's own text.",
        about=(
            f"Teacher-forced over the base's own greedy text after {drafters[0].agreement.texts} prompts. Accepted: of "
            "the positions at which all drafts before it were. Top-1: the draft is the base's token; top-5: the base's "
            f"token is among the drafter's five likeliest. {_BRACKETS}"
        ),
        picture=_lines(curves) if drawn else "",
    )


def _by_workload(drafters: list[DrafterFigures], drawn: bool) -> Table:
    first, *others = drafters
    lengths = {
        d.facts.name: {k: w.teacher_forced for k, w in (*d.workloads.items(), ("all", d.agreement))} for d in drafters
    }
    points = {name: {k: _point(f) for k, f in of.items() if f.value is not None} for name, of in lengths.items()}
    columns = ["top-1 %, step 1", "top-5 %, step 1", _FORCED]
    if others:
        columns = [*(f"{name}: {_FORCED}" for name in lengths), *(f"{d.facts.name}: to the first" for d in others)]
    rows = list[Sequence[str | int]]()
    for name, found in (*first.workloads.items(), ("all", first.agreement)):
        step = found.steps[0] if found.steps else None
        alone = [] if others else [rate(step.top1) if step else DASH, rate(step.top5) if step else DASH]
        changes = (d.change if found is first.agreement else d.changes[name] for d in others)
        cells = (*(mean(of[name]) for of in lengths.values()), *(signed(c.mean, c.interval) for c in changes))
        rows.append((name, found.texts, *alone, *cells))
    return Table(
        "Acceptance by workload",
        ["workload", "texts", *columns],
        rows,
        what=f"The first draft, and what rounds of {len(first.agreement.steps)} drafts come to, by kind of text.",
        about=(
            "Teacher-forced tokens per round: 1 + accepted drafts, from every position. Rounds of the loop begin where "
            "others ended, which is more often at a token that is hard to draft, and come to less."
            + (" Differences are text by text, each with its own interval." if others else "")
        ),
        picture=figures.dots(points, _FORCED, left=1.0) if drawn and any(points.values()) else "",
    )


def _costs(drafters: list[DrafterFigures]) -> Table:
    rows = list[Sequence[str | int]]()
    for drafter in drafters:
        facts, head = drafter.facts, drafter.facts.ordered_head
        what = "no record" if facts.made == "unknown" else facts.made + (f" ({facts.mode})" if facts.mode else "")
        if head:
            what += f", ordered head, {head.top_k} of {head.num_centroids} clusters"
        reads = facts.reads
        sizes = [f"{count:,}" for count in (reads.total, reads.once_a_round, reads.stored)]
        rows.append((facts.name, f"{what}, {facts.format}", *sizes, drafter.generation.break_even))
    return Table(
        "What a draft step costs",
        ("drafter", "what it is", "bytes a step", "once a round", "stored", "break-even K"),
        rows,
        what="What one step of the drafter reads of its own weights.",
        about=(
            "As its directory stores them: codes with their scales; of an ordered head the centroids and the clusters "
            "that are chosen. The base's K and V, embedding and hidden states come on top. Break-even K: the longest "
            "chain tried that is predicted to be faster than the base alone; 0 for none."
        ),
        folded=True,
    )


def checks(found: Validation) -> Table:
    """Is it the drafter of the file, question by question."""
    answers = {True: "passed", False: "refuted", None: "not checked"}
    return Table(
        "Is it the drafter of the file?",
        ("check", "what is asked", "result", "evidence"),
        [(check.name, check.what, answers[check.passed], check.evidence) for check in found.checks],
        what="Every answer is derived from the file anew. One that is refuted refutes the checkpoint.",
        folded=bool(found.drafters) and all(check.passed is not False for check in found.checks),
    )


def controls(found: Validation, drawn: bool = False) -> Table:
    """What the drafter reaches with one thing broken at a time, and what trivial drafters reach."""
    real = found.drafters[0].agreement
    curves = {"real drafter": real, **{result.name: result.agreement for result in found.controls if result.agreement}}
    rows = [("real drafter", rate(real.steps[0].top1), "", mean(real.teacher_forced), "nothing is broken")]
    for result in found.controls:
        of, gap, said = result.agreement, result.difference, f"{result.what}: {why(result)}"
        scores = (rate(of.steps[0].top1), rate(gap), mean(of.teacher_forced)) if of and gap else (DASH,) * 3
        rows.append((result.name, *scores, said))
    for trivial in found.trivial:
        below = rate(trivial.difference)
        rows.append((trivial.name, percent(trivial.top1), below, "", "it knows nothing of the base"))
    return Table(
        "Controls",
        ("drafter", "top-1 %, step 1", "below by", _FORCED, "what is broken: what it says"),
        rows,
        what="The same with one thing broken on purpose: each should draft worse. And what trivial drafters reach.",
        about=(
            "Below by: points of top-1 that the drafter is ahead, at the same positions; of the controls that ran, all "
            "intervals hold together in 95 % of measurements."
        ),
        picture=_lines({name: [step.top1 for step in of.steps] for name, of in curves.items()}) if drawn else "",
        folded=True,
    )


def _point(found: Figure) -> figures.Point:
    assert found.value is not None
    return found.value, found.ci95


def _lines(curves: Mapping[str, list[Figure]]) -> str:
    known = {name: [_point(figure) for figure in curve if figure.value is not None] for name, curve in curves.items()}
    return figures.lines({name: curve for name, curve in known.items() if curve}, "share of drafts (%)")


def _setting(found: Validation) -> Iterator[tuple[str, str]]:
    yield "drafter", found.drafter
    if found.source:
        yield "file", found.source
    if found.base:
        yield "base", f"{found.base.name} ({found.base.dtype}, on {', '.join(found.base.devices)})"
        yield "drafter computes in", found.base.drafter_dtype
        yield "chat template", "applied" if found.base.chat_template else "not applied"
    yield from ((name.replace("_", " "), _words(value)) for name, value in found.settings.items() if value != [])


def _words(value: Any) -> str:
    """A setting: numbers, names, or numbers by name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
