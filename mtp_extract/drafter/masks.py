"""Which of the base's K and V slots a draft query may see.

A mask is a boolean tensor, True = visible, that broadcasts to [batch, queries, slots]; the model takes one
per layer type. Three sources of masks exist, and they disagree at the edge of the sliding window:

===========================  ==================  ======================================================
source                       query position      slots a sliding layer sees (``n`` = newest one visible)
===========================  ==================  ======================================================
transformers 5.22            index of the token  ``n - window … n``: window + 1, counted from the last slot
LiteRT ``mtp_drafter``       ``input_pos``       ``input_pos - window < slot <= input_pos``
===========================  ==================  ======================================================

:func:`trailing_masks` and :func:`signature_masks` reproduce the two; :func:`position_masks` is the general
form, used with caches whose slots are not in order of position.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mtp_extract.architecture.config import DrafterConfig

__all__ = ["position_masks", "signature_masks", "trailing_masks"]


def position_masks(
    config: DrafterConfig, slot_positions: Mapping[str, Tensor], newest: Tensor, *, window_extra: int = 0
) -> dict[str, Tensor]:
    """Masks from the absolute position each slot holds.

    Args:
        config: gives the layer types and their windows.
        slot_positions: layer type → int64 [batch, slots], the position stored in each slot; a slot never
            written holds a position greater than any query's.
        newest: int64 [batch, queries], the newest position each query may see.
        window_extra: slots a sliding query sees beyond its window (transformers: 1).

    Returns:
        layer type → bool [batch, queries, slots].
    """
    masks = {}
    for layer_type, layer in config.kv_layers.items():
        positions = slot_positions[layer_type][:, None, :]
        last = newest[:, :, None].to(positions.device)
        visible = positions <= last
        if layer.sliding_window is not None:
            visible = visible & (positions > last - layer.sliding_window - window_extra)
        masks[layer_type] = visible
    return masks


def trailing_masks(
    config: DrafterConfig, kv_lengths: Mapping[str, int], queries: int = 1, padding: Tensor | None = None
) -> dict[str, Tensor]:
    """Masks as transformers' ``Gemma4AssistantForCausalLM`` builds them.

    Full layers see every slot. Sliding layers see the slots whose distance from the end is within the
    window of the query's own index, ``|query - (slots - 1 - slot)| <= window``: the bidirectional window
    mask, flipped along the slots.

    Args:
        config: gives the layer types and their windows.
        kv_lengths: layer type → number of slots. Sliding K may be shorter than full K (a cut cache).
        queries: number of query positions.
        padding: bool [batch, length], True = a token; aligned with the start of the full slots and the end
            of the sliding ones. None for no padding.

    Returns:
        layer type → bool [1 or batch, queries, slots].
    """
    device = padding.device if padding is not None else None
    full_length = max(kv_lengths.values())
    masks = {}
    for layer_type, layer in config.kv_layers.items():
        slots = kv_lengths[layer_type]
        visible = torch.ones(1, queries, slots, dtype=torch.bool, device=device)
        if layer.sliding_window is not None:
            from_end = torch.arange(slots - 1, -1, -1, device=device)
            query = torch.arange(queries, device=device)
            visible = ((query[:, None] - from_end[None, :]).abs() <= layer.sliding_window)[None]
        if padding is not None:
            kept = padding[:, :full_length]
            kept = kept[:, -slots:] if layer.sliding_window is not None else kept
            visible = visible & kept[:, None, :]
        masks[layer_type] = visible
    return masks


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
