"""Before and after on texts that nothing was trained on, and whether what came out is saved.

It is saved if it takes fewer rounds on held-out text at 95 %, may not lose more than 0.05 tokens per round where drafts
continue what no training text has, and is on no workload surely worse. What too few texts cannot show is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtp_extract.errors import escape
from mtp_extract.evaluate.intervals import Interval
from mtp_extract.evaluate.measured import Change, Measured, Saving, compare, saving
from mtp_extract.evaluate.texts import LEAST_TEXTS, undecided
from mtp_extract.tuning.corpus import Corpus
from mtp_extract.tuning.seen import seen

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
    own: bool = True  # whether its workload is one of those trained on; the others show whether they get worse

    @cached_property
    def change(self) -> Change:
        """Of teacher-forced tokens per round."""
        return compare(self.before, self.after)

    @cached_property
    def saving(self) -> Saving:
        """Of rounds; where the anchors are not all of a text's, it says nothing."""
        return saving(self.before, self.after)

    def may_lose(self, most: float) -> bool:
        """Whether more than ``most`` tokens per round may be lost, or it is not known; not where no draft is."""
        # Where nothing is lost, an interval's lower end is only as far off as the texts are few.
        lost, interval = bool((self.after.stands < self.before.stands).any()), self.change.interval
        return interval is None or (lost and interval.low <= -most)

    def where(self, rows: Tensor, *, own: bool = True) -> Comparison:
        """At these anchors alone, bool [N]."""
        return Comparison(self.before.where(rows), self.after.where(rows), own)

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {
            "texts": self.before.texts,
            "anchors": len(self.before.anchor),
            "trained_on_its_kind": self.own,
            "before": _figures(self.before),
            "after": _figures(self.after),
            "change": {"mean": round(self.change.mean, 4), "interval": _rounded(self.change.interval)},
            "rounds": {"ratio": round(self.saving.ratio, 4), "interval": _rounded(self.saving.interval)},
        }


@dataclass(frozen=True)
class Comparisons:
    overall: Comparison  # over all held-out texts of the workloads that were trained on
    workloads: Mapping[str, Comparison]  # by name; also those of shipped prompts that were not trained on
    unseen: Comparison  # over all held-out texts: anchors around which no training text has the same tokens
    # the held-out texts that lost most, that one first: workload, name, anchors, and tokens per round before and after
    worst: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, corpus: Corpus, before: Measured, after: Measured) -> Comparisons:
        """Of two drafters on the held-out texts of ``corpus``."""
        units = torch.tensor(corpus.units)
        every = Comparison(replace(before, text=units[before.text]), replace(after, text=units[after.text]))
        workloads = {}
        for name in dict.fromkeys(corpus.workloads):
            texts = [index for index, workload in enumerate(corpus.workloads) if workload == name]
            rows = torch.isin(before.text, torch.tensor(texts))
            workloads[name] = every.where(rows, own=texts[0] < corpus.own)
        lengths = [
            {
                "workload": corpus.workloads[index],
                "name": corpus.names[index],
                "anchors": int((before.text == index).sum()),
                "before": round(before.of([index]).teacher_forced, 4),
                "after": round(after.of([index]).teacher_forced, 4),
            }
            for index in torch.unique(before.text).tolist()
        ]
        return cls(
            overall=every.where(before.text < corpus.own),
            workloads=workloads,
            unseen=every.where(~seen(before, corpus.held_out, corpus.known)),
            worst=tuple(sorted(lengths, key=lambda text: text["after"] - text["before"])[:WORST]),
        )

    def refused(self) -> tuple[str, ...]:
        """Why what came after is not to be saved; empty if it is."""
        return tuple(self._reasons())

    def _reasons(self) -> Iterator[str]:
        overall, unseen = self.overall, self.unseen
        if not overall.saving.better:
            before, after, interval = overall.before, overall.after, overall.saving.interval
            rounds = f"{before.rounds:.0f} before, {after.rounds:.0f} after: ratio {overall.saving.ratio:.3f}"
            bounds = f"{interval.low:.3f} to {interval.high:.3f} at 95 %" if interval else undecided(before.texts)
            yield (
                f"it is not shown to take fewer rounds on held-out text ({rounds}, {bounds}; teacher-forced "
                f"{signed(overall.change)})"
            )
        if unseen.change.interval is not None and unseen.may_lose(MOST_LOST):
            yield (
                f"it may lose more than {MOST_LOST} teacher-forced tokens per round where drafts continue what no "
                f"training text has ({signed(unseen.change)})"
            )
        for name, comparison in self.workloads.items():
            if comparison.change.worse:
                yield f"it is worse on {escape(name)} ({signed(comparison.change)})"

    def notes(self) -> Iterator[str]:
        """What these texts cannot show."""
        texts, workloads = self.overall.before.texts, self.workloads.items()
        if texts < ENOUGH_TEXTS:
            yield (
                f"Only {texts} held-out texts of what was trained on: a kind of text that loses may not be among them. "
                f"Give more prompts, {ENOUGH_TEXTS} of them held out (one in eight is)."
            )
        if few := [f"{name} ({one.before.texts})" for name, one in workloads if one.change.interval is None]:
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
        unseen = self.unseen.as_json()
        return {
            "overall": self.overall.as_json(),
            "workloads": {name: comparison.as_json() for name, comparison in self.workloads.items()},
            "unseen": {key: unseen[key] for key in ("texts", "anchors", "change")}
            if self.unseen.before.texts
            else None,
            "worst": list(self.worst),
        }


def _figures(measured: Measured) -> dict[str, Any]:
    return {
        "teacher_forced": round(measured.teacher_forced, 4),
        "interval": _rounded(measured.interval),
        "conditional": [round(rate, 4) for rate in measured.conditional],
        "rounds": round(measured.rounds, 2),
        "tokens_per_round": round(measured.tokens_per_round, 4),
        "tokens_per_round_interval": _rounded(measured.tokens_per_round_interval),
    }


def _rounded(interval: Interval | None) -> list[float] | None:
    return interval and interval.rounded(4)


def signed(change: Change) -> str:
    """``change`` with its interval, or why it has none, in words."""
    interval = change.interval
    bounds = f"{interval.low:+.3f} to {interval.high:+.3f} at 95 %" if interval else undecided(change.texts)
    return f"{change.mean:+.3f}, {bounds}"
