"""A drafter beside its base, both in memory: what a training takes of a pair that is loaded from directories."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from accelerate import Accelerator

from mtp_extract.drafter.load import Network
from mtp_extract.speculate.target import Base
from mtp_extract.tuning.plan import TuningPlan


def beside(plan: TuningPlan, base: Base, drafter: Network | None, **more: Any) -> Any:
    """In the place of a :class:`~mtp_extract.tuning.pair.Pair`."""
    parts = {"plan": plan, "base": base, "drafter": drafter, "accelerator": Accelerator(cpu=True), **more}
    return SimpleNamespace(**parts)
