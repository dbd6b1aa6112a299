"""Which of the base's K and V slots a draft query may see.

Runtimes disagree at the edge of the sliding window:

===========================  ==================  ======================================================
source                       query position      slots a sliding layer sees (``n`` = newest one visible)
===========================  ==================  ======================================================
transformers 5.22            index of the token  ``n - window … n``: window + 1, counted from the last slot
LiteRT ``mtp_drafter``       ``input_pos``       ``input_pos - window < slot <= input_pos``
===========================  ==================  ======================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mtp_extract.architecture.config import DrafterConfig


@dataclass(frozen=True)
class Convention:
    """Where a round's queries stand. n is the position of the pending token, the last one known.

    The base has seen positions up to n - 1, and a query never sees a later slot. transformers' own loop leaves stale
    ones in view after a rejection, as older LiteRT-LM does at n. Here a slot is either verified or masked.
    """

    position_offset: int  # the query position is n plus this, in every step of the round
    window_extra: int  # slots a sliding query sees beyond its window, counted back from n - 1


TRANSFORMERS = Convention(position_offset=0, window_extra=1)
"""transformers 5.22: position n, the last window + 1 slots."""

LITERT = Convention(position_offset=-1, window_extra=0)
"""Newer LiteRT-LM: position n - 1, the last window slots. The default, as the drafter is from there."""


def position_masks(
    config: DrafterConfig, slot_positions: Mapping[str, Tensor], newest: Tensor, *, window_extra: int = 0
) -> dict[str, Tensor]:
    """Masks from the absolute position each slot holds; slots need not be in order of position.

    Args:
        config: gives the layer types and their windows.
        slot_positions: layer type → int64 [batch, slots], the position stored in each slot; a slot never
            written holds a position greater than any query's.
        newest: int64 [batch, queries], the newest position each query may see.
        window_extra: slots a sliding query sees beyond its window (transformers: 1).

    Returns:
        layer type → bool [batch, queries, slots], True = visible.
    """
    masks = {}
    for layer_type, layer in config.kv_layers.items():
        positions = slot_positions[layer_type][:, None, :]
        last = newest[:, :, None].to(positions.device)
        masks[layer_type] = positions <= last
        if layer.sliding_window is not None:
            masks[layer_type] &= positions > last - layer.sliding_window - window_extra
    return masks
