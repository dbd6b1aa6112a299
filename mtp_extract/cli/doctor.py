"""``mtp-doctor``: why a server rejects drafts."""

from __future__ import annotations

from pathlib import Path

import typer

from mtp_extract.cli._command import AsJson, program
from mtp_extract.cli.terminal import doing_unless, say_report, write_json
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.evaluation.extras import require
from mtp_extract.io.opening import checkpoint_here


def doctor_command(plan: DoctorPlan, print_json: AsJson = False) -> None:
    """Find out why a server rejects drafts: whether the pair fits, what is expected, what is served, which fault it is.

    The exit status is 1 if drafter and base do not fit.
    """
    path = Path(checkpoint_here(plan.place))
    require("torch", "transformers")

    from mtp_extract.doctor.run import diagnose
    from mtp_extract.doctor.verdict import diagnosis_tables
    from mtp_extract.report.page import plain_json

    diagnosis = diagnose(plan, path, doing_unless(print_json))
    if print_json:
        write_json(plain_json(diagnosis))
    else:
        say_report(plain_json(diagnosis), diagnosis_tables(diagnosis))
    if diagnosis.outcome == "does not fit":
        raise typer.Exit(1)


_EXAMPLES = {
    "mtp-doctor drafter --base google/gemma-4-E4B-it": "Says whether the pair fits, and what to expect of it.",
    "mtp-doctor drafter --base google/gemma-4-E4B-it --server http://localhost:8000": "Compares expected and served.",
}

app, main = program(doctor_command, _EXAMPLES)
