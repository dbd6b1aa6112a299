"""Drafters that know nothing of the base: what a drafter must be better than to be one.

Both learn from the texts themselves: from all others, and from the same one up to the token they draft after. No text
is learned from its own future.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch

from mtp_extract.evaluate.agreement import Continuations, figure
from mtp_extract.evaluate.measured import difference_over_texts
from mtp_extract.io.typed import Count, Figure, Record
from mtp_extract.speculate.teacher import Agreement, Text


class TrivialResult(Record):
    """A drafter that knows nothing of the base beside the real one, at the same positions."""

    name: str  #: `most frequent token` or `bigram`
    top1: float  #: share of first drafts that are the base's own token
    difference: Figure  #: top-1 of the first step, real less trivial
    texts: Count  #: how many

    @property
    def better(self) -> bool:
        """Than the real drafter, certain at 95 %."""
        return self.difference.ci95 is not None and self.difference.ci95[1] < 0

    @property
    def worse(self) -> bool:
        """Than the real drafter, certain at 95 %."""
        return self.difference.ci95 is not None and self.difference.ci95[0] > 0


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
        difference = figure(float(gap.mean()), len(gap), interval)
        found.append(TrivialResult(name, float(trivial_hits.mean()), difference, rows))
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
