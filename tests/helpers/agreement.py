"""The agreement of one drafter with its base."""

from __future__ import annotations

from mtp_extract.drafter.protocol import Drafter
from mtp_extract.evaluation.agreement import Asked, Continuations, measure_agreements
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement


def measure_agreement(
    base: Base, drafter: Drafter, continuations: Continuations, steps: int, *, batch: int
) -> Agreement:
    """Teacher forcing over all texts."""
    return measure_agreements(base, [Asked(drafter, steps)], continuations, batch=batch)[0]
