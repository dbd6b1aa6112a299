"""Engines with planted faults: a drafter that is wrong in one way, made otherwise than the doctor's own patterns.

Each takes the sound drafter and the base that it runs beside. What differs from ``mtp_extract/doctor/faults.py``:
another text's K and V are those of the text that was served before; 1/sqrt(d) is one number for all layers, by
the config; stale K and V are those of the round before, whatever it accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mtp_extract.drafter.mtp import LITERT, FaultyDrafter, MtpDrafter, MtpState
from mtp_extract.drafter.protocol import RoundStart
from mtp_extract.speculate.target import Base

Engine = Callable[[MtpDrafter, Base], Any]


def _zero_state(drafter: MtpDrafter, base: Base) -> Any:
    def zero(state: MtpState) -> MtpState:
        return dataclasses.replace(state, hidden=torch.zeros_like(state.hidden))

    return FaultyDrafter(drafter, every_step=zero)


def _shuffle_kv(drafter: MtpDrafter, base: Base) -> Any:
    last: dict[str, Any] = {}

    def change(state: RoundStart) -> RoundStart:
        if not int(state.fed.positions[0, 0]):
            last["before"] = last.get("now")
        last["now"] = state.fed.shared_kv
        if last["before"] is None:
            return state
        # As many slots as there are, over and over where the other text has fewer.
        at = {k: torch.arange(keys.shape[2]) % last["before"][k][0].shape[2] for k, (keys, _) in last["now"].items()}
        kv = {kind: (k[:, :, at[kind]], v[:, :, at[kind]]) for kind, (k, v) in last["before"].items()}
        return dataclasses.replace(state, fed=dataclasses.replace(state.fed, shared_kv=kv))

    return FaultyDrafter(drafter, change=change)


def _unscale_embedding(drafter: MtpDrafter, base: Base) -> Any:
    def change(state: RoundStart) -> RoundStart:
        return dataclasses.replace(state, embed=lambda tokens: state.embed(tokens) / base.width**0.5)

    return FaultyDrafter(drafter, change=change)


def _scale_attention(drafter: MtpDrafter, base: Base) -> Any:
    width = drafter.config.layers[0].head_dim
    return drafter.with_config(dataclasses.replace(drafter.config, attention_scale=width**-0.5))


def _rotate_all_dimensions(drafter: MtpDrafter, base: Base) -> Any:
    return drafter.with_config(drafter.config.replace_rope("full_attention", partial_rotary_factor=1.0))


def _drop_scalars(drafter: MtpDrafter, base: Base) -> Any:
    ones = {name: torch.ones(1) for name in drafter.state_dict() if name.endswith("layer_scalar")}
    return drafter.with_tensors(ones)


def _delay_query(drafter: MtpDrafter, base: Base) -> Any:
    return FaultyDrafter(drafter, dataclasses.replace(LITERT, position_offset=LITERT.position_offset + 1))


def _give_early_state(drafter: MtpDrafter, base: Base) -> Any:
    layer = base.num_layers - 1

    def change(state: RoundStart) -> RoundStart:
        fed = dataclasses.replace(state.fed, hidden=state.fed.layers[layer])
        return dataclasses.replace(state, fed=fed)

    return FaultyDrafter(drafter, change=change, layers=(layer,))


def _compute_in_half(drafter: MtpDrafter, base: Base) -> Any:
    """Compute in FP16; an overflow makes NaN, whose argmax is the first token."""
    half = drafter.with_tensors({name: tensor.half() for name, tensor in drafter.state_dict().items()})

    def step(state: MtpState, token: Tensor) -> tuple[Tensor, MtpState]:
        logits, following = half.step(state, token)
        return logits.nan_to_num(), following

    return SimpleNamespace(needs=half.needs, start=half.start, step=step)


def _give_stale_kv(drafter: MtpDrafter, base: Base) -> Any:
    """Give K and V of the round before, without what was written since."""
    seen: dict[str, Any] = {}

    def start(state: RoundStart) -> MtpState:
        now, first = int(state.positions), not int(state.fed.positions[0, 0])
        before = now if first else seen["position"]
        seen["position"] = now
        return drafter.start(state, dataclasses.replace(LITERT, unwritten=now - before))

    return SimpleNamespace(needs=drafter.needs, start=start, step=drafter.step)


PLANTED: dict[str, Engine] = {
    "shuffled_kv": _shuffle_kv,
    "zero_hidden": _zero_state,
    "unscaled_embedding": _unscale_embedding,
    "sqrt_d_attention": _scale_attention,
    "full_rope": _rotate_all_dimensions,
    "unit_layer_scalars": _drop_scalars,
    "position_off_by_one": _delay_query,
    "early_state": _give_early_state,
    "fp16_overflow": _compute_in_half,
    "stale_kv": _give_stale_kv,
}
"""By the name that the doctor should say."""


def scale_residual_stream(drafter: MtpDrafter, factor: float) -> MtpDrafter:
    """Scale the residual stream by ``factor``: norms undo it, so the function is the same, but FP16 may overflow."""
    names = ("pre_projection.weight", "post_attention_norm.weight", "post_ffw_norm.weight")
    state = drafter.state_dict()
    return drafter.with_tensors({name: state[name] * factor for name in state if name.endswith(names)})
