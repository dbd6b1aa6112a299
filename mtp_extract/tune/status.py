"""How far a run is, for whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """After a batch of text that the base wrote, or a step of the training."""

    kind: str  # "text" or "step"
    done: int  # texts of this process, or steps
    total: int  # likewise
    loss: float | None = None  # of the last step
    watched: float | None = None  # teacher-forced tokens per round on the watched texts
