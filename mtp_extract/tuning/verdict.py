"""Compares a drafter before and after on held-out text, and decides whether the result is saved.

It is saved if its intervals at 95 % show fewer rounds on held-out text, exclude a loss of 0.05 tokens per round where
drafts continue tokens that no training text has, and show no workload to be worse. A note names what too few texts
leave undecided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

import msgspec
import torch
from torch import Tensor

from mtp_extract.errors import escape
from mtp_extract.evaluation.agreement import Acceptance, Change, Saving, compare_acceptance, compare_rounds
from mtp_extract.evaluation.intervals import explain_undecided
from mtp_extract.tuning.corpus import Corpus, was_trained_on

_MOST_LOST = 0.05  # teacher-forced tokens per round, where drafts continue tokens that no training text has
_WORST = 3  # texts with the largest loss that are recorded
_NAME = 40  # characters of a prompt that identify its text


class RoundFigures(msgspec.Struct, frozen=True):
    teacher_forced: float  # tokens per round
    rounds: float
    tokens_per_round: float

    @classmethod
    def of(cls, measured: Acceptance) -> RoundFigures:
        return cls(measured.teacher_forced, measured.rounds, measured.tokens_per_round)


class Comparison(msgspec.Struct, frozen=True):
    """Before and after, over some of the held-out texts."""

    texts: int
    anchors: int
    before: RoundFigures
    after: RoundFigures
    change: Change  # of teacher-forced tokens per round
    rounds: Saving  # meaningful only over all anchors of each text
    loses: bool  # whether any draft is accepted less often than before

    @classmethod
    def of(cls, before: Acceptance, after: Acceptance, rows: Tensor) -> Comparison:
        """Compare at the anchors ``rows``, bool [N]."""
        before = before.where(rows)
        after = after.where(rows)
        return cls(
            texts=before.texts,
            anchors=len(before.anchor),
            before=RoundFigures.of(before),
            after=RoundFigures.of(after),
            change=compare_acceptance(before, after),
            rounds=compare_rounds(before, after),
            loses=bool((after.stands < before.stands).any()),
        )

    def may_lose(self, most: float) -> bool:
        """Return whether a loss of ``most`` tokens per round or more cannot be excluded."""
        # Without any lost draft, the interval's lower end only shows how few the texts are.
        interval = self.change.interval
        return interval is None or (self.loses and interval.low <= -most)


class Worst(msgspec.Struct, frozen=True):
    """Teacher-forced tokens per round on one held-out text."""

    workload: str
    name: str  # the beginning of its prompt
    before: float
    after: float


class Comparisons(msgspec.Struct, frozen=True):
    """All comparisons of a tuning, as the record stores them."""

    overall: Comparison  # on the held-out texts of the workloads that were trained on
    workloads: dict[str, Comparison]  # by name, those of the shipped prompts included
    unseen: Comparison | None  # where no training text has the same tokens; None without such an anchor
    worst: list[Worst]  # the texts that lost most, the worst first

    @classmethod
    def of(cls, corpus: Corpus, before: Acceptance, after: Acceptance) -> Comparisons:
        """Compare two drafters on the held-out texts of ``corpus``."""
        names = [item.workload for item, _ in corpus.held_out]
        number_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
        workload = torch.tensor([number_of[name] for name in names])[before.text]
        unseen = ~was_trained_on(before, [text for _, text in corpus.held_out], corpus.sequences)

        # Windows of one human text are not independent: intervals treat them as one unit.
        units = number_units(corpus)
        before_by_unit = replace(before, text=units[before.text])
        after_by_unit = replace(after, text=units[after.text])

        def compare_at(rows: Tensor) -> Comparison:
            return Comparison.of(before_by_unit, after_by_unit, rows)

        return cls(
            overall=compare_at(before.text < corpus.own_count),
            workloads={name: compare_at(workload == number) for name, number in number_of.items()},
            unseen=compare_at(unseen) if unseen.any() else None,
            worst=_find_worst_texts(corpus, before, after),
        )

    def list_refusals(self) -> Iterator[str]:
        """Yield the reasons against saving the result; none if it is accepted."""
        overall = self.overall
        unseen = self.unseen
        interval = overall.rounds.interval
        if interval is None or interval.low <= 1:
            rounds = f"{overall.before.rounds:.0f} before, {overall.after.rounds:.0f} after"
            bounds = (
                f"{interval.low:.3f} to {interval.high:.3f} at 95 %" if interval else explain_undecided(overall.texts)
            )
            change = describe_change(overall.change)
            figures = f"{rounds}: ratio {overall.rounds.ratio:.3f}, {bounds}; teacher-forced {change}"
            yield f"it is not shown to take fewer rounds on held-out text ({figures})"
        if unseen and unseen.change.interval is not None and unseen.may_lose(_MOST_LOST):
            condition = f"where drafts continue what no training text has ({describe_change(unseen.change)})"
            yield f"it may lose more than {_MOST_LOST} teacher-forced tokens per round {condition}"
        for name, comparison in self.workloads.items():
            if comparison.change.interval is not None and comparison.change.interval.high < 0:
                yield f"it is worse on {escape(name)} ({describe_change(comparison.change)})"

    def describe_undecided(self) -> Iterator[str]:
        """Yield a note on what too few texts leave undecided, if anything."""
        names = [f"{name} ({part.texts})" for name, part in self.workloads.items() if part.change.interval is None]
        if self.unseen is None or self.unseen.change.interval is None:
            names.append(f"drafts that continue what no training text has ({self.unseen.texts if self.unseen else 0})")
        if names:
            joined = ", ".join(names)
            yield f"Not decided, too few held-out texts: {joined}. Give more prompts: one in eight is held out."


def _find_worst_texts(corpus: Corpus, before: Acceptance, after: Acceptance) -> list[Worst]:
    texts = []
    for index, (item, _) in enumerate(corpus.held_out):
        content = item.content if isinstance(item.content, str) else str(item.content[-1].get("content"))
        name = " ".join(content.split())[:_NAME]
        forced_before = before.of([index]).teacher_forced
        forced_after = after.of([index]).teacher_forced
        texts.append(Worst(item.workload, name, forced_before, forced_after))
    return sorted(texts, key=lambda text: text.after - text.before)[:_WORST]


def number_units(corpus: Corpus) -> Tensor:
    """Return a unit number for each held-out text, int64; windows of one human text share it."""
    items = [None, *(item for item, _ in corpus.held_out)]
    return torch.tensor([*accumulate(item is not previous for previous, item in pairwise(items))])


def describe_change(change: Change) -> str:
    """Format ``change`` with its interval, or with the reason why it has none."""
    interval = change.interval
    bounds = f"{interval.low:+.3f} to {interval.high:+.3f} at 95 %" if interval else explain_undecided(change.texts)
    return f"{change.mean:+.3f}, {bounds}"
