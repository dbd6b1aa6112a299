"""The EAGLE-3 head, whole: one layer with a cache of its own, over three hidden states of the base.

The states that enter three layers of the base at position p are fused into one, ``g[p]``. The layer reads it beside the
embedding of the token at p + 1, and says what token comes at p + 2; what comes out of it takes the place of ``g`` in
the next step. So the head runs over every position of the text, as the base does: its keys and values at p are those of
``g[p]`` and token p + 1, of positions that the base has verified, and after them those of the round's own steps.

Every flag means what the engines mean by it (:class:`~mtp_extract.architecture.eagle3.Eagle3Config`). Norms, rotation,
attention logits and softmax are computed in F32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtp_extract.architecture.config import RopeConfig
from mtp_extract.architecture.eagle3 import FUSED, Eagle3Config
from mtp_extract.drafter.network import Angles, DrafterNetwork, RMSNorm, angles, turn
from mtp_extract.drafter.protocol import KV, BaseState, Embed, Needs, picked


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads twice its width: the normed embedding, then the normed state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.embedding_norm, self.hidden_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.q_proj = nn.Linear(2 * width, queries, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.post_attention_norm = RMSNorm(width, eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def read(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """What attention reads, [..., 2 · width], of both [..., width]."""
        return torch.cat((self.embedding_norm(embedding), self.hidden_norm(hidden)), dim=-1)

    def keys_values(self, x: Tensor, by: Angles) -> KV:
        """K, rotated, and V, F32 [batch, length, KV heads, head_dim], of ``x`` [batch, length, 2 · width]."""
        shape = (*x.shape[:2], self.config.num_kv_heads, self.config.head_dim)
        return turn(self.k_proj(x).view(shape), by).float(), self.v_proj(x).view(shape).float()

    def forward(self, x: Tensor, residual: Tensor, by: Angles, cache: KV, visible: Tensor, own: KV) -> Tensor:
        """One position of every query.

        Args:
            x: of :meth:`read`, [batch, queries, 2 · width].
            residual: where the residual stream begins, [batch, queries, width].
            by: the rotation of the queries.
            cache, visible, own: as of :class:`Eagle3State`; ``own`` with this step's.

        Returns:
            [batch, queries, width], before the final norm.
        """
        config, (keys, values), (own_keys, own_values) = self.config, cache, own
        batch, queries, _ = x.shape
        q = turn(self.q_proj(x).view(batch, queries, -1, config.head_dim), by)
        q = q.view(batch, queries, config.num_kv_heads, -1, config.head_dim).float() * config.head_dim**-0.5
        before = torch.einsum("blkgd,bskd->blkgs", q, keys)
        before = before.masked_fill(~visible[:, :, None, None], -math.inf)
        weights = torch.cat((before, torch.einsum("blkgd,bltkd->blkgt", q, own_keys)), dim=-1).softmax(-1)
        slots = keys.shape[1]
        mixed = torch.einsum("blkgs,bskd->blkgd", weights[..., :slots], values)
        mixed = mixed + torch.einsum("blkgt,bltkd->blkgd", weights[..., slots:], own_values)
        h = residual + self.o_proj(mixed.reshape(batch, queries, -1).type_as(x))
        y = self.post_attention_norm(h)
        out: Tensor = h + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))
        return out


@dataclass(frozen=True)
class Eagle3State:
    """Where a round stands."""

    embed: Embed  # unscaled
    hidden: Tensor  # [batch, queries, width], the fused state at ``positions``; after the first step, what was fed back
    positions: Tensor  # int64 [batch, queries], that of the pending token less one, and one more with every step
    cache: KV  # K and V of verified positions, at slots that are positions, F32 [batch, slots, KV heads, head_dim] each
    visible: Tensor  # bool [batch, queries, slots]
    own: KV | None = None
    """K and V of the round's steps, F32 [batch, queries, steps, KV heads, head_dim] each; None before the first."""

    def fork(self, width: int) -> Eagle3State:
        """Go on from each query ``width`` times, each with K and V of its own steps."""
        hidden, positions, visible = (
            part.repeat_interleave(width, 1) for part in (self.hidden, self.positions, self.visible)
        )
        own = self.own and (self.own[0].repeat_interleave(width, 1), self.own[1].repeat_interleave(width, 1))
        return replace(self, hidden=hidden, positions=positions, visible=visible, own=own)


class Eagle3Drafter(DrafterNetwork):
    """The EAGLE-3 head: the network, and the rounds of the :class:`~mtp_extract.drafter.protocol.Drafter` protocol.

    Made by :func:`mtp_extract.drafter.load.load_any`.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, self.rope = config, RopeConfig(config.rope_theta)
        width, base, eps = config.hidden_size, config.backbone_hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, width) if config.own_embedding else None
        self.fc_norm = nn.ModuleList(RMSNorm(base, eps) for _ in range(FUSED)) if config.fc_norm else None
        self.input_norm = RMSNorm(FUSED * base, eps) if config.norm_before_fc else None
        self.fc = nn.Linear(FUSED * base, width, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.final_norm = RMSNorm(width, eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.reduced:
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    @property
    def layer(self) -> Eagle3Layer:
        """The one there is."""
        return cast(Eagle3Layer, self.layers[0])

    @property
    def targets(self) -> Tensor:
        """int64 [draft vocabulary]: the base's token of every row of the head; stored as a difference."""
        rows = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return rows + self.get_buffer("d2t") if self.config.reduced else rows

    def rows(self, tokens: Tensor) -> Tensor:
        """The row of the head for each of the base's ``tokens``, −1 where it has none; int64, in their shape."""
        found = torch.full((self.config.vocab_size,), -1, dtype=torch.long, device=tokens.device)
        targets = self.targets.to(tokens.device)
        found[targets] = torch.arange(len(targets), device=tokens.device)
        return found[tokens]

    @property
    def needs(self) -> Needs:
        """Three hidden states of the base."""
        config = self.config
        return Needs(config.vocab_size, config.backbone_hidden_size, layers=config.base_layers)

    def fuse(self, states: Mapping[int, Tensor]) -> Tensor:
        """[…, width], of the base's states, layer → […, base width]."""
        low_to_high = [states[layer].to(self.fc.weight) for layer in self.config.base_layers]
        if self.input_norm is not None:
            low_to_high = list(self.input_norm(torch.cat(low_to_high, dim=-1)).chunk(FUSED, dim=-1))
        if self.fc_norm is not None:
            low_to_high = [norm(state) for norm, state in zip(self.fc_norm, low_to_high, strict=True)]
        fused: Tensor = self.fc(torch.cat(low_to_high, dim=-1))
        return fused

    def start(self, base: BaseState) -> Eagle3State:
        """Begin a round: take in what the base was fed, and leave the last state of it to the first step.

        In the first round the base was fed from position 0 on.
        """
        device, previous = self.fc.weight.device, base.previous
        embed, states = self._embedding(base.embed), self.fuse(base.fed.layers)  # [B, F, W]
        tokens, positions = base.fed.tokens.to(device), base.fed.positions.to(device) - 1
        if previous is None:
            tokens, positions = tokens[:, 1:], positions[:, 1:]  # the token at 0 has no state before it
        else:
            states = torch.cat((previous.hidden, states), dim=1)
        x, by = self.layer.read(embed(tokens), states[:, :-1]), self._angles(positions)
        keys, values = self.layer.keys_values(x, by)
        if previous is not None:
            keys, values = (torch.cat(both, dim=1) for both in zip(previous.cache, (keys, values), strict=True))
        newest, slots = base.positions.to(device) - 1, torch.arange(keys.shape[1], device=device)  # [B, Q], [S]
        first = base.fed.positions[:, :1].to(device) - int(previous is not None)  # the position of states[:, 0]
        visible = slots < newest[..., None]
        return Eagle3State(embed, picked(states, newest - first), newest, (keys, values), visible)

    def advance(self, state: Eagle3State, token: Tensor) -> tuple[Tensor, Eagle3State]:
        """As :meth:`DrafterNetwork.advance`; what comes out takes the place of the fused state in the next step."""
        x, by = self.layer.read(state.embed(token.to(state.hidden.device)), state.hidden), self._angles(state.positions)
        keys, values = (part[:, :, None] for part in self.layer.keys_values(x, by))
        if state.own is not None:
            keys, values = (torch.cat(both, dim=2) for both in zip(state.own, (keys, values), strict=True))
        residual = x.chunk(2, dim=-1)[1] if self.config.norm_before_residual else state.hidden
        h = self.layer(x, residual, by, state.cache, state.visible, (keys, values))
        normed: Tensor = self.final_norm(h)
        hidden = normed if self.config.norm_output else h
        return normed, replace(state, hidden=hidden, positions=state.positions + 1, own=(keys, values))

    def logits(self, h: Tensor) -> Tensor:
        """[…, vocabulary] of ``h`` […, width]; −∞ for tokens that the head cannot propose."""
        drafted: Tensor = self.lm_head(h)
        if not self.config.reduced:
            return drafted
        whole = drafted.new_full((*drafted.shape[:-1], self.config.vocab_size), -math.inf)
        whole[..., self.targets] = drafted
        return whole

    def _angles(self, positions: Tensor) -> Angles:
        return angles(positions, self.config.head_dim, self.rope)

    def _embedding(self, embed: Embed) -> Embed:
        """Tokens → embedding as engines share it with the head: the base's table, without the factor of its module."""
        weight, scale = self.fc.weight, self.config.backbone_hidden_size**-0.5
        return self.embed_tokens or (lambda tokens: (embed(tokens).float() * scale).to(weight))
