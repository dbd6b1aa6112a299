"""What became of single texts: which lost most, and which are ruined.

A text is *ruined* where its teacher-forced tokens per round fall below 0.7 of what they were, beyond chance. Positions
of a text go together, so chance is judged by blocks of 8 of its anchors, at 99 %, as texts are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mtp_extract.evaluate.measured import Measured, difference_over_texts
from mtp_extract.speculate.texts import LEAST_TEXTS

RUINED = 0.7
"""Of what its teacher-forced tokens per round was."""

BLOCK = 8
"""Anchors that are one draw."""

_LEVEL = 0.99

LEAST_ANCHORS = (LEAST_TEXTS - 1) * BLOCK + 1
"""Of a text, to be called ruined: blocks are draws, and of fewer than five there is no interval."""


@dataclass(frozen=True)
class TextChange:
    """A text, before and after."""

    workload: str
    name: str  # its source, or how its prompt begins
    before: Measured
    after: Measured
    ruined: bool

    @property
    def change(self) -> float:
        """Of teacher-forced tokens per round."""
        return self.after.mean_accepted_length - self.before.mean_accepted_length

    @property
    def decided(self) -> bool:
        """Whether it is long enough to be called ruined."""
        return len(self.before.anchor) >= LEAST_ANCHORS

    def as_json(self) -> dict[str, Any]:
        """For the record."""

        def figures(measured: Measured) -> dict[str, float]:
            return {
                "mean_accepted_length": round(measured.mean_accepted_length, 4),
                "tokens_a_round": round(measured.tokens_a_round, 4),
            }

        return {
            "workload": self.workload,
            "name": self.name,
            "anchors": len(self.before.anchor),
            "before": figures(self.before),
            "after": figures(self.after),
            "ruined": self.ruined,
        }


def text_changes(
    before: Measured, after: Measured, workloads: Sequence[str], names: Sequence[str]
) -> tuple[TextChange, ...]:
    """Of every text with an anchor, the one that lost most first.

    Args:
        before, after: at the same anchors, in order of text.
        workloads, names: of every text.
    """
    found = []
    indices, lengths = torch.unique_consecutive(before.text, return_counts=True)
    rows = torch.split(torch.arange(len(before.text)), lengths.tolist())
    for index, own in zip(indices.tolist(), rows, strict=True):
        old, new = before.where(own), after.where(own)
        found.append(TextChange(workloads[index], names[index], old, new, ruined(old, new)))
    return tuple(sorted(found, key=lambda one: one.change))


def ruined(before: Measured, after: Measured) -> bool:
    """Whether one text is, of which both are."""
    if not after.mean_accepted_length < RUINED * before.mean_accepted_length:
        return False
    gained = (after.stands - before.stands).mean(dim=1)
    interval = difference_over_texts(torch.arange(len(gained)) // BLOCK, gained, _LEVEL)
    return interval is not None and interval.high < 0
