"""The MTP drafter as a module with the runtime's ``mtp_drafter`` signature, and its float export.

The signature is the one LiteRT-LM looks up by name: inputs ``activations``, ``input_pos``, ``mask``,
``kv_cache_{k,v}_N`` (N is the base layer the cache belongs to) and ``param_tensor``; outputs ``logits`` and
``projected_activations``. Values are stored transposed, ``[1, kv_heads, head_dim, cache_length]``.
"""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import litert_torch
import torch
from litert_torch.backend.optimization_barrier import optimization_barrier
from litert_torch.generative.export_hf.core.attention import transposed_attention
from litert_torch.generative.export_hf.model_ext.gemma4.patch import gemma4_litert_patch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
)

TRANSPOSED_ATTENTION = "grouped_transposed"
"""Name under which transformers finds LiteRT's attention: grouped queries against transposed values."""
SLIDING, FULL = "sliding_attention", "full_attention"
MASKED = -1e9
"""Additive mask of a hidden position: large enough for a float32 softmax to give exactly zero."""
PARAM_TENSOR_SHAPE = (1, 1, 1, 7)

AttentionInterface.register(TRANSPOSED_ATTENTION, transposed_attention)


@dataclass(frozen=True)
class DrafterGeometry:
    """Sizes of a drafter. The defaults are the tiny sample's.

    ``kv_layers`` are the base's layers whose caches the drafter reads: the last sliding and the last full
    layer that still compute their own keys and values.
    """

    backbone_hidden_size: int = 64
    hidden_size: int = 32
    intermediate_size: int = 128
    vocab_size: int = 512
    layer_types: Sequence[str] = (SLIDING, SLIDING, SLIDING, FULL)
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    global_head_dim: int = 64
    sliding_window: int = 16
    max_position_embeddings: int = 1024
    full_rope_theta: float = 10_000.0
    softcap: float | None = 30.0
    kv_layers: Mapping[str, int] | None = None

    def kv_layer(self, layer_type: str) -> int:
        """Index of the base layer whose cache the layers of ``layer_type`` read."""
        return (self.kv_layers or {SLIDING: 2, FULL: 3})[layer_type]

    def text_config(self, **options: Any) -> Gemma4TextConfig:
        """A text model with this attention geometry, which base and drafter have in common."""
        attention: dict[str, Any] = {
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "global_head_dim": self.global_head_dim,
            "sliding_window": self.sliding_window,
            "max_position_embeddings": self.max_position_embeddings,
            "final_logit_softcapping": self.softcap,
            "tie_word_embeddings": True,
        }
        rope = {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": self.full_rope_theta},
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        }
        return Gemma4TextConfig(**attention, rope_parameters=rope, **options)

    def assistant_config(self) -> Gemma4AssistantConfig:
        """The transformers configuration of this geometry."""
        text = self.text_config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=len(self.layer_types),
            layer_types=list(self.layer_types),
            num_kv_shared_layers=len(self.layer_types),
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=0,
        )
        return Gemma4AssistantConfig(
            text_config=text,
            backbone_hidden_size=self.backbone_hidden_size,
            use_ordered_embeddings=False,
            tie_word_embeddings=True,
        )


class MtpDrafterModel(nn.Module):
    """A ``Gemma4AssistantForCausalLM`` behind the runtime's signature.

    Args:
        inner: the drafter; its text config names the window and the soft cap.
        geometry: sizes, and the base layers whose caches are read.
        fold_softcap: let the converter fold 1/softcap into the LM head (stored = weight / softcap).
            Otherwise a barrier keeps the division an op of its own.
    """

    def __init__(
        self, inner: Gemma4AssistantForCausalLM, geometry: DrafterGeometry, *, fold_softcap: bool = False
    ) -> None:
        super().__init__()
        self.inner = inner
        self.geometry = geometry
        self.fold_softcap = fold_softcap

    def forward(
        self, activations: Tensor, input_pos: Tensor, mask: Tensor, param_tensor: Tensor, **caches: Tensor
    ) -> dict[str, Tensor]:
        """One draft step.

        Args:
            activations: ``[1, 1, 2 * backbone]`` float32, the scaled embedding, then the hidden state.
            input_pos: ``[1]`` int32.
            mask: ``[1, 1, 1, cache_length]`` bool, true where the cache may be read.
            param_tensor: ``[1, 1, 1, 7]`` int32, for GPU kernels; unused here.
            caches: ``kv_cache_k_N`` ``[1, kv_heads, cache_length, head_dim]`` and ``kv_cache_v_N``
                ``[1, kv_heads, head_dim, cache_length]``.

        Returns:
            ``logits`` ``[1, 1, vocab]`` and ``projected_activations`` ``[1, 1, backbone]``, float32.
        """
        del param_tensor
        positions = torch.arange(mask.shape[-1], dtype=torch.int32)
        window_end = positions + self.geometry.sliding_window
        in_window = (input_pos >= positions) & (input_pos < window_end)
        zero, hidden = torch.tensor(0.0), torch.tensor(MASKED)
        masks = {
            FULL: torch.where(mask, zero, hidden),
            SLIDING: torch.where(mask & in_window.reshape(1, 1, 1, -1), zero, hidden),
        }
        shared = {
            kind: (
                caches[f"kv_cache_k_{self.geometry.kv_layer(kind)}"],
                caches[f"kv_cache_v_{self.geometry.kv_layer(kind)}"],
            )
            for kind in dict.fromkeys(self.geometry.layer_types)
        }
        normed = self.inner.model(
            inputs_embeds=self.inner.pre_projection(activations),
            position_ids=input_pos[None],
            attention_mask=masks,
            shared_kv_states=shared,
            use_cache=False,
            k_ts_idx=2,
            v_ts_idx=3,
        ).last_hidden_state
        logits = self.inner.lm_head(normed)
        projected = self.inner.post_projection(normed)
        softcap = self.geometry.softcap
        if softcap is not None:
            if not self.fold_softcap:
                # A barrier of one operand raises TypeError in litert-torch 0.10.0, so both outputs pass it.
                logits, projected = optimization_barrier(logits, projected)
            logits = torch.tanh(logits / softcap) * softcap
        return {"logits": logits, "projected_activations": projected}


def sample_inputs(geometry: DrafterGeometry, cache_length: int) -> dict[str, Tensor]:
    """Zero inputs of the right shapes and dtypes, in the order of the exported signature."""
    inputs = {
        "activations": torch.zeros(1, 1, 2 * geometry.backbone_hidden_size),
        "input_pos": torch.zeros(1, dtype=torch.int32),
        "mask": torch.ones(1, 1, 1, cache_length, dtype=torch.bool),
        "param_tensor": torch.zeros(PARAM_TENSOR_SHAPE, dtype=torch.int32),
    }
    for kind, head_dim in ((SLIDING, geometry.head_dim), (FULL, geometry.global_head_dim)):
        if kind in geometry.layer_types:
            layer, heads = geometry.kv_layer(kind), geometry.num_kv_heads
            inputs[f"kv_cache_k_{layer}"] = torch.zeros(1, heads, cache_length, head_dim)
            inputs[f"kv_cache_v_{layer}"] = torch.zeros(1, heads, head_dim, cache_length)
    return inputs


def exportable(
    geometry: DrafterGeometry,
    weights: Mapping[str, Tensor],
    *,
    composites: bool = True,
    attention: str = TRANSPOSED_ATTENTION,
) -> Gemma4AssistantForCausalLM:
    """A drafter with ``weights``, its norms as ``odml.rms_norm`` composites unless told otherwise."""
    config = geometry.assistant_config()
    config._attn_implementation = attention
    with gemma4_litert_patch() if composites else contextlib.nullcontext():
        model = Gemma4AssistantForCausalLM(config)
    model.load_state_dict(dict(weights), strict=True)
    model.tie_weights()
    model.eval()
    return model


def export_float(model: nn.Module, inputs: Mapping[str, Any], signature: str, path: Path) -> None:
    """Writes the float TFLite model of ``model`` with one signature."""
    exported = litert_torch.signature(signature, model, sample_kwargs=dict(inputs)).convert(strict_export=False)
    exported.export(str(path))
