"""The report of a diagnosis: ``doctor.json``, its page, and the tables that page and terminal show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from mtp_extract.doctor.fields import Diagnosis
from mtp_extract.doctor.verdict import judge
from mtp_extract.io.place import Inputs, listing, staged
from mtp_extract.report.numbers import DASH, number, percent
from mtp_extract.report.page import Page, Table, plain_json
from mtp_extract.report.page import write_report as write_page

DOCTOR_LISTED = listing("doctor.json", frozenset({"doctor.json", "doctor.html"}))
"""Everything that a report of a diagnosis consists of, and that may be replaced."""
_PASSED = {True: "yes", False: "NO", None: "?"}


def as_json(found: Diagnosis) -> dict[str, Any]:
    """``doctor.json``, with the verdict: only JSON's own types."""
    verdict = judge(found)
    judged = structs.replace(
        found,
        verdict=verdict.sentence,
        outcome=verdict.outcome,
        suspect=verdict.suspect,
        certainty=verdict.certainty,
        findings=list(verdict.findings),
        next=list(verdict.next),
    )
    report: dict[str, Any] = plain_json(judged)
    return report


def write_doctor(found: Diagnosis, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write the report; names of its files. None of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    report = as_json(found)
    with staged(target, overwrite=overwrite, inputs=inputs, listed=DOCTOR_LISTED) as stage:
        return write_page(stage, "doctor", report, page_of(report))


def page_of(report: Mapping[str, Any]) -> Page:
    """The page of a ``doctor.json``."""
    drafter, serving = report["drafter"], report["serving"]
    about = f"{drafter['format']}, {drafter['made']}" + (f"; beside {report['base']}" if report["base"] else "")
    if serving:
        about += f"; {serving['kind']} {serving['version'] or ''} at {serving['name']}"
    title, shown = f"Diagnosis of {drafter['name']}", list(tables(report))
    return Page(title, about, report["verdict"], shown, findings=report["findings"], notes=report["notes"])


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of a ``doctor.json``: what to do, what is expected and served, does the pair fit, patterns."""
    if report["next"]:
        yield Table("What to do next", ("",), [(step,) for step in report["next"]], what="In this order.")
    sides = {"expected": report["expected"], "served": report["serving"] and report["serving"]["rates"]}
    if told := {side: rates for side, rates in sides.items() if rates}:
        yield _drafts(told, report["settings"]["drafts"])
    if report["checks"]:
        yield Table(
            "Does the pair fit",
            ("what has to agree", "does", "found"),
            [(row["name"], _PASSED[row["passed"]], row["found"]) for row in report["checks"]],
            what="What has to agree of drafter and base, and whether it does; ? where nothing decides it.",
        )
    if report["engines"]:
        yield Table(
            "Engines",
            ("engine", "loads", "what it does"),
            [(row["engine"], _PASSED[row["loads"]], row["what"]) for row in report["engines"]],
            what="What engines make of this directory.",
        )
    if len(report["fits"]) > 1:
        yield _patterns(report)


def _drafts(told: Mapping[str, Mapping[str, Any]], drafts: int) -> Table:
    """Of the reference and the server, as far as they tell their drafts; a server may tell no steps."""
    rows = []
    for side, rates in told.items():
        length, steps = rates["mean_accepted_length"], rates["conditional"] or [None] * drafts
        counts = [rates["texts"], f"{rates['rounds']:.0f}", f"{rates['accepted']:.0f}"]
        tokens = number(length["value"], ".2f", length["interval"])
        rows.append((side, *counts, tokens, *(percent(of["value"], of["interval"]) if of else DASH for of in steps)))
    return Table(
        "Drafts",
        ("", "texts", "rounds", "accepted", "tokens per round", *(f"step {at + 1} %" for at in range(drafts))),
        rows,
        what="Drafts that stand along the same texts; in brackets 95 % intervals, over texts.",
        about=(
            "Expected: in the reference loop, along the served texts. Tokens per round: drafts that stand, and the "
            "base's own token. Step: accepted there, of those whose predecessors in the round all were."
        ),
    )


def _patterns(report: Mapping[str, Any]) -> Table:
    rows = []
    for fit in report["fits"]:
        gap = fit["gap"] and [100 * end for end in fit["gap"]]
        between = number(sum(gap) / 2, "+.1f", gap, between=" to ") if gap else DASH
        rows.append((fit["name"], number(fit["log_likelihood"], ".1f"), percent(fit["support"]), between))
    return Table(
        "Patterns",
        ("pattern", "log-likelihood", "support %", "served less expected, drafts in 100 tokens"),
        rows,
        what="What the drafter would come to with one thing broken, held against the counters text by text.",
        about="Support: share of draws of texts in which the pattern is 20 times as likely as any other.",
    )
