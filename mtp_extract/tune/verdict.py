"""Before and after on texts that nothing was trained on, and whether what came out is to be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtp_extract.evaluate.measured import Change, Measured, compare
from mtp_extract.speculate.texts import LEAST_TEXTS, undecided
from mtp_extract.tune.corpus import Corpus


@dataclass(frozen=True)
class Comparison:
    """Before and after, on texts that nothing was trained on or chosen by."""

    before: Measured
    after: Measured
    change: Change
    own: bool  # whether its workload is one of those trained on; the others are measured to see whether they get worse

    @property
    def loses(self) -> bool:
        """Whether any draft is accepted less often after than before."""
        return bool((self.after.stands < self.before.stands).any())

    def as_json(self) -> dict[str, Any]:
        """For the record."""

        def figures(measured: Measured) -> dict[str, Any]:
            return {
                "mean_accepted_length": round(measured.mean_accepted_length, 4),
                "interval": measured.interval and measured.interval.rounded(4),
                "conditional": [round(rate, 4) for rate in measured.conditional],
            }

        return {
            "texts": self.before.texts,
            "anchors": len(self.before.anchor),
            "trained_on_its_kind": self.own,
            "before": figures(self.before),
            "after": figures(self.after),
            "change": {
                "mean": round(self.change.mean, 4),
                "interval": self.change.interval and self.change.interval.rounded(4),
            },
        }


@dataclass(frozen=True)
class Comparisons:
    overall: Comparison  # over all held-out texts of the workloads that were trained on
    workloads: Mapping[str, Comparison]  # by name; also those of shipped prompts that were not trained on
    # over the corpus's texts of another serving; None where it has none. It decides nothing.
    otherwise: Comparison | None
    other_temperature: float  # of that serving

    @classmethod
    def of(
        cls, corpus: Corpus, before: tuple[Measured, Measured | None], after: tuple[Measured, Measured | None]
    ) -> Comparisons:
        """Of two drafters, as :meth:`~mtp_extract.tune.corpus.Corpus.measured` measures them."""
        (old, old_other), (new, new_other) = before, after
        workloads = {
            name: _compared(corpus, old.of(rows), new.of(rows), own=rows[0] < corpus.own)
            for name in dict.fromkeys(corpus.workloads)
            for rows in [[index for index, workload in enumerate(corpus.workloads) if workload == name]]
        }
        other = None
        if old_other is not None and new_other is not None:
            other = Comparison(old_other, new_other, compare(old_other, new_other), own=True)
        own = range(corpus.own)
        overall = _compared(corpus, old.of(own), new.of(own), own=True)
        return cls(overall, workloads, other, corpus.other_temperature)

    def refused(self) -> tuple[str, ...]:
        """Why what came after is not to be kept; empty if it is: better at 95 %, and worse on no workload at 95 %."""
        reasons = []
        if not self.overall.change.better:
            reasons.append(
                f"it is not shown to be better on held-out text (mean accepted length {signed(self.overall.change)})"
            )
        reasons += [
            f"it is worse on {name} ({signed(comparison.change)})"
            for name, comparison in self.workloads.items()
            if comparison.change.worse
        ]
        return tuple(reasons)

    def notes(self) -> tuple[str, ...]:
        """On which workloads nothing can be said."""
        few = [
            f"{name} ({comparison.before.texts})"
            for name, comparison in self.workloads.items()
            if comparison.change.interval is None
        ]
        if not few:
            return ()
        return (
            f"Whether it is worse on a workload is not decided for those of fewer than {LEAST_TEXTS} held-out texts: "
            f"{', '.join(few)}. More prompts of them would show it.",
        )

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        other = self.otherwise
        return {
            "other_serving": other and {"temperature": self.other_temperature, "comparison": other.as_json()},
            "overall": self.overall.as_json(),
            "workloads": {name: comparison.as_json() for name, comparison in self.workloads.items()},
        }


def _compared(corpus: Corpus, before: Measured, after: Measured, *, own: bool) -> Comparison:
    units = torch.tensor(corpus.units)
    before, after = (replace(found, text=units[found.text]) for found in (before, after))
    return Comparison(before, after, compare(before, after), own)


def signed(change: Change) -> str:
    """``change`` with its interval, or why it has none, in words."""
    interval = change.interval
    bounds = f"{interval.low:+.3f} to {interval.high:+.3f}" if interval else undecided(change.texts)
    return f"{change.mean:+.3f}, {bounds}" + (" at 95 %" if interval else "")
