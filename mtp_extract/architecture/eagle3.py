"""The config of EAGLE-3 heads, the other kind of drafter, and their architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.roles import Shapes, list_roles, resolve_shapes
from mtp_extract.errors import DrafterError, format_count

EAGLE3 = "eagle3"
"""Name of the architecture, and of the format that its training tools write."""

FUSED = 3
"""Hidden states of the base that are fused: a low, a middle and a high one."""


@dataclass(frozen=True)
class Eagle3Config:
    """The complete config of an EAGLE-3 head."""

    backbone_hidden_size: int  # width of the base model
    hidden_size: int  # width of the head
    intermediate_size: int  # width of the feed-forward block
    vocab_size: int  # tokens of the base
    draft_vocab_size: int  # rows of the LM head: tokens that the head can draft
    num_heads: int  # query heads
    num_kv_heads: int  # heads of K and V; each serves equally many query heads
    head_dim: int  # width of one attention head; num_heads times this need not be hidden_size
    base_layers: tuple[int, ...]
    """The layers of the base whose input hidden states are fused, from 0, ascending. The number of layers stands for
    the output of the last one, before the final norm. vLLM counts in this way; SGLang and SpecForge name the layer
    before, whose output the state is."""
    rope_theta: float  # base of the frequencies; all of a head is rotated
    rms_norm_eps: float = 1e-6
    fc_norm: bool = False  # each state has a norm of its own before they are fused
    norm_before_fc: bool = False  # one norm of all three states before they are fused
    norm_before_residual: bool = False  # the residual stream starts after the norm of the fused state
    norm_output: bool = False  # the state for the next step is taken after the final norm
    own_embedding: bool = False  # whether it has a token embedding, instead of using the base's
    max_position_embeddings: int | None = None  # longest context in tokens; None if not recorded
    base: str | None = None  # Hub name of the base it was trained for; None if not recorded

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise DrafterError(
                f"expected KV heads that divide the {self.num_heads} query heads, of an even width, found "
                f"{self.num_kv_heads} of {self.head_dim}. Check num_key_value_heads and head_dim in the config."
            )
        if self.draft_vocab_size > self.vocab_size:
            raise DrafterError(
                f"expected at most the base's {self.vocab_size} tokens, found a draft_vocab_size of "
                f"{self.draft_vocab_size}. Check the config."
            )
        ids = self.base_layers
        if len(ids) != FUSED or any(a >= b for a, b in pairwise(ids)) or ids[0] < 0:
            raise DrafterError(
                f"expected {FUSED} different layers of the base, the lowest first, found {list(ids)}: engines sort "
                "them and read each once, so that fc would not fit. Check eagle_aux_hidden_state_layer_ids."
            )
        if not self.own_embedding and self.hidden_size != self.backbone_hidden_size:
            raise DrafterError(
                f"expected a table of embeddings in a head of width {self.hidden_size} beside a base of "
                f"{self.backbone_hidden_size}, found none: the base's does not fit."
            )

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def reduced(self) -> bool:
        """Whether it drafts only some of the base's tokens."""
        return self.draft_vocab_size < self.vocab_size

    def as_json(self) -> dict[str, Any]:
        """Return one value per field, for ``extraction.json`` and ``--json``."""
        return {**dataclasses.asdict(self), "base_layers": list(self.base_layers)}


def list_eagle3_shapes(config: Eagle3Config) -> Shapes:
    """Return the roles of an EAGLE-3 head, in order, each with the shape of its tensor."""
    sizes = {
        "hidden": config.hidden_size,
        "pair": 2 * config.hidden_size,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "draft_vocab": config.draft_vocab_size,
        "kv": config.num_kv_heads * config.head_dim,
        "backbone": config.backbone_hidden_size,
        "fused": FUSED * config.backbone_hidden_size,
    }
    has_role = {
        "embed_tokens": config.own_embedding,
        "fc_norm": config.fc_norm,
        "input_norm": config.norm_before_fc,
        "d2t": config.reduced,
    }
    roles = list_roles(config.num_layers, architecture=EAGLE3)
    roles = tuple(role for role in roles if has_role.get(role.name.split(".")[0], True))
    return resolve_shapes(roles, sizes, config.num_heads, [config.head_dim])


def describe_eagle3(geometry: Mapping[str, Any]) -> list[str]:
    """Return a line about the layer, one about widths and vocabularies, and one about the states of the base."""
    heads = (
        f"{geometry['num_heads']} heads of {geometry['head_dim']}, {format_count(geometry['num_kv_heads'], 'KV head')}"
    )
    tokens = f"{geometry['draft_vocab_size']} of {geometry['vocab_size']} tokens"
    layers = ", ".join(map(str, geometry["base_layers"]))
    return [
        f"1 layer of its own, {heads}",
        f"hidden {geometry['hidden_size']}, feed-forward {geometry['intermediate_size']}, backbone "
        f"{geometry['backbone_hidden_size']}, {tokens}",
        f"reads what enters layers {layers} of {geometry['base'] or 'its base'}",
    ]


def choose_eagle3_serving(engines: Sequence[str], geometry: Mapping[str, Any]) -> list[str]:
    """Return a block for each engine that loads the directory, and one for llama.cpp, which converts it unless the
    state for the next step is taken after the final norm.
    """
    return [f"eagle3 {engine}" for engine in (*engines, *(() if geometry.get("norm_output") else ("llama.cpp",)))]


EAGLE3_HEAD = Architecture(
    name=EAGLE3,
    title="EAGLE-3 head",
    long_title="EAGLE-3 head",
    config=Eagle3Config,
    shapes=list_eagle3_shapes,
    network="mtp_extract.drafter.eagle3:Eagle3Drafter",
    describe=describe_eagle3,
    tags=("eagle3",),
    serving=choose_eagle3_serving,
    pair_role="eagle3_head",
)
