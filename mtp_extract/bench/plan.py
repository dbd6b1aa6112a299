"""What a benchmark is asked to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from mtp_extract.evaluate.progress import Say, Show, silent
from mtp_extract.options import About, ApiKey, Baseline, Replace, ServedModel, Workloads, check_other

_LIMITED = ("ttft", "tpot", "e2el")
_LIMIT = re.compile(rf"({'|'.join(_LIMITED)}):(\d+(?:\.\d+)?)(?:ms)?")


def share_of(text: str) -> float:
    """A share above 0, written ``3%`` or ``0.03``.

    Raises:
        ValueError: it is none.
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError(f"expected a share such as 3%, found {text!r}.")
    return share


def limits_of(text: str) -> Mapping[str, float]:
    """Milliseconds by name, written ``ttft:200,tpot:30``.

    Raises:
        ValueError: it is something else.
    """
    found = [_LIMIT.fullmatch(part) for part in text.replace(",", " ").split()]
    if not found or None in found:
        raise ValueError(f"expected limits such as ttft:200,tpot:30, found {text!r}.")
    return {match[1]: float(match[2]) for match in found if match}


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
    concurrency: Annotated[
        int, About("Requests in flight: the next is sent as soon as one has ended.", least=1, most=1024)
    ] = 1
    rate: Annotated[
        float | None,
        About("Requests a second instead, arriving at random (Poisson).", least=1e-3, most=1e5, metavar="R"),
    ] = None
    repeat: Annotated[int, About("How often each prompt is asked.", least=1)] = 1
    until: Annotated[
        float | None,
        About(
            "Ask all again, at most 20 times, until the interval of the speedup, or of tokens/s without a baseline, is "
            "as narrow: 3%.",
            metavar="SHARE",
            parse=share_of,
        ),
    ] = None
    goodput: Annotated[
        Mapping[str, float] | None,
        About(
            "Count answers that take no longer: ttft:200,tpot:30 (ttft, tpot, e2el, in ms).",
            metavar="LIMITS",
            parse=limits_of,
        ),
    ] = None
    warm_up: Annotated[int, About("Requests to each server that are not measured.", least=0)] = 1
    timeout: Annotated[float, About("Seconds an answer may take.", least=0.1)] = 300.0
    chat_template: Annotated[bool, About("Send prompts as chats, or to be continued.")] = True

    def __post_init__(self) -> None:
        check_other(self.baseline, self.url)


@dataclass(frozen=True)
class Benching(BenchPlan):
    """A benchmark, and what becomes of it: places to write to, and who is told how far it is."""

    report: Annotated[Path | None, About("Write bench.json and pages of it there.", metavar="DIR")] = None
    save: Annotated[
        Path | None, About("Write the server's figures in the JSON of vllm bench serve too.", metavar="FILE")
    ] = None
    overwrite: Replace = False
    say: Say = silent
    show: Show = silent
