"""Engines with planted faults: a drafter that is wrong in one way, made otherwise than the doctor's own patterns.

Each takes the sound drafter and the base that it runs beside. What differs from ``mtp_extract/doctor/faults.py``:
another text's K and V are those of the text that was served before; 1/sqrt(d) is one number for all layers, by
the config; stale K and V are those of the round before, whatever it accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtp_extract.drafter.mtp import LITERT, FaultyDrafter, MtpDrafter, MtpState
from mtp_extract.drafter.protocol import RoundStart
from mtp_extract.speculate.target import Base

Engine = Callable[[MtpDrafter, Base], Any]


class _Handing:
    """A drafter that is handed a changed state of its base."""

    def __init__(
        self, drafter: MtpDrafter, change: Callable[[RoundStart], RoundStart], layers: tuple[int, ...] = ()
    ) -> None:
        self.needs = dataclasses.replace(drafter.needs, layers=layers)
        self.step: Callable[[Any, Tensor], Any] = drafter.step
        self.start: Callable[[RoundStart], Any] = lambda base: drafter.start(change(base), LITERT)


def _no_state(drafter: MtpDrafter, base: Base) -> Any:
    def step(state: MtpState, token: Tensor) -> tuple[Tensor, MtpState]:
        return drafter.step(dataclasses.replace(state, hidden=torch.zeros_like(state.hidden)), token)

    engine = _Handing(drafter, lambda state: state)
    engine.step = step
    return engine


def _shuffled(drafter: MtpDrafter, base: Base) -> Any:
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

    return _Handing(drafter, change)


def _unscaled(drafter: MtpDrafter, base: Base) -> Any:
    def change(state: RoundStart) -> RoundStart:
        return dataclasses.replace(state, embed=lambda tokens: state.embed(tokens) / base.width**0.5)

    return _Handing(drafter, change)


def _scaled_attention(drafter: MtpDrafter, base: Base) -> Any:
    width = drafter.config.layers[0].head_dim
    return drafter.with_config(dataclasses.replace(drafter.config, attention_scale=width**-0.5))


def _full_rope(drafter: MtpDrafter, base: Base) -> Any:
    return drafter.with_config(drafter.config.with_rope("full_attention", partial_rotary_factor=1.0))


def _no_scalars(drafter: MtpDrafter, base: Base) -> Any:
    ones = {name: torch.ones(1) for name in drafter.state_dict() if name.endswith("layer_scalar")}
    return drafter.with_tensors(ones)


def _late_query(drafter: MtpDrafter, base: Base) -> Any:
    return FaultyDrafter(drafter, dataclasses.replace(LITERT, position_offset=LITERT.position_offset + 1))


def _early(drafter: MtpDrafter, base: Base) -> Any:
    layer = base.num_layers - 1

    def change(state: RoundStart) -> RoundStart:
        fed = dataclasses.replace(state.fed, hidden=state.fed.layers[layer])
        return dataclasses.replace(state, fed=fed)

    return _Handing(drafter, change, (layer,))


def _half(drafter: MtpDrafter, base: Base) -> Any:
    """What overflows is no number, and then the first token is drafted."""
    half = drafter.with_tensors({name: tensor.half() for name, tensor in drafter.state_dict().items()})
    engine = _Handing(half, lambda state: state)

    def step(state: MtpState, token: Tensor) -> tuple[Tensor, MtpState]:
        logits, following = half.step(state, token)
        return logits.nan_to_num(), following

    engine.step = step
    return engine


def _stale(drafter: MtpDrafter, base: Base) -> Any:
    """Of the round before: what was written since then is not seen."""
    seen: dict[str, Any] = {}

    def start(state: RoundStart) -> MtpState:
        now, first = int(state.positions), not int(state.fed.positions[0, 0])
        before = now if first else seen["position"]
        seen["position"] = now
        return drafter.start(state, dataclasses.replace(LITERT, unwritten=now - before))

    engine = _Handing(drafter, lambda state: state)
    engine.start = start
    return engine


PLANTED: dict[str, Engine] = {
    "shuffled_kv": _shuffled,
    "zero_hidden": _no_state,
    "unscaled_embedding": _unscaled,
    "sqrt_d_attention": _scaled_attention,
    "full_rope": _full_rope,
    "unit_layer_scalars": _no_scalars,
    "position_off_by_one": _late_query,
    "early_state": _early,
    "fp16_overflow": _half,
    "stale_kv": _stale,
}
"""By the name that the doctor should say."""


def near_overflow(drafter: MtpDrafter, factor: float) -> MtpDrafter:
    """The same function with a residual stream ``factor`` times as large: norms do not see it, FP16 may overflow."""
    names = ("pre_projection.weight", "post_attention_norm.weight", "post_ffw_norm.weight")
    state = drafter.state_dict()
    return drafter.with_tensors({name: state[name] * factor for name in state if name.endswith(names)})
