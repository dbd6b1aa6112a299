"""What may be wrong in a serving stack, one thing each: the controls of a validation, and three that engines have had.

Each is a row of :data:`FAULTS`: the drafter with that thing broken, whose counts along the served texts are those that
a server with that fault is expected to have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtp_extract.doctor.counts import Counts, expected_counts
from mtp_extract.drafter.mtp import LITERT, TRANSFORMERS, Convention, FaultyDrafter, MtpDrafter
from mtp_extract.drafter.protocol import Drafter, RoundStart
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.validation.controls import CONTROLS

_MOVES = 0.01  # accepted drafts a token that a fault adds or takes, over all texts, to be told from none
POSITION = "position_off_by_one"
"""The control that is the other of two runtimes' conventions."""

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
"""The ten, by their key in the record: what is done, in words, and what to look at."""


def break_drafter(drafter: MtpDrafter, convention: Convention, layers: int, lag: int) -> dict[str, Drafter]:
    """By fault, a drafter that has it; none where this one has nothing to break.

    ``convention`` is, of the two, the one that it drafts better by, and ``lag`` as of :func:`count_expected`; the base
    has so many ``layers``.
    """
    faulty: dict[str, Drafter] = {}
    for control in CONTROLS:
        if control.name == POSITION:
            faulty[POSITION] = FaultyDrafter(drafter, TRANSFORMERS if convention == LITERT else LITERT)
        elif (changed := control.drafter(drafter)) is not None:
            faulty[control.name] = control.broken(changed, convention)

    def give_early_state(base: RoundStart) -> RoundStart:
        return replace(base, fed=replace(base.fed, hidden=base.fed.layers[layers - 1]))

    faulty["early_state"] = FaultyDrafter(drafter, convention, change=give_early_state, layers=(layers - 1,))
    halves = {name: tensor.half() for name, tensor in drafter.state_dict().items() if tensor.is_floating_point()}
    faulty["fp16_overflow"] = FaultyDrafter(drafter.with_tensors(halves), convention)
    faulty["stale_kv"] = FaultyDrafter(drafter, replace(convention, unwritten=lag))
    return faulty


@dataclass(frozen=True)
class ExpectedCounts:
    """What a drafter comes to along some texts, as it is and with each thing broken."""

    counts: Mapping[str, Counts]  # by name: first :data:`SOUND`, then the faults that change drafts
    convention: Convention | None = None  # whose query position the drafter drafts better by; None where it has none


def count_expected(
    drafter: Drafter, base: Base, texts: Sequence[Text], steps: int, *, lag: float | None
) -> ExpectedCounts:
    """The drafter as it is: of the two positions that runtimes put its query at, at the one where it drafts better.

    Args:
        texts, steps: as of :func:`~mtp_extract.doctor.counts.expected_counts`.
        lag: tokens that a round adds in serving, on the mean; None where nothing is to be broken.
    """
    if not isinstance(drafter, MtpDrafter):
        return ExpectedCounts({SOUND: expected_counts(base, [drafter], texts, steps)[0]})
    conventions = (LITERT, TRANSFORMERS)
    both = expected_counts(base, [FaultyDrafter(drafter, convention) for convention in conventions], texts, steps)
    best, sound = max(zip(conventions, both, strict=True), key=lambda pair: float(pair[1].accepted.sum()))
    if lag is None:
        return ExpectedCounts({SOUND: sound}, best)
    faulty = break_drafter(drafter, best, base.num_layers, max(1, round(lag)))
    by_fault = zip(faulty, expected_counts(base, [*faulty.values()], texts, steps), strict=True)
    least = _MOVES * sound.tokens.sum()
    changing = {name: counts for name, counts in by_fault if np.abs(counts.accepted - sound.accepted).sum() >= least}
    return ExpectedCounts({SOUND: sound, **changing}, best)
