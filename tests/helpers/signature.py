"""The inputs of LiteRT's ``mtp_drafter`` signature, as arguments of the reference drafter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.drafter.arguments import DraftArguments
from mtp_extract.drafter.masks import position_masks
from mtp_extract.errors import DrafterError

__all__ = ["kv_names", "signature_arguments", "signature_masks"]

_KEY = re.compile(r"kv_cache_k_(\d+)")


def kv_names(config: DrafterConfig, inputs: Mapping[str, NDArray[Any]]) -> dict[str, tuple[str, str]]:
    """Which cache inputs are the sliding and which the full K and V: layer type → (K name, V name).

    Decided by shape, [1, KV heads, slots, head_dim]. Where both types have the same shape, by the number
    in the name: the base's last sliding layer comes before its last full one in every published model.

    Raises:
        DrafterError: not exactly one cache for each layer type.
    """
    found = {name: int(match[1]) for name in inputs if (match := _KEY.fullmatch(name))}
    shape = {name: (inputs[name].shape[1], inputs[name].shape[3]) for name in found}
    wanted = {kind: (layer.num_kv_heads, layer.head_dim) for kind, layer in config.kv_layers.items()}
    by_number = sorted(found, key=found.__getitem__)
    order = sorted(wanted, key=lambda kind: kind == "full_attention")
    if len(found) != len(wanted) or sorted(shape.values()) != sorted(wanted.values()):
        raise DrafterError(
            f"expected caches of (KV heads, head_dim) {wanted}, found {shape}; the inputs are not this drafter's"
        )
    if len(set(wanted.values())) == len(wanted):
        chosen = {kind: next(n for n in found if shape[n] == wanted[kind]) for kind in wanted}
    else:
        chosen = dict(zip(order, by_number, strict=True))
    return {kind: (name, name.replace("_k_", "_v_")) for kind, name in chosen.items()}


def signature_arguments(
    config: DrafterConfig,
    inputs: Mapping[str, NDArray[Any]],
    *,
    names: Mapping[str, tuple[str, str]] | None = None,
    kv_scales: Mapping[str, float] | None = None,
    device: torch.device | str = "cpu",
) -> DraftArguments:
    """Arguments of the reference drafter from one call's signature inputs.

    Args:
        config: the drafter's geometry.
        inputs: by name: ``activations`` f32 [1, 1, 2 · base width], ``input_pos`` i32 [1], ``mask`` bool
            [1, 1, 1, slots], ``kv_cache_k_N`` [1, KV heads, slots, head_dim] and ``kv_cache_v_N`` [1, KV
            heads, head_dim, slots]. ``param_tensor`` repeats the position and is not needed.
        names: layer type → (K name, V name); by default :func:`kv_names`.
        kv_scales: cache name → scale, for caches of INT8 with zero point 0.
        device: where the tensors go.

    Raises:
        DrafterError: an input is missing, or an integer cache has no scale.
    """
    for name in ("activations", "input_pos", "mask"):
        if name not in inputs:
            raise DrafterError(
                f"expected a signature input {name}, found {sorted(inputs)}; give the inputs of mtp_drafter"
            )

    def cache(name: str) -> Tensor:
        array = inputs[name]
        scale = (kv_scales or {}).get(name)
        if np.issubdtype(array.dtype, np.integer) and scale is None:
            raise DrafterError(f"{name}: expected a scale for an integer cache, found none; pass it in kv_scales")
        values = torch.from_numpy(np.array(array, dtype=np.float32)).to(device)
        return values if scale is None else values * scale

    activations = torch.from_numpy(np.array(inputs["activations"], dtype=np.float32)).to(device)
    embedding, hidden = activations.chunk(2, dim=-1)
    pairs = names or kv_names(config, inputs)
    input_pos = torch.from_numpy(np.array(inputs["input_pos"], dtype=np.int64)).to(device)
    mask = torch.from_numpy(np.array(inputs["mask"], dtype=np.bool_)).to(device)
    return DraftArguments(
        embedding=embedding,
        hidden=hidden,
        shared_kv={kind: (cache(k), cache(v).transpose(2, 3)) for kind, (k, v) in pairs.items()},
        position_ids=input_pos.reshape(1, 1),
        masks=signature_masks(config, mask, input_pos),
    )


def signature_masks(config: DrafterConfig, mask: Tensor, input_pos: Tensor) -> dict[str, Tensor]:
    """Masks as the LiteRT ``mtp_drafter`` signature applies them.

    The ``mask`` input serves the full layers as it is. A sliding layer sees slot ``a`` when it is also within
    ``input_pos - window < a <= input_pos``; the graph compares ``input_pos`` with two constant ranges,
    from 0 and from the window.

    Args:
        config: gives the layer types and their windows.
        mask: bool [1, 1, 1, slots].
        input_pos: integer [1].

    Returns:
        layer type → bool [1, 1, slots].
    """
    slots = torch.arange(mask.shape[-1], device=mask.device)[None]
    masks = position_masks(config, dict.fromkeys(config.kv_layers, slots), input_pos.long().reshape(1, 1))
    return {layer_type: visible & mask.reshape(1, 1, -1) for layer_type, visible in masks.items()}
