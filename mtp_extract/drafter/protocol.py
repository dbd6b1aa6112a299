"""What a drafter asks of its base, and what the speculative loop asks of a drafter.

The loop and the measurements know drafters by this alone. Tensors are over [batch, queries]: a *query* is a pending
token, the last one known, to draft from. Generation has one query a sequence, and where it drafts a tree one for every
branch; teacher forcing has one for every position of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

KV = tuple[Tensor, Tensor]
"""K and V, each [batch, KV heads, slots, head_dim]; K already rotated."""

Embed = Callable[[Tensor], Tensor]
"""Tokens [...] → [..., width], the base's embedding, times the root of its width."""


def picked(part: Tensor, queries: Tensor) -> Tensor:
    """[batch, branches, …] of ``part`` [batch, queries, …], at the places ``queries``, int64 [batch, branches]."""
    index = queries.to(part.device)
    return part.gather(1, index.view(*index.shape, *[1] * (part.dim() - 2)).expand(-1, -1, *part.shape[2:]))


@dataclass(frozen=True)
class Needs:
    """What a drafter reads of its base. A base that cannot give it is not the one the drafter was made for."""

    vocab_size: int  # tokens, the base's own
    width: int  # of the base's embeddings and hidden states
    layers: tuple[int, ...] = ()
    """The hidden states that enter these layers of the base, counted from 0; the number of its layers stands for what
    leaves the last one, before the final norm."""
    shared_kv: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Layer type → (KV heads, head_dim) of the base's K and V it looks at."""


@dataclass(frozen=True)
class Fed:
    """Tokens that the base was fed in one forward, and what it knows there.

    Right after the prompt these are the prompt's; then those of a round that stand. In teacher forcing they are whole
    texts, shorter ones padded at their ends.
    """

    tokens: Tensor  # int64 [batch, fed]
    positions: Tensor  # int64 [batch, fed]
    hidden: Tensor  # [batch, fed, width], after the final norm
    layers: Mapping[int, Tensor]  # layer → [batch, fed, width], the hidden state that enters it
    # layer type → the base's K and V, slots in order of position; the last is that of the last token
    shared_kv: Mapping[str, KV] = field(default_factory=dict)


@dataclass(frozen=True)
class BaseState:
    """What the base knows when a round starts: everything up to the token before the pending one."""

    positions: Tensor  # int64 [batch, queries], where the pending token stands; at least 1
    hidden: Tensor  # [batch, queries, width], the state after the final norm that predicted it
    embed: Embed
    slot_positions: Mapping[str, Tensor]  # layer type → int64 [batch, slots], the position whose K and V a slot holds
    fed: Fed  # what the base was fed since the last round: at first the whole prompt
    previous: Any = None  # what :meth:`Drafter.start` returned last; None in the first round

    @classmethod
    def after(cls, fed: Fed, positions: Tensor, embed: Embed, previous: Any = None) -> BaseState:
        """At pending tokens int64 [batch, queries], each right after one of those that were ``fed``."""
        last = fed.positions[:, -1:]
        slots = {
            kind: last - torch.arange(keys.shape[2] - 1, -1, -1, device=last.device)
            for kind, (keys, _) in fed.shared_kv.items()
        }
        hidden = picked(fed.hidden, positions - 1 - fed.positions[:, :1])
        return cls(positions, hidden, embed, slots, fed, previous)


class DraftState(Protocol):
    """Where a round of drafting stands; only the drafter that made it looks inside."""

    def fork(self, parents: Tensor) -> Any:
        """Go on from some queries of a step, from each as often as a tree branches there.

        Args:
            parents: int64 [batch, branches], for each branch the query it comes from.

        Returns:
            The state of the next step, whose queries are the branches.
        """


class Drafter(Protocol):
    """A small model that proposes the tokens its base will say."""

    @property
    def needs(self) -> Needs:
        """What it reads of its base."""

    def start(self, base: BaseState) -> Any:
        """Begin a round: a :class:`DraftState`."""

    def step(self, state: Any, token: Tensor) -> tuple[Tensor, Any]:
        """One draft step.

        Args:
            state: from :meth:`start`, or from the step before.
            token: int64 [batch, queries], the pending token, then one that was drafted last.

        Returns:
            Logits of the token that follows, [batch, queries, vocabulary], and the state of the next step.
        """
