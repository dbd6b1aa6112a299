"""Trains the tiny Gemma 4 base, and distils the drafter on its hidden states and caches."""

# The tools below carry no type hints.
# mypy: disable-error-code="misc, no-untyped-call"

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Gemma4AssistantForCausalLM, Gemma4ForConditionalGeneration

from . import corpus
from .corpus import Document
from .shape import DRAFT_STEPS, FULL, HIDDEN, MASKED, SLIDING, SOFT_CAP, WINDOW, build_base_config, build_drafter_config

LENGTH = 192
"""Most tokens of a document."""
_BATCH, _LEARNING_RATE = 12, 4e-3
_DRILLED = 0.2  # of the base's steps, on drills
_LAYER_SCALARS = (0.4, 0.6, 0.75, 0.9)
"""The drafter's, not trained. One of exactly 1 leaves no trace in the exported graph, and equal ones merge."""

Batch = tuple[Tensor, Tensor]
"""Token ids and what each weighs in the loss."""


def _train(
    what: str, model: nn.Module, batches: Iterable[Batch], steps: int, loss_of: Callable[[Tensor, Tensor, int], Tensor]
) -> None:
    """Takes ``steps`` steps down the loss of a batch and the number of the step."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    warmup, began = max(1, min(100, steps // 10)), time.monotonic()

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step, (batch, weights) in zip(range(steps), batches, strict=False):
        loss = loss_of(batch, weights, step)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad(set_to_none=True)
        if step == steps - 1 or step % max(1, steps // 10) == 0:
            print(
                f"{what}: step {step + 1}/{steps}, loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True
            )
    model.eval()


def train_base(
    drills: Sequence[Document], documents: Sequence[Document], steps: int, seed: int
) -> Gemma4ForConditionalGeneration:
    """Trains the base on next-token prediction: first of ``drills``, then of ``documents``."""
    # Seeded for base and drafter each: either can be trained alone.
    torch.manual_seed(seed)
    generator, config = torch.Generator().manual_seed(seed), build_base_config()
    config._attn_implementation = "sdpa"
    model = Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        embedding = model.model.language_model.embed_tokens.weight
        embedding.normal_(0, embedding.shape[1] ** -0.5)
    _soften(model.model.language_model.layers)

    def loss_of(batch: Tensor, weights: Tensor, step: int) -> Tensor:
        hidden = model.model.language_model(input_ids=batch, use_cache=False).last_hidden_state
        logits = _cap_logits(model.lm_head(hidden))
        losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        return _weigh_losses(losses, weights[:, 1:].flatten())

    drilled = islice(corpus.draw_batches(drills, _BATCH, generator), round(_DRILLED * steps))
    _train("base", model, chain(drilled, corpus.draw_batches(documents, _BATCH, generator)), steps, loss_of)
    return model


def _soften(layers: Iterable[nn.Module]) -> None:
    """Starts where a model this small learns to copy: attention not yet sharp, layers that add less than they read."""
    starts = {"self_attn.q_norm": 0.5, "self_attn.k_norm": 0.5}
    starts |= {f"post_{name}": 0.3 for name in ("attention_layernorm", "feedforward_layernorm", "per_layer_input_norm")}
    with torch.no_grad():
        for layer in layers:
            for name, parameter in layer.named_parameters():
                if (norm := name.removesuffix(".weight")) in starts:
                    parameter.fill_(starts[norm])


def _weigh_losses(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).sum() / weights.sum()


def _cap_logits(logits: Tensor) -> Tensor:
    return torch.tanh(logits / SOFT_CAP) * SOFT_CAP


def train_drafter(
    base: Gemma4ForConditionalGeneration, documents: Sequence[Document], steps: int, seed: int
) -> Gemma4AssistantForCausalLM:
    """Distils a drafter, every position of a text at once.

    At position t the drafter reads the embedding of token t + 1 and the base's final hidden state at t, attends the
    base's caches up to t from position t, and predicts what the base predicts at t + 1. The further steps read its own
    projected state and the next token's embedding, at the same position, over the same caches; they cost twice as
    much again, and join in the second half.
    """
    torch.manual_seed(seed)
    generator, config = torch.Generator().manual_seed(seed), build_drafter_config()
    config._attn_implementation = "sdpa"
    model, language = Gemma4AssistantForCausalLM(config), base.model.language_model
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(_LAYER_SCALARS[index])
        # The base's rows in the directions in which they differ most.
        left, strengths, _ = torch.linalg.svd(base.lm_head.weight, full_matrices=False)
        model.lm_head.weight.copy_(left[:, :HIDDEN] * strengths[:HIDDEN])
    _soften(model.model.layers)

    def loss_of(batch: Tensor, weights: Tensor, step: int) -> Tensor:
        queries = batch.shape[1] - DRAFT_STEPS - 1
        masks = _make_masks(queries, batch.shape[1])
        with torch.no_grad():
            output = language(input_ids=batch, use_cache=False, return_shared_kv_states=True)
            target = _cap_logits(base.lm_head(output.last_hidden_state)).softmax(-1)
            embedded = language.embed_tokens(batch)
            shared = {kind: tuple(state) for kind, state in output.shared_kv_states.items()}
        state, loss = output.last_hidden_state[:, :queries], torch.zeros(())
        ahead_most = DRAFT_STEPS if 2 * step >= steps else 1
        for ahead in range(ahead_most):
            inputs = torch.cat([embedded[:, ahead + 1 : ahead + 1 + queries], state], dim=-1)
            normed = model.model(
                inputs_embeds=model.pre_projection(inputs),
                position_ids=torch.arange(queries)[None],
                attention_mask=masks,
                shared_kv_states=shared,
                use_cache=False,
            ).last_hidden_state
            logits = _cap_logits(model.lm_head(normed))
            wanted = target[:, ahead + 1 : ahead + 1 + queries]
            counted = weights[:, ahead + 2 : ahead + 2 + queries]
            loss = loss + _weigh_losses(-(wanted * logits.log_softmax(-1)).sum(-1), counted) / ahead_most
            state = model.post_projection(normed)
            truth = output.last_hidden_state[:, ahead + 1 : ahead + 1 + queries]
            missed = _weigh_losses((state - truth).square().mean(-1), counted) / truth.var().clamp_min(1e-6)
            loss = loss + 0.1 * missed / ahead_most
        return loss

    _train("drafter", model, corpus.draw_batches(documents, _BATCH, generator), steps, loss_of)
    return model


def _make_masks(queries: int, keys: int) -> dict[str, Tensor]:
    """Additive masks ``[1, 1, queries, keys]``: query t is at position t, as in LiteRT-LM, and sees caches up to t."""
    query, key = torch.arange(queries)[:, None], torch.arange(keys)[None]
    visible = {FULL: key <= query, SLIDING: (key <= query) & (query < key + WINDOW)}
    return {kind: torch.where(mask, 0.0, MASKED)[None, None].to(torch.float32) for kind, mask in visible.items()}
