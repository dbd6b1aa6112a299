"""``mtp-validate``: is a checkpoint the drafter of its file, and does it draft what its base would say?"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from mtp_extract.cli._options import AsJson
from mtp_extract.cli._run import new_app, run
from mtp_extract.cli.terminal import (
    doing_unless,
    error,
    progress_of,
    say,
    say_all,
    say_notes,
    say_verdict,
    table,
    write_json,
)
from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.options import About
from mtp_extract.validate.run import Validating, run_validation, sample_plan

# What a control means is said in a sentence.
_LONGEST_TEXT = 1000


def command(
    plan: Validating,
    sample: Annotated[bool, About("Validate the sample that comes with mtp-extract.")] = False,
    print_json: AsJson = False,
) -> None:
    """Validate a drafter: proof that it is the file's (--source), measurements beside the base (--base).

    Exit status 1 also when a check or a measurement refutes the drafter.
    """
    try:
        trees = plan.wanted
    except MtpExtractError as wrong:
        raise typer.BadParameter(f"--tree: {wrong}.") from wrong
    if (plan.directory is None) != sample:
        raise typer.BadParameter("name a DIR, or --sample; one of the two.")
    if sample and (plan.base or plan.source):
        raise typer.BadParameter("--sample brings its own base and source; leave --base and --source out.")
    if trees and plan.base is None and not sample:
        raise typer.BadParameter("--tree is measured beside a base: give --base MODEL.")
    if not sample and plan.base is None and plan.source is None:
        raise typer.BadParameter("give --base MODEL, --source FILE.litertlm, or both.")

    from mtp_extract.evaluate.extras import require

    require("torch")
    out = plan.report
    to: dict[str, Any] = {"overwrite": plan.overwrite, "inputs": plan.inputs}
    if out is not None:
        require("matplotlib")

    from mtp_extract.io.place import check_place
    from mtp_extract.report.tables import REPORT_LISTED
    from mtp_extract.validate.report.document import as_json
    from mtp_extract.validate.report.pages import write_report

    if out is not None:
        check_place(out, **to, listed=REPORT_LISTED)
    with progress_of("batch", print_json) as show:
        found = run_validation(sample_plan(plan) if sample else plan, doing_unless(print_json), show)
    report = as_json(found)
    # Before it is written: what took hours is then seen where a disk is full.
    (write_json if print_json else _show)(report)
    files = write_report(found, out, **to) if out is not None else []
    if files and not print_json:
        say(f"Wrote {escape(out)}/: {', '.join(files)}")
    if found.refuted:
        error("the validation shows that something is wrong; the verdict says what.")
        raise typer.Exit(1)


def _show(report: Mapping[str, Any]) -> None:
    from mtp_extract.report.tables import measurements

    say_verdict(report["verdict"])
    for part in measurements(report):
        if not part.detail:
            say(part.title)
            table(part.rows, part.columns, longest=_LONGEST_TEXT)
            if part.after:
                say_all(f"  {part.after}")
    say_notes(report["notes"])
    if report["parity"] is None:
        say("With --source FILE.litertlm it is compared with the file it came from.")
    if report["agreement"] is None:
        say("With --base MODEL it is run beside the model it drafts for.")


_EXAMPLES = {
    "drafter --source gemma-4-E4B-it.litertlm": "Is it what the bundle holds?",
    "drafter --base google/gemma-4-E4B-it --report report": "How many drafts the base takes; pages in report/.",
}

app = new_app(command, _EXAMPLES)
main = partial(run, app)
