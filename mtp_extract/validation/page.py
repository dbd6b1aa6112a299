"""A validation as its reader sees it: large figures, tables and pictures; and the directory that it is written to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtp_extract.evaluate.agreement import Workload
from mtp_extract.evaluate.intervals import LEAST_TEXTS
from mtp_extract.io.place import Inputs, staged
from mtp_extract.io.typed import Figure
from mtp_extract.report import figures
from mtp_extract.report.files import PAIR, REPORT_LISTED
from mtp_extract.report.numbers import DASH, mean, number, rate, signed, within
from mtp_extract.report.page import NOT_MEASURED, Headline, Page, Table, as_json, write_report
from mtp_extract.validation.result import DrafterFigures, Validation
from mtp_extract.validation.verdict import drafts_of

_BRACKETS = f"In brackets: 95 % intervals, over texts; none with fewer than {LEAST_TEXTS}."
_FORCED = "teacher-forced tokens per round"
_ALL = "all"
_STANDING = {
    "below": "below the real drafter",
    "above": "above the real drafter",
    "same": "within 5 points of the real drafter, so it matters little here",
    "undecided": "too few texts to tell it from the real drafter",
}


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
        notes=notes,
    )


def _standing(found: Validation) -> Headline:
    """Is it the file's drafter?"""
    passed, failed, left = ([c.name for c in found.checks if c.passed is answer] for answer in (True, False, None))
    of, means = "compared with no file", "Verified: its weights, settings and outputs are those of the file."
    if found.checks:
        of = f"{len(passed)} of {len(found.checks)} checks against {found.source} passed"
    of += f", not checked: {', '.join(left)}" if left else ""
    if found.refuted:
        return Headline("Verdict", "Refuted", f"{of}, refuted: {', '.join(failed)}", means, "bad")
    return Headline("Verdict", *(("Verified", of, means, "good") if found.verified else ("Not verified", of, means)))


def _measured(found: Validation) -> Iterator[Headline]:
    """Of the best chain tokens per round and speedup; and whether text stays."""
    length, speed, same, whole = DASH, DASH, DASH, False
    length_of = speed_of = same_of = "it was run beside no base"
    if found.drafters and found.base is not None:
        generation = found.drafters[0].generation
        best, name = generation.worth[generation.best], drafts_of(generation.best, generation.worth[generation.best])
        length, length_of = number(best.tokens_per_round.value, ".2f"), f"{name}; {within(best.tokens_per_round.ci95)}"
        speed = DASH if generation.disturbed else number(best.measured_speedup, ".2f", unit="×")
        speed_of = f"{name}; {generation.timed} texts, one at a time, on {', '.join(found.base.devices)}; no interval"
        if speed == DASH:
            speed_of = "something else used the machine meanwhile" if generation.disturbed else "no text was timed"
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
    if found.checks:
        yield checks(found)
    if found.controls:
        yield controls(found, drawn)
    yield Table("Setting", ("", ""), [*_setting(found)], "What a second run needs.", folded=True)


def worth(drafters: Sequence[DrafterFigures], drawn: bool = False) -> Table:
    """What drafting is worth: every chain and tree of every drafter."""
    rows = {
        (f"{drafter.name}: " if len(drafters) > 1 else "") + drafts_of(name, found): found
        for drafter in drafters
        for name, found in drafter.generation.worth.items()
    }
    first = drafters[0].generation
    bars: list[tuple[str, figures.Point, str]] = [("the base alone", (1.0, None), "1")]
    for name, found in rows.items():
        length, speed = found.tokens_per_round, found.measured_speedup
        if length.value is not None:
            bars.append((name, _point(length), f"{length.value:.2f}" + (f", {speed:.2f}×" if speed else "")))
    best = list(rows)[[*first.worth].index(first.best)]
    alone = first.worth[first.best].base_tokens_per_s
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
            for name, found in rows.items()
        ],
        what="Tokens that one forward of the base yields, and how much sooner text is there.",
        about=(
            "Tokens per round, of the loop along all texts: drafts that stand, and the base's own token. Speedup: "
            f"tokens a second of {first.timed} texts, one at a time, over the base alone; predicted: by tokens per "
            "round and the times of a round's drafts, its verification and the base's forward. Same text: of these, "
            f"those that the base alone writes so. The base alone: {number(alone, '.1f')} tokens a second, "
            f"{number(first.base_ms, '.2f')} ms a forward. A chain drafts each token after the one before; the drafts "
            f"of a tree branch. {_BRACKETS}"
        ),
        picture=figures.bars(bars, best, "tokens per round, and the speedup") if drawn and len(bars) > 1 else "",
    )


def _by_step(drafters: Sequence[DrafterFigures], drawn: bool) -> Table:
    first, *others = drafters
    steps = first.agreement.steps
    curves = {
        "top-5": [step.top5 for step in steps],
        "accepted": [step.conditional for step in steps],
        "top-1": [step.top1 for step in steps],
    }
    more = {f"{other.name}: accepted": [step.conditional for step in other.agreement.steps] for other in others}
    return Table(
        "Acceptance by draft step",
        ["draft step", "positions", "top-1 %", "top-5 %", "accepted %", *(f"{name} %" for name in more)],
        [
            (
                *(step.step, step.top1.n, rate(step.top1), rate(step.top5), rate(step.conditional)),
                *(rate(curve[step.step - 1]) for curve in more.values()),
            )
            for step in steps
        ],
        what="How often each draft of a round is what the base says, at every position of the base's own text.",
        about=(
            f"Teacher-forced over the base's own greedy text after {first.agreement.texts} prompts. Accepted: of "
            "the positions at which all drafts before it were. Top-1: the draft is the base's token; top-5: the base's "
            f"token is among the drafter's five likeliest. {_BRACKETS}"
        ),
        picture=_lines({**curves, **more}) if drawn else "",
    )


def _by_workload(drafters: Sequence[DrafterFigures], drawn: bool) -> Table:
    first, *others = drafters
    points = {
        d.name: {name: _point(forced) for name, of in _parts(d).items() if (forced := of.teacher_forced).value}
        for d in drafters
    }
    rows = list[Sequence[str | int]]()
    for name, found in _parts(first).items():
        shares = [rate(share) for step in found.steps[:1] for share in (step.top1, step.top5)] or [DASH, DASH]
        cells = [*shares, mean(found.teacher_forced)]
        for other in others:
            change = {**other.changes, _ALL: other.change}[name]
            cells += (mean(_parts(other)[name].teacher_forced), signed(change.mean, change.interval))
        rows.append((name, found.texts, *cells))
    more = [title for other in others for title in (f"{other.name}: {_FORCED}", "to the first")]
    return Table(
        "Acceptance by workload",
        ["workload", "texts", "top-1 %, step 1", "top-5 %, step 1", _FORCED, *more],
        rows,
        what=f"The first draft, and what rounds of {len(first.agreement.steps)} drafts come to, by kind of text.",
        about=(
            "Teacher-forced tokens per round: 1 + accepted drafts, from every position. Rounds of the loop begin where "
            "others ended, which is more often at a token that is hard to draft, and come to less."
            + (" Differences are text by text, each with its own interval." if others else "")
        ),
        picture=figures.dots(points, _FORCED, left=1.0) if drawn and any(points.values()) else "",
    )


def _parts(drafter: DrafterFigures) -> dict[str, Workload]:
    """By workload, and over all texts."""
    return {**drafter.workloads, _ALL: drafter.agreement}


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
    """What the drafter reaches with one thing broken at a time."""
    real = found.drafters[0].agreement
    curves = {"real drafter": real, **{result.name: result.agreement for result in found.controls if result.agreement}}
    rows = [("real drafter", rate(real.steps[0].top1), "", mean(real.teacher_forced), "nothing is broken")]
    for result in found.controls:
        of, gap, said = result.agreement, result.difference, f"not run: {result.skipped}"
        scores = (rate(of.steps[0].top1), rate(gap), mean(of.teacher_forced)) if of and gap else (DASH,) * 3
        if result.standing is not None:
            said = f"{_STANDING[result.standing]}: changed {result.changed} first drafts: {result.better} better, "
            said += f"{result.worse} worse" + (f"; look at {result.suspect}" if result.standing == "above" else "")
        rows.append((result.name, *scores, f"{result.what}: {said}"))
    return Table(
        "Controls",
        ("drafter", "top-1 %, step 1", "below by", _FORCED, "what is broken: what it says"),
        rows,
        what="The same with one thing broken on purpose: each should draft worse.",
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


def _lines(curves: Mapping[str, Sequence[Figure]]) -> str:
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
