"""Tuning: fitting a drafter to the base that it is served with, on what that base writes.

::

    from mtp_extract.tune import Plan, run_tuning

    found = run_tuning(Plan(Path("DIR"), "google/gemma-4-E4B-it", Path("DIR-tuned"), Path("DIR-tuned.work")))
    print(found.overall.before.mean_accepted_length, found.overall.after.mean_accepted_length)

Names are imported when they are first used: torch, transformers and accelerate come with the extra ``validate``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_extract.tune.run import Plan, Tuned, run_tuning

__all__ = ["Plan", "Tuned", "run_tuning"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mtp_extract.tune import run

    return getattr(run, name)
