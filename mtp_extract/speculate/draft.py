"""Drafting: the arguments of a round, and the steps of it. Shared by generation and by teacher forcing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mtp_extract.drafter import DraftArguments, Drafter, position_masks
from mtp_extract.speculate.base import Base

__all__ = ["LITERT", "TRANSFORMERS", "Convention", "Transform", "draft_step", "round_arguments"]

Transform = Callable[[DraftArguments, int], DraftArguments]
"""Changes the arguments of a draft step; gets them and the step, counted from 0. For controls."""


@dataclass(frozen=True)
class Convention:
    """Where a round's queries stand. n is the position of the pending token, the last one known.

    The base has seen positions up to n - 1, and a query never sees a later slot. transformers' own loop
    leaves stale ones in view after a rejection (one at n; in sliding layers, once the context exceeds the
    window, one for each rejected draft), as older LiteRT-LM does at n. Here a slot is either verified or
    masked.

    Attributes:
        position_offset: the query position is n plus this, in every step of the round.
        window_extra: slots a sliding query sees beyond its window, counted back from n - 1.
    """

    position_offset: int
    window_extra: int


TRANSFORMERS = Convention(position_offset=0, window_extra=1)
"""transformers 5.22: position n, the last window + 1 slots."""

LITERT = Convention(position_offset=-1, window_extra=0)
"""Newer LiteRT-LM: position n - 1, the last window slots. The default, as the drafter is from there."""


def round_arguments(
    base: Base,
    drafter: Drafter,
    convention: Convention,
    pending: Tensor,
    pending_positions: Tensor,
    hidden: Tensor,
    shared_kv: Mapping[str, tuple[Tensor, Tensor]],
    slot_positions: Mapping[str, Tensor],
) -> DraftArguments:
    """The arguments of a round's first step.

    Args:
        base: embeds the pending tokens.
        drafter: says which layer types and windows there are, and where the arguments go.
        convention: position and extent.
        pending: int64 [batch, queries], the last known token of each query.
        pending_positions: int64 [batch, queries], where that token stands (n); at least 1.
        hidden: [batch, queries, width], the base's state that predicted it, after the final norm.
        shared_kv: layer type → K and V.
        slot_positions: layer type → int64 [batch, slots].
    """
    kinds = drafter.config.kv_layers
    arguments = DraftArguments(
        embedding=base.embed(pending),
        hidden=hidden,
        shared_kv={kind: shared_kv[kind] for kind in kinds},
        position_ids=pending_positions + convention.position_offset,
        masks=position_masks(
            drafter.config, slot_positions, pending_positions - 1, window_extra=convention.window_extra
        ),
    )
    weight = drafter.pre_projection.weight
    return arguments.to(weight.device, weight.dtype)


def draft_step(
    drafter: Drafter, arguments: DraftArguments, step: int, transform: Transform | None
) -> tuple[Tensor, DraftArguments]:
    """One step: logits [batch, queries, vocabulary], and the next step's arguments but for the embedding.

    Only the hidden state moves on, to the drafter's own projection. Position, K and V stay.
    """
    logits, projected = drafter(*(transform(arguments, step) if transform else arguments))
    return logits, dataclasses.replace(arguments, hidden=projected)
