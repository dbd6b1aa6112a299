"""Controls: the same measurement with one thing broken on purpose.

Each row of :data:`CONTROLS` changes the drafter or its inputs. A broken drafter should do worse. If it does as well,
what is broken matters little here; if it does significantly better, its ``suspect`` is where to look for a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from mtp_extract.architecture import find_architecture
from mtp_extract.drafter.mtp import LITERT, Convention, FaultyDrafter, MtpDrafter, MtpState
from mtp_extract.drafter.network import DrafterNetwork
from mtp_extract.drafter.protocol import RoundStart
from mtp_extract.evaluation.agreement import (
    DraftRequest,
    build_figure,
    estimate_difference,
    estimate_share,
    measure_agreements,
)
from mtp_extract.evaluation.base_texts import Continuations
from mtp_extract.evaluation.intervals import Interval
from mtp_extract.io.typed import Figure, Record
from mtp_extract.progress import SILENT, Reporter
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Agreement

_NEGLIGIBLE = 0.05  # largest difference of top-1 that counts as none

Standing = Literal["below", "above", "same", "undecided"]


@dataclass(frozen=True)
class Control:
    name: str  # key in the report
    what: str  # what is broken, in words
    suspect: str  # where to look for a fault if it scores better than the real drafter
    # Returns the changed drafter, or None if there is nothing to change.
    drafter: Callable[[MtpDrafter], MtpDrafter | None] = lambda drafter: drafter
    # Changes of the drafter's inputs: see FaultyDrafter.
    change: Callable[[RoundStart], RoundStart] = lambda base: base
    every_step: Callable[[MtpState], MtpState] = lambda state: state
    convention: Convention = LITERT

    def build_faulty(self, changed: MtpDrafter, convention: Convention | None = None) -> FaultyDrafter:
        """Wrap the ``changed`` drafter to feed it this control's inputs; ``convention`` replaces the control's own."""
        return FaultyDrafter(changed, convention or self.convention, self.change, self.every_step)


class ControlResult(Record):
    """A control compared with the real drafter at the same positions."""

    name: str  #: what is broken, as a key
    what: str  #: the same in words
    suspect: str  #: what to look at if it scores better
    top1: Figure  #: of the first draft
    difference: Figure  #: the real drafter's less this; its interval holds together with those of the other controls
    #: `below` the real drafter, `above` it, the `same` (at most 5 points either way, or no first draft is changed),
    #: `undecided` (too few texts for any of these)
    standing: Standing


def _use_other_text(base: RoundStart) -> RoundStart:
    kv = {kind: (k.roll(1, 0), v.roll(1, 0)) for kind, (k, v) in base.fed.shared_kv.items()}
    return replace(base, fed=replace(base.fed, shared_kv=kv))


def _scale_attention(drafter: MtpDrafter) -> MtpDrafter:
    # The q norm is the last factor before Q·Kᵀ, so a factor there scales the scores. Head dims differ by layer.
    state = drafter.state_dict()
    layers = {f"layers.{index}.q_norm.weight": layer for index, layer in enumerate(drafter.config.layers)}
    return drafter.with_tensors({name: state[name] / layer.head_dim**0.5 for name, layer in layers.items()})


def _rotate_fully(drafter: MtpDrafter) -> MtpDrafter | None:
    config = drafter.config
    partial = [kind for kind, layer in config.kv_layers.items() if layer.rope.partial_rotary_factor < 1]
    for kind in partial:
        config = config.replace_rope(kind, partial_rotary_factor=1.0)
    return drafter.with_config(config) if partial else None


def _reset_layer_scalars(drafter: MtpDrafter) -> MtpDrafter | None:
    scalars = {name: value for name, value in drafter.state_dict().items() if name.endswith(".layer_scalar")}
    if all(bool((value == 1).all()) for value in scalars.values()):
        return None
    return drafter.with_tensors({name: torch.ones_like(value) for name, value in scalars.items()})


CONTROLS: tuple[Control, ...] = (
    Control(
        "shuffled_kv",
        "K and V of another text",
        "the base's K and V: which layers' they are, and whether the drafter reads them at all",
        # Slots keep their positions, so masks still hide everything after the query.
        change=_use_other_text,
    ),
    Control(
        "zero_hidden",
        "the base's hidden state set to zero",
        "the base's hidden state: it must be the one after the final norm, at the position before the token",
        every_step=lambda state: replace(state, hidden=torch.zeros_like(state.hidden)),
    ),
    Control(
        "unscaled_embedding",
        "the embedding not multiplied by the root of the base's width",
        "the embedding's scale, which must be the base's own times the root of its width",
        change=lambda base: replace(base, embed=lambda tokens: base.embed(tokens) / base.fed.hidden.shape[-1] ** 0.5),
    ),
    Control(
        "sqrt_d_attention",
        "attention logits divided by the root of the head dim",
        "the scale of attention, which must be 1, or a q norm in the wrong place",
        drafter=_scale_attention,
    ),
    Control(
        "full_rope",
        "every dimension of the full layers' heads rotated",
        "the share of the full layer's head that is rotated",
        drafter=_rotate_fully,
    ),
    Control(
        "unit_layer_scalars",
        "layer scalars set to 1",
        "the layer scalars, which may be missing or in the wrong place",
        drafter=_reset_layer_scalars,
    ),
    Control(
        "position_off_by_one",
        "queries one position later",
        "the query's position",
        convention=replace(LITERT, position_offset=LITERT.position_offset + 1),
    ),
)

LEVEL = 1 - 0.05 / len(CONTROLS)  # of each interval. Bonferroni: all intervals hold together at 95 %.


def draft_together(
    base: Base, requests: Sequence[DraftRequest], written: Continuations, *, batch: int, reporter: Reporter = SILENT
) -> tuple[list[Agreement], list[ControlResult]]:
    """Draft as each of ``requests`` says, and with every control of the first drafter; the base reads the texts once.

    Controls are those of the drafter's architecture, and draft one token. A control that would change nothing is left
    out. PairError if all texts are too short.
    """
    real = requests[0][0]
    broken: dict[Control, DraftRequest] = {}
    controls = find_architecture(real.config).import_controls() if isinstance(real, DrafterNetwork) else ()
    for control in controls:
        changed = control.drafter(real)
        # K and V of another text need a batch of two.
        if changed is not None and (control.change != _use_other_text or min(batch, len(written.usable)) > 1):
            broken[control] = control.build_faulty(changed), 1, False
    agreements = measure_agreements(base, [*requests, *broken.values()], written, batch=batch, reporter=reporter)
    controls = [
        compare_with_control(control, agreements[0], agreement)
        for control, agreement in zip(broken, agreements[len(requests) :], strict=True)
    ]
    return agreements[: len(requests)], controls


def compare_with_control(control: Control, real: Agreement, broken: Agreement) -> ControlResult:
    """Compare the first drafts of ``broken`` and ``real`` at the same positions."""
    has_target = real.targets[:, 0] >= 0
    text = real.text[has_target]
    changed = bool((real.drafts[:, 0] != broken.drafts[:, 0])[has_target].any())
    real_hits = (real.drafts[:, 0] == real.targets[:, 0])[has_target].double()
    broken_hits = (broken.drafts[:, 0] == broken.targets[:, 0])[has_target].double()
    interval = estimate_difference(text, real_hits - broken_hits, LEVEL)
    return ControlResult(
        name=control.name,
        what=control.what,
        suspect=control.suspect,
        top1=estimate_share(text, broken_hits),
        difference=build_figure(float((real_hits - broken_hits).mean()), len(text), interval),
        standing=_judge_standing(interval, changed=changed),
    )


def _judge_standing(interval: Interval | None, *, changed: bool) -> Standing:
    """Judge a control by the ``interval`` of real less control, and by whether it ``changed`` any first draft."""
    if interval is None:
        return "undecided"
    if changed and (interval.low > 0 or interval.high < 0):
        return "below" if interval.low > 0 else "above"
    negligible = max(interval.high, -interval.low) <= _NEGLIGIBLE
    return "same" if negligible or not changed else "undecided"
