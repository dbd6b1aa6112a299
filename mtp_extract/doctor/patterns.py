"""What a drafter comes to in rounds along given texts: the pattern over texts and steps that counters are held against.

A round begins at a pending token, and the next one where it ends. Whether a draft stands is known at every position of
a text by teacher forcing, so the rounds that a server makes of the text follow: with drafts that are the likeliest
tokens, exactly, at any temperature, for the server keeps such a draft where its token is the one that it emits. A draft
that is drawn from q stands, given that the text goes on with x, with probability min(1, q(x) / p(x)), and what follows
are expectations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mtp_extract.drafter.protocol import Drafter
from mtp_extract.evaluate.batches import groups
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text, chances_of_text, read_texts, teacher_forced

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Counted:
    """Drafts of several texts, expected or counted. K steps."""

    tokens: Floats  # [texts], after the first: those that rounds add
    rounds: Floats  # [texts]
    accepted: Floats  # [texts], drafts that stand
    by_step: Floats | None  # [texts, K], those of each step; None where a server does not tell

    @property
    def gain(self) -> float:
        """Accepted drafts a token."""
        return float(self.accepted.sum() / self.tokens.sum())

    @property
    def mean_accepted_length(self) -> float:
        """1 + accepted / rounds."""
        return 1 + float(self.accepted.sum() / self.rounds.sum())

    @property
    def conditional(self) -> list[float] | None:
        """By step, over all texts: accepted there, of those accepted at the step before; None where not told."""
        if self.by_step is None:
            return None
        reached = np.concatenate(([self.rounds.sum()], self.by_step.sum(0)))
        return [float(a / b) if b else 0.0 for b, a in pairwise(reached)]

    def of(self, rows: Sequence[int]) -> Counted:
        """The part of these texts."""
        at = list(rows)
        steps = None if self.by_step is None else self.by_step[at]
        return Counted(self.tokens[at], self.rounds[at], self.accepted[at], steps)


def mean_of(counts: Sequence[Counted]) -> Counted:
    """Of expectations along the same texts, with steps."""
    rounds, accepted, by_step = (
        np.mean([getattr(one, name) for one in counts], axis=0) for name in ("rounds", "accepted", "by_step")
    )
    return Counted(counts[0].tokens, rounds, accepted, by_step)


def patterns(
    base: Base,
    drafters: Sequence[Drafter],
    texts: Sequence[Text],
    steps: int,
    *,
    temperature: float | None = None,
    batch: int,
) -> list[Counted]:
    """What each of ``drafters`` comes to along ``texts``, in their order.

    Args:
        texts: the base's own, each with at least one anchor.
        steps: drafts a round.
        temperature: where drafts are drawn at it; None where they are the likeliest tokens.
    """
    found, stops = [_empty(len(texts), steps) for _ in drafters], frozenset(base.stop_token_ids)
    for rows in groups([len(text.tokens) for text in texts], batch):
        chosen = [texts[row] for row in rows]
        full = read_texts(base, chosen, [drafter.needs for drafter in drafters])
        for pattern, drafter in zip(found, drafters, strict=True):
            if temperature is None:
                agreement = teacher_forced(base, drafter, chosen, steps, full=full)
                text, stands = agreement.text, (agreement.drafts == agreement.targets).double()
            else:
                chances = chances_of_text(base, drafter, chosen, steps, temperature=temperature, full=full)
                text, stands = chances.text, chances.values
            for place, row in enumerate(rows):
                stopped = chosen[place].tokens[-1] in stops
                rounds, by_step = _walk(stands[text == place].cumprod(dim=1).numpy(), stopped=stopped)
                pattern.rounds[row], pattern.accepted[row] = rounds, by_step.sum()
                pattern.tokens[row] = len(chosen[place].anchors)
                assert pattern.by_step is not None
                pattern.by_step[row] = by_step
    return found


def _empty(texts: int, steps: int) -> Counted:
    return Counted(np.zeros(texts), np.zeros(texts), np.zeros(texts), np.zeros((texts, steps)))


def _walk(stands: Floats, *, stopped: bool = False) -> tuple[float, Floats]:
    """Rounds of drafting along one text, and drafts that stand by step.

    Args:
        stands: [anchors, K], the probability that all drafts up to a step stand, in a round that begins there.
        stopped: whether the text ended by itself. Else the last token is no draft: an engine that adds so many tokens
            and no more takes it from the base.
    """
    anchors, steps = stands.shape
    left = np.arange(anchors, 0, -1)[:, None] - (not stopped)  # drafts that a round has room for
    stands = np.where(np.arange(1, steps + 1) <= left, stands, 0.0)
    # The chance that a round begins at an anchor; behind the last one, where the text is over.
    begins = np.zeros(anchors + steps + 1)
    begins[0] = 1.0
    ends = -np.diff(stands, axis=1, prepend=1.0, append=0.0)  # [anchors, K + 1], that so many stand and no more
    for at in range(anchors):
        if begins[at]:
            begins[at + 1 : at + steps + 2] += begins[at] * ends[at]
    # Where there is no room for a draft, a round is none that a server counts.
    begun = begins[:anchors]
    return float(begun[left[:, 0] > 0].sum()), begun @ stands
