"""The shape of an EAGLE-3 head, the other kind of drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mtp_extract.errors import DrafterError

FUSED = 3
"""Hidden states of the base that are fused: a low, a middle and a high one."""


@dataclass(frozen=True)
class Eagle3Config:
    """Everything there is to say of an EAGLE-3 head, beside its weights."""

    backbone_hidden_size: int  # width of the base, whose states are fused
    hidden_size: int  # width of the head
    intermediate_size: int  # width of the feed-forward block
    vocab_size: int  # tokens of the base
    draft_vocab_size: int  # rows of the LM head: tokens that it can propose
    num_heads: int  # query heads
    num_kv_heads: int  # heads of K and V, each for as many query heads
    head_dim: int  # width of one head; heads times this need not be ``hidden_size``
    base_layers: tuple[int, ...]
    """Whose incoming hidden states are fused, counted from 0, ascending. The number of the base's layers stands for
    what leaves the last one, before the final norm. vLLM counts so; SGLang and SpecForge name the layer before, whose
    output that is."""
    rope_theta: float  # base of the frequencies; the whole head is rotated
    rms_norm_eps: float = 1e-6
    fc_norm: bool = False  # each state is normed by itself before they are fused
    norm_before_fc: bool = False  # they are normed together
    norm_before_residual: bool = False  # the residual stream begins after the norm of the fused state, not before it
    norm_output: bool = False  # what is fed back in the next step is taken after the final norm, not before it
    own_embedding: bool = False  # it embeds tokens by a table of its own, and not by the base's
    max_position_embeddings: int | None = None  # longest context it was made for, in tokens; None when not recorded
    base: str | None = None  # name of the base it was trained for, as the Hub has it; None when not recorded

    def __post_init__(self) -> None:
        for expected in self._wrong():
            raise DrafterError(f"expected {expected}")

    def _wrong(self) -> Iterator[str]:
        ids = self.base_layers
        width = self.hidden_size
        kv = (self.num_kv_heads, self.head_dim)
        if self.num_heads % kv[0] or kv[1] % 2:
            heads = f"KV heads that divide the {self.num_heads} query heads, of an even width"
            yield f"{heads}, found {kv[0]} of {kv[1]}. Check num_key_value_heads and head_dim in the config."
        if (draft_vocab := self.draft_vocab_size) > self.vocab_size:
            most = f"at most the base's {self.vocab_size} tokens"
            yield f"{most}, found a draft_vocab_size of {draft_vocab}. Check the config."
        if len(ids) != FUSED or any(a >= b for a, b in pairwise(ids)) or ids[0] < 0:
            yield (
                f"{FUSED} different layers of the base, the lowest first, found {list(ids)}: engines sort them and "
                "read each once, so that fc would not fit. Check eagle_aux_hidden_state_layer_ids."
            )
        if not self.own_embedding and width != self.backbone_hidden_size:
            beside = f"in a head of width {width} beside a base of {self.backbone_hidden_size}"
            yield f"a table of embeddings {beside}, found none: the base's does not fit."

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def reduced(self) -> bool:
        """Whether it proposes only some of the base's tokens."""
        return self.draft_vocab_size < self.vocab_size

    def as_json(self) -> dict[str, Any]:
        """For ``extraction.json`` and ``--json``."""
        return {**dataclasses.asdict(self), "base_layers": list(self.base_layers)}
