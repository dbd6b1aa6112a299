"""Before and after on texts that nothing was trained on, and whether what came out is saved.

It is saved if it takes fewer rounds on held-out text at 95 %, may not lose more than 0.05 tokens per round where drafts
continue what no training text has, and is on no workload surely worse. What too few texts cannot show is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtp_extract.checkpoint.checkpoint import Checkpoint
from mtp_extract.errors import escape
from mtp_extract.evaluate.intervals import Interval
from mtp_extract.evaluate.measured import Change, Measured, Saving, compare, saving
from mtp_extract.evaluate.texts import LEAST_TEXTS, undecided
from mtp_extract.tune.corpus import Corpus
from mtp_extract.tune.seen import seen

ENOUGH_TEXTS = 30
"""Held out; of fewer it is said what they cannot show."""

MOST_LOST = 0.05
"""Teacher-forced tokens per round, on sequences that training has not seen."""

WORST = 3
"""Texts that are shown and recorded by name."""


@dataclass(frozen=True)
class Comparison:
    """Before and after, on texts that nothing was trained on or chosen by."""

    before: Measured
    after: Measured
    own: bool  # whether its workload is one of those trained on; the others are measured to see whether they get worse

    @cached_property
    def change(self) -> Change:
        """Of teacher-forced tokens per round."""
        return compare(self.before, self.after)

    @cached_property
    def saving(self) -> Saving:
        """Of rounds; where the anchors are not all of a text's, it says nothing."""
        return saving(self.before, self.after)

    @property
    def loses(self) -> bool:
        """Whether any draft is accepted less often after than before."""
        return bool((self.after.stands < self.before.stands).any())

    def where(self, rows: Tensor) -> Comparison:
        """At these anchors alone, bool [N]."""
        return replace(self, before=self.before.where(rows), after=self.after.where(rows))

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {
            "texts": self.before.texts,
            "anchors": len(self.before.anchor),
            "trained_on_its_kind": self.own,
            "before": _figures(self.before),
            "after": _figures(self.after),
            "change": self.change_as_json(),
            "rounds": {"ratio": round(self.saving.ratio, 4), "interval": _rounded(self.saving.interval)},
        }

    def change_as_json(self) -> dict[str, Any]:
        """For the record: of teacher-forced tokens per round."""
        return {"mean": round(self.change.mean, 4), "interval": _rounded(self.change.interval)}


@dataclass(frozen=True)
class TextChange:
    """A held-out text, before and after."""

    workload: str
    name: str  # its source, or how its prompt begins
    before: Measured
    after: Measured

    @property
    def change(self) -> float:
        """Of teacher-forced tokens per round."""
        return self.after.teacher_forced - self.before.teacher_forced

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        lengths = {when: round(one.teacher_forced, 4) for when, one in (("before", self.before), ("after", self.after))}
        return {"workload": self.workload, "name": self.name, "anchors": len(self.before.anchor), **lengths}


@dataclass(frozen=True)
class Comparisons:
    overall: Comparison  # over all held-out texts of the workloads that were trained on
    workloads: Mapping[str, Comparison]  # by name; also those of shipped prompts that were not trained on
    # over all held-out texts: anchors around which a training text has the same tokens, and all others
    seen: Comparison
    unseen: Comparison
    worst: tuple[TextChange, ...]  # the held-out texts that lost most, that one first

    @classmethod
    def of(cls, corpus: Corpus, before: Measured, after: Measured) -> Comparisons:
        """Of two drafters on the held-out texts of ``corpus``."""
        units = torch.tensor(corpus.units)
        old, new = (replace(found, text=units[found.text]) for found in (before, after))
        every = Comparison(old, new, own=True)

        def of(texts: Sequence[int]) -> Comparison:
            rows = torch.isin(before.text, torch.tensor(texts))
            return replace(every.where(rows), own=texts[0] < corpus.own)

        known = seen(before, corpus.held_out, corpus.known, before.stands.shape[1])
        return cls(
            overall=of(range(corpus.own)),
            workloads={
                name: of([index for index, workload in enumerate(corpus.workloads) if workload == name])
                for name in dict.fromkeys(corpus.workloads)
            },
            seen=every.where(known),
            unseen=every.where(~known),
            worst=_worst(before, after, corpus),
        )

    def refused(self) -> tuple[str, ...]:
        """Why what came after is not to be saved; empty if it is."""
        return tuple(self._reasons())

    def _reasons(self) -> Iterator[str]:
        overall = self.overall
        if not overall.saving.better:
            yield (
                "it is not shown to take fewer rounds on held-out text "
                f"({rounds_in_words(overall)}; teacher-forced {signed(overall.change)})"
            )
        unseen = self.unseen.change
        # Where nothing is lost, an interval's lower end is only as far off as the texts are few.
        if unseen.interval is not None and unseen.interval.low <= -MOST_LOST and self.unseen.loses:
            yield (
                f"it may lose more than {MOST_LOST} teacher-forced tokens per round where drafts continue what no "
                f"training text has ({signed(unseen)})"
            )
        for name, comparison in self.workloads.items():
            if comparison.change.worse:
                yield f"it is worse on {escape(name)} ({signed(comparison.change)})"

    def notes(self) -> Iterator[str]:
        """What these texts cannot show."""
        texts = self.overall.before.texts
        if texts < ENOUGH_TEXTS:
            yield (
                f"Only {texts} held-out texts of what was trained on: a kind of text that loses may not be among them. "
                f"Give more prompts, {ENOUGH_TEXTS} of them held out (one in eight is)."
            )
        few = [
            f"{name} ({comparison.before.texts})"
            for name, comparison in self.workloads.items()
            if comparison.change.interval is None
        ]
        if few:
            yield (
                f"Not decided for workloads of fewer than {LEAST_TEXTS} held-out texts: {', '.join(few)}. More prompts "
                "of them would show whether they get worse."
            )
        if self.unseen.change.interval is None:
            yield (
                "Not decided for drafts that continue what no training text has: "
                f"{undecided(self.unseen.before.texts)}. More prompts, or ones less alike, would show it."
            )

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {
            "overall": self.overall.as_json(),
            "workloads": {name: comparison.as_json() for name, comparison in self.workloads.items()},
            "sequences": {name: _part(found) for name, found in (("seen", self.seen), ("unseen", self.unseen))},
            "worst": [text.as_json() for text in self.worst],
        }


@dataclass(frozen=True)
class Made:
    """What a mode made, with the evidence for it."""

    checkpoint: Checkpoint
    key: str  # of the record, under which it is described
    about: Mapping[str, Any]  # how it was made, for the record
    comparisons: Comparisons
    refused: tuple[str, ...]
    notes: tuple[str, ...] = ()


def _worst(before: Measured, after: Measured, corpus: Corpus) -> tuple[TextChange, ...]:
    texts = torch.unique(before.text).tolist()
    changes = [
        TextChange(corpus.workloads[index], corpus.names[index], before.of([index]), after.of([index]))
        for index in texts
    ]
    return tuple(sorted(changes, key=lambda one: one.change)[:WORST])


def _figures(measured: Measured) -> dict[str, Any]:
    return {
        "teacher_forced": round(measured.teacher_forced, 4),
        "interval": _rounded(measured.interval),
        "conditional": [round(rate, 4) for rate in measured.conditional],
        "rounds": round(measured.rounds, 2),
        "tokens_per_round": round(measured.tokens_per_round, 4),
        "tokens_per_round_interval": _rounded(measured.tokens_per_round_interval),
    }


def _part(found: Comparison) -> dict[str, Any]:
    anchors = len(found.before.anchor)
    return {"texts": found.before.texts, "anchors": anchors, "change": found.change_as_json() if anchors else None}


def _rounded(interval: Interval | None) -> list[float] | None:
    return interval and interval.rounded(4)


def signed(change: Change) -> str:
    """``change`` with its interval, or why it has none, in words."""
    interval = change.interval
    bounds = f"{interval.low:+.3f} to {interval.high:+.3f} at 95 %" if interval else undecided(change.texts)
    return f"{change.mean:+.3f}, {bounds}"


def rounds_in_words(found: Comparison) -> str:
    """Rounds before and after, with the ratio's interval or why there is none."""
    before, after, interval = found.before, found.after, found.saving.interval
    bounds = f"{interval.low:.3f} to {interval.high:.3f} at 95 %" if interval else undecided(before.texts)
    return f"{before.rounds:.0f} before, {after.rounds:.0f} after: ratio {found.saving.ratio:.3f}, {bounds}"
