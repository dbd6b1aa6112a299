"""Trains the tiny Gemma 4 base, and distils the drafter on its hidden states and caches."""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
)

from . import corpus
from .corpus import Document
from .drafter import FULL, MASKED, SLIDING, DrafterGeometry

BASE_LAYER_TYPES = (SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL)
DRAFT_STEPS = 3
"""Draft steps the drafter is trained for: one fewer than the ``verify`` signature takes."""
LAYER_SCALARS = (0.4, 0.6, 0.75, 0.9)
"""The drafter's, not trained. One of exactly 1 leaves no trace in the exported graph, and equal ones merge."""


@dataclass(frozen=True)
class Schedule:
    """Training lengths. ``steps`` is the base's, ``drilled`` of them on drills; the drafter gets ``drafter_steps``."""

    steps: int
    drafter_steps: int
    drilled: float = 0.2
    batch: int = 12
    length: int = 192
    learning_rate: float = 4e-3


def base_config(geometry: DrafterGeometry) -> Gemma4Config:
    """A six-layer text-only Gemma 4 whose last two layers share caches."""
    text = geometry.text_config(
        vocab_size=geometry.vocab_size,
        hidden_size=geometry.backbone_hidden_size,
        intermediate_size=2 * geometry.backbone_hidden_size,
        num_hidden_layers=len(BASE_LAYER_TYPES),
        layer_types=list(BASE_LAYER_TYPES),
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=geometry.vocab_size,
        bos_token_id=corpus.BOS,
        eos_token_id=corpus.EOS,
        pad_token_id=corpus.PAD,
    )
    return Gemma4Config(text_config=text, vision_config=None, audio_config=None, tie_word_embeddings=True)


def _optimize(model: nn.Module, steps: int, peak: float) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, min(100, steps // 10))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def _progress(what: str, step: int, steps: int, loss: float, began: float) -> None:
    if step == steps - 1 or step % max(1, steps // 10) == 0:
        print(f"{what}: step {step + 1}/{steps}, loss {loss:.3f}, {time.monotonic() - began:.0f} s", flush=True)


def train_base(
    geometry: DrafterGeometry,
    drills: Sequence[Document],
    documents: Sequence[Document],
    schedule: Schedule,
    seed: int,
) -> Gemma4ForConditionalGeneration:
    """Trains the base on next-token prediction: first of ``drills``, then of ``documents``."""
    generator = _seeded(seed)
    config = base_config(geometry)
    config._attn_implementation = "sdpa"
    model = Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        embedding = model.model.language_model.embed_tokens.weight
        embedding.normal_(0, embedding.shape[1] ** -0.5)
    _soften(model.model.language_model.layers)
    model.train()
    optimizer, decay = _optimize(model, schedule.steps, schedule.learning_rate)
    began = time.monotonic()
    drilled = islice(corpus.batches(drills, schedule.batch, generator), round(schedule.drilled * schedule.steps))
    batches = chain(drilled, corpus.batches(documents, schedule.batch, generator))
    for step, (batch, weights) in zip(range(schedule.steps), batches, strict=False):
        hidden = model.model.language_model(input_ids=batch, use_cache=False).last_hidden_state
        logits = _softcapped(model.lm_head(hidden), geometry.softcap)
        losses = functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        loss = _weighted(losses, weights[:, 1:].flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad(set_to_none=True)
        _progress("base", step, schedule.steps, loss.item(), began)
    model.eval()
    return model


def _seeded(seed: int) -> torch.Generator:
    """Seeds weights and the order of documents, for base and drafter each: either can be trained alone."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def _narrowed(rows: Tensor, width: int) -> Tensor:
    """``rows`` ``[count, wide]`` in the ``width`` directions in which they differ most: ``[count, width]``."""
    left, strengths, _ = torch.linalg.svd(rows, full_matrices=False)
    narrowed: Tensor = left[:, :width] * strengths[:width]
    return narrowed


def _soften(layers: Iterable[nn.Module]) -> None:
    """Starts where a model this small learns to copy: attention not yet sharp, layers that add less than they read."""
    starts = {
        "self_attn.q_norm": 0.5,
        "self_attn.k_norm": 0.5,
        "post_attention_layernorm": 0.3,
        "post_feedforward_layernorm": 0.3,
        "post_per_layer_input_norm": 0.3,
    }
    with torch.no_grad():
        for layer in layers:
            for name, parameter in layer.named_parameters():
                if (norm := name.removesuffix(".weight")) in starts:
                    parameter.fill_(starts[norm])


def _weighted(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).sum() / weights.sum()


def _softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def train_drafter(
    geometry: DrafterGeometry,
    base: Gemma4ForConditionalGeneration,
    documents: Sequence[Document],
    schedule: Schedule,
    seed: int,
) -> Gemma4AssistantForCausalLM:
    """Distils a drafter, every position of a text at once.

    At position t the drafter reads the embedding of token t + 1 and the base's final hidden state at t, attends the
    base's caches up to t from position t, and predicts what the base predicts at t + 1. The further steps read its own
    projected state and the next token's embedding, at the same position, over the same caches; they cost twice as
    much again, and join in the second half.
    """
    generator = _seeded(seed)
    config = geometry.assistant_config()
    config._attn_implementation = "sdpa"
    model = Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.layer_scalar.fill_(LAYER_SCALARS[index])
        model.lm_head.weight.copy_(_narrowed(base.lm_head.weight, geometry.hidden_size))
    _soften(model.model.layers)
    model.train()
    language = base.model.language_model
    optimizer, decay = _optimize(model, schedule.drafter_steps, schedule.learning_rate)
    batches = corpus.batches(documents, schedule.batch, generator)
    began = time.monotonic()
    for step, (batch, weights) in zip(range(schedule.drafter_steps), batches, strict=False):
        queries = batch.shape[1] - DRAFT_STEPS - 1
        masks = _training_masks(queries, batch.shape[1], geometry.sliding_window)
        positions = torch.arange(queries)[None]
        with torch.no_grad():
            output = language(input_ids=batch, use_cache=False, return_shared_kv_states=True)
            target = _softcapped(base.lm_head(output.last_hidden_state), geometry.softcap).softmax(-1)
            embedded = language.embed_tokens(batch)
            shared = {kind: tuple(state) for kind, state in output.shared_kv_states.items()}
        state = output.last_hidden_state[:, :queries]
        loss = torch.zeros(())
        ahead_most = DRAFT_STEPS if 2 * step >= schedule.drafter_steps else 1
        for ahead in range(ahead_most):
            inputs = torch.cat([embedded[:, ahead + 1 : ahead + 1 + queries], state], dim=-1)
            normed = model.model(
                inputs_embeds=model.pre_projection(inputs),
                position_ids=positions,
                attention_mask=masks,
                shared_kv_states=shared,
                use_cache=False,
            ).last_hidden_state
            logits = _softcapped(model.lm_head(normed), geometry.softcap)
            wanted = target[:, ahead + 1 : ahead + 1 + queries]
            counted = weights[:, ahead + 2 : ahead + 2 + queries]
            loss = loss + _weighted(-(wanted * logits.log_softmax(-1)).sum(-1), counted) / ahead_most
            state = model.post_projection(normed)
            truth = output.last_hidden_state[:, ahead + 1 : ahead + 1 + queries]
            missed = _weighted((state - truth).square().mean(-1), counted) / truth.var().clamp_min(1e-6)
            loss = loss + 0.1 * missed / ahead_most
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        optimizer.zero_grad(set_to_none=True)
        _progress("drafter", step, schedule.drafter_steps, loss.item(), began)
    model.eval()
    return model


def _training_masks(queries: int, keys: int, window: int) -> dict[str, Tensor]:
    """Additive masks ``[1, 1, queries, keys]``: query t is at position t, as in LiteRT-LM, and sees caches up to t."""
    query = torch.arange(queries)[:, None]
    key = torch.arange(keys)[None]
    seen = key <= query
    visible = {FULL: seen, SLIDING: seen & (query < key + window)}
    return {kind: torch.where(mask, 0.0, MASKED)[None, None].to(torch.float32) for kind, mask in visible.items()}
