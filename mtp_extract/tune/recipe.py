"""How a drafter is trained: how long, on how much of each text, and at what rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mtp_extract.tune.loss import LOGITS_AT_ONCE

_LEAST_RATE = 0.02  # of the learning rate, at the end


def cosine(share: float) -> float:
    """The factor on a learning rate after ``share`` of the way, along half a cosine: from 1 to 0.02."""
    return _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))


@dataclass(frozen=True)
class Recipe:
    steps: int  # of the optimizer
    draft_steps: int = 3  # K, drafts a round
    batch: int = 16  # texts a step, of all processes together
    anchors: int = 24  # of each text, chosen at random
    objective: str = "mixed"  # a name in :data:`~mtp_extract.tune.loss.OBJECTIVES`
    temperature: float = 0.0  # of serving; 0 for greedy
    learning_rate: float | None = None  # None for the mode's own
    warm_up: float = 0.1  # share of the steps
    evaluations: int = 10  # how often the watched texts are measured on the way
    patience: int = 5  # evaluations without a better one after which training ends
    seed: int = 0  # of the order of texts and the anchors
    logits_at_once: int = LOGITS_AT_ONCE  # most logits held in one piece

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
