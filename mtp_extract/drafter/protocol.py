"""What a drafter asks of its base, and what the loop and the measurements know of a drafter.

Tensors are over [batch, queries]. A *query* is a pending token, the last one known, to draft from: in generation one a
sequence, or one for every branch of a tree; in teacher forcing one for every position of a text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

KV = tuple[Tensor, Tensor]  # K and V, each [batch, KV heads, slots, head_dim]; K already rotated
Embed = Callable[[Tensor], Tensor]  # tokens [...] → [..., width], the base's embedding, times the root of its width


def gather_positions(part: Tensor, places: Tensor) -> Tensor:
    """[batch, queries, width] of ``part`` [batch, length, width], at ``places``, int64 [batch, queries]."""
    return part.gather(1, places.to(part.device)[..., None].expand(-1, -1, part.shape[2]))


@dataclass(frozen=True)
class BaseRequirements:
    """What a drafter reads of its base. A base that cannot give it is not the one the drafter was made for."""

    vocab_size: int  # tokens, the base's own
    width: int  # of the base's embeddings and hidden states
    layers: tuple[int, ...] = ()
    """The hidden states that enter these layers of the base, counted from 0; the number of its layers stands for what
    leaves the last one, before the final norm."""
    shared_kv: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Layer type → (KV heads, head_dim) of the base's K and V it looks at."""


@dataclass(frozen=True)
class BaseOutput:
    """Tokens that the base was fed in one forward, and what it knows there.

    Right after the prompt these are the prompt's; then those of a round that stand. In teacher forcing they are whole
    texts, shorter ones padded at their ends.
    """

    tokens: Tensor  # int64 [batch, fed]
    positions: Tensor  # int64 [batch, fed], one more from each to the next
    hidden: Tensor  # [batch, fed, width], after the final norm
    layers: Mapping[int, Tensor]  # layer → [batch, fed, width], the hidden state that enters it
    # layer type → the base's K and V, slots in order of position; the last is that of the last token
    shared_kv: Mapping[str, KV] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundStart:
    """What the base knows when a round starts: everything up to the token before the pending one."""

    fed: BaseOutput  # since the last round: at first the whole prompt
    positions: Tensor  # int64 [batch, queries], where pending tokens stand, each right after one that was fed
    embed: Embed
    previous: Any = None  # what :meth:`Drafter.start` returned last; None in the first round

    @property
    def hidden(self) -> Tensor:
        """[batch, queries, width], the state after the final norm that predicted each pending token."""
        return gather_positions(self.fed.hidden, self.positions - 1 - self.fed.positions[:, :1])


class Drafter(Protocol):
    """A small model that proposes the tokens its base will say. Only it looks into the states that it makes."""

    @property
    @abstractmethod
    def needs(self) -> BaseRequirements:
        """What it reads of its base."""

    @abstractmethod
    def start(self, base: RoundStart) -> Any:
        """The state that a round begins with; its ``fork(width)`` goes on from each query ``width`` times."""

    @abstractmethod
    def step(self, state: Any, token: Tensor) -> tuple[Tensor, Any]:
        """One draft step.

        Args:
            state: from :meth:`start`, or from the step before.
            token: int64 [batch, queries], the pending token, then one that was drafted last.

        Returns:
            Logits of the token that follows, [batch, queries, vocabulary], and the state of the next step.
        """
