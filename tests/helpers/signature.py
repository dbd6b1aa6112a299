"""The reference drafter on the inputs of LiteRT's ``mtp_drafter`` signature, or on inputs of any shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_extract.drafter.mtp import MtpDrafter, MtpState
from mtp_extract.drafter.protocol import KV


class Outputs(NamedTuple):
    """Of one step."""

    logits: Tensor  # [batch, queries, vocabulary]
    projected: Tensor  # [batch, queries, base width]


def one_step(
    drafter: MtpDrafter,
    inputs: Tensor,
    shared_kv: Mapping[str, KV],
    position_ids: Tensor,
    masks: Mapping[str, Tensor] | None = None,
) -> Outputs:
    """Of ``inputs`` [batch, queries, 2 · base width], embeddings then hidden states."""
    embedding, hidden = inputs.chunk(2, dim=-1)
    state = MtpState(lambda _: embedding, hidden, drafter.build_views(shared_kv, position_ids, masks))
    logits, after = drafter.step(state, position_ids)
    return Outputs(logits, after.hidden)


def run_signature(drafter: MtpDrafter, inputs: Mapping[str, NDArray[Any]]) -> Outputs:
    """What the reference drafter makes of one call's signature inputs.

    A cache is of the layer type whose KV heads and head size are its own; where both types have the same, the numbers
    in the names are in their order. The ``mask`` [1, 1, 1, slots] serves the full layers as it is. A sliding layer sees
    slot ``a`` when it is also within ``input_pos - window < a <= input_pos``.
    """
    given = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}
    keys = sorted((name for name in given if name.startswith("kv_cache_k_")), key=lambda n: int(n.split("_")[-1]))
    position = given["input_pos"].long().reshape(1, 1)
    mask = given["mask"].reshape(1, 1, -1)
    slots = torch.arange(mask.shape[-1])
    kv, masks = {}, {}
    for kind, layer in drafter.config.kv_layers.items():
        shape = layer.num_kv_heads, layer.head_dim
        fitting = [name for name in keys if (given[name].shape[1], given[name].shape[3]) == shape]
        name = fitting[-1 if kind == "full_attention" else 0]
        kv[kind] = given[name], given[name.replace("_k_", "_v_")].transpose(2, 3)
        window = layer.sliding_window
        masks[kind] = mask if window is None else mask & (slots <= position) & (slots > position - window)
    return one_step(drafter, given["activations"], kv, position, masks)
