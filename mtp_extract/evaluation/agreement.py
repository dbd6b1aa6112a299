"""Agreement with the base's own text: which drafts it accepts, how many rounds a text takes, which drafter is better.

A round drafts K tokens after an anchor token. *Conditional* acceptance at step i is accepted_i / accepted_(i-1).
*Teacher-forced tokens per round*, 1 + accepted / rounds, counts only anchors with all K targets: the end of a text
bounds the others. Every position of a text is an anchor, so anchors of a text are correlated: intervals are over texts,
which are independent, and a text that repeats another is not counted.

The loop that serves begins rounds at some anchors only: at the first of a text, and at n + 1 + a after a round at n
that accepts a drafts. In greedy serving the drafts decide that. In sampling, a draft x drawn from q is accepted with
probability min(1, p(x) / q(x)); given that the text goes on with x, that token was an accepted draft with probability
min(1, q(x) / p(x)), and else the base's own. So each anchor has a probability that a round begins there; their sum is
the expected number of rounds.
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
from mtp_extract.evaluation.base_texts import Continuations, group_by_length
from mtp_extract.evaluation.intervals import Interval, bound_difference, bound_ratio, bound_share, compute_interval
from mtp_extract.io.typed import Count, Figure, Positive, Record
from mtp_extract.progress import SILENT, Reporter, report_each
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement, PerAnchor, draft_teacher_forced, read_texts

# Drafter, draft steps, and whether each step reads the text's token (``along`` of draft_teacher_forced).
DraftRequest = tuple[Drafter, int, bool]


def measure_agreements(
    base: Base, requests: Sequence[DraftRequest], written: Continuations, *, batch: int, reporter: Reporter = SILENT
) -> list[Agreement]:
    """Draft along all texts as each of ``requests`` says; the base reads them once. PairError if all are too short."""
    usable = torch.tensor(written.usable or range(len(written.texts)))
    batches = group_by_length([len(written.texts[row].tokens) for row in usable], batch)
    parts: list[list[Agreement]] = [[] for _ in requests]
    for group in report_each(batches, reporter, "drafts after every token"):
        rows = usable[group]
        texts = [written.texts[row] for row in rows]
        full = read_texts(base, texts, [drafter.needs for drafter, *_ in requests])
        for agreements, (drafter, steps, along) in zip(parts, requests, strict=True):
            agreement = draft_teacher_forced(base, drafter, texts, steps, along=along, full=full)
            agreements.append(replace(agreement, text=rows[agreement.text]))
    return [Agreement.from_parts(agreements) for agreements in parts]


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
    """Compute acceptance by step and teacher-forced tokens per round, with 95 % intervals."""
    rounds = compute_acceptance(part)
    accepted = rounds.stands.sum(dim=1)
    interval = compute_interval(bound_share, accepted / part.steps, torch.ones_like(accepted), text=rounds.text)
    return Workload(
        texts=len(set(part.text.tolist())),
        n=len(part.anchor),
        teacher_forced=build_figure(
            rounds.teacher_forced, len(accepted), interval and interval.rescale(part.steps, 1.0)
        ),
        steps=[_summarize_step(part, step) for step in range(part.steps)],
    )


def _summarize_step(part: Agreement, step: int) -> Step:
    hit = part.drafts == part.targets
    has_target = part.targets[:, step] >= 0
    reached = has_target & hit[:, :step].all(dim=1)
    return Step(
        step + 1,
        top1=estimate_share(part.text[has_target], hit[has_target, step]),
        top5=estimate_share(part.text[has_target], part.ranks[has_target, step] < 5),
        conditional=estimate_share(part.text[reached], hit[reached, step]),
    )


@dataclass(frozen=True)
class Acceptance(PerAnchor):
    """Acceptance and rounds of the loop at N anchors that have all K targets."""

    stands: Tensor  # F64 [N, K], the probability that all drafts up to a step are accepted; 0 or 1 if greedy
    start_probability: Tensor  # F64 [N], the probability that a round of the loop begins there; 0 or 1 if greedy
    advance: Tensor  # F64 [N], tokens of a round there, 1 to K + 1; their mean given the text if sampled

    @classmethod
    def from_stands(cls, text: Tensor, anchor: Tensor, stands: Tensor, along: Tensor | None = None) -> Acceptance:
        """Derive the rounds of the loop; anchors are in order of text, then position.

        ``along``, F64 [N, K]: the probability, given the text, that all drafts up to a step are accepted and are the
        text's tokens. By default ``stands``, as in greedy serving.
        """
        along = stands if along is None else along
        return cls(text, anchor, stands, _compute_start_probability(text, along), 1 + along.sum(dim=1))

    @property
    def teacher_forced(self) -> float:
        """1 + mean number of accepted drafts, over all anchors; NaN without anchors."""
        return 1 + float(self.stands.sum(dim=1).mean())

    @property
    def rounds(self) -> float:
        """Expected number of rounds of the loop, over all texts."""
        return float(self.start_probability.sum())

    @property
    def tokens_per_round(self) -> float:
        """Mean of ``advance`` over the rounds of the loop, weighted by ``start_probability``; NaN without rounds."""
        return float((self.start_probability * self.advance).sum() / self.start_probability.sum())

    @property
    def texts(self) -> int:
        """Number of texts that have an anchor."""
        return len(torch.unique(self.text))


@dataclass(frozen=True)
class Change:
    """The change of teacher-forced tokens per round from one drafter to another at the same anchors."""

    mean: float  # over anchors, after - before; NaN without anchors
    interval: Interval | None  # 95 %; None with too few texts
    texts: int  # number of texts that have an anchor


@dataclass(frozen=True)
class Saving:
    """How many rounds one drafter needs for each round of another, over the same texts."""

    ratio: float  # rounds before / rounds after; NaN without rounds
    interval: Interval | None  # 95 %; None with too few texts


def compare_rounds(before: Acceptance, after: Acceptance) -> Saving:
    """Compare the expected rounds of two drafters over the same texts."""
    ratio = before.rounds / after.rounds if after.rounds else math.nan
    return Saving(
        ratio, compute_interval(bound_ratio, before.start_probability, after.start_probability, text=before.text)
    )


def compare_acceptance(before: Acceptance, after: Acceptance) -> Change:
    """Compare the accepted drafts of two drafters at the same anchors."""
    steps = before.stands.shape[1]
    difference = (after.stands - before.stands).sum(dim=1)
    interval = estimate_difference(before.text, difference / steps)
    return Change(float(difference.mean()), interval and interval.rescale(steps), before.texts)


def compute_acceptance(agreement: Agreement) -> Acceptance:
    """Compute acceptance in greedy serving, where a draft is accepted if it is the text's token."""
    complete = agreement.where((agreement.targets >= 0).all(dim=1))
    stands = (complete.drafts == complete.targets).double().cumprod(dim=1)
    return Acceptance.from_stands(complete.text, complete.anchor, stands)


def _compute_start_probability(text: Tensor, along: Tensor) -> Tensor:
    """Return the probability that a round begins at each anchor, F64 [N]; it is 1 at the first anchor of a text.

    A round that begins at n and accepts k drafts is followed by one at n + k + 1. So, from the first anchor of a text
    to its last, begins[n + k + 1] += begins[n] · P(exactly k are accepted at n).
    """
    if not len(text):
        return torch.zeros(0, dtype=torch.double)

    # [N, K + 1]: P(exactly k) = P(at least k) - P(at least k + 1), with P(at least 0) = 1 and P(at least K + 1) = 0.
    at_least = pad(along.double(), (1, 1))
    at_least[:, 0] = 1
    exactly = -at_least.diff(dim=1)

    # All texts at once: [texts, longest, K + 1].
    lengths = torch.unique_consecutive(text, return_counts=True)[1]
    rows = rnn.pad_sequence(list(torch.split(exactly, lengths.tolist())), batch_first=True)
    texts, longest, ahead = rows.shape
    begins = torch.zeros(texts, longest + ahead, dtype=torch.double)
    begins[:, 0] = 1
    for n in range(longest):
        begins[:, n + 1 : n + 1 + ahead] += begins[:, n, None] * rows[:, n]
    return begins[:, :longest][torch.arange(longest) < lengths[:, None]]


def estimate_share(text: Tensor, values: Tensor) -> Figure:
    """Return the mean of ``values`` [N], bool or in 0 to 1, with its interval over texts."""
    values = values.double()
    interval = compute_interval(bound_share, values, torch.ones_like(values), text=text)
    return build_figure(float(values.mean()), len(values), interval)


def estimate_difference(text: Tensor, values: Tensor, level: float = 0.95) -> Interval | None:
    """Return the interval, over texts, of the mean of ``values`` [N]: gains in -1 to 1. None with too few texts."""
    gained, lost = values.clamp(min=0), (-values).clamp(min=0)
    return compute_interval(bound_difference, gained, lost, torch.ones_like(values), text=text, level=level)


def build_figure(value: float, n: int, interval: Interval | None) -> Figure:
    return Figure(nan_to_none(value), n, list(interval) if interval else None)


def nan_to_none(value: float) -> float | None:
    return None if math.isnan(value) else value
