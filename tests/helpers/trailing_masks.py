"""The masks transformers builds for its assistant: the yardstick of parity with it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mtp_extract.architecture.config import DrafterConfig

__all__ = ["trailing_masks"]


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
