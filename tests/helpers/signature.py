"""The inputs of LiteRT's ``mtp_drafter`` signature, as arguments of the reference drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.drafter.masks import position_masks
from mtp_extract.drafter.mtp import DraftArguments

__all__ = ["signature_arguments"]


def signature_arguments(config: DrafterConfig, inputs: Mapping[str, NDArray[Any]]) -> DraftArguments:
    """Arguments of the reference drafter from one call's signature inputs.

    Args:
        config: the drafter's geometry.
        inputs: by name: ``activations`` f32 [1, 1, 2 · base width], ``input_pos`` i32 [1], ``mask`` bool
            [1, 1, 1, slots], ``kv_cache_k_N`` [1, KV heads, slots, head_dim] and ``kv_cache_v_N`` [1, KV
            heads, head_dim, slots], with two shapes of caches.

    The ``mask`` serves the full layers as it is. A sliding layer sees slot ``a`` when it is also within
    ``input_pos - window < a <= input_pos``.
    """
    given = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}
    keys = {(k.shape[1], k.shape[3]): name for name, k in given.items() if name.startswith("kv_cache_k_")}
    kv = {}
    for kind, layer in config.kv_layers.items():
        name = keys[layer.num_kv_heads, layer.head_dim]
        kv[kind] = given[name], given[name.replace("_k_", "_v_")].transpose(2, 3)
    position = given["input_pos"].long().reshape(1, 1)
    mask = given["mask"].reshape(1, 1, -1)
    slots = torch.arange(mask.shape[-1])[None]
    masks = position_masks(config, dict.fromkeys(config.kv_layers, slots), position)
    return DraftArguments(given["activations"], kv, position, {kind: visible & mask for kind, visible in masks.items()})
