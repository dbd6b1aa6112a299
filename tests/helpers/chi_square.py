"""Pearson's test of counts against probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> tuple[float, float]:
    """The statistic, and the chance of one at least as great when the probabilities are right.

    An outcome of probability 0 that was observed gives (inf, 0.0), no counts at all (0.0, 1.0).
    """
    total = sum(observed)
    if not total:
        return 0.0, 1.0
    if any(count and not share for count, share in zip(observed, expected, strict=True)):
        return math.inf, 0.0
    cells = [(count, share * total) for count, share in zip(observed, expected, strict=True) if share]
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return statistic, float(torch.special.gammaincc(half[0], half[1])) if len(cells) > 1 else 1.0
