"""What a diagnosis is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer

from mtp_extract.options import BASE, ApiKey, ChatTemplate, Device, ServedModel, Workloads
from mtp_extract.validation.plan import MOST_STEPS


@dataclass(frozen=True)
class DoctorPlan:
    """Which pair, beside which server, on which prompts."""

    place: Annotated[str, typer.Argument(help="A drafter's directory, .gguf or id on the Hub.", metavar="DIR")]
    base: Annotated[str, BASE]
    server: Annotated[
        str | None,
        typer.Option(help="An OpenAI-compatible server with that pair: http://localhost:8000.", metavar="URL"),
    ] = None
    prompts: Workloads = None
    model: ServedModel = None
    key: ApiKey = field(default=None, repr=False)
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=8, metavar="N")] = 64
    drafts: Annotated[
        int | None,
        typer.Option(
            help="Drafts a round; by default as many as the server's counters say, or 3.",
            min=1,
            max=MOST_STEPS,
            metavar="N",
        ),
    ] = None
    chat_template: ChatTemplate = True
    device: Device = "auto"
