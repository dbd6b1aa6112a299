"""What is drafted in a round, and what a round yields: a chain of K drafts, a chain whose K is adapted, or a tree.

A chain is a tree with one draft for each place. The *conditional* acceptance of a step is the probability that its
draft is accepted given that all before it were. A round adds one token more than it accepts: the base's own.
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
_FIRST_LENGTH = 4  # the first K that is adapted
_PRIOR_ROUNDS = 4.0  # rounds that every step is taken to have seen
_PRIOR_RATE = 0.7  # the acceptance of every step at first
_DECAY = 0.95  # weight that a past round keeps with each new one


@dataclass(frozen=True)
class DraftTree:
    """A tree of the same shape in every round, whose drafts are all verified in one forward of the base.

    Nodes are numbered level by level, the pending token first; those after one node, the likeliest first.

    >>> DraftTree.parse("2x1").parents
    [-1, 0, 0, 1, 2]
    """

    widths: tuple[int, ...]  # of each step, the drafts after every draft of the step before; none drafts nothing

    @classmethod
    def parse(cls, text: str) -> DraftTree:
        """``4x2x1``: four drafts after the pending token, two after each of these, one after each of those.

        PlanError for another notation, or too large a tree.
        """
        is_tree = re.fullmatch("[1-9][0-9]{,3}(x[1-9][0-9]{,3}){,63}", text)
        tree = cls(tuple(map(int, text.split("x"))) if is_tree else ())
        if not 0 < tree.drafts <= _MOST_DRAFTS:
            what = f"a tree such as 4x2x1, of at most {_MOST_DRAFTS} drafts, found {escape(text)}"
            raise PlanError(f"expected {what}. Give drafts after each draft.", remedies=("trees",))
        return tree

    @property
    def drafts(self) -> int:
        """Drafts that the base verifies."""
        return sum(math.prod(self.widths[:depth]) for depth in range(1, self.depth + 1))

    @property
    def depth(self) -> int:
        """Draft steps."""
        return len(self.widths)

    @property
    def width(self) -> int:
        """Of the drafter's choices for one place, how many are looked at."""
        return max(self.widths, default=1)

    @cached_property
    def parents(self) -> list[int]:
        """Of every node, the node it comes after; -1 of the pending token."""
        parents = [-1]
        level = range(1)
        for width in self.widths:
            parents += [node for node in level for _ in range(width)]
            level = range(level.stop, len(parents))
        return parents

    @cached_property
    def sees(self) -> list[list[bool]]:
        """[nodes][nodes]: whether the column's node is the row's node itself, or an ancestor of it."""
        rows: list[list[bool]] = []
        for node, parent in enumerate(self.parents):
            rows.append([*rows[parent]] if node else [False] * len(self.parents))
            rows[node][node] = True
        return rows

    def require_tokens(self, vocabulary: int) -> None:
        """Raise MtpExtractError where a base with so many tokens has fewer choices for a place than this tree holds."""
        if self.width > vocabulary:
            raise MtpExtractError(
                f"expected at most {vocabulary} drafts for one place, as many as the base has tokens, found "
                f"{self.width}; make the tree narrower",
                remedies=("trees",),
            )

    def crop_to_depth(self, depth: int) -> DraftTree:
        """The part that lies at most ``depth`` steps from the root."""
        return self if depth >= self.depth else DraftTree(self.widths[:depth])

    def stands(self, ranks: Sequence[int]) -> int:
        """How many drafts stand where the base's next tokens have these ``ranks`` among the drafter's choices."""
        in_tree = (0 <= rank < width for rank, width in zip(ranks, self.widths, strict=False))
        return sum(1 for _ in takewhile(bool, in_tree))

    def find_accepted_path(self, tokens: Sequence[int], choices: Sequence[int]) -> list[int]:
        """The accepted path of nodes, the root first, by each node's token and the base's choice after it."""
        path = [0]
        for node, parent in enumerate(self.parents):
            if parent == path[-1] and tokens[node] == choices[parent]:
                path.append(node)
        return path


@dataclass(frozen=True)
class AdaptiveDrafts:
    """A chain whose K, from 1 to ``most``, is chosen anew after every round.

    With measured times the choice depends on the clock: greedy text does not, sampled text with a fixed seed does.
    """

    most: int = 8
    cost_ratio: float | None = None  # time of one draft step over time of one verification; None measures it


Drafts = int | AdaptiveDrafts | DraftTree
"""What is drafted a round: a chain of K, a chain whose K is adapted, or a tree. 0 decodes with the base alone."""


def build_deepest_tree(drafts: Drafts) -> DraftTree:
    """The shape of a round where nothing is cut short."""
    if isinstance(drafts, DraftTree):
        return drafts
    return DraftTree((1,) * (drafts.most if isinstance(drafts, AdaptiveDrafts) else drafts))


def compute_expected_tokens(conditional: Sequence[float]) -> float:
    """Mean tokens a round from per-step conditional acceptance: 1 + p₁ + p₁p₂ + … + p₁⋯p_K.

    >>> expected_tokens([0.5, 0.5])
    1.75
    """
    total = reached = 1.0
    for rate in conditional:
        reached = reached and reached * rate  # a step that is never reached has no rate
        total += reached
    return total


def choose_draft_length(conditional: Sequence[float], *, draft_cost: float) -> int:
    """The K from 0 to ``len(conditional)`` with the most tokens a unit of time; the smallest such K in a tie.

    A round takes ``1 + K · draft_cost``: ``draft_cost`` is the time of a draft step over that of a forward of the base.
    What a further token adds to that forward is small while memory bandwidth is the limit, and not counted.

    >>> best_draft_length([0.8] * 8, draft_cost=0.1), best_draft_length([0.1] * 8, draft_cost=0.2)
    (6, 0)
    """
    gains = [compute_expected_tokens(conditional[:k]) / (1 + k * draft_cost) for k in range(len(conditional) + 1)]
    return gains.index(max(gains))


class RunningLength:
    """The K of the next round, ``value``: :func:`choose_draft_length` of the running ``conditional`` acceptance.

    The rate of a step that has seen few drafts is drawn towards that of all steps.
    """

    def __init__(self, policy: AdaptiveDrafts) -> None:
        self.value = min(_FIRST_LENGTH, policy.most)
        self.policy = policy
        self.conditional = [_PRIOR_RATE] * policy.most
        self._tried = [0.0] * policy.most  # by step: rounds that judged its draft, older ones counting less
        self._accepted = [0.0] * policy.most  # and those that accepted it
        self._step_ms = 0.0
        self._verify_ms = 0.0

    def observe(self, drafted: int, accepted: int, draft_ms: float, verify_ms: float) -> None:
        """Learn from a round, of which all draft steps took ``draft_ms``."""
        # A draft after a rejected one is not judged.
        judged = min(drafted, accepted + 1)
        for step in range(self.policy.most):
            self._tried[step] = _DECAY * self._tried[step] + (step < judged)
            self._accepted[step] = _DECAY * self._accepted[step] + (step < accepted)
        self._step_ms = _DECAY * self._step_ms + (draft_ms / drafted if drafted else 0.0)
        self._verify_ms = _DECAY * self._verify_ms + verify_ms

        # Each step's rate, as if it had also seen _PRIOR rounds with the rate of all steps.
        pooled = (sum(self._accepted) + _PRIOR_ROUNDS * _PRIOR_RATE) / (sum(self._tried) + _PRIOR_ROUNDS)
        for step in range(self.policy.most):
            self.conditional[step] = (self._accepted[step] + _PRIOR_ROUNDS * pooled) / (
                self._tried[step] + _PRIOR_ROUNDS
            )
        self.value = max(1, choose_draft_length(self.conditional, draft_cost=self._measure_cost_ratio()))

    def _measure_cost_ratio(self) -> float:
        if self.policy.cost_ratio is not None:
            return self.policy.cost_ratio
        return self._step_ms / self._verify_ms if self._verify_ms else 0.0
