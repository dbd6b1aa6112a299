"""What may be wrong in a serving stack, one thing each: the controls of a validation, and four that engines have had.

Each is a row of :data:`FAULTS`: the drafter with that thing broken, whose pattern along the served texts is what a
server with that fault is expected to count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mtp_extract.doctor.patterns import Counted, mean_of
from mtp_extract.drafter.arguments import DraftArguments
from mtp_extract.drafter.masks import LITERT, TRANSFORMERS, Convention
from mtp_extract.drafter.mtp import Altered, MtpDrafter
from mtp_extract.drafter.protocol import BaseState, Drafter, DraftState, Needs
from mtp_extract.speculate.target import Base
from mtp_extract.validate.acceptance.controls import CONTROLS, Control

_MOVES = 0.01  # accepted drafts a token that a fault adds or takes, over all texts, to be told from none
_OTHER_TEXT = "shuffled_kv"
POSITION = "position_off_by_one"
"""The control whose pattern is that of the other of two runtimes' conventions."""


@dataclass(frozen=True)
class Setting:
    """What a fault is made of."""

    drafter: MtpDrafter
    layers: int  # of the base
    convention: Convention  # of the two, the one that the drafter drafts better by
    lag: int  # tokens that a round adds, on the mean


@dataclass(frozen=True)
class Fault:
    name: str  # key in the record
    what: str  # what is done, in words
    suspect: str  # what to look at
    # drafters that have it, whose mean is the pattern; none where there is nothing to break in this one
    make: Callable[[Setting], Sequence[Drafter]]


@dataclass(frozen=True)
class Handed:
    """A drafter that is handed another state of the base than there is."""

    drafter: Drafter
    change: Callable[[BaseState], BaseState]
    layers: tuple[int, ...] = ()  # whose incoming states the change needs

    @property
    def needs(self) -> Needs:
        return dataclasses.replace(self.drafter.needs, layers=self.layers)

    def start(self, base: BaseState) -> DraftState:
        return self.drafter.start(self.change(base))

    def step(self, state: DraftState, token: Tensor) -> tuple[Tensor, DraftState]:
        return self.drafter.step(state, token)

    def fork(self, state: DraftState, parents: Tensor) -> DraftState:
        return self.drafter.fork(state, parents)


def _other_texts(setting: Setting) -> Sequence[Drafter]:
    """Which text's K and V a sequence is given depends on the engine: the mean over three."""

    def of(distance: int) -> Drafter:
        def transform(arguments: DraftArguments, step: int) -> DraftArguments:
            # In a small batch too, of another text.
            by = 1 + (distance - 1) % max(1, len(arguments.hidden) - 1)
            kv = {kind: (k.roll(by, 0), v.roll(by, 0)) for kind, (k, v) in arguments.shared_kv.items()}
            return dataclasses.replace(arguments, shared_kv=kv)

        return Altered(setting.drafter, setting.convention, transform)

    return [of(distance) for distance in (1, 3, 5)]


def _early_state(setting: Setting) -> Sequence[Drafter]:
    layer = setting.layers - 1

    def change(base: BaseState) -> BaseState:
        states, seen = base.fed.layers[layer], base.positions - 1
        at = (base.fed.positions[:, None] == seen[..., None].to(base.fed.positions)).int().argmax(-1)
        index = at[..., None].expand(-1, -1, states.shape[-1]).to(states.device)
        return dataclasses.replace(base, hidden=states.gather(1, index).to(base.hidden))

    return [Handed(Altered(setting.drafter, setting.convention), change, (layer,))]


def _other_base(setting: Setting) -> Sequence[Drafter]:
    """Another base has its state in other coordinates; the round's later steps have the drafter's own."""

    def transform(arguments: DraftArguments, step: int) -> DraftArguments:
        if step:
            return arguments
        return dataclasses.replace(arguments, hidden=arguments.hidden.roll(arguments.hidden.shape[-1] // 2, -1))

    return [Altered(setting.drafter, setting.convention, transform)]


def _half(setting: Setting) -> Sequence[Drafter]:
    state = setting.drafter.state_dict()
    halves = {name: tensor.half() for name, tensor in state.items() if tensor.is_floating_point()}
    return [Altered(setting.drafter.with_tensors(halves), setting.convention)]


def _stale(setting: Setting) -> Sequence[Drafter]:
    """The newest slots are as if they were not written yet."""

    def change(base: BaseState) -> BaseState:
        later = {kind: positions + setting.lag for kind, positions in base.slot_positions.items()}
        return dataclasses.replace(base, slot_positions=later)

    return [Handed(Altered(setting.drafter, setting.convention), change)]


def _of_control(control: Control) -> Fault:
    def make(setting: Setting) -> Sequence[Drafter]:
        changed = control.drafter(setting.drafter) if control.drafter else setting.drafter
        if changed is None:
            return ()
        if control.name == POSITION:
            return [Altered(changed, TRANSFORMERS if setting.convention == LITERT else LITERT)]
        return [Altered(changed, setting.convention, control.transform)]

    makers = {_OTHER_TEXT: _other_texts}
    return Fault(control.name, control.what, control.suspect, makers.get(control.name, make))


FAULTS: tuple[Fault, ...] = (
    *map(_of_control, CONTROLS),
    Fault(
        "early_state",
        "the base's hidden state as it enters the last layer",
        "which of the base's states the drafter is given: that after the final norm, not one layer earlier",
        _early_state,
    ),
    Fault(
        "other_base_state",
        "the hidden state of another base",
        "which base the drafter is paired with: another model's state has other coordinates",
        _other_base,
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
"""Eleven."""


@dataclass(frozen=True)
class Reference:
    """What a pair comes to along some texts, sound and with each thing broken."""

    sound: Counted
    convention: Convention | None  # whose query position the drafter drafts better by; None where it has none
    broken: Mapping[str, Counted]  # by name of the fault; those alone that move drafts
    untold: tuple[str, ...]  # faults that do not


Along = Callable[[Sequence[Drafter]], list[Counted]]
"""What drafters come to along the texts at hand."""


def reference(drafter: Drafter, along: Along) -> Reference:
    """The drafter as it is: of the two positions that runtimes put its query at, at the one where it drafts better."""
    if not isinstance(drafter, MtpDrafter):
        return Reference(along([drafter])[0], None, {}, ())
    conventions = (LITERT, TRANSFORMERS)
    both = along([Altered(drafter, convention) for convention in conventions])
    best = max((0, 1), key=lambda at: both[at].gain)
    return Reference(both[best], conventions[best], {}, ())


def with_faults(found: Reference, base: Base, drafter: Drafter, along: Along, lag: float) -> Reference:
    """The same with one thing broken at a time.

    Args:
        lag: tokens that a round adds in serving, on the mean.
    """
    if not isinstance(drafter, MtpDrafter) or found.convention is None:
        return found
    setting = Setting(drafter, base.num_layers, found.convention, max(1, round(lag)))
    made = {fault.name: drafters for fault in FAULTS if (drafters := fault.make(setting))}
    counts = iter(along([one for drafters in made.values() for one in drafters]))
    counted = {name: mean_of([next(counts) for _ in drafters]) for name, drafters in made.items()}
    untold = tuple(name for name, pattern in counted.items() if not _moves(pattern, found.sound))
    broken = {name: pattern for name, pattern in counted.items() if name not in untold}
    return dataclasses.replace(found, broken=broken, untold=untold)


def _moves(pattern: Counted, sound: Counted) -> bool:
    return bool(np.abs(pattern.accepted - sound.accepted).sum() >= _MOVES * sound.tokens.sum())
