"""The report of a diagnosis: ``doctor.json``, two pages, and the tables that pages and terminal show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mtp_extract._version import __version__
from mtp_extract.doctor import fields
from mtp_extract.doctor.diagnosis import Diagnosis
from mtp_extract.doctor.verdict import judge
from mtp_extract.io.place import Inputs, listing, staged
from mtp_extract.io.typed import fill
from mtp_extract.report.columns import DASH, Table, number, share
from mtp_extract.report.page import page, plain_json
from mtp_extract.report.web import web_page

_DOCTOR, _PAGE, _WEB_PAGE = "doctor.json", "doctor.md", "doctor.html"
_FILES = frozenset({_DOCTOR, _PAGE, _WEB_PAGE})
DOCTOR_LISTED = listing(_DOCTOR, _FILES)
"""Everything that a report of a diagnosis consists of, and that may be replaced."""
_VERSION = 1
_PASSED = {True: "yes", False: "NO", None: "?"}


def as_json(found: Diagnosis) -> dict[str, Any]:
    """``doctor.json``: only JSON's own types."""
    verdict = judge(found)
    report: dict[str, Any] = plain_json(
        fill(
            fields.Doctor,
            found,
            version=_VERSION,
            tool={"name": "mtp-extract", "version": __version__},
            verdict=verdict.sentence,
            **{name: getattr(verdict, name) for name in ("outcome", "suspect", "certainty", "findings", "next")},
        )
    )
    return report


def write_doctor(found: Diagnosis, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write the report; names of its files. None of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    report = as_json(found)
    with staged(target, overwrite=overwrite, inputs=inputs, listed=DOCTOR_LISTED) as stage:
        (stage / _DOCTOR).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        for name, make in ((_PAGE, page), (_WEB_PAGE, web_page)):
            shown = make(f"Diagnosis of {found.identity.name}", report, tables(report))
            (stage / name).write_text(shown, encoding="utf-8")
    return sorted(_FILES)


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of a ``doctor.json``: what to do, does the pair fit, what is expected and served, patterns."""
    if report["next"]:
        yield Table("What to do next", ("",), tuple((step,) for step in report["next"]), first=True)
    if report["checks"]:
        checks = tuple((check["name"], _PASSED[check["passed"]], check["found"]) for check in report["checks"])
        yield Table("Does the pair fit", ("", "", ""), checks, first=True)
    if report["engines"]:
        engines = tuple((e["engine"], _PASSED[e["loads"]], e["what"]) for e in report["engines"])
        yield Table("Engines", ("engine", "loads", ""), engines)
    sides = {"expected": report["expected"], "served": report["serving"] and report["serving"]["rates"]}
    if any(sides.values()):
        steps = range(report["settings"]["drafts"])
        columns = ("", "texts", "rounds", "accepted", "mean length", *(f"step {step + 1} %" for step in steps))
        yield Table(
            "Drafts",
            columns,
            tuple(_drafts(side, rates, len(steps)) for side, rates in sides.items() if rates),
            about="Along the same texts. By step: accepted, of those accepted a step before. In brackets: 95 % "
            "intervals, over texts.",
            first=True,
        )
    if report["fits"]:
        yield Table(
            "Patterns",
            ("pattern", "log-likelihood", "support %", "served less expected, drafts in 100 tokens"),
            tuple(map(_fit, report["fits"])),
            about="What the drafter would come to with one thing broken, held against the counters text by text. "
            "Support: share of draws of texts in which a pattern is 20 times as likely as any other.",
        )


def _drafts(side: str, rates: Mapping[str, Any], steps: int) -> tuple[str | int, ...]:
    by_step = [share(rate["value"], rate["interval"]) for rate in rates["conditional"] or ()]
    length = rates["mean_accepted_length"]
    return (
        side,
        rates["texts"],
        round(rates["rounds"]),
        round(rates["accepted"]),
        number(length["value"], ".2f", length["interval"]),
        *[*by_step, *[DASH] * steps][:steps],
    )


def _fit(fit: Mapping[str, Any]) -> tuple[str | int, ...]:
    gap = fit["gap"] and [100 * end for end in fit["gap"]]
    apart = number(sum(gap) / 2, "+.1f", gap, between=" to ") if gap else DASH
    return fit["name"], number(fit["log_likelihood"], ".1f"), number(100 * fit["support"], ".1f"), apart
