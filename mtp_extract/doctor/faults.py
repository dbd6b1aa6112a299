"""What may be wrong in a serving stack, one thing each: the controls of a validation, and three that engines have had.

Each is a row of :data:`FAULTS`: the drafter with that thing broken, whose counts along the served texts are those that
a server with that fault is expected to have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mtp_extract.doctor.counts import Counts
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS, Convention
from mtp_extract.drafter.mtp import Altered, MtpDrafter, MtpState
from mtp_extract.drafter.protocol import BaseState, Drafter, Needs
from mtp_extract.speculate.target import Base
from mtp_extract.validation.acceptance.controls import CONTROLS, Control

_MOVES = 0.01  # accepted drafts a token that a fault adds or takes, over all texts, to be told from none
POSITION = "position_off_by_one"
"""The control that is the other of two runtimes' conventions."""

Along = Callable[[Sequence[Drafter]], list[Counts]]
"""What drafters come to along the texts at hand."""


@dataclass(frozen=True)
class Setting:
    """What a fault is made of."""

    drafter: MtpDrafter
    layers: int  # of the base
    convention: Convention  # of the two, the one that the drafter drafts better by
    lag: int  # tokens that a round adds in serving, on the mean


@dataclass(frozen=True)
class Fault:
    name: str  # key in the record
    what: str  # what is done, in words
    suspect: str  # what to look at
    make: Callable[[Setting], Drafter | None]  # a drafter that has it; None where this one has nothing to break


@dataclass(frozen=True)
class Handed(Altered):
    """A drafter that is handed another state of the base than there is."""

    change: Callable[[BaseState], BaseState] = lambda base: base
    layers: tuple[int, ...] = ()  # whose incoming states the change needs

    @property
    def needs(self) -> Needs:
        return dataclasses.replace(self.drafter.needs, layers=self.layers)

    def start(self, base: BaseState) -> MtpState:
        return self.drafter.start(self.change(base), self.convention)


def _of_control(control: Control) -> Fault:
    def make(setting: Setting) -> Drafter | None:
        changed = control.drafter(setting.drafter)
        if control.name == POSITION:
            return Altered(setting.drafter, TRANSFORMERS if setting.convention == LITERT else LITERT)
        return changed and Altered(changed, setting.convention, control.transform)

    return Fault(control.name, control.what, control.suspect, make)


def _early_state(setting: Setting) -> Drafter:
    layer = setting.layers - 1

    def change(base: BaseState) -> BaseState:
        before = dataclasses.replace(base.fed, hidden=base.fed.layers[layer])
        hidden = BaseState.after(before, base.positions, base.embed).hidden
        return dataclasses.replace(base, hidden=hidden.to(base.hidden))

    return Handed(setting.drafter, setting.convention, change=change, layers=(layer,))


def _half(setting: Setting) -> Drafter:
    state = setting.drafter.state_dict()
    halves = {name: tensor.half() for name, tensor in state.items() if tensor.is_floating_point()}
    return Altered(setting.drafter.with_tensors(halves), setting.convention)


def _stale(setting: Setting) -> Drafter:
    """The newest slots are as if they were not written yet."""

    def change(base: BaseState) -> BaseState:
        later = {kind: positions + setting.lag for kind, positions in base.slot_positions.items()}
        return dataclasses.replace(base, slot_positions=later)

    return Handed(setting.drafter, setting.convention, change=change)


FAULTS: tuple[Fault, ...] = (
    *map(_of_control, CONTROLS),
    Fault(
        "early_state",
        "the base's hidden state as it enters the last layer",
        "which of the base's states the drafter is given: that after the final norm, not one layer earlier",
        _early_state,
    ),
    Fault(
        "fp16_overflow",
        "the drafter computed in FP16, whose range it may leave",
        "the type that the engine computes the drafter in: BF16 or F32, never FP16",
        _half,
    ),
    Fault(
        "stale_kv",
        "the base's K and V of the last round not written yet",
        "when the drafter reads the base's K and V: after the tokens of the last round are in them",
        _stale,
    ),
)
"""Ten."""


@dataclass(frozen=True)
class Reference:
    """What a pair comes to along some texts, sound and with each thing broken."""

    sound: Counts
    convention: Convention | None = None  # whose query position the drafter drafts better by; None where it has none
    broken: Mapping[str, Counts] = dataclasses.field(default_factory=dict)  # by fault; only those that change drafts
    untold: tuple[str, ...] = ()  # faults that do not


def reference(drafter: Drafter, base: Base, along: Along, *, lag: float | None) -> Reference:
    """The drafter as it is: of the two positions that runtimes put its query at, at the one where it drafts better.

    Args:
        lag: tokens that a round adds in serving, on the mean; None where nothing is to be broken.
    """
    if not isinstance(drafter, MtpDrafter):
        return Reference(along([drafter])[0])
    conventions = (LITERT, TRANSFORMERS)
    both = dict(zip(conventions, along([Altered(drafter, convention) for convention in conventions]), strict=True))
    best, sound = max(both.items(), key=lambda item: float(item[1].accepted.sum()))
    if lag is None:
        return Reference(sound, best)
    setting = Setting(drafter, base.num_layers, best, max(1, round(lag)))
    made = {fault.name: broken for fault in FAULTS if (broken := fault.make(setting)) is not None}
    counts = dict(zip(made, along([*made.values()]), strict=True))
    least = _MOVES * sound.tokens.sum()
    moves = {name: bool(np.abs(found.accepted - sound.accepted).sum() >= least) for name, found in counts.items()}
    changing = {name: found for name, found in counts.items() if moves[name]}
    return Reference(sound, best, changing, tuple(name for name in counts if not moves[name]))
