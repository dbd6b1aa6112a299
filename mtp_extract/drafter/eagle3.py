"""The EAGLE-3 head: one layer with a cache of its own, over three hidden states of the base.

The states that enter three layers of the base at position p are fused into one, ``g[p]``. The layer reads it beside the
embedding of token p + 1, and predicts token p + 2; in the next step its output takes the place of ``g``. So the head
runs over every position of the text, as the base does: for positions that the base has verified, its K and V at p come
from ``g[p]`` and token p + 1; after them stand K and V of the round's own steps.

Every flag has the engines' meaning (:class:`~mtp_extract.architecture.eagle3.Eagle3Config`). Norms, rotation, attention
logits and softmax are computed in F32.
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
from mtp_extract.drafter.network import Angles, DrafterNetwork, RMSNorm, compute_angles, rotate
from mtp_extract.drafter.protocol import KV, BaseRequirements, Embed, RoundStart, gather_positions


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads the normed embedding and the normed hidden state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        inner = config.intermediate_size
        eps = config.rms_norm_eps
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        self.embedding_norm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.q_proj = nn.Linear(2 * width, queries, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.post_attention_norm = RMSNorm(width, eps)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def concat_inputs(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """Norm both [..., width] and concatenate them to [..., 2 · width]."""
        return torch.cat((self.embedding_norm(embedding), self.hidden_norm(hidden)), dim=-1)

    def project_queries(self, x: Tensor, by: Angles) -> Tensor:
        """Compute rotated queries by group, F32 [batch, queries, KV heads, heads a group, head_dim]."""
        batch, queries, _ = x.shape
        heads = rotate(self.q_proj(x).view(batch, queries, -1, self.config.head_dim), by)
        return heads.view(batch, queries, self.config.num_kv_heads, -1, self.config.head_dim).float()

    def project_keys_values(self, x: Tensor, by: Angles) -> KV:
        """Compute rotated K, and V, F32 [batch, length, KV heads, head_dim], from ``x`` [batch, length, 2 · width]."""
        shape = (*x.shape[:2], self.config.num_kv_heads, self.config.head_dim)
        return rotate(self.k_proj(x).view(shape), by).float(), self.v_proj(x).view(shape).float()

    def forward(self, x: Tensor, residual: Tensor, by: Angles, cache: KV, visible: Tensor, step_kv: KV) -> Tensor:
        """Compute one position of every query, [batch, queries, width], before the final norm.

        Args:
            x: from :meth:`concat_inputs`, [batch, queries, 2 · width].
            residual: the start of the residual stream, [batch, queries, width].
            by: the rotation of the queries.
            cache, visible, step_kv: as in :class:`Eagle3State`; ``step_kv`` includes this step.
        """
        h = residual + self._attend(x, by, cache, visible, step_kv)
        y = self.post_attention_norm(h)
        out: Tensor = h + self.down_proj(functional.silu(self.gate_proj(y)) * self.up_proj(y))
        return out

    def _attend(self, x: Tensor, by: Angles, cache: KV, visible: Tensor, step_kv: KV) -> Tensor:
        """Attend to verified slots and the round's own steps in one softmax.

        In the products b is the batch, l a query, k a KV head, g a query head of its group, s a slot, t a step.
        """
        q = self.project_queries(x, by) * self.config.head_dim**-0.5
        keys, values = cache
        step_keys, step_values = step_kv
        cache_scores = torch.einsum("blkgd,bskd->blkgs", q, keys).masked_fill(~visible[:, :, None, None], -math.inf)
        step_scores = torch.einsum("blkgd,bltkd->blkgt", q, step_keys)
        weights = torch.cat((cache_scores, step_scores), dim=-1).softmax(-1)

        slots = values.shape[1]
        mixed = torch.einsum("blkgs,bskd->blkgd", weights[..., :slots], values)
        mixed = mixed + torch.einsum("blkgt,bltkd->blkgd", weights[..., slots:], step_values)
        out: Tensor = self.o_proj(mixed.flatten(2).type_as(x))
        return out


@dataclass(frozen=True)
class Eagle3State:
    """The state of a round between two steps."""

    embed: Embed  # unscaled
    hidden: Tensor  # [batch, queries, width], the fused state at ``positions``; then the output of the step before
    positions: Tensor  # int64 [batch, queries], the position before the pending token, plus 1 per step
    cache: KV  # K and V of verified positions, which are the slots, F32 [batch, slots, KV heads, head_dim] each
    visible: Tensor  # bool [batch, queries, slots]
    step_kv: KV | None = None
    """K and V of the round's steps, F32 [batch, queries, steps, KV heads, head_dim] each; None before the first."""

    def fork(self, width: int) -> Eagle3State:
        """Repeat each query ``width`` times, each with its own K and V of the steps."""

        def repeat(part: Tensor) -> Tensor:
            return part.repeat_interleave(width, 1)

        step_kv = self.step_kv and (repeat(self.step_kv[0]), repeat(self.step_kv[1]))
        hidden, positions, visible = map(repeat, (self.hidden, self.positions, self.visible))
        return replace(self, hidden=hidden, positions=positions, visible=visible, step_kv=step_kv)


def _append(first: KV, second: KV, dim: int) -> KV:
    return torch.cat((first[0], second[0]), dim), torch.cat((first[1], second[1]), dim)


class Eagle3Drafter(DrafterNetwork):
    """The network of an EAGLE-3 head, with the :class:`~mtp_extract.drafter.protocol.Drafter` protocol.

    Load one with :func:`mtp_extract.drafter.load.load_any_drafter`.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        self.rope = RopeConfig(config.rope_theta)
        width = config.hidden_size
        base = config.backbone_hidden_size
        eps = config.rms_norm_eps
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
        return cast(Eagle3Layer, self.layers[0])

    @property
    def targets(self) -> Tensor:
        """The base's token of every row of the head, int64 [draft vocabulary]; stored as a difference."""
        rows = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return rows + self.get_buffer("d2t") if self.config.reduced else rows

    def find_rows(self, tokens: Tensor) -> Tensor:
        row_of_token = torch.full((self.config.vocab_size,), -1, dtype=torch.long, device=tokens.device)
        targets = self.targets.to(tokens.device)
        row_of_token[targets] = torch.arange(len(targets), device=tokens.device)
        return row_of_token[tokens]

    @property
    def needs(self) -> BaseRequirements:
        config = self.config
        return BaseRequirements(config.vocab_size, config.backbone_hidden_size, layers=config.base_layers)

    def fuse(self, states: Mapping[int, Tensor]) -> Tensor:
        """Fuse the base's states, layer → […, base width], into one, […, width]."""
        layer_states = [states[layer].to(self.fc.weight) for layer in self.config.base_layers]
        if self.input_norm is not None:
            layer_states = list(self.input_norm(torch.cat(layer_states, dim=-1)).chunk(FUSED, dim=-1))
        if self.fc_norm is not None:
            layer_states = [norm(state) for norm, state in zip(self.fc_norm, layer_states, strict=True)]
        fused: Tensor = self.fc(torch.cat(layer_states, dim=-1))
        return fused

    def start(self, base: RoundStart) -> Eagle3State:
        """Begin a round: extend the cache by what the base was fed, but for the last state, which the first step reads.

        In the first round the base was fed from position 0 on.
        """
        weight = self.fc.weight
        device = weight.device
        # Engines share the base's embedding table with the head, without the factor of the base's module.
        scale = self.config.backbone_hidden_size**-0.5
        embed: Embed = self.embed_tokens or (lambda tokens: (base.embed(tokens).float() * scale).to(weight))
        states = self.fuse(base.fed.layers)  # [B, F, W]
        embedded = embed(base.fed.tokens.to(device))
        positions = base.fed.positions.to(device) - 1  # of the state beside each token
        if base.previous is None:
            # The token at position 0 has no state before it.
            cache = self._compute_keys_values(embedded[:, 1:], states[:, :-1], positions[:, 1:])
            first = positions[:, :1] + 1
        else:
            states = torch.cat((base.previous.hidden, states), dim=1)
            cache = _append(base.previous.cache, self._compute_keys_values(embedded, states[:, :-1], positions), dim=1)
            first = positions[:, :1]
        newest = base.positions.to(device) - 1  # [B, Q]
        visible = torch.arange(cache[0].shape[1], device=device) < newest[..., None]  # [B, Q, S]
        return Eagle3State(embed, gather_positions(states, newest - first), newest, cache, visible)

    def _compute_keys_values(self, embedding: Tensor, hidden: Tensor, positions: Tensor) -> KV:
        by = compute_angles(positions, self.config.head_dim, self.rope)
        return self.layer.project_keys_values(self.layer.concat_inputs(embedding, hidden), by)

    def advance(self, state: Eagle3State, token: Tensor) -> tuple[Tensor, Eagle3State]:
        x = self.layer.concat_inputs(state.embed(token.to(state.hidden.device)), state.hidden)
        by = compute_angles(state.positions, self.config.head_dim, self.rope)
        keys, values = self.layer.project_keys_values(x, by)
        step_kv = keys[:, :, None], values[:, :, None]
        if state.step_kv is not None:
            step_kv = _append(state.step_kv, step_kv, dim=2)
        residual = x.chunk(2, dim=-1)[1] if self.config.norm_before_residual else state.hidden
        h = self.layer(x, residual, by, state.cache, state.visible, step_kv)
        normed: Tensor = self.final_norm(h)
        hidden = normed if self.config.norm_output else h
        return normed, replace(state, hidden=hidden, positions=state.positions + 1, step_kv=step_kv)

    def logits(self, h: Tensor) -> Tensor:
        draft_logits: Tensor = self.lm_head(h)
        if not self.config.reduced:
            return draft_logits
        logits = draft_logits.new_full((*draft_logits.shape[:-1], self.config.vocab_size), -math.inf)
        logits[..., self.targets] = draft_logits
        return logits
