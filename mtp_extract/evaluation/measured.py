"""How many drafts stand, how many rounds a text takes, and by how much two drafters differ on the same texts.

Counted over *anchors that have all K targets*: those near the end of a text could accept fewer whatever is drafted.

Rounds are those of the loop that serves: the first begins at a text's first anchor, and after a round at n that accepts
a drafts the next begins at n + 1 + a, until the anchors end. Served greedily, what is accepted at an anchor decides
where the next round begins. Sampled, a draft x drawn from q stands with min(1, p / q): where the text goes on with x,
drawn from p, it was a draft that stood with probability min(1, q(x) / p(x)), and else the base's own token in its
place. So every anchor has a probability that a round begins there, and the sum of these is the expected number of
rounds of the loop that wrote this text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils import rnn

from mtp_extract.evaluation.intervals import (
    Bounds,
    Interval,
    difference_bounds,
    over_texts,
    ratio_bounds,
    share_bounds,
)
from mtp_extract.speculate.teacher import Agreement, OfTexts


@dataclass(frozen=True)
class Measured(OfTexts):
    """Over anchors that have all K targets. N anchors."""

    stands: Tensor  # F64 [N, K], the probability that the drafts up to a step stand; 0 or 1 in greedy serving
    begins: Tensor  # F64 [N], the probability that a round of the loop begins there; 0 or 1 in greedy serving
    advance: Tensor  # F64 [N], tokens of a round there, 1 to K + 1; of sampled serving the mean, given the text

    @classmethod
    def over(cls, text: Tensor, anchor: Tensor, stands: Tensor, along: Tensor | None = None) -> Measured:
        """With the rounds that follow.

        Args:
            text, anchor, stands: of every anchor with all targets, in order of text, then position.
            along: F64 [N, K], the probability that the drafts up to a step stand and are the text's tokens, given the
                text; by default ``stands``, which it is in greedy serving.
        """
        along = stands if along is None else along
        return cls(text, anchor, stands, _begins(text, along), 1 + along.sum(dim=1))

    @property
    def teacher_forced(self) -> float:
        """1 + mean accepted drafts of a round; NaN without anchors."""
        return 1 + float(self.stands.sum(dim=1).mean())

    @property
    def interval(self) -> Interval | None:
        """Of it, 95 % over texts; None with too few."""
        steps = self.stands.shape[1]
        found = share_over_texts(self.text, self.stands.sum(dim=1) / steps)
        return found and found.scaled(steps, 1.0)

    @property
    def rounds(self) -> float:
        """Of the loop, over all texts."""
        return float(self.begins.sum())

    @property
    def tokens_per_round(self) -> float:
        """Of these rounds; NaN without any."""
        return float((self.begins * self.advance).sum() / self.begins.sum())

    @property
    def tokens_per_round_interval(self) -> Interval | None:
        """Of tokens a round, 95 % over texts; None with too few."""
        steps = self.stands.shape[1]
        found = _interval(share_bounds, self.text, self.begins * (self.advance - 1) / steps, self.begins)
        return found and found.scaled(steps, 1.0)

    @property
    def conditional(self) -> list[float]:
        """Acceptance by step: accepted_i / accepted_(i-1); 0 where nothing came to a step."""
        return [rate / before if before else 0.0 for before, rate in pairwise([1.0, *self.stands.mean(dim=0).tolist()])]

    @property
    def texts(self) -> int:
        """How many have an anchor."""
        return len(torch.unique(self.text))


@dataclass(frozen=True)
class Change:
    """The difference in teacher-forced tokens per round between two drafters on the same anchors, after less before."""

    mean: float  # over anchors; NaN without any
    interval: Interval | None  # of it, 95 % over texts; None with too few, and then nothing is certain
    texts: int  # how many have an anchor

    @property
    def better(self) -> bool:
        """Certain at 95 %."""
        return self.interval is not None and self.interval.low > 0

    @property
    def worse(self) -> bool:
        """Certain at 95 %."""
        return self.interval is not None and self.interval.high < 0


@dataclass(frozen=True)
class Saving:
    """Rounds of one drafter for a round of another, over the same texts."""

    ratio: float  # rounds before over rounds after; NaN without any
    interval: Interval | None  # of it, 95 % over texts; None with too few, and then nothing is certain

    @property
    def better(self) -> bool:
        """Certain at 95 %."""
        return self.interval is not None and self.interval.low > 1


def saving(before: Measured, after: Measured) -> Saving:
    """Over all texts of both."""
    ratio = before.rounds / after.rounds if after.rounds else float("nan")
    return Saving(ratio, _interval(ratio_bounds, before.text, before.begins, after.begins))


def compare(before: Measured, after: Measured) -> Change:
    """At every anchor of both."""
    difference, steps = (after.stands - before.stands).sum(dim=1), before.stands.shape[1]
    found = difference_over_texts(before.text, difference / steps)
    return Change(float(difference.mean()), found and found.scaled(steps), before.texts)


def of_agreement(agreement: Agreement) -> Measured:
    """Greedy serving: the drafts that the base's own text confirms."""
    whole = agreement.where((agreement.targets >= 0).all(dim=1))
    return Measured.over(whole.text, whole.anchor, (whole.drafts == whole.targets).double().cumprod(dim=1))


def _begins(text: Tensor, along: Tensor) -> Tensor:
    """F64 [N], the probability that a round begins at each anchor; the first of each text begins one."""
    if not len(text):
        return torch.zeros(0, dtype=torch.double)
    ends = along.new_ones(len(along), 1, dtype=torch.double)
    exactly = -torch.cat((ends, along.double(), 0 * ends), dim=1).diff(dim=1)  # [N, K + 1], so many drafts stand
    lengths = torch.unique_consecutive(text, return_counts=True)[1]
    rows = rnn.pad_sequence(list(torch.split(exactly, lengths.tolist())), batch_first=True)
    texts, longest, ahead = rows.shape
    begins = torch.zeros(texts, longest + ahead, dtype=torch.double)
    begins[:, 0] = 1
    for n in range(longest):
        begins[:, n + 1 : n + 1 + ahead] += begins[:, n, None] * rows[:, n]
    return begins[:, :longest][torch.arange(longest) < lengths[:, None]]


def share_over_texts(text: Tensor, values: Tensor) -> Interval | None:
    """Of the mean of ``values`` [N] in 0 to 1, or that are true, 95 % over texts; None with too few."""
    return _interval(share_bounds, text, values, torch.ones_like(values))


def difference_over_texts(text: Tensor, values: Tensor, level: float = 0.95) -> Interval | None:
    """Of the mean of ``values`` [N] in -1 to 1, what one gains over another there, over texts; None with too few."""
    gained, lost = values.clamp(min=0), (-values).clamp(min=0)
    return _interval(difference_bounds, text, gained, lost, torch.ones_like(values), level=level)


def _interval(bounds: Callable[..., Bounds], text: Tensor, *columns: Tensor, level: float = 0.95) -> Interval | None:
    """:func:`over_texts` of the sums of each of ``columns`` [N] by text."""
    rows, index = torch.unique(text, return_inverse=True)
    empty = torch.zeros(len(rows), dtype=torch.double)
    sums = (empty.index_add(0, index, column.double()).tolist() for column in columns)
    return over_texts(bounds, *sums, level=level)
