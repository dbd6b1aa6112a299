"""Numbers as text, each with its 95 % interval in brackets behind it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mtp_extract.io.typed import Figure

DASH = "–"  # where there is no number
Ends = Sequence[float] | None  # low and high end of an interval; None for no interval


def format_number(value: float | None, form: str, ends: Ends = None, *, between: str = "–", unit: str = "") -> str:
    """A number with its interval, ``2.98 (2.90–3.10)``, and its ``unit``; a dash for None and NaN."""
    if value is None or math.isnan(value):
        return DASH
    return f"{value:{form}}" + (f" ({ends[0]:{form}}{between}{ends[1]:{form}})" if ends else "") + unit


def format_mean(figure: Figure) -> str:
    """A measured mean, ``2.98 (2.90–3.10)``."""
    return format_number(figure.value, ".2f", figure.ci95)


def format_rate(figure: Figure) -> str:
    """A measured share in percent, ``81.5 (80.4–82.6)``."""
    percent = figure.value and 100 * figure.value
    ends = figure.ci95 and [100 * end for end in figure.ci95]
    return format_number(percent, ".1f", ends)
