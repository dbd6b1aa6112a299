"""Before and after on texts that nothing was trained on, and whether what came out is to be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtp_extract.evaluate.measured import Change, Measured, compare
from mtp_extract.speculate.intervals import LEAST_TEXTS, undecided
from mtp_extract.tune.corpus import Corpus


@dataclass(frozen=True)
class Comparison:
    """Before and after, on texts that nothing was trained on or chosen by.

    Attributes:
        own: whether its workload is one of those trained on, and not only looked at for harm.
    """

    before: Measured
    after: Measured
    change: Change
    own: bool

    @property
    def loses(self) -> bool:
        """Whether any draft that stood before stands less after."""
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
    """All of one corpus.

    Attributes:
        overall: over all held-out texts of the workloads that were trained on.
        workloads: by name; those of shipped prompts that were not trained on are there to see harm.
        otherwise: over the corpus's texts of another serving; None where it has none. It decides nothing.
        other_temperature: of that serving.
    """

    overall: Comparison
    workloads: Mapping[str, Comparison]
    otherwise: Comparison | None
    other_temperature: float

    @classmethod
    def of(
        cls, corpus: Corpus, before: Measured, after: Measured, otherwise: tuple[Measured, Measured] | None = None
    ) -> Comparisons:
        """Of measurements before and after.

        Args:
            corpus: the texts.
            before, after: over those that were held out.
            otherwise: before and after over those of another serving.
        """
        workloads = {
            name: _compared(corpus, before.of(rows), after.of(rows), own=rows[0] < corpus.own)
            for name in dict.fromkeys(corpus.workloads)
            for rows in [[index for index, workload in enumerate(corpus.workloads) if workload == name]]
        }
        other = otherwise and Comparison(*otherwise, compare(*otherwise), own=True)
        own = range(corpus.own)
        overall = _compared(corpus, before.of(own), after.of(own), own=True)
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
