"""Sizes of the sample's base and drafter, and their configurations in transformers."""

# mypy: disable-error-code="misc, no-untyped-call"

from __future__ import annotations

from typing import Any

from transformers import Gemma4AssistantConfig, Gemma4Config, Gemma4TextConfig

from . import corpus

SLIDING, FULL = "sliding_attention", "full_attention"
MASKED = -1e9
"""Additive mask of a hidden position: large enough for a float32 softmax to give exactly zero."""
VOCAB, BACKBONE, HIDDEN, WINDOW, SOFT_CAP = 512, 64, 32, 16, 30.0
BASE_LAYERS = (SLIDING, SLIDING, SLIDING, FULL, SLIDING, FULL)
DRAFTER_LAYERS = (SLIDING, SLIDING, SLIDING, FULL)
KV_LAYERS = {SLIDING: 2, FULL: 3}
"""The base's layers whose caches the drafter reads: the last of each kind that still compute their own K and V."""
DRAFT_STEPS = 3
"""Draft steps the drafter is trained for: one fewer than the ``verify`` signature takes."""


def _build_text_config(**options: Any) -> Gemma4TextConfig:
    sizes: dict[str, Any] = {"global_head_dim": 64, "vocab_size": VOCAB}
    return Gemma4TextConfig(
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=WINDOW,
        max_position_embeddings=1024,
        final_logit_softcapping=SOFT_CAP,
        tie_word_embeddings=True,
        intermediate_size=128,
        rope_parameters={
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 10_000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        },
        num_hidden_layers=len(options["layer_types"]),
        **options,
    )


def build_base_config() -> Gemma4Config:
    """A six-layer text-only Gemma 4 whose last two layers share caches."""
    text = _build_text_config(
        hidden_size=BACKBONE,
        layer_types=list(BASE_LAYERS),
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB,
        bos_token_id=corpus.BOS,
        eos_token_id=corpus.EOS,
        pad_token_id=corpus.PAD,
    )
    return Gemma4Config(text_config=text, vision_config=None, audio_config=None, tie_word_embeddings=True)


def build_drafter_config() -> Gemma4AssistantConfig:
    """A drafter half as wide as the base."""
    text = _build_text_config(
        hidden_size=HIDDEN,
        layer_types=list(DRAFTER_LAYERS),
        num_kv_shared_layers=len(DRAFTER_LAYERS),
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    )
    return Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=BACKBONE, use_ordered_embeddings=False, tie_word_embeddings=True
    )
