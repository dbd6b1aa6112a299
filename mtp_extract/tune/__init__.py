"""Tuning: fitting a drafter to the base that it is served with, on what that base writes.

::

    from mtp_extract.tune import Plan, Setting, run_tuning

    tuned = run_tuning(Plan(Setting(Path("DIR"), "google/gemma-4-E4B-it", Path("work")), Path("DIR-tuned")))
    overall = tuned.comparisons.overall
    print(overall.before.mean_accepted_length, overall.after.mean_accepted_length)

Names are imported when they are first used: torch, transformers and accelerate come with the extra ``validate``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtp_extract.tune.run import Plan, Tuned, run_tuning
    from mtp_extract.tune.setting import Setting

__all__ = ["Plan", "Setting", "Tuned", "run_tuning"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from mtp_extract.tune import run

    return getattr(run, name)
