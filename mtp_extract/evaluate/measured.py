"""How many drafts stand, and by how much two drafters differ on the same texts.

Counted over *anchors that have all K targets*: those near the end of a text could accept fewer whatever is drafted.
Intervals are over texts, which are independent, not over their positions. Two drafters are compared text by text.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mtp_extract.speculate.intervals import Interval, difference_interval, share_interval
from mtp_extract.speculate.teacher import Agreement, OfTexts


@dataclass(frozen=True)
class Measured(OfTexts):
    """Over anchors that have all K targets. N anchors."""

    anchor: Tensor  # int64 [N], position of the pending token
    stands: Tensor  # F64 [N, K], the probability that the drafts up to a step stand; 0 or 1 in greedy serving

    @property
    def mean_accepted_length(self) -> float:
        """1 + mean accepted drafts of a round; NaN without anchors."""
        return 1 + float(self._accepted.mean())

    @property
    def interval(self) -> Interval | None:
        """Of it, 95 % over texts; None with too few."""
        steps = self.stands.shape[1]
        found = share_over_texts(self.text, self._accepted / steps)
        return found and found.scaled(steps, 1.0)

    @property
    def unconditional(self) -> list[float]:
        """By step."""
        return [float(rate) for rate in self.stands.mean(dim=0)]

    @property
    def conditional(self) -> list[float]:
        """By step."""
        rates = [1.0, *self.unconditional]
        return [rate / before if before else 0.0 for before, rate in pairwise(rates)]

    @property
    def texts(self) -> int:
        """How many have an anchor."""
        return len(torch.unique(self.text))

    @property
    def _accepted(self) -> Tensor:
        return self.stands.sum(dim=1)


@dataclass(frozen=True)
class Change:
    """The difference in mean accepted length between two drafters on the same anchors, after less before."""

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


def compare(before: Measured, after: Measured) -> Change:
    difference, steps = (after.stands - before.stands).sum(dim=1), before.stands.shape[1]
    found = difference_over_texts(before.text, difference / steps)
    return Change(float(difference.mean()), found and found.scaled(steps), before.texts)


def of_agreement(agreement: Agreement) -> Measured:
    """Greedy serving: the drafts that the base's own text confirms."""
    whole = (agreement.targets >= 0).all(dim=1)
    stands = (agreement.drafts == agreement.targets).double().cumprod(dim=1)
    return Measured(agreement.text[whole], agreement.anchor[whole], stands[whole])


def share_over_texts(text: Tensor, values: Tensor) -> Interval | None:
    """Of the mean of ``values`` [N] in 0 to 1, or that are true, 95 % over texts; None with too few."""
    return share_interval(*_by_text(text, values, torch.ones_like(values)))


def difference_over_texts(text: Tensor, values: Tensor, level: float = 0.95) -> Interval | None:
    """Of the mean of ``values`` [N] in -1 to 1, what one gains over another there, over texts; None with too few."""
    sizes = torch.ones_like(values)
    return difference_interval(*_by_text(text, values.clamp(min=0), (-values).clamp(min=0), sizes), level=level)


def _by_text(text: Tensor, *columns: Tensor) -> list[list[float]]:
    """Sums of each column by text."""
    rows, index = torch.unique(text, return_inverse=True)
    empty = torch.zeros(len(rows), dtype=torch.double)
    return [empty.index_add(0, index, column.double()).tolist() for column in columns]
