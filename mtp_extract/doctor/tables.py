"""The tables of a diagnosis, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from mtp_extract.doctor.result import Diagnosis
from mtp_extract.doctor.verdict import in_100_tokens
from mtp_extract.report.numbers import DASH, mean, number, rate
from mtp_extract.report.page import Table


def tables(found: Diagnosis) -> Iterator[Table]:
    """What to do, what is expected and served, does the pair fit, and what the counters are like."""
    if found.next:
        yield Table("What to do next", ("",), [(step,) for step in found.next])
    drafts, rows = found.settings["drafts"], list[tuple[str | int, ...]]()
    for side, rates in (("expected", found.expected), ("served", found.served)):
        if rates is not None:
            counts = (side, rates.texts, f"{rates.rounds:.0f}", f"{rates.accepted:.0f}", mean(rates.tokens_per_round))
            rows.append((*counts, *(map(rate, rates.steps) if rates.steps else [DASH] * drafts)))
    if rows:
        steps = (f"step {at + 1} %" for at in range(drafts))
        yield Table("Drafts", ("", "texts", "rounds", "accepted", "tokens per round", *steps), rows)
    if found.checks:
        passed = {True: "yes", False: "NO", None: "?"}
        checks = [(check.name, passed[check.passed], check.found) for check in found.checks]
        yield Table("Does the pair fit", ("what has to agree", "does", "found"), checks)
    if len(found.fits) > 1:
        columns = ("fault", "log-likelihood", "behind, a text", "at least", "missing drafts in 100 tokens")
        figures = [
            (fit.name, f"{fit.log_likelihood:.1f}", f"{fit.behind:.2f}", number(fit.behind_at_least, ".2f"))
            for fit in found.fits
        ]
        rows = [(*row, in_100_tokens(fit)) for row, fit in zip(figures, found.fits, strict=True)]
        yield Table("What the counters are like", columns, rows)
