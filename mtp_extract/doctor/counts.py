"""Rounds and accepted drafts of texts: as a server counts them, as a drafter is expected to have them, and compared.

Whether a draft stands is known at every position of a text by teacher forcing, and so are the rounds that a server
makes of the text.

Compared are the drafts of a text that stand at a step, of those that stood at the step before (of rounds, at the
first): binomial, with the share that is expected there. Where a server tells no steps, the same is said of all accepted
drafts, of the tokens that rounds added. Drafts of a text go together, and texts are independent: so how surely one is
ahead of another is asked of the texts, by the mean of its lead and what this varies by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from mtp_extract.doctor.result import Fit, Rates
from mtp_extract.drafter.protocol import Drafter
from mtp_extract.evaluation.agreement import Acceptance, figure
from mtp_extract.evaluation.base_texts import groups
from mtp_extract.evaluation.intervals import LEAST_TEXTS, over_texts, share_bounds, student_quantile
from mtp_extract.io.typed import Figure
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement, Text, read_texts, teacher_forced

BATCH = 16
"""Texts that the base reads at a time."""
_LEAST_CHANCE = 0.002  # of a draft, whatever is expected
CountArray = NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """Drafts of several texts, expected or counted. K steps."""

    tokens: CountArray  # [texts], those that rounds add: all but the first
    rounds: CountArray  # [texts]
    accepted: CountArray  # [texts]
    by_step: CountArray | None  # [texts, K], accepted at each step; None where a server does not report it

    @property
    def tokens_per_round(self) -> float:
        """1 + accepted / rounds."""
        return 1 + float(self.accepted.sum() / self.rounds.sum())

    @property
    def reached(self) -> list[CountArray]:
        """Rounds, and drafts accepted at each step, as far as steps are known; [texts] each."""
        return [self.rounds] if self.by_step is None else [self.rounds, *self.by_step.T]

    def rates(self, steps: int) -> Rates:
        """With intervals over texts; K is ``steps``."""
        share = _share(self.accepted / steps, self.rounds)
        length = Figure(self.tokens_per_round, share.n, share.ci95 and [1 + steps * end for end in share.ci95])
        conditional = [_share(hits, sizes) for sizes, hits in pairwise(self.reached)]
        totals = float(self.rounds.sum()), float(self.accepted.sum())
        return Rates(len(self.tokens), *totals, length, conditional or None)


def _share(hits: CountArray, sizes: CountArray) -> Figure:
    # A server that drafts beyond the end of a text may count more than the text has room for.
    interval = over_texts(share_bounds, np.minimum(hits, sizes).tolist(), sizes.tolist())
    return figure(float(hits.sum() / sizes.sum()) if sizes.sum() else np.nan, round(sizes.sum()), interval)


def expected_counts(base: Base, drafters: Sequence[Drafter], texts: Sequence[Text], steps: int) -> list[Counts]:
    """What each of ``drafters`` comes to along ``texts``, in their order; the base reads each text once.

    Each text has an anchor. Where there is no room for a draft, a round is none that a server counts.
    """
    tables = torch.zeros(len(drafters), len(texts), steps + 1, dtype=torch.double)
    for rows in groups([len(text.tokens) for text in texts], BATCH):
        chosen = [texts[row] for row in rows]
        full = read_texts(base, chosen, [drafter.needs for drafter in drafters])
        # A text that was cut off ends in a token of the base's: an engine that adds so many tokens drafts up to the one
        # before.
        ends = torch.tensor([len(text.tokens) - 1 - (text.tokens[-1] not in base.stop_token_ids) for text in chosen])
        for table, drafter in zip(tables, drafters, strict=True):
            forced = teacher_forced(base, drafter, chosen, steps, full=full)
            table.index_add_(0, torch.tensor(rows)[forced.text], _expected_of_anchors(forced, ends))
    tokens = np.array([float(len(text.anchors)) for text in texts])
    return [Counts(tokens, table[:, 0], table[:, 1:].sum(1), table[:, 1:]) for table in tables.numpy()]


def _expected_of_anchors(forced: Agreement, ends: torch.Tensor) -> torch.Tensor:
    """By anchor: rounds that begin there, and drafts that these accept at each step; [anchors, 1 + K].

    ``ends`` is, by text, the index of the last token up to which an engine drafts.
    """
    room = ends[forced.text] - forced.anchor
    # A draft stands where all before it do, and where there is room for it.
    steps = forced.drafts.shape[1]
    stands = (forced.drafts == forced.targets).double().cumprod(dim=1) * (torch.arange(steps) < room[:, None])
    begins = Acceptance.over(forced.text, forced.anchor, stands).begins * (room > 0)
    return begins[:, None] * torch.cat([torch.ones(len(room), 1), stands], dim=1)


def rank_fits(served: Counts, expected: Mapping[str, Counts]) -> list[Fit]:
    """How well each of ``expected`` fits, likeliest first; all over the same texts."""
    scores = {name: _log_likelihood(served, counts) for name, counts in expected.items()}
    names = sorted(scores, key=lambda name: -scores[name].sum())
    texts = len(served.tokens)
    fits = list[Fit]()
    for name in names:
        lead = scores[names[0]] - scores[name]
        least = None
        if texts >= LEAST_TEXTS:
            # One end of an interval that has 5 % on either side.
            least = float(lead.mean() - student_quantile(0.90, texts - 1) * lead.std(ddof=1) / math.sqrt(texts))
        missing = _missing(served, expected[name])
        fits.append(Fit(name, float(scores[name].sum()), float(lead.mean()), least, missing))
    return fits


def _missing(served: Counts, expected: Counts) -> Figure:
    """Accepted drafts that were expected and not served, of a token: Σ missing / Σ tokens."""
    texts = len(served.tokens)
    missing = expected.accepted - served.accepted
    mean = float(missing.sum() / served.tokens.sum())
    if texts < LEAST_TEXTS:
        return Figure(mean, texts)
    # Not by delta_bounds: these are no draws, and exactly 0 where a server does what is expected of it.
    error = math.sqrt(((missing - mean * served.tokens) ** 2).sum() * texts / (texts - 1))
    half = student_quantile(0.95, texts - 1) * float(error / served.tokens.sum())
    return Figure(mean, texts, [mean - half, mean + half])


def is_surely_likeliest(fits: Sequence[Fit], texts: int) -> bool:
    """Whether the likeliest is so against every other: at 95 % over texts, its lead is at least 20 times."""
    leads = [fit.behind_at_least for fit in fits[1:]]
    return all(lead is not None and lead * texts >= math.log(20) for lead in leads)


def _log_likelihood(served: Counts, expected: Counts) -> CountArray:
    """Of each text."""
    by_step = served.by_step is not None and expected.by_step is not None
    served_pairs, expected_pairs = (
        pairwise(counts.reached if by_step else [counts.tokens, counts.accepted]) for counts in (served, expected)
    )
    total = np.zeros(len(served.tokens))
    for (size, hits), (among, stand) in zip(served_pairs, expected_pairs, strict=True):
        # The expected share of a text is drawn towards that of all texts, as if one more draw had been that.
        overall = stand.sum() / among.sum() if among.sum() else 0.0
        mean = np.clip((stand + overall) / (among + 1), _LEAST_CHANCE, 1 - _LEAST_CHANCE)
        total += hits * np.log(mean) + (np.maximum(size, hits) - hits) * np.log(1 - mean)
    return total
