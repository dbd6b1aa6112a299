"""Before and after on texts that nothing was trained on, and whether what came out is to be kept.

What is kept takes fewer rounds on held-out text, at 95 %. It may not lose more than 0.05 of teacher-forced tokens per
round where drafts continue what no training text has. And it is not seen to ruin a text, to be worse on a workload, or
to lose more than 0.05 served otherwise; what too few or too short texts cannot show is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mtp_extract.errors import escape
from mtp_extract.evaluate.measured import Change, Measured, Saving, compare, saving
from mtp_extract.speculate.intervals import Interval
from mtp_extract.speculate.texts import LEAST_TEXTS, undecided
from mtp_extract.tune.corpus import Corpus
from mtp_extract.tune.ruined import LEAST_ANCHORS, RUINED, TextChange, text_changes
from mtp_extract.tune.seen import seen

ENOUGH_TEXTS = 30
"""Held out; of fewer it is said what they cannot show."""

MOST_LOST = 0.05
"""Of teacher-forced tokens per round, on sequences that training has not seen, and served otherwise."""

WORST = 5
"""Texts that are recorded by name."""


@dataclass(frozen=True)
class Comparison:
    """Before and after, on texts that nothing was trained on or chosen by."""

    before: Measured
    after: Measured
    change: Change  # of teacher-forced tokens per round
    own: bool  # whether its workload is one of those trained on; the others are measured to see whether they get worse

    @classmethod
    def of(cls, before: Measured, after: Measured, *, own: bool) -> Comparison:
        """Of two drafters at the same anchors."""
        return cls(before, after, compare(before, after), own)

    @cached_property
    def saving(self) -> Saving:
        """Of rounds; where the anchors are not all of a text's, it says nothing."""
        return saving(self.before, self.after)

    @property
    def loses(self) -> bool:
        """Whether any draft is accepted less often after than before."""
        return bool((self.after.stands < self.before.stands).any())

    @property
    def shows(self) -> float | None:
        """A change that so many texts, as unlike as these, would show half of the time; None with too few for any."""
        interval = self.change.interval
        return interval and (interval.high - interval.low) / 2

    def where(self, rows: Tensor) -> Comparison:
        """At these anchors alone, bool [N]."""
        return Comparison.of(self.before.where(rows), self.after.where(rows), own=self.own)

    def as_json(self) -> dict[str, Any]:
        """For the record."""

        def figures(measured: Measured) -> dict[str, Any]:
            return {
                "mean_accepted_length": round(measured.mean_accepted_length, 4),
                "interval": _rounded(measured.interval),
                "conditional": [round(rate, 4) for rate in measured.conditional],
                "rounds": round(measured.rounds, 2),
                "tokens_a_round": round(measured.tokens_a_round, 4),
                "tokens_a_round_interval": _rounded(measured.rounds_interval),
            }

        return {
            "texts": self.before.texts,
            "anchors": len(self.before.anchor),
            "trained_on_its_kind": self.own,
            "before": figures(self.before),
            "after": figures(self.after),
            "change": self.change_as_json(),
            "rounds": {"ratio": round(self.saving.ratio, 4), "interval": _rounded(self.saving.interval)},
        }

    def change_as_json(self) -> dict[str, Any]:
        """For the record: of teacher-forced tokens per round."""
        return {
            "mean": round(self.change.mean, 4),
            "interval": _rounded(self.change.interval),
            "shows": None if self.shows is None else round(self.shows, 4),
        }


@dataclass(frozen=True)
class Comparisons:
    overall: Comparison  # over all held-out texts of the workloads that were trained on
    workloads: Mapping[str, Comparison]  # by name; also those of shipped prompts that were not trained on
    # over all held-out texts: anchors around which a training text has the same tokens, and all others
    seen: Comparison
    unseen: Comparison
    texts: tuple[TextChange, ...]  # every held-out text, the one that lost most first
    otherwise: Comparison | None  # over the corpus's texts of another serving; None where it has none
    other_temperature: float  # of that serving

    @classmethod
    def of(
        cls, corpus: Corpus, before: tuple[Measured, Measured | None], after: tuple[Measured, Measured | None]
    ) -> Comparisons:
        """Of two drafters, as :meth:`~mtp_extract.tune.corpus.Corpus.measured` measures them."""
        (old, old_other), (new, new_other) = before, after
        units = torch.tensor(corpus.units)
        every = Comparison.of(*(replace(found, text=units[found.text]) for found in (old, new)), own=True)

        def of(texts: Sequence[int]) -> Comparison:
            found = every.where(torch.isin(old.text, torch.tensor(texts)))
            return replace(found, own=texts[0] < corpus.own)

        known = seen(old, corpus.held_out, corpus.known, old.stands.shape[1])
        return cls(
            overall=of(range(corpus.own)),
            workloads={
                name: of([index for index, workload in enumerate(corpus.workloads) if workload == name])
                for name in dict.fromkeys(corpus.workloads)
            },
            seen=every.where(known),
            unseen=every.where(~known),
            texts=text_changes(old, new, corpus.workloads, corpus.names),
            otherwise=None if old_other is None or new_other is None else Comparison.of(old_other, new_other, own=True),
            other_temperature=corpus.other_temperature,
        )

    @property
    def ruined(self) -> tuple[TextChange, ...]:
        """The texts that are, the one that lost most first."""
        return tuple(text for text in self.texts if text.ruined)

    @property
    def too_short(self) -> int:
        """How many texts are, for whether they are ruined to be decided."""
        return sum(not text.decided for text in self.texts)

    @property
    def served_otherwise(self) -> str:
        """How :attr:`otherwise` was served, in words."""
        return f"at temperature {self.other_temperature:g}" if self.other_temperature else "greedily"

    def refused(self) -> tuple[str, ...]:
        """Why what came after is not to be kept; empty if it is."""
        return tuple(self._reasons())

    def _reasons(self) -> Iterator[str]:
        overall = self.overall
        if not overall.saving.better:
            yield (
                "it is not shown to take fewer rounds on held-out text "
                f"({rounds_in_words(overall)}; teacher-forced tokens per round {signed(overall.change)})"
            )
        unseen = self.unseen.change
        # Where nothing is lost, an interval's lower end is only as far off as the texts are few.
        if unseen.interval is not None and unseen.interval.low <= -MOST_LOST and self.unseen.loses:
            yield (
                f"it may lose more than {MOST_LOST} of teacher-forced tokens per round where drafts continue what no "
                f"training text has ({signed(unseen)})"
            )
        if self.ruined:
            worst = self.ruined[0]
            yield (
                f"it ruins {_counted(len(self.ruined), 'text')}, below {RUINED} of what it was: {in_words(worst)}"
                + (", and others" if len(self.ruined) > 1 else "")
            )
        for name, comparison in self.workloads.items():
            if comparison.change.worse:
                yield f"it is worse on {escape(name)} ({signed(comparison.change)})"
        other = self.otherwise
        if other is not None and other.change.interval is not None and other.change.interval.high < -MOST_LOST:
            yield f"it loses more than {MOST_LOST} served {self.served_otherwise} ({signed(other.change)})"

    def notes(self) -> tuple[str, ...]:
        """What these texts cannot show."""
        return tuple(self._notes())

    def _notes(self) -> Iterator[str]:
        overall = self.overall
        if (texts := overall.before.texts) < ENOUGH_TEXTS:
            shown = (
                f"a change of teacher-forced tokens per round below {overall.shows:.2f} would more likely not show"
                if overall.shows
                else "whether it drafts better cannot be known"
            )
            yield (
                f"{_counted(texts, 'held-out text')} of what was trained on: {shown}, "
                f"and a kind of text that loses may not be among them. "
                f"Give more prompts, {ENOUGH_TEXTS} of them held out (one in eight is)."
            )
        few = [
            f"{name} ({comparison.before.texts})"
            for name, comparison in self.workloads.items()
            if comparison.change.interval is None
        ]
        if few:
            yield (
                f"Whether it is worse on a workload is not decided for those of fewer than {LEAST_TEXTS} held-out "
                f"texts: {', '.join(few)}. More prompts of them would show it."
            )
        if self.unseen.change.interval is None:
            yield (
                "What becomes of drafts that continue what no training text has is not known: "
                f"{undecided(self.unseen.before.texts)}. More prompts, or ones less alike, would show it."
            )
        if self.too_short:
            yield (
                f"Whether a text is ruined is not decided for {self.too_short} of {len(self.texts)}, of fewer than "
                f"{LEAST_ANCHORS} places to draft from. Longer texts would show it."
            )

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        other = self.otherwise
        return {
            "other_serving": other and {"temperature": self.other_temperature, "comparison": other.as_json()},
            "overall": self.overall.as_json(),
            "workloads": {name: comparison.as_json() for name, comparison in self.workloads.items()},
            "sequences": {name: _part(found) for name, found in (("seen", self.seen), ("unseen", self.unseen))},
            "worst": [text.as_json() for text in self.texts[:WORST]],
            "ruined": len(self.ruined),
            "too_short": self.too_short,
        }


def _part(found: Comparison) -> dict[str, Any]:
    anchors = len(found.before.anchor)
    return {"texts": found.before.texts, "anchors": anchors, "change": found.change_as_json() if anchors else None}


def _rounded(interval: Interval | None) -> list[float] | None:
    return interval and interval.rounded(4)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def signed(change: Change) -> str:
    """``change`` with its interval, or why it has none, in words."""
    interval = change.interval
    bounds = f"{interval.low:+.3f} to {interval.high:+.3f}" if interval else undecided(change.texts)
    return f"{change.mean:+.3f}, {bounds}" + (" at 95 %" if interval else "")


def rounds_in_words(found: Comparison) -> str:
    """Rounds and tokens per round before and after, with the ratio's interval or why there is none."""
    before, after, interval = found.before, found.after, found.saving.interval
    bounds = f"{interval.low:.3f} to {interval.high:.3f} at 95 %" if interval else undecided(before.texts)
    return (
        f"{before.rounds:.0f} before, {after.rounds:.0f} after: ratio {found.saving.ratio:.3f}, {bounds}; "
        f"{before.tokens_a_round:.3f} to {after.tokens_a_round:.3f} tokens per round"
    )


def in_words(text: TextChange) -> str:
    """Which text, and what became of it."""
    before, after = text.before.mean_accepted_length, text.after.mean_accepted_length
    named = f'{escape(text.workload)} "{escape(text.name)}"'
    return f"{named}, teacher-forced tokens per round from {before:.2f} to {after:.2f}"
