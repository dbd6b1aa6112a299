"""``mtp-doctor``: find out why a server rejects drafts."""

from __future__ import annotations

from typing import Annotated

import typer

from mtp_extract.cli._command import Version, make_command
from mtp_extract.cli._options import BASE, ApiKey, AsJson, ChatTemplate, Device, Prompts, ServedModel
from mtp_extract.cli.terminal import TerminalReporter, say_report
from mtp_extract.doctor.plan import DoctorPlan
from mtp_extract.validation.plan import MOST_STEPS


def doctor_command(
    *,
    place: Annotated[str, typer.Argument(metavar="DIR", help="A drafter's directory, .gguf or id on the Hub.")],
    base: Annotated[str, BASE],
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An OpenAI-compatible server with that pair: http://localhost:8000."),
    ] = None,
    prompts: Prompts = None,
    model: ServedModel = None,
    key: ApiKey = None,
    max_tokens: Annotated[int, typer.Option(min=8, metavar="N", help="Most tokens of an answer.")] = 64,
    drafts: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_STEPS,
            metavar="N",
            help="Drafts a round; by default as many as the server's counters say, or 3.",
        ),
    ] = None,
    chat_template: ChatTemplate = True,
    device: Device = "auto",
    print_json: AsJson = False,
    version: Version = False,
) -> None:
    """Find out why a server rejects drafts: whether the pair fits, what is expected, what is served, which fault it is.

    The exit status is 1 if drafter and base do not fit.
    """
    from mtp_extract.api import diagnose
    from mtp_extract.doctor.verdict import list_diagnosis_tables

    plan = DoctorPlan(
        place,
        base,
        server=server,
        prompts=prompts,
        model=model,
        key=key,
        max_tokens=max_tokens,
        drafts=drafts,
        chat_template=chat_template,
        device=device,
    )
    with TerminalReporter(quiet=print_json) as reporter:
        diagnosis = diagnose(plan, reporter)
    say_report(diagnosis, list_diagnosis_tables(diagnosis), as_json=print_json)
    if diagnosis.outcome == "does not fit":
        raise typer.Exit(1)


_EXAMPLES = {
    "mtp-doctor drafter --base google/gemma-4-E4B-it": "Says whether the pair fits, and what to expect of it.",
    "mtp-doctor drafter --base google/gemma-4-E4B-it --server http://localhost:8000": "Compares expected and served.",
}

app, main = make_command(doctor_command, _EXAMPLES)
