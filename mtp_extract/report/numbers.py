"""Formats numbers with their 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtp_extract.io.typed import Figure

DASH = "–"  # in place of a missing number
Ends = Sequence[float] | None  # low and high end of an interval; None for no interval


def format_number(value: float | None, form: str, ends: Ends = None, *, between: str = "–", unit: str = "") -> str:
    """Format a number with its interval and ``unit``, as in ``2.98 (2.90–3.10)``; None and NaN are a dash."""
    if value is None or math.isnan(value):
        return DASH
    return f"{value:{form}}" + (f" ({ends[0]:{form}}{between}{ends[1]:{form}})" if ends else "") + unit


def format_mean(figure: Figure) -> str:
    """Format a measured mean, as in ``2.98 (2.90–3.10)``."""
    return format_number(figure.value, ".2f", figure.ci95)


def format_rate(figure: Figure) -> str:
    """Format a measured share in percent, as in ``81.5 (80.4–82.6)``."""
    percent = figure.value and 100 * figure.value
    ends = figure.ci95 and [100 * end for end in figure.ci95]
    return format_number(percent, ".1f", ends)
