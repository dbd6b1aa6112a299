"""The page of a validation, with headlines, tables and pictures; and the directory that it is written to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from mtp_extract.evaluation.agreement import Workload
from mtp_extract.evaluation.intervals import LEAST_TEXTS
from mtp_extract.io.place import InputPaths, stage_output
from mtp_extract.io.typed import Figure
from mtp_extract.report import figures
from mtp_extract.report.files import PAGE_FILE, PAIR, REPORT, REPORT_LISTED
from mtp_extract.report.numbers import format_mean, format_number, format_rate
from mtp_extract.report.page import Page, ReportTable, encode_json, render_html
from mtp_extract.validation.result import (
    DrafterFigures,
    RunFacts,
    Validation,
    describe_drafts,
    describe_findings,
    format_change,
    list_headlines,
)

_BRACKETS = f"In brackets: 95 % intervals, over texts; none with fewer than {LEAST_TEXTS}."
_ROUND, _FORCED = "tokens per round", "teacher-forced tokens per round"
_STANDING = {
    "below": "below the real drafter",
    "above": "above the real drafter",
    "same": "within 5 points of the real drafter, so it matters little here",
    "undecided": "too few texts to tell it from the real drafter",
}


def write_validation(validation: Validation, target: Path, *, overwrite: bool = False, inputs: InputPaths = ()) -> None:
    """Write ``report.html``, ``report.json`` and, with a base, ``pair.json``: all of them or none.

    Raise OutputError if they cannot be written, or if that would replace one of ``inputs``.
    """
    with stage_output(target, overwrite=overwrite, inputs=inputs, listed=REPORT_LISTED) as stage:
        if validation.pair is not None:
            (stage / PAIR).write_bytes(encode_json(validation.pair))
        (stage / REPORT).write_bytes(encode_json(validation))
        (stage / PAGE_FILE).write_text(render_html(build_page(validation)), encoding="utf-8")


def build_page(validation: Validation) -> Page:
    """Build the page of ``validation``."""
    about = list[str]()
    if base := validation.base:
        template = "with" if base.chat_template else "without"
        about.append(f"Base: {base.name}, in {base.dtype} on {', '.join(base.devices)}, {template} its chat template.")
        counts = ", ".join(f"{count} {name}" for name, count in validation.settings["prompts"].items())
        about.append(f"Prompts: {counts}; at most {validation.settings['new_tokens']} new tokens each.")
    if validation.source:
        about.append(f"File: {validation.source}.")
    return Page(
        title=f"Validation of {validation.drafter}",
        about=" ".join(about),
        verdict=" ".join(f"{finding}." for finding in describe_findings(validation)),
        headlines=list_headlines(validation),
        tables=list(build_tables(validation)),
        notes=validation.notes,
        measured=", ".join(_list_run_facts(validation.run)) if validation.run else "",
    )


def _list_run_facts(run: RunFacts) -> Iterator[str]:
    yield f"Measured {run.when}"
    if run.command is not None:
        yield f"by {run.command}"
    if run.prompts_sha256 is not None:
        yield f"prompts with SHA-256 {run.prompts_sha256}"
    for name, version in run.versions.items():
        yield f"{name} {version}"


def build_tables(validation: Validation) -> Iterator[ReportTable]:
    """Yield the tables in reading order."""
    if validation.drafters:
        if validation.drafters[0].worth:
            yield build_worth_table(validation)
        yield build_steps_table(validation.drafters)
        yield _build_workload_table(validation.drafters)
    if validation.checks:
        yield build_checks_table(validation)
    if validation.controls:
        yield build_controls_table(validation)


def build_worth_table(validation: Validation) -> ReportTable:
    """Build the table of all chains and trees of all drafters: tokens per round, speedup, same text."""
    base = validation.base
    first, *others = validation.drafters
    assert base is not None
    rows: list[Sequence[str]] = []
    lengths: dict[str, dict[str, figures.Point]] = {}
    for drafter in validation.drafters:
        lengths[drafter.name] = {} if lengths else {"the base alone": (1.0, None)}
        for name, row in drafter.worth.items():
            drafts = describe_drafts(name, row)
            lengths[drafter.name][drafts] = _to_point(row.tokens_per_round)
            cells = [f"{drafter.name}: {drafts}" if others else drafts, format_mean(row.tokens_per_round)]
            cells += [format_number(x, ".2f", unit="×") for x in (row.measured_speedup, row.predicted_speedup)]
            rows.append([*cells, f"{row.same_text}/{base.timed}"])
    best = "" if others else describe_drafts(first.best, first.worth[first.best])
    return ReportTable(
        "What drafting is worth",
        ("drafts", _ROUND, "speedup", "predicted", "same text"),
        rows,
        what="Tokens per forward of the base, and how much faster text is generated.",
        about=(
            "Tokens per round, of the loop along all texts: accepted drafts, and the base's own token. Speedup: "
            f"tokens per second of {base.timed} texts, one at a time, over the base alone; predicted: by tokens per "
            "round and the times of a round's drafts, its verification and the base's forward. Same text: those of "
            "these texts that are what the base alone writes. The base alone: "
            f"{format_number(base.tokens_per_s, '.1f')} tokens per second, {format_number(base.forward_ms, '.2f')} ms "
            f"per forward. A chain drafts each token after the one before; the drafts of a tree branch. {_BRACKETS}"
        ),
        picture=partial(figures.draw_bars, lengths, _ROUND, strong=best),
    )


def build_steps_table(drafters: Sequence[DrafterFigures]) -> ReportTable:
    """Build the table of acceptance by draft step."""
    first, *others = drafters
    by_step = first.agreement.steps
    curves = {
        "top-1": [step.top1 for step in by_step],
        "top-5": [step.top5 for step in by_step],
        "accepted": [step.conditional for step in by_step],
        **{f"{drafter.name}: accepted": [step.conditional for step in drafter.agreement.steps] for drafter in others},
    }
    # The picture lists curves from the highest to the lowest.
    order = ("top-5", "accepted", *curves)
    lines = {name: [_to_percent(points) for points in curves[name] if points.value is not None] for name in order}
    return ReportTable(
        "Acceptance by draft step",
        ["draft step", "positions", *(f"{name} %" for name in curves)],
        [
            (step.step, step.top1.n, *(format_rate(curve[step.step - 1]) for curve in curves.values()))
            for step in by_step
        ],
        what="How often each draft of a round is the base's token, at every position of the base's own text.",
        about=(
            f"Teacher-forced over the base's own greedy text after {first.agreement.texts} prompts. Accepted: of "
            "the positions at which all drafts before it were. Top-1: the draft is the base's token; top-5: the base's "
            f"token is among the drafter's five likeliest. {_BRACKETS}"
        ),
        picture=partial(
            figures.draw_lines, {name: points for name, points in lines.items() if points}, "share of drafts (%)"
        ),
    )


def _build_workload_table(drafters: Sequence[DrafterFigures]) -> ReportTable:
    first, *others = drafters
    rows: list[Sequence[str | int]] = []
    for name, workload in _list_workloads(first).items():
        first_draft = workload.steps[0]
        cells = [format_rate(first_draft.top1), format_rate(first_draft.top5), format_mean(workload.teacher_forced)]
        for drafter in others:
            change = drafter.changes.get(name, drafter.change)
            cells += [format_mean(_list_workloads(drafter)[name].teacher_forced), format_change(change)]
        rows.append((name, workload.texts, *cells))
    more = [title for drafter in others for title in (f"{drafter.name}: {_FORCED}", "to the first")]
    return ReportTable(
        "Acceptance by workload",
        ["workload", "texts", "top-1 %, step 1", "top-5 %, step 1", _FORCED, *more],
        rows,
        what=f"The first draft, and tokens per round of {len(first.agreement.steps)} drafts, by kind of text.",
        about=(
            "Teacher-forced tokens per round: 1 + accepted drafts, from every position. Rounds of the loop begin where "
            "others ended, more often at a token that is hard to draft, and yield fewer."
            + (" Differences are text by text, each with its own interval." if others else "")
        ),
        picture=partial(
            figures.draw_bars, {drafter.name: _list_forced_points(drafter) for drafter in drafters}, _FORCED
        ),
    )


def _list_workloads(drafter: DrafterFigures) -> dict[str, Workload]:
    return {**drafter.workloads, "all": drafter.agreement}


def _list_forced_points(drafter: DrafterFigures) -> dict[str, figures.Point]:
    forced = {name: workload.teacher_forced for name, workload in _list_workloads(drafter).items()}
    return {name: _to_point(length) for name, length in forced.items() if length.value is not None}


def build_checks_table(validation: Validation) -> ReportTable:
    """Build the table of checks against the bundle."""
    answers = {True: "passed", False: "refuted", None: "not checked"}
    return ReportTable(
        "Is it the drafter of the file?",
        ("check", "what is asked", "result", "evidence"),
        [(check.name, check.what, answers[check.passed], check.evidence) for check in validation.checks],
        what="Every answer is derived from the file anew. One that is refuted refutes the checkpoint.",
        folded=bool(validation.drafters) and not validation.refuted,
    )


def build_controls_table(validation: Validation) -> ReportTable:
    """Build the table of the drafter's first draft with one thing broken at a time."""
    rows: list[Sequence[str]] = []
    points = {"the real drafter": _to_percent(validation.drafters[0].agreement.steps[0].top1)}
    for control in validation.controls:
        meaning = _STANDING[control.standing] + (f"; look at {control.suspect}" if control.standing == "above" else "")
        rows.append(
            (control.name, format_rate(control.top1), format_rate(control.difference), f"{control.what}: {meaning}")
        )
        points[control.name] = _to_percent(control.top1)
    return ReportTable(
        "Controls",
        ("control", "top-1 %, step 1", "below by", "what is broken: what it says"),
        rows,
        what="The same with one thing broken on purpose: each should draft worse.",
        about=(
            "Below by: points of top-1 that the drafter is ahead, at the same positions; all intervals hold together "
            "in 95 % of measurements. Controls that would change nothing of this drafter are left out."
        ),
        picture=partial(
            figures.draw_bars, {"": points}, "top-1 of the first draft (%)", form=".1f", strong="the real drafter"
        ),
        folded=True,
    )


def _to_point(figure: Figure) -> figures.Point:
    assert figure.value is not None
    return figure.value, figure.ci95


def _to_percent(figure: Figure) -> figures.Point:
    value, ends = _to_point(figure)
    return 100 * value, ends and [100 * end for end in ends]
