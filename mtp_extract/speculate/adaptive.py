"""Choosing K while generating, from the acceptance and the costs seen so far."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mtp_extract.errors import MtpExtractError
from mtp_extract.speculate.arithmetic import best_draft_length
from mtp_extract.speculate.numbers import count
from mtp_extract.speculate.trees import AutoTree, Tree

_PRIOR = 4.0
_START = 0.7
_FIRST = 4


@dataclass(frozen=True)
class AdaptiveDrafts:
    """K from the running acceptance.

    After every round K becomes :func:`~mtp_extract.speculate.arithmetic.best_draft_length` of the per-step
    conditional acceptance, each step's rate drawn towards that of all steps while it has seen little. With
    a measured cost ratio the choice depends on the clock: greedy text does not, sampled text with a fixed
    seed does.
    """

    most: int = 8  # largest K
    least: int = 1  # smallest K; at least 1, so that acceptance goes on being seen
    cost_ratio: float | None = None  # time of one draft step over time of one verification; None measures it
    memory: float = 0.95  # weight a past round keeps with each new one, in (0, 1]

    def __post_init__(self) -> None:
        if not count("least", self.least, least=1) <= count("most", self.most, least=1):
            raise MtpExtractError(f"expected 1 <= least <= most, found least {self.least} and most {self.most}")
        if not 0 < self.memory <= 1:
            raise MtpExtractError(f"expected memory in (0, 1], found {self.memory}")
        if self.cost_ratio is not None and not self.cost_ratio >= 0:
            raise MtpExtractError(f"expected a cost_ratio of at least 0, found {self.cost_ratio}")


class DraftLength:
    """The K of the next round: fixed, 0 for none, or adapted by what was observed. Of a tree, its depth."""

    def __init__(self, drafts: int | AdaptiveDrafts | Tree | AutoTree) -> None:
        self.policy = drafts if isinstance(drafts, AdaptiveDrafts) else None
        self.tree = drafts if isinstance(drafts, Tree | AutoTree) else None
        self.most = self.verified = self._most(drafts)
        if self.tree is not None:
            self.verified = self.tree.drafts
        self.value = self.most if self.policy is None else max(self.policy.least, min(_FIRST, self.most))
        self._tried = [0.0] * self.most
        self._held = [0.0] * self.most
        self._draft_ms = self._verify_ms = 0.0

    @staticmethod
    def _most(drafts: int | AdaptiveDrafts | Tree | AutoTree) -> int:
        if isinstance(drafts, AdaptiveDrafts):
            return drafts.most
        if isinstance(drafts, Tree):
            return drafts.depth
        if isinstance(drafts, AutoTree):
            return len(drafts.widths(drafts.depth))
        return count("drafts", drafts, least=0, advice="0 decodes without a drafter")

    @property
    def conditional(self) -> list[float]:
        """Estimated conditional acceptance of each step up to the largest K."""
        pooled = (sum(self._held) + _PRIOR * _START) / (sum(self._tried) + _PRIOR)
        return [
            (held + _PRIOR * pooled) / (tried + _PRIOR) for held, tried in zip(self._held, self._tried, strict=True)
        ]

    def observe(self, rounds: Iterable[tuple[int, int]], *, draft_ms_per_step: float, verify_ms: float) -> None:
        """Learn from a round: (drafted, accepted) of each sequence, times of a draft step and of the verification."""
        if self.policy is None:
            return
        memory = self.policy.memory
        self._tried = [memory * x for x in self._tried]
        self._held = [memory * x for x in self._held]
        for drafted, accepted in rounds:
            for step in range(min(drafted, accepted + 1)):
                self._tried[step] += 1
                self._held[step] += step < accepted
        self._draft_ms = memory * self._draft_ms + draft_ms_per_step
        self._verify_ms = memory * self._verify_ms + verify_ms
        ratio = self.policy.cost_ratio
        if ratio is None:
            ratio = self._draft_ms / self._verify_ms if self._verify_ms else 0.0
        self.value = max(self.policy.least, best_draft_length(self.conditional, draft_cost=ratio))
