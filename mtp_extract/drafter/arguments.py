"""What one draft step reads, as one value that experiments can change field by field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftArguments:
    """The inputs of one draft step; ``drafter(*arguments)`` runs it.

    Controls are changed copies: ``dataclasses.replace(arguments, hidden=torch.zeros_like(arguments.hidden))``.
    """

    embedding: Tensor  # [batch, queries, base width], the base's embedding of the last token, times sqrt(base width)
    hidden: Tensor
    """[batch, queries, base width], the base's state after its final norm in the first step of a round, the drafter's
    projected state in later ones."""
    shared_kv: Mapping[str, tuple[Tensor, Tensor]]
    """Layer type → the base's K and V, each [batch, KV heads, slots, head_dim], K already rotated."""
    position_ids: Tensor  # integers [batch, queries]; the same in every step of a round
    masks: Mapping[str, Tensor] | None
    """Layer type → bool, broadcastable to [batch, queries, slots], True = visible; None sees every slot."""

    @property
    def embedding_and_hidden(self) -> Tensor:
        """[batch, queries, 2 · base width], the embedding first: what the pre projection reads."""
        return torch.cat((self.embedding, self.hidden), dim=-1)

    def __iter__(self) -> Iterator[object]:
        return iter((self.embedding_and_hidden, self.shared_kv, self.position_ids, self.masks))


Transform = Callable[[DraftArguments, int], DraftArguments]
"""Changes the arguments of a draft step; gets them and the step, counted from 0. For controls."""
