"""The arithmetic of speculative decoding: what a round yields, how many drafts are worth it, and choosing K on the way.

K drafts a round; the *conditional* acceptance of a step is the probability that its draft is accepted given that all
before it were. A round adds one token more than it accepts: the base's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FIRST = 4  # the first K
_PRIOR = 4.0  # rounds that every step is taken to have seen
_START = 0.7  # the acceptance of every step at first
_MEMORY = 0.95  # weight that a past round keeps with each new one


def expected_tokens(conditional: Sequence[float]) -> float:
    """Mean tokens a round from per-step conditional acceptance: 1 + p₁ + p₁p₂ + … + p₁⋯p_K.

    >>> expected_tokens([0.5, 0.5])
    1.75
    """
    total = reached = 1.0
    for rate in conditional:
        reached = reached and reached * rate  # a step that is never reached has no rate
        total += reached
    return total


def best_draft_length(conditional: Sequence[float], *, draft_cost: float) -> int:
    """The K from 0 to ``len(conditional)`` with the most tokens a unit of time; the smallest such K in a tie.

    A round takes ``1 + K · draft_cost``: ``draft_cost`` is the time of a draft step over that of a forward of the base.
    What a further token adds to that forward is small while memory bandwidth is the limit, and not counted.

    >>> best_draft_length([0.8] * 8, draft_cost=0.1), best_draft_length([0.1] * 8, draft_cost=0.2)
    (6, 0)
    """
    gains = [expected_tokens(conditional[:k]) / (1 + k * draft_cost) for k in range(len(conditional) + 1)]
    return gains.index(max(gains))


@dataclass(frozen=True)
class AdaptiveDrafts:
    """A chain whose K, from 1 to ``most``, is chosen anew after every round.

    With measured times the choice depends on the clock: greedy text does not, sampled text with a fixed seed does.
    """

    most: int = 8
    cost_ratio: float | None = None  # time of one draft step over time of one verification; None measures it


class RunningLength:
    """The K of the next round, ``value``: :func:`best_draft_length` of the running ``conditional`` acceptance.

    The rate of a step that has seen few drafts is drawn towards that of all steps.
    """

    def __init__(self, policy: AdaptiveDrafts) -> None:
        self.value = min(_FIRST, policy.most)
        self.policy = policy
        self.conditional = [_START] * policy.most
        self._tried = [0.0] * policy.most  # by step: rounds that judged its draft, older ones counting less
        self._accepted = [0.0] * policy.most  # and those that accepted it
        self._step_ms = 0.0
        self._verify_ms = 0.0

    def observe(self, drafted: int, accepted: int, draft_ms: float, verify_ms: float) -> None:
        """Learn from a round, of which all draft steps took ``draft_ms``."""
        # A draft after a rejected one is not judged.
        judged = min(drafted, accepted + 1)
        for step in range(self.policy.most):
            self._tried[step] = _MEMORY * self._tried[step] + (step < judged)
            self._accepted[step] = _MEMORY * self._accepted[step] + (step < accepted)
        self._step_ms = _MEMORY * self._step_ms + (draft_ms / drafted if drafted else 0.0)
        self._verify_ms = _MEMORY * self._verify_ms + verify_ms

        # Each step's rate, as if it had also seen _PRIOR rounds with the rate of all steps.
        pooled = (sum(self._accepted) + _PRIOR * _START) / (sum(self._tried) + _PRIOR)
        for step in range(self.policy.most):
            self.conditional[step] = (self._accepted[step] + _PRIOR * pooled) / (self._tried[step] + _PRIOR)
        self.value = max(1, best_draft_length(self.conditional, draft_cost=self._cost_ratio()))

    def _cost_ratio(self) -> float:
        """Time of a draft step over time of a verification: the policy's, or as measured."""
        if self.policy.cost_ratio is not None:
            return self.policy.cost_ratio
        return self._step_ms / self._verify_ms if self._verify_ms else 0.0
