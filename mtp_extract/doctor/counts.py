"""Count rounds and accepted drafts of texts, as a server reports them and as a drafter is expected to have them.

Teacher forcing tells at every position of a text whether a draft is accepted there, and so which rounds a server makes.

The likelihood of a server's counters is binomial: of the drafts that were accepted at one step, a share is accepted at
the next (at the first step: of the rounds). If a server reports no steps, the accepted drafts are compared with the
tokens that the rounds added. Drafts within a text depend on each other, and texts do not: how sure it is that one fault
is likelier than another follows from the mean and the variance of its lead over texts.
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
from mtp_extract.evaluation.agreement import Acceptance, build_figure
from mtp_extract.evaluation.base_texts import group_by_length
from mtp_extract.evaluation.intervals import LEAST_TEXTS, bound_share, compute_interval, compute_student_quantile
from mtp_extract.io.typed import Figure
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement, Text, draft_teacher_forced, read_texts

BATCH = 16
"""Number of texts that the base reads at a time."""
_LEAST_CHANCE = 0.002  # least probability that a draft is accepted, and that it is not
CountArray = NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """Rounds and accepted drafts of several texts, expected or counted, with K drafts in a round."""

    tokens: CountArray  # [texts], tokens that rounds added: all but the first of a text
    rounds: CountArray  # [texts]
    accepted: CountArray  # [texts]
    by_step: CountArray | None  # [texts, K], accepted at each step; None where a server does not report it

    @property
    def tokens_per_round(self) -> float:
        """1 + accepted / rounds."""
        return 1 + float(self.accepted.sum() / self.rounds.sum())

    @property
    def reached(self) -> list[CountArray]:
        """Rounds, then the drafts accepted at each step if steps are known; [texts] each."""
        return [self.rounds] if self.by_step is None else [self.rounds, *self.by_step.T]

    def estimate_rates(self, steps: int) -> Rates:
        """Estimate rates with intervals over texts; K is ``steps``."""
        share = _estimate_acceptance(self.accepted / steps, self.rounds)
        length = Figure(self.tokens_per_round, share.n, share.ci95 and [1 + steps * end for end in share.ci95])
        conditional = [_estimate_acceptance(hits, sizes) for sizes, hits in pairwise(self.reached)]
        totals = float(self.rounds.sum()), float(self.accepted.sum())
        return Rates(len(self.tokens), *totals, length, conditional or None)


def _estimate_acceptance(hits: CountArray, sizes: CountArray) -> Figure:
    # A server that drafts beyond the end of a text may count more than the text has room for.
    interval = compute_interval(bound_share, np.minimum(hits, sizes).tolist(), sizes.tolist())
    return build_figure(float(hits.sum() / sizes.sum()) if sizes.sum() else np.nan, round(sizes.sum()), interval)


def compute_expected_counts(base: Base, drafters: Sequence[Drafter], texts: Sequence[Text], steps: int) -> list[Counts]:
    """Compute what each drafter is expected to have accepted along ``texts``; the base reads each text once.

    Each text needs an anchor. A round without room for a draft does not count, as no server counts it.

    Returns:
        counts, in the order of ``drafters``.
    """
    tables = torch.zeros(len(drafters), len(texts), steps + 1, dtype=torch.double)
    for rows in group_by_length([len(text.tokens) for text in texts], BATCH):
        chosen = [texts[row] for row in rows]
        full = read_texts(base, chosen, [drafter.needs for drafter in drafters])
        # A text that was cut off does not end in a stop token: an engine with that limit drafts up to the token before.
        ends = torch.tensor([len(text.tokens) - 1 - (text.tokens[-1] not in base.stop_token_ids) for text in chosen])
        for table, drafter in zip(tables, drafters, strict=True):
            forced = draft_teacher_forced(base, drafter, chosen, steps, full=full)
            table.index_add_(0, torch.tensor(rows)[forced.text], _count_by_anchor(forced, ends))
    tokens = np.array([float(len(text.anchors)) for text in texts])
    return [Counts(tokens, table[:, 0], table[:, 1:].sum(1), table[:, 1:]) for table in tables.numpy()]


def _count_by_anchor(forced: Agreement, ends: torch.Tensor) -> torch.Tensor:
    """Return the rounds that begin at each anchor, then the drafts accepted at each of their steps; [anchors, 1 + K].

    ``ends`` [texts] is the index of the last token that an engine may draft.
    """
    room = ends[forced.text] - forced.anchor
    # A draft is accepted if all drafts before it are, and if there is room for it.
    steps = forced.drafts.shape[1]
    stands = (forced.drafts == forced.targets).double().cumprod(dim=1) * (torch.arange(steps) < room[:, None])
    begins = Acceptance.from_stands(forced.text, forced.anchor, stands).start_probability * (room > 0)
    return begins[:, None] * torch.cat([torch.ones(len(room), 1), stands], dim=1)


def rank_fits(served: Counts, expected: Mapping[str, Counts]) -> list[Fit]:
    """Rank the ``expected`` counts by how likely they make ``served``, likeliest first; all over the same texts."""
    scores = {name: _compute_log_likelihood(served, counts) for name, counts in expected.items()}
    names = sorted(scores, key=lambda name: -scores[name].sum())
    texts = len(served.tokens)
    fits = list[Fit]()
    for name in names:
        lead = scores[names[0]] - scores[name]
        least = None
        if texts >= LEAST_TEXTS:
            # Lower end of a t interval with 5 % on either side: mean − t · s / √texts.
            least = float(lead.mean() - compute_student_quantile(0.90, texts - 1) * lead.std(ddof=1) / math.sqrt(texts))
        missing = _estimate_missing_drafts(served, expected[name])
        fits.append(Fit(name, float(scores[name].sum()), float(lead.mean()), least, missing))
    return fits


def _estimate_missing_drafts(served: Counts, expected: Counts) -> Figure:
    """Estimate the accepted drafts per token that were expected and not served: Σ missing / Σ tokens."""
    texts = len(served.tokens)
    missing = expected.accepted - served.accepted
    mean = float(missing.sum() / served.tokens.sum())
    if texts < LEAST_TEXTS:
        return Figure(mean, texts)
    # Not by bound_difference: these are not draws, and exactly 0 if a server does what is expected.
    error = math.sqrt(((missing - mean * served.tokens) ** 2).sum() * texts / (texts - 1))
    half = compute_student_quantile(0.95, texts - 1) * float(error / served.tokens.sum())
    return Figure(mean, texts, [mean - half, mean + half])


def is_surely_likeliest(fits: Sequence[Fit], texts: int) -> bool:
    """Return whether the likeliest is at least 20 times as likely as every other, at 95 % over texts."""
    leads = [fit.behind_at_least for fit in fits[1:]]
    return all(lead is not None and lead * texts >= math.log(20) for lead in leads)


def _compute_log_likelihood(served: Counts, expected: Counts) -> CountArray:
    """Return the log-likelihood of the ``served`` counters of each text, [texts]."""
    by_step = served.by_step is not None and expected.by_step is not None
    served_pairs, expected_pairs = (
        pairwise(counts.reached if by_step else [counts.tokens, counts.accepted]) for counts in (served, expected)
    )
    total = np.zeros(len(served.tokens))
    for (size, hits), (among, stand) in zip(served_pairs, expected_pairs, strict=True):
        # The share expected of a text is smoothed by one draw from that of all texts.
        overall = stand.sum() / among.sum() if among.sum() else 0.0
        mean = np.clip((stand + overall) / (among + 1), _LEAST_CHANCE, 1 - _LEAST_CHANCE)
        total += hits * np.log(mean) + (np.maximum(size, hits) - hits) * np.log(1 - mean)
    return total
