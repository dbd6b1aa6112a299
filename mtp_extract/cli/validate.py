"""``mtp-validate``: is a checkpoint the drafter of its file, and does it draft what its base would say?"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from mtp_extract.cli._command import AsJson, command_line, program
from mtp_extract.cli.terminal import (
    doing_unless,
    error,
    progress_lines,
    say,
    say_all,
    say_notes,
    table,
    write_json,
)
from mtp_extract.errors import escape
from mtp_extract.validation.plan import ValidationPlan

if TYPE_CHECKING:
    from mtp_extract.validation.result import Validation


def command(plan: ValidationPlan, print_json: AsJson = False) -> None:
    """Check a drafter against its bundle (--source), and measure acceptance with its base (--base).

    The exit status is 1 also if a check refutes the drafter.
    """
    from mtp_extract.api import validate
    from mtp_extract.report.page import plain_json

    def tell(found: Validation) -> None:
        if print_json:
            write_json(plain_json(found))
        else:
            _show(found)

    saved: list[Validation] = []
    told = replace(plan, command=command_line(), say=doing_unless(print_json), rescue=saved.append)
    try:
        with progress_lines(print_json, "batch") as show:
            found = validate(replace(told, show=show), tell)
    except BaseException:
        for measured in saved:
            tell(measured)
        raise
    if plan.report is not None and not print_json:
        say(f"Wrote {escape(plan.report)}/: {', '.join(sorted(os.listdir(plan.report)))}")
    if found.refuted:
        error("the validation shows that something is wrong; the verdict says what.")
        raise typer.Exit(1)


def _show(found: Validation) -> None:
    """The verdict, what to know of it, and one table."""
    from mtp_extract.validation import page

    say_all(found.verdict)
    if not found.drafters:
        shown = page.checks(found)
    else:
        shown = page.worth(found) if found.drafters[0].worth else page.steps(found.drafters)
    say(shown.title)
    table(shown.rows, shown.columns, longest=1000)
    say_notes(found.notes)
    if found.source is None:
        say("With --source FILE.litertlm it is compared with the file it came from.")
    if not found.drafters:
        say("With --base MODEL it is run beside the model it drafts for.")


_EXAMPLES = {
    "mtp-validate drafter --source gemma-4-E4B-it.litertlm": "Checks that it is what the bundle holds.",
    "mtp-validate drafter --base google/gemma-4-E4B-it --report report": "Measures acceptance; writes a report.",
}

app, main = program(command, _EXAMPLES, kept="what was measured until then is above, if anything was")
