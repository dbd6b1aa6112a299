"""Checks of what a plan holds, made where the plan is made: of a number, of a name, and of several fields together."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_extract.errors import PlanError, either, escape, nearest


def check_bounds(name: str, value: float | None, least: float | None = None, most: float | None = None) -> None:
    """Raise PlanError where the field ``name`` is out of bounds, which are ``least`` and ``most``; None never is."""
    if value is None:
        return
    # NaN is refused by either bound: it compares with none.
    require_that(least is None or value >= least, f"{name} of at least {least}, found {escape(value)}. Raise it.", name)
    require_that(most is None or value <= most, f"{name} of at most {most}, found {escape(value)}. Lower it.", name)


def check_choice(name: str, value: str | None, choices: Sequence[str]) -> None:
    """Raise PlanError where the field ``name`` is none of ``choices``; None is always one."""
    if value is not None and value not in choices:
        raise PlanError(f"{name} {escape(value)!r}: expected {either(choices)}.{nearest(value, choices)}")


def require_that(fits: bool, expected: str, *remedies: str) -> None:
    """Raise PlanError unless it ``fits``: what was expected and found, and the fields that would help."""
    if not fits:
        raise PlanError(f"expected {expected}", remedies=remedies)
