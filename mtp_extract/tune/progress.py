"""How far a run is, for whoever shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Written:
    """How far the text is, in this process.

    Attributes:
        done, texts: there, and to be there.
        seconds_left: at the pace so far; None before anything was written.
    """

    done: int
    texts: int
    seconds_left: float | None


@dataclass(frozen=True)
class Progress:
    """Where the training stands.

    Attributes:
        step, steps: done, and in all.
        loss: of the last step.
        watched: mean accepted length on the watched texts, when it was last measured.
        seconds_left: at the pace so far; None before the first step.
    """

    step: int
    steps: int
    loss: float | None
    watched: float
    seconds_left: float | None
