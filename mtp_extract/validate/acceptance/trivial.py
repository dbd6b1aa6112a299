"""Drafters that know nothing of the base: what a drafter must be better than to be one.

Both learn from the texts themselves: from all others, and from the same one up to the token they draft after. No text
is learned from its own future.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from mtp_extract.evaluate.agreement import Continuations
from mtp_extract.evaluate.measured import difference_over_texts
from mtp_extract.speculate.intervals import Interval
from mtp_extract.speculate.teacher import Agreement, Text


@dataclass(frozen=True)
class TrivialResult:
    name: str  # "most frequent token" or "bigram"
    share: float  # of positions at which it drafts the base's token
    difference: float  # real less trivial
    interval: Interval | None  # 95 % of that, over texts; None with too few
    texts: int  # how many

    @property
    def better(self) -> bool:
        """Than the real drafter, certain at 95 %."""
        return self.interval is not None and self.interval.high < 0

    @property
    def worse(self) -> bool:
        """Than the real drafter, certain at 95 %."""
        return self.interval is not None and self.interval.low > 0


def compare_trivial(continuations: Continuations, real: Agreement) -> tuple[TrivialResult, ...]:
    """Both trivial drafters, at the positions of the first step of ``real``."""
    aimed = real.targets[:, 0] >= 0
    places = list(zip(real.text[aimed].tolist(), real.anchor[aimed].tolist(), strict=True))
    if not places:
        return ()
    # A repeat of a text would tell its future.
    texts = [Text((), 0) if row in continuations.repeats else text for row, text in enumerate(continuations.texts)]
    drafted = {(row, at): guesses for row in {row for row, _ in places} for at, guesses in _drafts(texts, row)}
    real_hits = (real.drafts[:, 0] == real.targets[:, 0])[aimed].double()
    targets = real.targets[aimed, 0].tolist()
    found, rows = [], len({row for row, _ in places})
    for index, name in enumerate(("most frequent token", "bigram")):
        hits = [drafted[place][index] == target for place, target in zip(places, targets, strict=True)]
        trivial_hits = torch.tensor(hits, dtype=torch.double)
        gap = real_hits - trivial_hits
        interval = difference_over_texts(real.text[aimed], gap)
        found.append(TrivialResult(name, float(trivial_hits.mean()), float(gap.mean()), interval, rows))
    return tuple(found)


def _drafts(texts: Sequence[Text], row: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Per position of a text: its most frequent token so far, and the one that most often followed the one here."""
    tokens: Counter[int] = Counter()
    followers: dict[int, Counter[int]] = defaultdict(Counter)
    for other, text in enumerate(texts):
        if other != row:
            tokens.update(text.tokens)
            for before, after in zip(text.tokens, text.tokens[1:], strict=False):
                followers[before][after] += 1
    previous: int | None = None
    for at, token in enumerate(texts[row].tokens):
        tokens[token] += 1
        if previous is not None:
            followers[previous][token] += 1
        most = tokens.most_common(1)[0][0]
        yield at, (most, followers[token].most_common(1)[0][0] if followers[token] else most)
        previous = token
