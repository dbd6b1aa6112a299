"""What a diagnosis is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mtp_extract.options import check_bounds
from mtp_extract.validation.plan import MOST_STEPS


@dataclass(frozen=True)
class DoctorPlan:
    """Arguments of a diagnosis; :func:`~mtp_extract.api.diagnose` explains each."""

    place: str
    base: str
    server: str | None = None
    prompts: Path | None = None
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    max_tokens: int = 64
    drafts: int | None = None
    chat_template: bool = True
    device: str = "auto"

    def __post_init__(self) -> None:
        """Raise PlanError if a number is out of bounds."""
        check_bounds("max_tokens", self.max_tokens, least=8)
        check_bounds("drafts", self.drafts, least=1, most=MOST_STEPS)
