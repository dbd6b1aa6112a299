"""Pearson's test of counts against probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> float:
    """The chance of counts at least as far from the ``expected`` shares, when those are the probabilities."""
    total = sum(observed)
    cells = [(count, share * total) for count, share in zip(observed, expected, strict=True) if share]
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
