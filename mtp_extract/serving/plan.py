"""What a benchmark is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mtp_extract.evaluate.progress import Say, Show, silent
from mtp_extract.options import About, ApiKey, Baseline, ServedModel, Workloads, check_other


@dataclass(frozen=True)
class BenchPlan:
    """What to measure, of which server; ``key`` is sent to both servers."""

    url: Annotated[str, About("An OpenAI-compatible server: http://localhost:8000.", metavar="URL")]
    baseline: Baseline = None
    prompts: Workloads = None
    model: ServedModel = None
    key: ApiKey = field(default=None, repr=False)
    max_tokens: Annotated[int, About("Most tokens of an answer.", least=1)] = 128
    temperature: Annotated[float, About("0 is greedy; then texts are compared.", least=0)] = 0.0
    concurrency: Annotated[int, About("Requests in flight: the next when one has ended.", least=1, most=64)] = 1
    warm_up: Annotated[int, About("Requests to each server that are not measured.", least=0, option=False)] = 1
    timeout: Annotated[float, About("Seconds an answer may take.", least=0.1, option=False)] = 300.0
    chat_template: Annotated[bool, About("Send prompts as chats, or to be continued.")] = True
    say: Say = silent
    show: Show = silent

    def __post_init__(self) -> None:
        check_other(self.baseline, self.url)
