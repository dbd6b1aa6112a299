"""The EAGLE-3 head, whole: one layer with a cache of its own, over three hidden states of the base.

The states that enter three layers of the base at position p are fused into one, ``g[p]``. The layer reads it beside the
embedding of the token at p + 1, and says what token comes at p + 2; what comes out of it takes the place of ``g`` in
the next step. So the head runs over every position of the text, as the base does: its keys and values at p are those of
``g[p]`` and token p + 1, of positions that the base has verified, and after them those of the round's own steps.

Every flag means what the engines mean by it (:class:`~mtp_extract.architecture.eagle3.Eagle3Config`). Norms, rotation,
attention logits and softmax are computed in F32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtp_extract.architecture.config import RopeConfig
from mtp_extract.architecture.eagle3 import FUSED, Eagle3Config
from mtp_extract.drafter.network import Angles, DrafterNetwork, RMSNorm, angles, turn
from mtp_extract.drafter.protocol import KV, BaseState, Needs, picked


class Eagle3Layer(nn.Module):
    """A Llama layer whose attention reads twice its width: the normed embedding, then the normed state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, self.rope = config, RopeConfig(config.rope_theta)
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

    def read(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, [..., 2 · width], and where the residual stream begins, [..., width]."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.config.norm_before_residual else hidden
        return torch.cat((self.embedding_norm(embedding), normed), dim=-1), residual

    def angles(self, positions: Tensor) -> Angles:
        """The rotation at ``positions``, int64 [batch, length]."""
        return angles(positions, self.config.head_dim, self.rope)

    def keys_values(self, x: Tensor, by: Angles) -> KV:
        """K, rotated, and V, F32 [batch, length, KV heads, head_dim], of ``x`` [batch, length, 2 · width]."""
        shape = (*x.shape[:2], self.config.num_kv_heads, self.config.head_dim)
        return turn(self.k_proj(x).view(shape), by).float(), self.v_proj(x).view(shape).float()

    def forward(self, x: Tensor, residual: Tensor, by: Angles, cache: KV, visible: Tensor, own: KV) -> Tensor:
        """One position of every query.

        Args:
            x, residual: of :meth:`read`, [batch, queries, …].
            by: the rotation of the queries.
            cache: K and V of verified positions, each [batch, slots, KV heads, head_dim].
            visible: bool [batch, queries, slots].
            own: those of the round's steps up to this, [batch, queries, steps, KV heads, head_dim].

        Returns:
            [batch, queries, width], before the final norm.
        """
        config = self.config
        (keys, values), (own_keys, own_values) = cache, own
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

    embed: Callable[[Tensor], Tensor]  # tokens → embedding, unscaled
    hidden: Tensor  # [batch, queries, width], the fused state at ``positions``; after the first step, what was fed back
    positions: Tensor  # int64 [batch, queries], that of the pending token less one, and one more with every step
    cache: KV  # K and V at slots that are positions, F32 [batch, slots, KV heads, head_dim] each
    visible: Tensor  # bool [batch, queries, slots]
    own: KV | None = None
    """K and V of the round's steps, F32 [batch, queries, steps, KV heads, head_dim] each; None before the first."""


class Eagle3Drafter(DrafterNetwork):
    """The EAGLE-3 head: the network, and the rounds of the :class:`~mtp_extract.drafter.protocol.Drafter` protocol.

    Made by :func:`mtp_extract.drafter.load_any`.
    """

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
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
        layer = self.layers[0]
        assert isinstance(layer, Eagle3Layer)
        return layer

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
        """Three hidden states and the embedding of every token; a cache of its own."""
        config = self.config
        return Needs(
            vocab_size=config.vocab_size,
            width=config.backbone_hidden_size,
            embedding=not config.own_embedding,
            final_hidden=False,
            layers=config.base_layers,
            own_cache=True,
        )

    def fuse(self, states: Mapping[int, Tensor]) -> Tensor:
        """[…, width], of the base's states, layer → […, base width]."""
        weight = self.fc.weight
        low_to_high = [states[layer].to(weight) for layer in self.config.base_layers]
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
            # The token at 0 has no state before it.
            tokens, positions = tokens[:, 1:], positions[:, 1:]
        else:
            states = torch.cat((previous.hidden, states), dim=1)
        x, _ = self.layer.read(embed(tokens), states[:, :-1])
        cache = self.layer.keys_values(x, self.layer.angles(positions))
        if previous is not None:
            cache = torch.cat((previous.cache[0], cache[0]), dim=1), torch.cat((previous.cache[1], cache[1]), dim=1)
        newest = base.positions.to(device) - 1  # [B, Q]
        first = base.fed.positions[:, :1].to(device) - int(previous is not None)  # the position of states[:, 0]
        slots = torch.arange(cache[0].shape[1], device=device)
        return Eagle3State(
            embed=embed,
            hidden=picked(states, newest - first),
            positions=newest,
            cache=cache,
            visible=slots < newest[..., None],
        )

    def fork(self, state: Eagle3State, parents: Tensor) -> Eagle3State:
        """Go on from the queries ``parents``, int64 [batch, branches]: each has keys and values of its own steps."""
        return dataclasses.replace(
            state,
            hidden=picked(state.hidden, parents),
            positions=picked(state.positions, parents),
            visible=picked(state.visible, parents),
            own=state.own and (picked(state.own[0], parents), picked(state.own[1], parents)),
        )

    def advance(self, state: Eagle3State, token: Tensor) -> tuple[Tensor, Eagle3State]:
        """As :meth:`DrafterNetwork.advance`; what comes out takes the place of the fused state in the next step."""
        layer = self.layer
        x, residual = layer.read(state.embed(token.to(state.hidden.device)), state.hidden)
        by = layer.angles(state.positions)
        keys, values = (part[:, :, None] for part in layer.keys_values(x, by))
        if state.own is not None:
            keys, values = torch.cat((state.own[0], keys), dim=2), torch.cat((state.own[1], values), dim=2)
        h = layer(x, residual, by, state.cache, state.visible, (keys, values))
        normed: Tensor = self.final_norm(h)
        hidden = normed if self.config.norm_output else h
        return normed, dataclasses.replace(state, hidden=hidden, positions=state.positions + 1, own=(keys, values))

    def logits(self, h: Tensor) -> Tensor:
        """[…, vocabulary] of ``h`` […, width]; −∞ for tokens that the head cannot propose."""
        drafted: Tensor = self.lm_head(h)
        if not self.config.reduced:
            return drafted
        whole = drafted.new_full((*drafted.shape[:-1], self.config.vocab_size), -math.inf)
        whole[..., self.targets] = drafted
        return whole

    def _embedding(self, embed: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Tokens → embedding as engines share it with the head: the base's table, without the factor of its module."""
        weight = self.fc.weight
        if self.embed_tokens is not None:
            return self.embed_tokens
        scale = self.config.backbone_hidden_size**-0.5
        return lambda tokens: (embed(tokens).float() * scale).to(weight)
