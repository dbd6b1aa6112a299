"""``mtp-validate``: is a checkpoint the drafter of its file, and does it draft what its base would say?"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from click import Argument, IntRange, Option

from mtp_extract.cli._command import Command, command_line, run
from mtp_extract.cli._options import AS_JSON, CHAT_TEMPLATE, DEVICE, PATH, PROMPTS, WholeNumbers, base_option
from mtp_extract.cli._reporter import TerminalReporter
from mtp_extract.cli.terminal import error, say, say_all, say_notes, table, write_json
from mtp_extract.errors import escape
from mtp_extract.validation.plan import MOST_STEPS, ValidationPlan

if TYPE_CHECKING:
    from mtp_extract.validation.result import Validation


_OPTIONS = (
    Argument(
        ["directory"],
        type=PATH,
        required=False,
        metavar="[DIR]",
        help="A checkpoint that mtp-extract wrote, or an official assistant; or its id on the Hub.",
    ),
    base_option(required=False),
    Option(["--beside"], type=PATH, metavar="DIR", help="Another drafter of that base, to measure on the same texts."),
    Option(
        ["--source"], metavar="FILE", help="The .litertlm it was extracted from, to prove that this is its drafter."
    ),
    Option(["--sample"], is_flag=True, help="Validate the sample that comes with mtp-extract."),
    PROMPTS,
    Option(
        ["--draft-steps"],
        type=WholeNumbers(),
        default="1,2,4,8",
        metavar="K,…",
        help=f"Numbers of drafts a round, up to {MOST_STEPS}.",
    ),
    Option(
        ["--tree", "trees"],
        multiple=True,
        metavar="TREE",
        help="Tree of drafts to measure too: 4x2x1 is four drafts, two after each, one after each of those; or "
        "adaptive, a chain whose length follows acceptance. May be repeated.",
    ),
    DEVICE,
    Option(["--new-tokens"], type=IntRange(3), default=64, metavar="N", help="Most tokens the base adds to a prompt."),
    Option(["--batch"], type=IntRange(1), default=16, metavar="N", help="Prompts at a time."),
    CHAT_TEMPLATE,
    Option(["--report"], type=PATH, metavar="DIR", help="Write report.html, report.json and pair.json there."),
    Option(["--overwrite"], is_flag=True, help="Replace an older report."),
    AS_JSON,
)


def validate_command(*, print_json: bool, **values: Any) -> None:
    """Check a drafter against its bundle (--source), and measure acceptance with its base (--base).

    The exit status is 1 also if a check refutes the drafter.
    """
    from mtp_extract.api import validate
    from mtp_extract.report.page import plain_json

    def print_result(validation: Validation) -> None:
        if print_json:
            write_json(plain_json(validation))
        else:
            _show(validation)

    plan = ValidationPlan(**values, command=command_line())
    # The result is printed before a report of it is written.
    with TerminalReporter(quiet=print_json, print_result=print_result) as reporter:
        result = validate(plan, reporter)
    if plan.report is not None and not print_json:
        say(f"Wrote {escape(plan.report)}/: {', '.join(sorted(os.listdir(plan.report)))}")
    if result.refuted:
        error("the validation shows that something is wrong; the verdict says what.")
        sys.exit(1)


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

app = Command(validate_command, _OPTIONS, _EXAMPLES)
main = partial(run, app, kept="what was measured until then is above, if anything was")
