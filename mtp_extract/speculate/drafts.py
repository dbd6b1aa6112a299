"""Shapes of the drafts of a round: a chain of K drafts, a chain whose K is adapted, or a tree; and what a round yields.

A chain is a tree with one draft per position. The *conditional* acceptance of a step is the probability that its draft
is accepted given that all drafts before it were. A round adds its accepted drafts and one token of the base.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from mtp_extract.errors import MtpExtractError, PlanError, escape

_MOST_DRAFTS = 1024
_FIRST_LENGTH = 4  # K of the first round of an adaptive chain
_PRIOR_ROUNDS = 4.0  # weight of the prior, in rounds
_PRIOR_RATE = 0.7  # conditional acceptance of every step before any round
_DECAY = 0.95  # each round multiplies the weight of all earlier rounds by this


@dataclass(frozen=True)
class DraftTree:
    """A tree of the same shape in every round, whose drafts are all verified in one forward of the base.

    Nodes are numbered level by level, the pending token first, and the children of a node by falling likelihood.

    >>> DraftTree.parse("2x1").parents
    [-1, 0, 0, 1, 2]
    """

    widths: tuple[int, ...]  # by step, the children of each node of the step before; () drafts nothing

    @classmethod
    def parse(cls, text: str) -> DraftTree:
        """Parse ``4x2x1``: four drafts after the pending token, two after each of these, one after each of those.

        Raise PlanError for another notation or a tree of more than 1024 drafts.
        """
        is_tree = re.fullmatch("[1-9][0-9]{,3}(x[1-9][0-9]{,3}){,63}", text)
        tree = cls(tuple(map(int, text.split("x"))) if is_tree else ())
        if not 0 < tree.drafts <= _MOST_DRAFTS:
            raise PlanError(
                f"expected a tree such as 4x2x1, of at most {_MOST_DRAFTS} drafts, found {escape(text)}. Give drafts "
                "after each draft.",
                remedies=("trees",),
            )
        return tree

    @property
    def drafts(self) -> int:
        """Number of drafts that the base verifies: Σ widths₁ ⋯ widths_d over the depths d."""
        return sum(math.prod(self.widths[:depth]) for depth in range(1, self.depth + 1))

    @property
    def depth(self) -> int:
        """Number of draft steps."""
        return len(self.widths)

    @property
    def width(self) -> int:
        """The most children of a node: how many of the drafter's likeliest tokens are drafted for one position."""
        return max(self.widths, default=1)

    @cached_property
    def parents(self) -> list[int]:
        """The parent of each node; -1 for the pending token."""
        parents = [-1]
        level = range(1)
        for width in self.widths:
            parents += [node for node in level for _ in range(width)]
            level = range(level.stop, len(parents))
        return parents

    @cached_property
    def sees(self) -> list[list[bool]]:
        """[nodes][nodes]: whether the column's node is the row's node or an ancestor of it."""
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            rows.append([*rows[parent]] if node else [False] * len(self.parents))
            rows[node][node] = True
        return rows

    def require_tokens(self, vocabulary: int) -> None:
        """Raise MtpExtractError if the tree is wider than a base's ``vocabulary``."""
        if self.width > vocabulary:
            raise MtpExtractError(
                f"expected at most {vocabulary} drafts for one position, as many as the base has tokens, found "
                f"{self.width}; make the tree narrower",
                remedies=("trees",),
            )

    def crop_to_depth(self, depth: int) -> DraftTree:
        """Return the nodes that are at most ``depth`` steps from the root."""
        return self if depth >= self.depth else DraftTree(self.widths[:depth])

    def count_accepted(self, ranks: Sequence[int]) -> int:
        """Count the drafts that are accepted if the base's next tokens have these ``ranks`` in the drafter's logits."""
        in_tree = (0 <= rank < width for rank, width in zip(ranks, self.widths, strict=False))
        return sum(1 for _ in takewhile(bool, in_tree))

    def find_accepted_path(self, tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
        """Return the accepted nodes, root first, from the token of each node and the base's choice after each node."""
        path = [0]
        for node, parent in enumerate(self.parents):
            if parent == path[-1] and tokens[node] == choices[parent]:
                path.append(node)
        return path


@dataclass(frozen=True)
class AdaptiveDrafts:
    """A chain whose K, from 1 to ``most``, is chosen anew after every round.

    With measured times the choice depends on the clock. Greedy text does not change with it; sampled text does, even
    with a fixed seed.
    """

    most: int = 8
    cost_ratio: float | None = None  # time of one draft step over time of one verification; None measures it


Drafts = int | AdaptiveDrafts | DraftTree
"""Drafts of a round: a chain of K, a chain whose K is adapted, or a tree. 0 decodes with the base alone."""


def build_deepest_tree(drafts: Drafts) -> DraftTree:
    """Return the largest tree that a round may draft."""
    if isinstance(drafts, DraftTree):
        return drafts
    return DraftTree((1,) * (drafts.most if isinstance(drafts, AdaptiveDrafts) else drafts))


def compute_expected_tokens(conditional: Sequence[float]) -> float:
    """Return the mean tokens per round, 1 + p₁ + p₁p₂ + … + p₁⋯p_K, from the conditional acceptance p of each step.

    >>> compute_expected_tokens([0.5, 0.5])
    1.75
    """
    total = reached = 1.0
    for rate in conditional:
        reached = reached and reached * rate  # a step that is never reached has no rate
        total += reached
    return total


def choose_draft_length(conditional: Sequence[float], *, draft_cost: float) -> int:
    """Return the K from 0 to ``len(conditional)`` with the most tokens per unit of time; the smallest such K in a tie.

    K maximizes (1 + p₁ + … + p₁⋯p_K) / (1 + K · draft_cost), where ``draft_cost`` is the time of a draft step over the
    time of a forward of the base. More tokens make that forward hardly slower while memory bandwidth is the limit.

    >>> choose_draft_length([0.8] * 8, draft_cost=0.1), choose_draft_length([0.1] * 8, draft_cost=0.2)
    (6, 0)
    """
    gains = [compute_expected_tokens(conditional[:k]) / (1 + k * draft_cost) for k in range(len(conditional) + 1)]
    return gains.index(max(gains))


class RunningLength:
    """``value``, the K of the next round: :func:`choose_draft_length` of the running ``conditional`` acceptance.

    The rate of a step with few drafts is drawn towards the rate of all steps.
    """

    def __init__(self, policy: AdaptiveDrafts) -> None:
        self.value = min(_FIRST_LENGTH, policy.most)
        self.policy = policy
        self.conditional = [_PRIOR_RATE] * policy.most
        self._tried = [0.0] * policy.most  # by step: rounds that judged its draft, decayed
        self._accepted = [0.0] * policy.most  # by step: rounds that accepted its draft, decayed
        self._step_ms = 0.0
        self._verify_ms = 0.0

    def observe(self, drafted: int, accepted: int, draft_ms: float, verify_ms: float) -> None:
        """Update ``value`` after a round; ``draft_ms`` is the time of all its draft steps together."""
        # A draft after a rejected one is not judged.
        judged = min(drafted, accepted + 1)
        for step in range(self.policy.most):
            self._tried[step] = _DECAY * self._tried[step] + (step < judged)
            self._accepted[step] = _DECAY * self._accepted[step] + (step < accepted)
        self._step_ms = _DECAY * self._step_ms + (draft_ms / drafted if drafted else 0.0)
        self._verify_ms = _DECAY * self._verify_ms + verify_ms

        # Shrinkage: rateᵢ = (acceptedᵢ + P · pooled) / (triedᵢ + P), with P prior rounds at the rate of all steps;
        # pooled = (Σ accepted + P · prior rate) / (Σ tried + P).
        pooled = (sum(self._accepted) + _PRIOR_ROUNDS * _PRIOR_RATE) / (sum(self._tried) + _PRIOR_ROUNDS)
        self.conditional = [
            (hits + _PRIOR_ROUNDS * pooled) / (rounds + _PRIOR_ROUNDS)
            for hits, rounds in zip(self._accepted, self._tried, strict=True)
        ]
        self.value = max(1, choose_draft_length(self.conditional, draft_cost=self._measure_cost_ratio()))

    def _measure_cost_ratio(self) -> float:
        if self.policy.cost_ratio is not None:
            return self.policy.cost_ratio
        return self._step_ms / self._verify_ms if self._verify_ms else 0.0
