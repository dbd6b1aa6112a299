"""The report of a diagnosis: ``doctor.json``, two pages, and the tables that pages and terminal show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from mtp_extract._version import __version__
from mtp_extract.doctor import fields
from mtp_extract.doctor.diagnosis import Diagnosis
from mtp_extract.doctor.verdict import BELOW, IDLE, IN_LINE, OTHER_TEXT, UNFIT, judge
from mtp_extract.io.place import Inputs, listing, staged
from mtp_extract.io.typed import fill
from mtp_extract.report.colours import light
from mtp_extract.report.columns import DASH, Cell, Column, Row, Table, decimal, item, named, number, percent
from mtp_extract.report.drawing import Draw, Line, by_step
from mtp_extract.report.page import TOKENS_A_ROUND, Headline, Page, measured, pages_of, plain_json, within
from mtp_extract.report.web import write_pages

PICTURES: Mapping[str, str] = {"acceptance_by_step": "Accepted drafts by step, of those accepted a step before"}
DOCTOR_LISTED = listing("doctor.json", pages_of("doctor", PICTURES))
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
        return write_pages(page_of(report), stage, "doctor")


def page_of(report: Mapping[str, Any]) -> Page:
    """The page of a ``doctor.json``."""
    drafter, serving = report["drafter"], report["serving"]
    about = f"{drafter['format']}, {drafter['made']}" + (f"; beside {report['base']}" if report["base"] else "")
    if serving:
        about += f"; {serving['kind']} {serving['version'] or ''} at {serving['name']}"
    drawings: Mapping[str, Draw] = {"acceptance_by_step": _by_step}
    title, shown = f"Diagnosis of {drafter['name']}", list(tables(report))
    return Page(title, about, report, headlines(report), shown, PICTURES, drawings)


_STANDING: Mapping[str, Literal["good", "bad"]] = {
    IN_LINE: "good", **dict.fromkeys((BELOW, UNFIT, IDLE, OTHER_TEXT), "bad"),
}  # fmt: skip


def headlines(report: Mapping[str, Any]) -> list[Headline]:
    """The large figures of its head: the verdict, tokens a round as served and as expected, texts that stay."""
    outcome, suspect, text, serving = report["outcome"], report["suspect"], report["text"], report["serving"]
    temperature, told = report["settings"]["temperature"], _told(report)
    unserved = "no server was asked" if serving is None else ""
    unknown = "it was run beside no base" if report["base"] is None else "no text can be counted along"
    lengths = [
        (side.title(), told[side]["mean_accepted_length"] if side in told else {"value": None, "interval": None}, why)
        for side, why in (("served", unserved or unknown), ("expected", unknown))
    ]
    same = f"{text['same']} of {text['texts']}" if text and temperature == 0 else None
    drawn = f"answers were drawn at a temperature of {temperature:g}" if temperature else ""
    named = f"suspect: {suspect}" if suspect else "no suspect is named"
    in_line = "In line: served as in the reference loop, along the same texts."
    stays = "Greedy texts that are the reference loop's, character for character."
    return [
        Headline("Verdict", outcome[:1].upper() + outcome[1:], named, in_line, _STANDING.get(outcome, "")),
        *(
            measured(name, of["value"], "{:.2f}", f"tokens a round; {within(of['interval'])}", why, TOKENS_A_ROUND)
            for name, of, why in lengths
        ),
        measured("Same text", same, "{}", "served texts beside the reference's", unserved or drawn or unknown, stays),
    ]


def _by_step(report: Mapping[str, Any], plots: Any) -> Any:
    looks = {"expected": {"color": light("orange"), "marker": "s"}, "served": {"color": light("blue"), "marker": "o"}}
    lines = [
        Line(side, [of["value"] for of in steps], [of["interval"] for of in steps], looks[side])
        for side, rates in _told(report).items()
        if (steps := rates["conditional"])
    ]
    return by_step(plots, lines, "draft step; bars: 95 % intervals", "accepted (%)")


def _told(report: Mapping[str, Any]) -> dict[str, Row]:
    """Of reference and server, those whose drafts are known."""
    sides = {"expected": report["expected"], "served": report["serving"] and report["serving"]["rates"]}
    return {side: rates for side, rates in sides.items() if rates}


def tables(report: Mapping[str, Any]) -> Iterator[Table]:
    """The tables of a ``doctor.json``: what to do, what is expected and served, does the pair fit, patterns."""
    if report["next"]:
        todo = tuple((step,) for step in report["next"])
        yield Table("What to do next", ("",), todo, what="In this order.", first=True)
    if told := _told(report):
        steps = tuple((f"step {step + 1} %", _of_step(step)) for step in range(report["settings"]["drafts"]))
        yield Table.of("Drafts", (*_DRAFTS, *steps), named(told), what=_OF_DRAFTS, figures=tuple(PICTURES), first=True)
    if report["checks"]:
        unfit = any(row["passed"] is False for row in report["checks"])
        yield Table.of("Does the pair fit", _CHECKS, report["checks"], what=_OF_CHECKS, first=unfit or not told)
    if report["engines"]:
        yield Table.of("Engines", _ENGINES, report["engines"], what="What engines make of this directory.")
    if len(report["fits"]) > 1:
        yield Table.of("Patterns", _FITS, report["fits"], what=_OF_FITS)


def _of_step(step: int) -> Cell:
    # A server may tell no steps.
    return lambda row: percent(f"{step}.value", f"{step}.interval")(row["conditional"]) if row["conditional"] else DASH


def _gap(fit: Row) -> str:
    gap = fit["gap"] and [100 * end for end in fit["gap"]]
    return number(sum(gap) / 2, "+.1f", gap, between=" to ") if gap else DASH


_CHECKS: tuple[Column, ...] = (
    ("what has to agree", item("name")),
    ("does", lambda row: _PASSED[row["passed"]]),
    ("found", item("found")),
)
_OF_CHECKS = "What has to agree of drafter and base, and whether it does; ? where nothing decides it."
_ENGINES: tuple[Column, ...] = (
    ("engine", item("engine")),
    ("loads", lambda row: _PASSED[row["loads"]]),
    ("what it does", item("what")),
)
_DRAFTS: tuple[Column, ...] = (
    ("", item("name")),
    ("texts", item("texts")),
    ("rounds", decimal("rounds", ".0f")),
    ("accepted", decimal("accepted", ".0f")),
    ("mean length", decimal("mean_accepted_length.value", ".2f", "mean_accepted_length.interval")),
)
_OF_DRAFTS = "Drafts that stand along the same texts; in brackets 95 % intervals, over texts."
_FITS: tuple[Column, ...] = (
    ("pattern", item("name")),
    ("log-likelihood", decimal("log_likelihood", ".1f")),
    ("support %", percent("support")),
    ("served less expected, drafts in 100 tokens", _gap),
)
_OF_FITS = "What the drafter would come to with one thing broken, held against the counters text by text."
