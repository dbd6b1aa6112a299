"""The arguments of a benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mtp_extract.options import check_bounds


@dataclass(frozen=True)
class BenchPlan:
    """The arguments of :func:`~mtp_extract.api.bench`, which explains them."""

    url: str
    baseline: str | None = None
    prompts: Path | None = None
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    max_tokens: int = 128
    temperature: float = 0.0
    concurrency: int = 1
    warm_up: int = 1
    chat_template: bool = True

    def __post_init__(self) -> None:
        """Raise PlanError if a number is out of bounds."""
        check_bounds("max_tokens", self.max_tokens, least=1)
        check_bounds("temperature", self.temperature, least=0)
        check_bounds("concurrency", self.concurrency, least=1, most=64)
        check_bounds("warm_up", self.warm_up, least=0)
