"""What a drafter asks of its base, and what the speculative loop asks of a drafter.

The loop and the measurements know drafters by this alone. Tensors are over [batch, queries]: a *query* is a pending
token, the last one known, to draft from. Generation has one query a sequence, and where it drafts a tree one for every
branch; teacher forcing has one for every position of a text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

KV = tuple[Tensor, Tensor]
"""K and V, each [batch, KV heads, slots, head_dim]; K already rotated."""

DraftState = Any
"""Where a round of drafting stands; only the drafter that made it looks inside."""


@dataclass(frozen=True)
class Needs:
    """What a drafter reads of its base. A base that cannot give it is not the one the drafter was made for."""

    vocab_size: int  # tokens, the base's own
    width: int  # of the base's embeddings and hidden states
    embedding: bool = True  # the base's embedding of every drafted token, times sqrt(width)
    final_hidden: bool = True  # the state after the final norm that predicted the pending token
    layers: tuple[int, ...] = ()
    """The hidden states that enter these layers of the base, counted from 0; the number of its layers stands for what
    leaves the last one, before the final norm."""
    shared_kv: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Layer type → (KV heads, head_dim) of the base's K and V it looks at."""
    own_cache: bool = False  # it keeps something of its own from round to round: BaseState.previous


@dataclass(frozen=True)
class Fed:
    """Tokens the base was fed in one forward, and its states there.

    Rejected drafts are among them, and padding after a shorter prompt: both stand at the pending token's position or
    later.
    """

    tokens: Tensor  # int64 [batch, fed]
    positions: Tensor  # int64 [batch, fed]
    hidden: Tensor  # [batch, fed, width], after the final norm
    layers: Mapping[int, Tensor]  # layer → [batch, fed, width], the hidden state that enters it

    def keep(self, rows: Tensor) -> Fed:
        """These sequences alone, int64 [kept]."""
        return self._picked(lambda part: part[rows.to(part.device)], self.positions[rows])

    def along(self, path: Tensor, positions: Tensor) -> Fed:
        """Of a tree, one way down: the nodes ``path`` [batch, depth + 1], at ``positions``."""

        def picked(part: Tensor) -> Tensor:
            index = path.to(part.device)
            return part.gather(1, index[..., None].expand(-1, -1, part.shape[2]) if part.ndim > 2 else index)

        return self._picked(picked, positions)

    def _picked(self, pick: Callable[[Tensor], Tensor], positions: Tensor) -> Fed:
        layers = {layer: pick(states) for layer, states in self.layers.items()}
        return Fed(pick(self.tokens), positions, pick(self.hidden), layers)


@dataclass(frozen=True)
class BaseState:
    """What the base knows when a round starts: everything up to the token before the pending one."""

    positions: Tensor  # int64 [batch, queries], where the pending token stands; at least 1
    hidden: Tensor  # [batch, queries, width], the state after the final norm that predicted it
    embed: Callable[[Tensor], Tensor]  # tokens [...] → [..., width], the base's embedding, scaled
    shared_kv: Mapping[str, KV]  # layer type → the base's K and V, of every layer type that is needed at least
    slot_positions: Mapping[str, Tensor]
    """Layer type → int64 [batch, slots], the position whose K and V a slot holds; later than any query where it holds
    none."""
    fed: Fed  # what the base was fed since the last round: at first the whole prompt
    previous: DraftState = None
    """What :meth:`Drafter.start` returned last; None in the first round, and for a drafter without a cache."""
    rows: Sequence[int] | None = None  # which sequences of ``previous`` are still there; None: all


class Drafter(Protocol):
    """A small model that proposes the tokens its base will say."""

    @property
    def needs(self) -> Needs:
        """What it reads of its base."""

    def start(self, base: BaseState) -> DraftState:
        """Begin a round."""

    def step(self, state: DraftState, token: Tensor) -> tuple[Tensor, DraftState]:
        """One draft step.

        Args:
            state: from :meth:`start`, or from the step before.
            token: int64 [batch, queries], the pending token, then one that was drafted last.

        Returns:
            Logits of the token that follows, [batch, queries, vocabulary], and the state of the next step.
        """

    def fork(self, state: DraftState, parents: Tensor) -> DraftState:
        """Go on from some queries of a step, from each as often as a tree branches there.

        Args:
            parents: int64 [batch, branches], for each branch the query it comes from.

        Returns:
            The state of the next step, whose queries are the branches.
        """
