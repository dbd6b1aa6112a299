"""Agreement with the base's own text: which drafts stand, how many rounds a text takes, who drafts better.

A round drafts K tokens after an anchor token. *Conditional* acceptance at step i is accepted_i / accepted_(i-1);
*teacher-forced tokens per round*, 1 + accepted / rounds, are of anchors with all K targets: those near the end of a
text could accept fewer whatever is drafted. Every position of a text is an anchor, so positions go together; intervals
are over texts, which are independent, and a text that repeats another is not counted.

The loop that serves has rounds at some anchors alone: at a text's first, and after a round at n that accepts a drafts
at n + 1 + a. Served greedily, the drafts decide that. Sampled, a draft x drawn from q stands with min(1, p / q): where
the text goes on with x, it was a draft that stood with probability min(1, q(x) / p(x)), and else the base's own token.
So each anchor has a probability that a round begins there; their sum is the expected number of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils import rnn

from mtp_extract.drafter.protocol import Drafter
from mtp_extract.evaluation.base_texts import Continuations, groups
from mtp_extract.evaluation.intervals import Interval, bound_difference, over_texts, ratio_bounds, share_bounds
from mtp_extract.io.typed import Count, Figure, Positive, Record
from mtp_extract.progress import SILENT, Reporter, report_each
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement, PerAnchor, read_texts, teacher_forced

DraftRequest = tuple[
    Drafter, int, bool
]  # how many drafts after every token; whether they follow it: see teacher_forced


def measure_agreements(
    base: Base, asked: Sequence[DraftRequest], written: Continuations, *, batch: int, reporter: Reporter = SILENT
) -> list[Agreement]:
    """What each of ``asked`` drafts along all texts, which the base reads once; PairError if all are too short."""
    usable = torch.tensor(written.usable or range(len(written.texts)))
    batches = groups([len(written.texts[row].tokens) for row in usable], batch)
    parts: list[list[Agreement]] = [[] for _ in asked]
    for group in report_each(batches, reporter, "drafts after every token"):
        rows = usable[group]
        texts = [written.texts[row] for row in rows]
        full = read_texts(base, texts, [drafter.needs for drafter, *_ in asked])
        for of_drafter, (drafter, steps, along) in zip(parts, asked, strict=True):
            agreement = teacher_forced(base, drafter, texts, steps, along=along, full=full)
            of_drafter.append(replace(agreement, text=rows[agreement.text]))
    return [Agreement.joined(of_drafter) for of_drafter in parts]


class Step(Record):
    """One draft of a round, at every position that has a target there."""

    step: Positive  #: 1 is the first draft
    top1: Figure  #: the draft is the base's token
    top5: Figure  #: the base's token is among the drafter's five likeliest
    conditional: Figure  #: the draft is accepted, of the positions at which all before it were


class Workload(Record):
    """Drafts after the tokens of the base's own texts, of one workload or of all."""

    texts: Count  #: texts that repeat no other
    n: Count  #: positions from which was drafted
    teacher_forced: Figure  #: tokens per round, from every position that has a target at every step
    steps: list[Step]  #: by draft step


def summarize_agreement(part: Agreement) -> Workload:
    """What it comes to."""
    rounds = compute_acceptance(part)
    stand = rounds.stands.sum(dim=1)
    interval = over_texts(share_bounds, stand / part.steps, torch.ones_like(stand), text=rounds.text)
    return Workload(
        texts=len(set(part.text.tolist())),
        n=len(part.anchor),
        teacher_forced=figure(rounds.teacher_forced, len(stand), interval and interval.scaled(part.steps, 1.0)),
        steps=[_summarize_step(part, step) for step in range(part.steps)],
    )


def _summarize_step(part: Agreement, step: int) -> Step:
    hit = part.drafts == part.targets
    aimed = part.targets[:, step] >= 0
    reached = aimed & hit[:, :step].all(dim=1)
    return Step(
        step + 1,
        top1=estimate_share(part.text[aimed], hit[aimed, step]),
        top5=estimate_share(part.text[aimed], part.ranks[aimed, step] < 5),
        conditional=estimate_share(part.text[reached], hit[reached, step]),
    )


@dataclass(frozen=True)
class Acceptance(PerAnchor):
    """Over anchors that have all K targets. N anchors."""

    stands: Tensor  # F64 [N, K], the probability that the drafts up to a step stand; 0 or 1 in greedy serving
    begins: Tensor  # F64 [N], the probability that a round of the loop begins there; 0 or 1 in greedy serving
    advance: Tensor  # F64 [N], tokens of a round there, 1 to K + 1; of sampled serving the mean, given the text

    @classmethod
    def over(cls, text: Tensor, anchor: Tensor, stands: Tensor, along: Tensor | None = None) -> Acceptance:
        """With the rounds that follow; anchors in order of text, then position.

        ``along``, F64 [N, K]: the probability that the drafts up to a step stand and are the text's tokens, given the
        text; by default ``stands``, which it is in greedy serving.
        """
        along = stands if along is None else along
        return cls(text, anchor, stands, _compute_start_probability(text, along), 1 + along.sum(dim=1))

    @property
    def teacher_forced(self) -> float:
        """1 + mean accepted drafts of a round; NaN without anchors."""
        return 1 + float(self.stands.sum(dim=1).mean())

    @property
    def rounds(self) -> float:
        """Of the loop, over all texts."""
        return float(self.begins.sum())

    @property
    def tokens_per_round(self) -> float:
        """Of these rounds; NaN without any."""
        return float((self.begins * self.advance).sum() / self.begins.sum())

    @property
    def texts(self) -> int:
        """How many have an anchor."""
        return len(torch.unique(self.text))


@dataclass(frozen=True)
class Change:
    """The difference in teacher-forced tokens per round between two drafters on the same anchors, after less before."""

    mean: float  # over anchors; NaN without any
    interval: Interval | None  # 95 %; None with too few texts, and then nothing is certain
    texts: int  # that have an anchor


@dataclass(frozen=True)
class Saving:
    """Rounds of one drafter for a round of another, over the same texts."""

    ratio: float  # rounds before over rounds after; NaN without any
    interval: Interval | None  # 95 %; None with too few texts, and then nothing is certain


def compare_rounds(before: Acceptance, after: Acceptance) -> Saving:
    """Over all texts of both."""
    ratio = before.rounds / after.rounds if after.rounds else math.nan
    return Saving(ratio, over_texts(ratio_bounds, before.begins, after.begins, text=before.text))


def compare_acceptance(before: Acceptance, after: Acceptance) -> Change:
    """At every anchor of both."""
    steps = before.stands.shape[1]
    difference = (after.stands - before.stands).sum(dim=1)
    interval = estimate_difference(before.text, difference / steps)
    return Change(float(difference.mean()), interval and interval.scaled(steps), before.texts)


def compute_acceptance(agreement: Agreement) -> Acceptance:
    """Greedy serving: the drafts that the base's own text confirms."""
    complete = agreement.where((agreement.targets >= 0).all(dim=1))
    stands = (complete.drafts == complete.targets).double().cumprod(dim=1)
    return Acceptance.over(complete.text, complete.anchor, stands)


def _compute_start_probability(text: Tensor, along: Tensor) -> Tensor:
    """F64 [N], the probability that a round begins at each anchor; the first of each text begins one.

    A round that begins at n and in which k drafts stand is followed by one at n + k + 1. So
    begins[n + k + 1] += begins[n] · P(exactly k stand at n), from the first anchor of a text to its last.
    """
    if not len(text):
        return torch.zeros(0, dtype=torch.double)

    # [N, K + 1]: P(exactly k stand) = P(at least k) - P(at least k + 1); at least none always do, K + 1 never.
    at_least = pad(along.double(), (1, 1))
    at_least[:, 0] = 1
    exactly = -at_least.diff(dim=1)

    # All texts side by side: [texts, longest, K + 1].
    lengths = torch.unique_consecutive(text, return_counts=True)[1]
    rows = rnn.pad_sequence(list(torch.split(exactly, lengths.tolist())), batch_first=True)
    texts, longest, ahead = rows.shape
    begins = torch.zeros(texts, longest + ahead, dtype=torch.double)
    begins[:, 0] = 1
    for n in range(longest):
        begins[:, n + 1 : n + 1 + ahead] += begins[:, n, None] * rows[:, n]
    return begins[:, :longest][torch.arange(longest) < lengths[:, None]]


def estimate_share(text: Tensor, values: Tensor) -> Figure:
    """The mean of ``values`` [N] in 0 to 1, or that are true."""
    values = values.double()
    interval = over_texts(share_bounds, values, torch.ones_like(values), text=text)
    return figure(float(values.mean()), len(values), interval)


def estimate_difference(text: Tensor, values: Tensor, level: float = 0.95) -> Interval | None:
    """Of the mean of ``values`` [N] in -1 to 1, what one gains over another there, over texts; None with too few."""
    gained, lost = values.clamp(min=0), (-values).clamp(min=0)
    return over_texts(bound_difference, gained, lost, torch.ones_like(values), text=text, level=level)


def figure(value: float, n: int, interval: Interval | None) -> Figure:
    return Figure(nan_to_none(value), n, list(interval) if interval else None)


def nan_to_none(value: float) -> float | None:
    """None for NaN."""
    return None if math.isnan(value) else value
