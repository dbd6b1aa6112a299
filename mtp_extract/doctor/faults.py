"""Faults of a serving stack: the controls of a validation, and three that engines have had.

Each row of :data:`FAULTS` breaks one thing of the drafter. The counts of the broken drafter along the served texts are
what a server with that fault is expected to report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtp_extract.doctor.counts import Counts, compute_expected_counts
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention, FaultyDrafter, MtpDrafter
from mtp_extract.drafter.protocol import Drafter, RoundStart
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.validation.controls import CONTROLS

_LEAST_CHANGE = 0.01  # accepted drafts per token, over all texts, by which a fault has to change them to be compared
POSITION = "position_off_by_one"
"""Name of the control that puts the query where the other runtime puts it."""

SOUND = "sound"
"""Name of the drafter as it is."""

FAULTS: Mapping[str, tuple[str, str]] = {
    **{control.name: (control.what, control.suspect) for control in CONTROLS},
    "early_state": (
        "the base's hidden state as it enters the last layer",
        "which of the base's states the drafter is given: that after the final norm, not one layer earlier",
    ),
    "fp16_overflow": (
        "the drafter computed in FP16, whose range it may leave",
        "the type that the engine computes the drafter in: BF16 or F32, never FP16",
    ),
    "stale_kv": (
        "the base's K and V of the last round not written yet",
        "when the drafter reads the base's K and V: after the tokens of the last round are in them",
    ),
}
"""Key in the record → what is broken, and what to look at, in words."""


def break_drafter(drafter: MtpDrafter, convention: Convention, layers: int, lag: int) -> dict[str, Drafter]:
    """Break the drafter in every way that it can be broken; by the name of the fault.

    Args:
        convention: the runtime's convention with which the drafter drafts better.
        layers: how many the base has.
        lag: tokens whose K and V are not written yet.
    """
    faulty: dict[str, Drafter] = {}
    for control in CONTROLS:
        if control.name == POSITION:
            faulty[POSITION] = FaultyDrafter(drafter, TRANSFORMERS if convention == LITERT else LITERT)
        elif (changed := control.drafter(drafter)) is not None:
            faulty[control.name] = control.build_faulty(changed, convention)

    def give_early_state(base: RoundStart) -> RoundStart:
        return replace(base, fed=replace(base.fed, hidden=base.fed.layers[layers - 1]))

    faulty["early_state"] = FaultyDrafter(drafter, convention, change=give_early_state, layers=(layers - 1,))
    halves = {name: tensor.half() for name, tensor in drafter.state_dict().items() if tensor.is_floating_point()}
    faulty["fp16_overflow"] = FaultyDrafter(drafter.with_tensors(halves), convention)
    faulty["stale_kv"] = FaultyDrafter(drafter, replace(convention, unwritten=lag))
    return faulty


@dataclass(frozen=True)
class ExpectedCounts:
    """Counts that are expected along some texts, of the drafter as it is and with each thing broken."""

    counts: Mapping[str, Counts]  # by name: first :data:`SOUND`, then the faults that change drafts
    convention: Convention | None = None  # the convention with which it drafts better; None without a query position


def count_expected(
    drafter: Drafter, base: Base, texts: Sequence[Text], steps: int, *, lag: float | None
) -> ExpectedCounts:
    """Count what the drafter is expected to have accepted, sound and broken.

    Runtimes put its query at one of two positions: it is sound at the one where it drafts better.

    Args:
        texts, steps: as for :func:`~mtp_extract.doctor.counts.compute_expected_counts`.
        lag: mean number of tokens that a round adds in serving; None to break nothing.
    """
    if not isinstance(drafter, MtpDrafter):
        return ExpectedCounts({SOUND: compute_expected_counts(base, [drafter], texts, steps)[0]})
    conventions = (LITERT, TRANSFORMERS)
    both = compute_expected_counts(
        base, [FaultyDrafter(drafter, convention) for convention in conventions], texts, steps
    )
    best, sound = max(zip(conventions, both, strict=True), key=lambda pair: float(pair[1].accepted.sum()))
    if lag is None:
        return ExpectedCounts({SOUND: sound}, best)
    faulty = break_drafter(drafter, best, base.num_layers, max(1, round(lag)))
    by_fault = zip(faulty, compute_expected_counts(base, [*faulty.values()], texts, steps), strict=True)
    least = _LEAST_CHANGE * sound.tokens.sum()
    changing = {name: counts for name, counts in by_fault if np.abs(counts.accepted - sound.accepted).sum() >= least}
    return ExpectedCounts({SOUND: sound, **changing}, best)
