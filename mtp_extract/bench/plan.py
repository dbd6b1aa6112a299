"""What a benchmark is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mtp_extract.options import About, ApiKey, Workloads


@dataclass(frozen=True)
class BenchPlan:
    """What to measure, of which server; ``key`` is sent to both servers."""

    url: Annotated[str, About("An OpenAI-compatible server: http://localhost:8000.", metavar="URL")]
    baseline: Annotated[
        str | None,
        About("The same server started without a drafter; asked in turn with the first.", metavar="URL"),
    ] = None
    prompts: Workloads = None
    model: Annotated[str | None, About("As the server calls it; needed where it serves several.", metavar="NAME")] = (
        None
    )
    key: ApiKey = field(default=None, repr=False)
    max_tokens: Annotated[int, About("Most tokens of an answer.", least=1)] = 128
    temperature: Annotated[float, About("0 is greedy; then texts are compared.", least=0)] = 0.0
    concurrency: Annotated[int, About("Requests at a time, in groups.", least=1, most=1024)] = 1
    repeat: Annotated[int, About("How often each prompt is asked.", least=1)] = 1
    warm_up: Annotated[int, About("Requests to each server that are not measured.", least=0)] = 1
    timeout: Annotated[float, About("Seconds an answer may take.", least=0.1)] = 300.0
    chat_template: Annotated[bool, About("Send prompts as chats, or to be continued.")] = True
