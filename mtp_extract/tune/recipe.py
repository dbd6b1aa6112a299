"""How a drafter is trained: how long, on how much of each text, and at what rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtp_extract.tune.loss import LOGITS_AT_ONCE

_LEAST_RATE = 0.02
"""Of the learning rate, at the end."""


def cosine(share: float) -> float:
    """The factor on a learning rate after ``share`` of the way, along half a cosine: from 1 to 0.02."""
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        steps: of the optimizer.
        draft_steps: K, drafts a round.
        batch: texts a step, of all processes together.
        anchors: of each text, chosen at random.
        objective: a name in :data:`~mtp_extract.tune.loss.OBJECTIVES`.
        temperature: of serving; 0 for greedy.
        learning_rate: None for the mode's own.
        warm_up: share of the steps.
        evaluations: how often the watched texts are measured on the way.
        patience: evaluations without a better one after which training ends.
        seed: of the order of texts and the anchors.
        logits_at_once: most logits held in one piece.
    """

    steps: int
    draft_steps: int = 3
    batch: int = 16
    anchors: int = 24
    objective: str = "ce"
    temperature: float = 0.0
    learning_rate: float | None = None
    warm_up: float = 0.1
    evaluations: int = 10
    patience: int = 5
    seed: int = 0
    logits_at_once: int = LOGITS_AT_ONCE

    def rate(self, step: int) -> float:
        """The factor on the learning rate of step ``step``, from 0: a ramp, then a cosine."""
        ramp = max(1, round(self.warm_up * self.steps))
        if step < ramp:
            return (step + 1) / ramp
        return cosine((step - ramp) / max(1, self.steps - ramp))

    def evaluates(self, done: int) -> bool:
        """Whether the watched texts are measured after ``done`` steps."""
        every = max(1, self.steps // self.evaluations)
        return done % every == 0 or done == self.steps
