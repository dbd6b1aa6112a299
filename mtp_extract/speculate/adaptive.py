"""Choosing K while generating, from the acceptance and the costs seen so far."""

from __future__ import annotations

from dataclasses import dataclass

from mtp_extract.errors import MtpExtractError
from mtp_extract.speculate.arithmetic import best_draft_length
from mtp_extract.speculate.numbers import count

_PRIOR, _START = 4.0, 0.7  # rounds that every step is taken to have seen, and the acceptance of all of them at first
_FIRST = 4  # the first K


@dataclass(frozen=True)
class AdaptiveDrafts:
    """K from the running acceptance.

    After every round K becomes :func:`~mtp_extract.speculate.arithmetic.best_draft_length` of the per-step conditional
    acceptance, each step's rate drawn towards that of all steps while it has seen little. With a measured cost ratio
    the choice depends on the clock: greedy text does not, sampled text with a fixed seed does.
    """

    most: int = 8  # largest K
    least: int = 1  # smallest K; at least 1, so that acceptance goes on being seen
    cost_ratio: float | None = None  # time of one draft step over time of one verification; None measures it
    memory: float = 0.95  # weight that a past round keeps with each new one, in (0, 1]

    def __post_init__(self) -> None:
        if not count("least", self.least, least=1) <= count("most", self.most, least=1):
            raise MtpExtractError(f"expected 1 <= least <= most, found least {self.least} and most {self.most}")
        if not 0 < self.memory <= 1:
            raise MtpExtractError(f"expected memory in (0, 1], found {self.memory}")
        if self.cost_ratio is not None and not self.cost_ratio >= 0:
            raise MtpExtractError(f"expected a cost_ratio of at least 0, found {self.cost_ratio}")


class RunningLength:
    """The K of the next round, ``value``, by what was observed of the rounds before."""

    def __init__(self, policy: AdaptiveDrafts) -> None:
        self.policy = policy
        self.value = max(policy.least, min(_FIRST, policy.most))
        self._tried, self._held = [0.0] * policy.most, [0.0] * policy.most
        self._step_ms = self._verify_ms = 0.0

    @property
    def conditional(self) -> list[float]:
        """Estimated conditional acceptance of each step up to the largest K."""
        pooled = (sum(self._held) + _PRIOR * _START) / (sum(self._tried) + _PRIOR)
        return [(h + _PRIOR * pooled) / (t + _PRIOR) for h, t in zip(self._held, self._tried, strict=True)]

    def observe(self, drafted: int, accepted: int, draft_ms: float, verify_ms: float) -> None:
        """Learn from a round, of which all draft steps took ``draft_ms``."""
        memory = self.policy.memory
        self._tried = [memory * x + (step < min(drafted, accepted + 1)) for step, x in enumerate(self._tried)]
        self._held = [memory * x + (step < accepted) for step, x in enumerate(self._held)]
        self._step_ms = memory * self._step_ms + (draft_ms / drafted if drafted else 0.0)
        self._verify_ms = memory * self._verify_ms + verify_ms
        ratio = self.policy.cost_ratio
        if ratio is None:
            ratio = self._step_ms / self._verify_ms if self._verify_ms else 0.0
        self.value = max(self.policy.least, best_draft_length(self.conditional, draft_cost=ratio))
