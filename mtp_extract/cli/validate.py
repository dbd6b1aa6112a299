"""``mtp-validate``: check a drafter against its bundle, and measure acceptance with its base."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtp_extract.cli._command import Version, describe_command_line, make_command
from mtp_extract.cli._options import BASE, AsJson, ChatTemplate, Device, Prompts, parse_whole_numbers
from mtp_extract.cli.terminal import TerminalReporter, say, say_all, say_error, say_notes, say_table, write_json
from mtp_extract.errors import escape
from mtp_extract.validation.plan import MOST_STEPS, ValidationPlan

if TYPE_CHECKING:
    from mtp_extract.validation.result import Validation


def validate_command(
    *,
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="A checkpoint that mtp-extract wrote, or an official assistant; or its id on the Hub."
        ),
    ] = None,
    base: Annotated[str | None, BASE] = None,
    beside: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Another drafter of that base, to measure on the same texts.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The .litertlm it was extracted from, to prove that this is its drafter."),
    ] = None,
    sample: Annotated[bool, typer.Option("--sample", help="Validate the sample that comes with mtp-extract.")] = False,
    prompts: Prompts = None,
    draft_steps: Annotated[
        str, typer.Option(metavar="K,…", help=f"Numbers of drafts a round, up to {MOST_STEPS}.")
    ] = "1,2,4,8",
    trees: Annotated[
        list[str] | None,
        typer.Option(
            "--tree",
            metavar="TREE",
            help="Tree of drafts to measure too: 4x2x1 is four drafts, two after each, one after each of those; or "
            "adaptive, a chain whose length follows acceptance. May be repeated.",
        ),
    ] = None,
    device: Device = "auto",
    new_tokens: Annotated[int, typer.Option(min=3, metavar="N", help="Most tokens the base adds to a prompt.")] = 64,
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts at a time.")] = 16,
    chat_template: ChatTemplate = True,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.html, report.json and pair.json there.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an older report.")] = False,
    print_json: AsJson = False,
    version: Version = False,
) -> None:
    """Check a drafter against its bundle (--source), and measure acceptance with its base (--base).

    The exit status is 1 also if a check refutes the drafter.
    """
    from mtp_extract.api import validate
    from mtp_extract.report.page import convert_to_json

    def print_result(validation: Validation) -> None:
        if print_json:
            write_json(convert_to_json(validation))
        else:
            _show(validation)

    plan = ValidationPlan(
        directory=directory,
        base=base,
        beside=beside,
        source=source,
        sample=sample,
        prompts=prompts,
        draft_steps=parse_whole_numbers("draft_steps", draft_steps),
        trees=tuple(trees or ()),
        device=device,
        new_tokens=new_tokens,
        batch=batch,
        chat_template=chat_template,
        report=report,
        overwrite=overwrite,
        command=describe_command_line(),
    )
    # The result is printed before a report of it is written.
    with TerminalReporter(quiet=print_json, print_result=print_result) as reporter:
        result = validate(plan, reporter)
    if plan.report is not None and not print_json:
        say(f"Wrote {escape(plan.report)}/: {', '.join(sorted(os.listdir(plan.report)))}")
    if result.refuted:
        say_error("the validation shows that something is wrong; the verdict says what.")
        raise typer.Exit(1)


def _show(validation: Validation) -> None:
    from mtp_extract.validation import page

    say_all(validation.verdict)
    drafters = validation.drafters
    if not drafters:
        part = page.build_checks_table(validation)
    elif drafters[0].worth:
        part = page.build_worth_table(validation)
    else:
        part = page.build_steps_table(drafters)
    say(part.title)
    say_table(part.rows, part.columns, longest=1000)
    say_notes(validation.notes)
    if validation.source is None:
        say("With --source FILE.litertlm it is compared with the file it came from.")
    if not drafters:
        say("With --base MODEL it is run beside the model it drafts for.")


_EXAMPLES = {
    "mtp-validate drafter --source gemma-4-E4B-it.litertlm": "Checks that it is what the bundle holds.",
    "mtp-validate drafter --base google/gemma-4-E4B-it --report report": "Measures acceptance; writes a report.",
}

app, main = make_command(validate_command, _EXAMPLES, kept="what was measured until then is above, if anything was")
