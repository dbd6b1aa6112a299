"""How far a run is, for whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Status:
    """After a batch of text that the base wrote, or a step of the training.

    Attributes:
        kind: "text" or "step".
        done, total: texts of this process, or steps.
        seconds_left: at the pace so far.
        loss: of the last step.
        watched: mean accepted length on the watched texts, when it was last measured.
    """

    kind: str
    done: int
    total: int
    seconds_left: float
    loss: float | None = None
    watched: float | None = None
