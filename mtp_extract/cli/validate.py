"""``mtp-validate``: is a checkpoint the drafter of its file, and does it draft what its base would say?"""

from __future__ import annotations

import os
from contextlib import ExitStack
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


def validate_command(plan: ValidationPlan, print_json: AsJson = False) -> None:
    """Check a drafter against its bundle (--source), and measure acceptance with its base (--base).

    The exit status is 1 also if a check refutes the drafter.
    """
    from mtp_extract.api import validate
    from mtp_extract.report.page import plain_json

    saved: list[Validation] = []
    run_plan = replace(plan, command=command_line(), say=doing_unless(print_json), rescue=saved.append)
    with ExitStack() as bar:
        show = bar.enter_context(progress_lines(print_json, "batch"))

        def print_result(validation: Validation) -> None:
            # It is printed before the report is written, when the bar may still stand where the verdict would begin.
            bar.close()
            if print_json:
                write_json(plain_json(validation))
            else:
                _show(validation)

        try:
            result = validate(replace(run_plan, show=show), print_result)
        except BaseException:
            for measured in saved:
                print_result(measured)
            raise
    if plan.report is not None and not print_json:
        say(f"Wrote {escape(plan.report)}/: {', '.join(sorted(os.listdir(plan.report)))}")
    if result.refuted:
        error("the validation shows that something is wrong; the verdict says what.")
        raise typer.Exit(1)


def _show(validation: Validation) -> None:
    """Print the verdict, what to know of it, and one table."""
    from mtp_extract.validation import page

    say_all(validation.verdict)
    drafters = validation.drafters
    if not drafters:
        part = page.checks(validation)
    elif drafters[0].worth:
        part = page.worth(validation)
    else:
        part = page.steps(drafters)
    say(part.title)
    table(part.rows, part.columns, longest=1000)
    say_notes(validation.notes)
    if validation.source is None:
        say("With --source FILE.litertlm it is compared with the file it came from.")
    if not drafters:
        say("With --base MODEL it is run beside the model it drafts for.")


_EXAMPLES = {
    "mtp-validate drafter --source gemma-4-E4B-it.litertlm": "Checks that it is what the bundle holds.",
    "mtp-validate drafter --base google/gemma-4-E4B-it --report report": "Measures acceptance; writes a report.",
}

app, main = program(validate_command, _EXAMPLES, kept="what was measured until then is above, if anything was")
