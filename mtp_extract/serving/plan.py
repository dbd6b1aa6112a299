"""What a benchmark is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import typer
from msgspec import Meta

from mtp_extract.evaluation.progress import Say, Show, silent
from mtp_extract.options import ApiKey, ServedModel, Workloads
from mtp_extract.serving.result import Benchmark


@dataclass(frozen=True)
class BenchPlan:
    """What to measure, of which server; ``key`` is sent to both servers."""

    url: Annotated[str, typer.Argument(help="An OpenAI-compatible server: http://localhost:8000.", metavar="URL")]
    baseline: Annotated[
        str | None,
        typer.Option(help="The same server started without a drafter, asked in turn with the first.", metavar="URL"),
    ] = None
    prompts: Workloads = None
    model: ServedModel = None
    key: ApiKey = field(default=None, repr=False)
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1, metavar="N")] = 128
    temperature: Annotated[float, typer.Option(help="Temperature; at 0 texts are compared.", min=0, metavar="X")] = 0.0
    concurrency: Annotated[int, typer.Option(help="Requests in flight at a time.", min=1, max=64, metavar="N")] = 1
    warm_up: Annotated[int, Meta(ge=0)] = 1
    """Requests to each server that are not measured."""
    chat_template: Annotated[bool, typer.Option(help="Send prompts as chats, or as text to be continued.")] = True
    say: Say = silent
    show: Show = silent
    rescue: Callable[[Benchmark], None] = silent
    """Told what was measured so far, where an error or a signal ends it."""
