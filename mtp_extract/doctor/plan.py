"""What a diagnosis is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mtp_extract.options import BASE, About, ApiKey, ChatTemplate, Device, ServedModel, Workloads
from mtp_extract.validation.plan import MOST_STEPS


@dataclass(frozen=True)
class DoctorPlan:
    """Which pair, beside which server, on which prompts."""

    place: Annotated[
        str,
        About(
            "A drafter's directory, .gguf or id on the Hub; or a .litertlm, by path or address: does it hold one?",
            metavar="DIR|FILE",
        ),
    ]
    base: Annotated[str | None, BASE] = None
    server: Annotated[
        str | None, About("An OpenAI-compatible server with that pair: http://localhost:8000.", metavar="URL")
    ] = None
    prompts: Workloads = None
    model: ServedModel = None
    key: ApiKey = field(default=None, repr=False)
    max_tokens: Annotated[int, About("Most tokens of an answer.", least=8)] = 64
    temperature: Annotated[
        float,
        About(
            "Of the answers; 0 is greedy. Drafts are taken to be the drafter's likeliest tokens.", least=0, option=False
        ),
    ] = 0.0
    drafts: Annotated[
        int | None,
        About("Drafts a round; by default as many as the server's counters say, or 3.", least=1, most=MOST_STEPS),
    ] = None
    chat_template: ChatTemplate = True
    device: Device = "auto"
    batch: Annotated[int, About("Texts at a time, in the reference.", least=1, option=False)] = 16
    timeout: Annotated[float, About("Seconds an answer may take.", least=0.1, option=False)] = 300.0
