"""``mtp-doctor``: why a server rejects drafts."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from click import Argument, IntRange, Option

from mtp_extract.cli._command import Command, run
from mtp_extract.cli._options import API_KEY, AS_JSON, CHAT_TEMPLATE, DEVICE, MODEL, PROMPTS, base_option
from mtp_extract.cli._reporter import TerminalReporter
from mtp_extract.cli.terminal import say_report, write_json
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.validation.plan import MOST_STEPS

_OPTIONS = (
    Argument(["place"], metavar="DIR", help="A drafter's directory, .gguf or id on the Hub."),
    base_option(required=True),
    Option(["--server"], metavar="URL", help="An OpenAI-compatible server with that pair: http://localhost:8000."),
    PROMPTS,
    MODEL,
    API_KEY,
    Option(["--max-tokens"], type=IntRange(8), default=64, metavar="N", help="Most tokens of an answer."),
    Option(
        ["--drafts"],
        type=IntRange(1, MOST_STEPS),
        metavar="N",
        help="Drafts a round; by default as many as the server's counters say, or 3.",
    ),
    CHAT_TEMPLATE,
    DEVICE,
    AS_JSON,
)


def doctor_command(*, print_json: bool, **values: Any) -> None:
    """Find out why a server rejects drafts: whether the pair fits, what is expected, what is served, which fault it is.

    The exit status is 1 if drafter and base do not fit.
    """
    from mtp_extract.api import diagnose
    from mtp_extract.doctor.verdict import diagnosis_tables
    from mtp_extract.report.page import plain_json

    with TerminalReporter(quiet=print_json) as reporter:
        diagnosis = diagnose(DoctorPlan(**values), reporter)
    if print_json:
        write_json(plain_json(diagnosis))
    else:
        say_report(plain_json(diagnosis), diagnosis_tables(diagnosis))
    if diagnosis.outcome == "does not fit":
        sys.exit(1)


_EXAMPLES = {
    "mtp-doctor drafter --base google/gemma-4-E4B-it": "Says whether the pair fits, and what to expect of it.",
    "mtp-doctor drafter --base google/gemma-4-E4B-it --server http://localhost:8000": "Compares expected and served.",
}

app = Command(doctor_command, _OPTIONS, _EXAMPLES)
main = partial(run, app)
