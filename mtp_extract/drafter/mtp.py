"""The MTP drafter of Gemma 4.

In each step the embedding of the last token (from the *base*, times the root of the base's width) and the base's hidden
state that predicted it go in side by side, embedding first. A few layers without K and V of their own attend to the
base's cache. Out come logits of the next token, and a state of the base's width that takes the place of the hidden
state in the next step.

Weights and activations may be BF16; every RMSNorm, the rotation, attention logits, softmax and soft cap are computed in
F32. FP16 is refused when loading: the residual stream of Gemma 4 exceeds its range. Every matrix is an ``nn.Linear``
under the name of its role, so that PyTorch's forward hooks can see and replace its input and output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtp_extract.architecture.config import DrafterConfig, LayerConfig, OrderedHeadConfig
from mtp_extract.drafter.network import Angles, DrafterNetwork, RMSNorm, compute_angles, rotate
from mtp_extract.drafter.protocol import KV, BaseRequirements, Embed, RoundStart

_ROWS_AT_ONCE = 1 << 18  # rows of the head to gather at once: as many as Gemma 4's vocabulary


@dataclass(frozen=True)
class Convention:
    """The position of a round's queries and the slots they see, in every step; n is the pending token's position.

    The base has seen positions up to n - 1, and no query sees a later slot. transformers' own loop leaves stale slots
    visible after a rejection, as older LiteRT-LM does at n. Here a slot is either verified or masked.
    """

    position_offset: int  # the query position is n plus this
    window_extra: int  # slots that a sliding query sees before its window
    unwritten: int = 0  # newest slots that are not seen: 0 except for an engine that writes them too late


TRANSFORMERS = Convention(position_offset=0, window_extra=1)
"""transformers 5.22: position n, the last window + 1 slots."""

LITERT = Convention(position_offset=-1, window_extra=0)
"""Newer LiteRT-LM: position n - 1, the last window slots. The default, since the drafter comes from there."""


class OrderedHeadNetwork(nn.Module):
    """Computes logits of the tokens of the nearest centroids only; all other tokens get the least of these minus 1.

    ``token_ordering`` lists the tokens cluster by cluster. As in transformers the least logit is taken over the whole
    call, so the *unselected* logits depend on the rest of the batch; the argmax does not.
    """

    def __init__(self, config: DrafterConfig, head: OrderedHeadConfig) -> None:
        super().__init__()
        self.head = head
        self.vocab_size = config.vocab_size
        self.centroids = nn.Linear(config.hidden_size, head.num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.zeros(config.vocab_size, dtype=torch.long))
        self.token_ordering: Tensor

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        nearest = self.centroids(x).topk(self.head.top_k, dim=-1).indices  # [B, L, k]
        tokens = self.token_ordering.view(self.head.num_centroids, -1)[nearest].flatten(-2)  # [B, L, k · V/C]
        at_once = max(1, _ROWS_AT_ONCE // tokens.shape[-1])
        parts = zip(torch.split(tokens.flatten(0, -2), at_once), torch.split(x.flatten(0, -2), at_once), strict=True)
        # Every query gathers its own rows; those of all queries at once would not fit into memory.
        selected = torch.cat([(weight[rows] @ query[..., None]).squeeze(-1) for rows, query in parts])
        selected = selected.view(tokens.shape)
        rest = (selected.min() - 1.0).expand(*x.shape[:-1], self.vocab_size)
        return rest.scatter(-1, tokens, selected)


class AttentionInput(NamedTuple):
    """K, V, mask and rotation of one kind of layer; computed once per round, since its steps share them."""

    keys: Tensor  # F32 [batch, KV heads, slots, head_dim]
    values: Tensor  # the same
    bias: Tensor | None
    """F32 [batch, 1, rows, slots], added to the logits: 0 where a slot is visible. One row serves all queries and
    heads; else there is one for each query of each head of a group, heads before queries. None: all are visible."""
    angles: Angles  # of the queries


class MtpLayer(nn.Module):
    """h += norm(attention(norm(h))); x = norm(h); h += norm(down(gelu(gate(x)) · up(x))); h *= scalar."""

    def __init__(self, config: DrafterConfig, layer: LayerConfig) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.approximate = "tanh" if config.hidden_activation == "gelu_pytorch_tanh" else "none"
        width = config.hidden_size
        inner = config.intermediate_size
        heads = config.num_heads * layer.head_dim
        self.pre_attention_norm = RMSNorm(width, config.rms_norm_eps)
        self.q_proj = nn.Linear(width, heads, bias=False)
        self.q_norm = RMSNorm(layer.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(heads, width, bias=False)
        self.post_attention_norm = RMSNorm(width, config.rms_norm_eps)
        self.pre_ffw_norm = RMSNorm(width, config.rms_norm_eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.post_ffw_norm = RMSNorm(width, config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))
        self.layer_scalar: Tensor

    def attend(self, x: Tensor, view: AttentionInput) -> Tensor:
        batch, queries, _ = x.shape
        heads, width = self.layer.num_kv_heads, self.layer.head_dim
        q = rotate(self.q_norm(self.q_proj(x).view(batch, queries, -1, width)), view.angles).float()
        # All heads of a group and all queries attend to the same K and V, so they become rows of one product.
        rows = q.view(batch, queries, heads, -1, width).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, Hkv, G · L, D]
        mixed = functional.scaled_dot_product_attention(
            rows, view.keys, view.values, attn_mask=view.bias, scale=self.config.attention_scale
        )
        mixed = mixed.view(batch, heads, -1, queries, width).permute(0, 3, 1, 2, 4)  # [B, L, Hkv, G, D]
        out: Tensor = self.o_proj(mixed.reshape(batch, queries, -1).type_as(x))
        return out

    def forward(self, h: Tensor, view: AttentionInput) -> Tensor:
        h = h + self.post_attention_norm(self.attend(self.pre_attention_norm(h), view))
        x = self.pre_ffw_norm(h)
        gated = functional.gelu(self.gate_proj(x), approximate=self.approximate) * self.up_proj(x)
        h = h + self.post_ffw_norm(self.down_proj(gated))
        return h * self.layer_scalar


@dataclass(frozen=True)
class MtpState:
    """The state of a round between two steps; ``views`` never change."""

    embed: Embed
    hidden: Tensor
    """[batch, queries, base width]: the base's state after its final norm, after the first step the projected state."""
    views: tuple[AttentionInput, ...]  # of each layer

    def fork(self, width: int) -> MtpState:
        """Repeat each query ``width`` times, each with its own projected state."""
        return replace(self, hidden=self.hidden.repeat_interleave(width, 1))


class MtpDrafter(DrafterNetwork):
    """The network of an MTP drafter, with the :class:`~mtp_extract.drafter.protocol.Drafter` protocol.

    Load one with :func:`mtp_extract.drafter.load.load_drafter`.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.pre_projection = nn.Linear(2 * config.backbone_hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(MtpLayer(config, layer) for layer in config.layers)
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_projection = nn.Linear(config.hidden_size, config.backbone_hidden_size, bias=False)
        self.ordered_head = OrderedHeadNetwork(config, config.ordered_head) if config.ordered_head else None

    def logits(self, h: Tensor) -> Tensor:
        """Compute soft-capped logits, […, vocabulary], of ``h`` […, width] after the final norm."""
        logits: Tensor = self.ordered_head(h, self.lm_head.weight) if self.ordered_head else self.lm_head(h)
        if (cap := self.config.final_logit_softcap) is not None:
            logits = (torch.tanh(logits.float() / cap) * cap).type_as(logits)
        return logits

    @property
    def needs(self) -> BaseRequirements:
        config = self.config
        return BaseRequirements(
            vocab_size=config.vocab_size,
            width=config.backbone_hidden_size,
            shared_kv={kind: (layer.num_kv_heads, layer.head_dim) for kind, layer in config.kv_layers.items()},
        )

    def start(self, base: RoundStart, convention: Convention = LITERT) -> MtpState:
        """Begin a round. K and V become F32; embedding and hidden state take the weights' dtype."""
        newest = (base.positions - 1 - convention.unwritten)[..., None]  # [B, L, 1]
        masks = {}
        for kind, layer in self.config.kv_layers.items():
            distances = torch.arange(base.fed.shared_kv[kind][0].shape[2], device=newest.device).flip(0)
            slots = base.fed.positions[:, -1:, None] - distances  # the position of each slot, [B, 1, S]
            masks[kind] = slots <= newest
            if layer.sliding_window is not None:
                masks[kind] &= slots > newest - layer.sliding_window - convention.window_extra
        views = self.build_views(base.fed.shared_kv, base.positions + convention.position_offset, masks)
        return MtpState(base.embed, base.hidden.to(self.pre_projection.weight), views)

    def advance(self, state: MtpState, token: Tensor) -> tuple[Tensor, MtpState]:
        h = self.pre_projection(torch.cat((state.embed(token).to(state.hidden), state.hidden), dim=-1))
        for layer, view in zip(self.layers, state.views, strict=True):
            h = layer(h, view)
        h = self.final_norm(h)
        return h, replace(state, hidden=self.post_projection(h))

    def build_views(
        self, shared_kv: Mapping[str, KV], position_ids: Tensor, masks: Mapping[str, Tensor] | None = None
    ) -> tuple[AttentionInput, ...]:
        """Build each layer's attention input; layers that are alike share one.

        Args:
            position_ids: of the queries, integers [batch, queries].
            masks: bool, broadcastable to [batch, queries, slots], True = visible; None makes all slots visible.
        """
        device = self.pre_projection.weight.device
        view_of: dict[LayerConfig, AttentionInput] = {}
        for layer in dict.fromkeys(self.config.layers):
            keys, values = (part.to(device, torch.float32).contiguous() for part in shared_kv[layer.layer_type])
            heads_a_group = self.config.num_heads // layer.num_kv_heads
            bias = None if masks is None else _build_bias(masks[layer.layer_type].to(device), heads_a_group)
            by = compute_angles(position_ids.to(device), layer.head_dim, layer.rope)
            view_of[layer] = AttentionInput(keys, values, bias, by)
        return tuple(view_of[layer] for layer in self.config.layers)


def _build_bias(visible: Tensor, heads_a_group: int) -> Tensor:
    """Build :attr:`AttentionInput.bias` from ``visible``, bool [batch, 1 or queries, slots]."""
    bias = torch.where(visible[:, None], 0.0, torch.finfo(torch.float32).min)
    return bias.repeat(1, 1, heads_a_group, 1) if bias.shape[2] > 1 else bias


@dataclass(frozen=True)
class FaultyDrafter:
    """An MTP drafter that is fed by another runtime's convention, or wrongly on purpose."""

    drafter: MtpDrafter
    convention: Convention = LITERT
    change: Callable[[RoundStart], RoundStart] = lambda base: base  # applied to the start of every round
    every_step: Callable[[MtpState], MtpState] = lambda state: state  # applied to the state before every step
    layers: tuple[int, ...] = ()  # of the base, whose incoming states ``change`` needs

    @property
    def needs(self) -> BaseRequirements:
        return replace(self.drafter.needs, layers=self.layers)

    def start(self, base: RoundStart) -> MtpState:
        return self.drafter.start(self.change(base), self.convention)

    def step(self, state: MtpState, token: Tensor) -> tuple[Tensor, MtpState]:
        return self.drafter.step(self.every_step(state), token)
