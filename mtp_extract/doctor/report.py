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
from mtp_extract.report.columns import DASH, Cell, Column, Row, Table, decimal, item, named, number, percent
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
        columns = (("", item("name")), ("", lambda row: _PASSED[row["passed"]]), ("", item("found")))
        yield Table.of("Does the pair fit", columns, report["checks"], first=True)
    if report["engines"]:
        columns = (("engine", item("engine")), ("loads", lambda row: _PASSED[row["loads"]]), ("", item("what")))
        yield Table.of("Engines", columns, report["engines"])
    sides = {"expected": report["expected"], "served": report["serving"] and report["serving"]["rates"]}
    if told := {side: rates for side, rates in sides.items() if rates}:
        steps = tuple((f"step {step + 1} %", _of_step(step)) for step in range(report["settings"]["drafts"]))
        yield Table.of("Drafts", (*_DRAFTS, *steps), named(told), about=_ABOUT_DRAFTS, first=True)
    if len(report["fits"]) > 1:
        yield Table.of("Patterns", _FITS, report["fits"], about=_ABOUT_FITS)


def _of_step(step: int) -> Cell:
    # A server may tell no steps.
    return lambda row: percent(f"{step}.value", f"{step}.interval")(row["conditional"]) if row["conditional"] else DASH


def _gap(fit: Row) -> str:
    gap = fit["gap"] and [100 * end for end in fit["gap"]]
    return number(sum(gap) / 2, "+.1f", gap, between=" to ") if gap else DASH


_DRAFTS: tuple[Column, ...] = (
    ("", item("name")),
    ("texts", item("texts")),
    ("rounds", decimal("rounds", ".0f")),
    ("accepted", decimal("accepted", ".0f")),
    ("mean length", decimal("mean_accepted_length.value", ".2f", "mean_accepted_length.interval")),
)
_ABOUT_DRAFTS = (
    "Along the same texts. By step: accepted, of those accepted a step before. In brackets: 95 % intervals, over texts."
)
_FITS: tuple[Column, ...] = (
    ("pattern", item("name")),
    ("log-likelihood", decimal("log_likelihood", ".1f")),
    ("support %", percent("support")),
    ("served less expected, drafts in 100 tokens", _gap),
)
_ABOUT_FITS = (
    "What the drafter would come to with one thing broken, held against the counters text by text. "
    "Support: share of draws of texts in which a pattern is 20 times as likely as any other."
)
