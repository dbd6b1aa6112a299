"""The base's sections: ``prefill_decode`` (prefill, decode, verify), ``embedder``, ``per_layer_embedder``.

The signatures are those LiteRT-LM's speculative decoding looks for: ``verify`` takes a run of drafted tokens,
and ``activations`` (the state after the final norm) is what the drafter reads.
"""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import litert_torch
import torch
from litert_torch.generative.custom_ops.dynamic_update_slice import dynamic_update_slice
from litert_torch.generative.export_hf.model_ext.gemma4.patch import gemma4_litert_patch
from torch import Tensor, nn
from transformers import Gemma4ForConditionalGeneration

from .drafter import FULL, SLIDING, TRANSPOSED_ATTENTION

SLIDING_MASKED = -1e4
"""Added outside the window; the runtime's own mask is added on top, and the sum must stay finite."""


class ExportCache:
    """Key and value caches as plain tensors, written in place of ``transformers``' cache while tracing.

    Keys are ``[1, kv_heads, cache_length, head_dim]``, values ``[1, kv_heads, head_dim, cache_length]``.
    """

    def __init__(self, tensors: Mapping[str, Tensor], first_position: Tensor) -> None:
        self.tensors = dict(tensors)
        self.first_position = first_position

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the new positions and returns the whole caches of a layer."""
        zero = torch.zeros_like(self.first_position)
        at = self.first_position
        new_keys = dynamic_update_slice(self.tensors[f"kv_cache_k_{layer_idx}"], keys, [zero, zero, at, zero])
        new_values = dynamic_update_slice(
            self.tensors[f"kv_cache_v_{layer_idx}"], values.transpose(2, 3), [zero, zero, zero, at]
        )
        self.tensors[f"kv_cache_k_{layer_idx}"] = new_keys
        self.tensors[f"kv_cache_v_{layer_idx}"] = new_values
        return new_keys, new_values

    def get_seq_length(self, *_: Any) -> int:
        """Unused: positions are always passed."""
        return 0


class BaseStep(nn.Module):
    """One call of the base over a fixed number of tokens.

    Args:
        model: the base, built for export.
        with_logits: return ``logits`` and ``activations`` (decode, verify) or the caches only (prefill).
    """

    def __init__(self, model: Gemma4ForConditionalGeneration, *, with_logits: bool) -> None:
        super().__init__()
        self.model = model
        self.with_logits = with_logits
        config = model.config.get_text_config()
        self.window = int(config.sliding_window)
        self.softcap = config.final_logit_softcapping

    def forward(
        self,
        embeddings: Tensor,
        per_layer_embeddings: Tensor,
        input_pos: Tensor,
        mask: Tensor,
        **caches: Tensor,
    ) -> dict[str, Tensor]:
        """Runs T tokens.

        Args:
            embeddings: ``[1, T, width]``, already scaled.
            per_layer_embeddings: ``[1, T, layers, per-layer width]``, already scaled.
            input_pos: ``[T]`` int32, consecutive.
            mask: ``[1, 1, T, cache_length]`` float32, added to the attention scores.
            caches: ``kv_cache_{k,v}_i`` of every layer that owns one.
        """
        key = torch.arange(mask.shape[-1], dtype=torch.int32)[None]
        in_window = key > input_pos[:, None] - self.window
        sliding = torch.where(in_window, torch.tensor(0.0), torch.tensor(SLIDING_MASKED))[None, None]
        cache = ExportCache(caches, input_pos[0])
        hidden = self.model.model.language_model(
            inputs_embeds=embeddings,
            per_layer_inputs=per_layer_embeddings,
            position_ids=input_pos[None],
            attention_mask={FULL: mask, SLIDING: mask + sliding},
            past_key_values=cache,
            use_cache=True,
            k_ts_idx=2,
            v_ts_idx=3,
        ).last_hidden_state
        outputs = dict(cache.tensors)
        if self.with_logits:
            logits = self.model.lm_head(hidden)
            if self.softcap is not None:
                logits = torch.tanh(logits / self.softcap) * self.softcap
            outputs |= {"logits": logits, "activations": hidden}
        return outputs


class Embedder(nn.Module):
    """``token_ids`` ``[1, 1]`` int32 → ``embeddings`` ``[1, 1, width]``, scaled."""

    def __init__(self, model: Gemma4ForConditionalGeneration) -> None:
        super().__init__()
        self.table = model.model.language_model.embed_tokens

    def forward(self, token_ids: Tensor) -> dict[str, Tensor]:
        """Looks up the scaled embedding; negative ids (images, audio) read row 0."""
        return {"embeddings": self.table(torch.clamp(token_ids, min=0))}


class PerLayerEmbedder(nn.Module):
    """``token_ids`` ``[1, 1]`` int32 → ``embeddings`` ``[1, 1, layers, per-layer width]``, scaled."""

    def __init__(self, model: Gemma4ForConditionalGeneration) -> None:
        super().__init__()
        self.language_model = model.model.language_model

    def forward(self, token_ids: Tensor) -> dict[str, Tensor]:
        """Looks up every layer's embedding."""
        return {"embeddings": self.language_model.get_per_layer_inputs(token_ids, None)}


def exportable(trained: Gemma4ForConditionalGeneration) -> Gemma4ForConditionalGeneration:
    """A copy of the base with norms as composites and LiteRT's attention."""
    config = type(trained.config).from_dict(trained.config.to_dict())
    config._attn_implementation = TRANSPOSED_ATTENTION
    config.get_text_config()._attn_implementation = TRANSPOSED_ATTENTION
    with gemma4_litert_patch():
        model = Gemma4ForConditionalGeneration(config)
    model.load_state_dict(trained.state_dict(), strict=True)
    model.tie_weights()
    model.eval()
    return model


def cache_shapes(model: Gemma4ForConditionalGeneration, cache_length: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the caches by signature name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(model.model.language_model.layers):
        attention = layer.self_attn
        if not attention.is_kv_shared_layer:
            heads = attention.k_proj.out_features // attention.head_dim
            shapes[f"kv_cache_k_{index}"] = (1, heads, cache_length, attention.head_dim)
            shapes[f"kv_cache_v_{index}"] = (1, heads, attention.head_dim, cache_length)
    return shapes


def step_inputs(model: Gemma4ForConditionalGeneration, tokens: int, cache_length: int) -> dict[str, Tensor]:
    """Zero inputs of a step over ``tokens`` tokens."""
    config = model.config.get_text_config()
    caches = {name: torch.zeros(shape) for name, shape in cache_shapes(model, cache_length).items()}
    per_layer = (1, tokens, config.num_hidden_layers, config.hidden_size_per_layer_input)
    return {
        "embeddings": torch.zeros(1, tokens, config.hidden_size),
        "per_layer_embeddings": torch.zeros(per_layer),
        "input_pos": torch.arange(tokens, dtype=torch.int32),
        "mask": torch.zeros(1, 1, tokens, cache_length),
        **caches,
    }


def export_base(
    trained: Gemma4ForConditionalGeneration,
    folder: Path,
    cache_length: int,
    prefill_lengths: Sequence[int],
    verify_length: int,
) -> dict[str, Path]:
    """Writes the float sections; returns their paths by model type."""
    model = exportable(trained)
    prefill, decode = BaseStep(model, with_logits=False).eval(), BaseStep(model, with_logits=True).eval()
    signatures: list[tuple[str, nn.Module, int]] = [
        *((f"prefill_{length}", prefill, length) for length in prefill_lengths),
        ("decode", decode, 1),
        ("verify", decode, verify_length),
    ]
    converter: Any = None
    for name, module, tokens in signatures:
        add = litert_torch.signature if converter is None else converter.signature
        converter = add(name, module, sample_kwargs=step_inputs(model, tokens, cache_length))
    paths = {kind: folder / f"{kind}.float.tflite" for kind in ("prefill_decode", "embedder", "per_layer_embedder")}
    converter.convert(strict_export=False).export(str(paths["prefill_decode"]))
    one_token = {"token_ids": torch.zeros(1, 1, dtype=torch.int32)}
    for kind, table in (("embedder", Embedder(model)), ("per_layer_embedder", PerLayerEmbedder(model))):
        made = litert_torch.signature(kind, table.eval(), sample_kwargs=one_token).convert(strict_export=False)
        made.export(str(paths[kind]))
    return paths
