"""The arithmetic of speculative decoding: what a round yields, what it costs, how many drafts are worth it.

Notation: K drafts a round; ``p[i]`` the probability that draft i is accepted given that all before it were
(the *conditional* acceptance). A round always emits one token more than it accepts: the base's own choice
at the first rejection, or after the last draft.
"""

from __future__ import annotations

from collections.abc import Sequence


def expected_tokens(conditional: Sequence[float]) -> float:
    """Mean tokens a round from per-step conditional acceptance: 1 + p₁ + p₁p₂ + … + p₁⋯p_K.

    With the same p at every step that is (1 - p^(K+1)) / (1 - p).

    >>> expected_tokens([0.5, 0.5])
    1.75
    >>> round(expected_tokens([0.8] * 3), 3)
    2.952
    """
    total = reached = 1.0
    for rate in conditional:
        # A step that is never reached has no rate.
        reached = reached and reached * rate
        total += reached
    return total


def speedup(conditional: Sequence[float], *, draft_cost: float) -> float:
    """Tokens a unit of time with drafting, over tokens a unit of time without.

    A round of K drafts takes ``1 + K · draft_cost``, and plain decoding 1 a token: the unit is one forward of the base.
    What a further token adds to that forward is small while memory bandwidth is the limit, and not counted.

    Args:
        conditional: per-step conditional acceptance; its length is K.
        draft_cost: time of one step of the drafter over that of one forward of the base.
    """
    return expected_tokens(conditional) / (1 + len(conditional) * draft_cost)


def best_draft_length(conditional: Sequence[float], *, draft_cost: float) -> int:
    """The K from 0 to ``len(conditional)`` with the greatest :func:`speedup`; the smallest such K in a tie.

    >>> best_draft_length([0.8] * 8, draft_cost=0.1)
    6
    >>> best_draft_length([0.1] * 8, draft_cost=0.2)
    0
    """
    gains = [speedup(conditional[:drafts], draft_cost=draft_cost) for drafts in range(len(conditional) + 1)]
    return gains.index(max(gains))
