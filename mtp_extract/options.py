"""Check the fields of a plan when it is made: bounds of numbers, choices of names, fields that depend on each other."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_extract.errors import PlanError, escape, format_choice, suggest_name


def check_bounds(name: str, value: float | None, least: float | None = None, most: float | None = None) -> None:
    """Raise PlanError if the field ``name`` is below ``least`` or above ``most``; None is always within bounds."""
    if value is None:
        return
    # Any bound refuses NaN, since comparisons with NaN are false.
    require_that(least is None or value >= least, f"{name} of at least {least}, found {escape(value)}. Raise it.", name)
    require_that(most is None or value <= most, f"{name} of at most {most}, found {escape(value)}. Lower it.", name)


def check_choice(name: str, value: str | None, choices: Sequence[str]) -> None:
    """Raise PlanError if the field ``name`` is not one of ``choices``; None is always allowed."""
    if value is not None and value not in choices:
        raise PlanError(f"{name} {escape(value)!r}: expected {format_choice(choices)}.{suggest_name(value, choices)}")


def require_that(fits: bool, expected: str, *remedies: str) -> None:
    """Raise PlanError unless ``fits``; ``expected`` says what was expected and found, ``remedies`` what would help."""
    if not fits:
        raise PlanError(f"expected {expected}", remedies=remedies)
