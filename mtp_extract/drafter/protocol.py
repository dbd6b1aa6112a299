"""The interface between a drafter, its base and the draft loop.

Tensors have the shape [batch, queries]. A *query* is a pending token, the last known token, from which drafting starts:
in generation there is one per sequence, or one per branch of a tree; in teacher forcing one per position of a text.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

KV = tuple[Tensor, Tensor]  # K and V, each [batch, KV heads, slots, head_dim]; K is rotated
Embed = Callable[[Tensor], Tensor]  # tokens [...] → the base's embeddings times √width, [..., width]


def gather_positions(part: Tensor, places: Tensor) -> Tensor:
    """Gather [batch, queries, width] from ``part`` [batch, length, width] at ``places``, int64 [batch, queries]."""
    return part.gather(1, places.to(part.device)[..., None].expand(-1, -1, part.shape[2]))


@dataclass(frozen=True)
class BaseRequirements:
    """What a drafter reads from its base. A base that lacks it is not the one that the drafter was made for."""

    vocab_size: int  # of the base
    width: int  # of the base's embeddings and hidden states
    layers: tuple[int, ...] = ()
    """Layers of the base, counted from 0, whose incoming hidden states are read; the number of layers stands for the
    output of the last one, before the final norm."""
    shared_kv: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Layer type → (KV heads, head_dim) of the base's K and V that are read."""


@dataclass(frozen=True)
class BaseOutput:
    """Tokens that the base was fed in one forward, and its states there.

    First the tokens of the prompt, then the accepted tokens of each round. In teacher forcing they are whole texts,
    shorter ones padded at the end.
    """

    tokens: Tensor  # int64 [batch, fed]
    positions: Tensor  # int64 [batch, fed], consecutive
    hidden: Tensor  # [batch, fed, width], after the final norm
    layers: Mapping[int, Tensor]  # layer → [batch, fed, width], the hidden state that enters it
    # layer type → the base's K and V, slots in order of position up to the last token
    shared_kv: Mapping[str, KV] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundStart:
    """The base's outputs when a round starts: everything up to the token before the pending one."""

    fed: BaseOutput  # since the last round; in the first round the whole prompt
    positions: Tensor  # int64 [batch, queries], of the pending tokens, each right after a token that was fed
    embed: Embed
    previous: Any = None  # what :meth:`Drafter.start` returned last; None in the first round

    @property
    def hidden(self) -> Tensor:
        """The state after the final norm that predicted each pending token, [batch, queries, width]."""
        return gather_positions(self.fed.hidden, self.positions - 1 - self.fed.positions[:, :1])


class Drafter(Protocol):
    """A small model that proposes its base's next tokens. Its states are opaque to callers."""

    @property
    @abstractmethod
    def needs(self) -> BaseRequirements:
        """What the drafter reads from its base."""

    @abstractmethod
    def start(self, base: RoundStart) -> Any:
        """Return the first state of a round; its ``fork(width)`` repeats each query ``width`` times."""

    @abstractmethod
    def step(self, state: Any, token: Tensor) -> tuple[Tensor, Any]:
        """Compute one draft step.

        Args:
            state: from :meth:`start`, or from the previous step.
            token: int64 [batch, queries], the pending token, then the token drafted last.

        Returns:
            Logits of the next token, [batch, queries, vocabulary], and the state of the next step.
        """
