"""A diagnosis for readers: the tables of page and terminal, and the files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mtp_extract.doctor.result import Diagnosis
from mtp_extract.doctor.verdict import in_100_tokens
from mtp_extract.io.place import Inputs, listing, staged
from mtp_extract.report.numbers import DASH, mean, number, rate
from mtp_extract.report.page import Page, Table, write_report

DOCTOR_LISTED = listing("doctor.json", frozenset({"doctor.json", "doctor.html"}))
"""Everything that a report of a diagnosis consists of, and that may be replaced."""


def write_doctor(found: Diagnosis, target: Path, *, overwrite: bool = False, inputs: Inputs = ()) -> list[str]:
    """Write the report; names of its files. None of ``inputs``, which were read, is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    about = f"{found.drafter.format}; beside {found.base}"
    if serving := found.serving:
        about += f"; {serving.kind} {serving.version or ''} at {serving.name}"
    title = f"Diagnosis of {found.drafter.name}"
    page = Page(title, about, found.verdict, list(tables(found)), findings=found.findings, notes=found.notes)
    with staged(target, overwrite=overwrite, inputs=inputs, listed=DOCTOR_LISTED) as stage:
        return write_report(stage, "doctor", found, page)


def tables(found: Diagnosis) -> Iterator[Table]:
    """What to do, what is expected and served, does the pair fit, and what the counters are like."""
    if found.next:
        yield Table("What to do next", ("",), [(step,) for step in found.next], what="In this order.")
    drafts, rows = found.settings["drafts"], list[tuple[str | int, ...]]()
    for side, rates in (("expected", found.expected), ("served", found.served)):
        if rates is not None:
            counts = (side, rates.texts, f"{rates.rounds:.0f}", f"{rates.accepted:.0f}", mean(rates.tokens_per_round))
            rows.append((*counts, *(map(rate, rates.steps) if rates.steps else [DASH] * drafts)))
    if rows:
        yield Table(
            "Drafts",
            ("", "texts", "rounds", "accepted", "tokens per round", *(f"step {at + 1} %" for at in range(drafts))),
            rows,
            what="Drafts that stand along the same texts; in brackets 95 % intervals, over texts.",
            about=(
                "Expected: of the reference, along the served texts. Tokens per round: drafts that stand, and the "
                "base's own token. Step: accepted there, of those whose predecessors in the round all were."
            ),
        )
    if found.checks:
        passed = {True: "yes", False: "NO", None: "?"}
        yield Table(
            "Does the pair fit",
            ("what has to agree", "does", "found"),
            [(check.name, passed[check.passed], check.found) for check in found.checks],
            what="What has to agree of drafter and base, and whether it does; ? where nothing decides it.",
        )
    if len(found.fits) > 1:
        figures = (
            (number(fit.log_likelihood, ".1f"), number(fit.behind, ".2f"), number(fit.behind_at_least, ".2f"))
            for fit in found.fits
        )
        yield Table(
            "What the counters are like",
            ("fault", "log-likelihood", "behind, a text", "at least", "missing drafts in 100 tokens"),
            [(fit.name, *row, in_100_tokens(fit)) for fit, row in zip(found.fits, figures, strict=True)],
            what="What the drafter comes to with one thing broken, compared with the counters text by text.",
            about=(
                "Behind: log-likelihood of a text by which the likeliest is ahead of this one, on the mean, and at "
                "least, 95 % over texts. Missing: accepted drafts that it expects and that were not served."
            ),
        )
