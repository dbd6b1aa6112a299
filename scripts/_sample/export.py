"""Drafter and base as modules with the runtime's signatures, their float exports, and inputs with real contents.

The signatures are those that LiteRT-LM looks up by name. The drafter's: inputs ``activations``, ``input_pos``,
``mask``, ``kv_cache_{k,v}_N`` (N is the base layer that the cache belongs to) and ``param_tensor``; outputs ``logits``
and ``projected_activations``. Of the base, ``verify`` takes a run of drafted tokens, and ``activations`` (the state
after the final norm) is what the drafter reads. Keys are ``[1, kv_heads, CACHE, head_dim]``, values
``[1, kv_heads, head_dim, CACHE]``.
"""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import litert_torch
import torch
from litert_torch.backend.optimization_barrier import optimization_barrier
from litert_torch.generative.custom_ops.dynamic_update_slice import dynamic_update_slice
from litert_torch.generative.export_hf.core.attention import transposed_attention
from litert_torch.generative.export_hf.model_ext.gemma4.patch import gemma4_litert_patch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, Gemma4AssistantForCausalLM, Gemma4ForConditionalGeneration

from . import corpus
from .shape import DRAFT_STEPS, FULL, KV_LAYERS, MASKED, SLIDING, SOFT_CAP, WINDOW

Inputs = dict[str, NDArray[Any]]
CACHE = 256
PREFILL, VERIFY = 32, DRAFT_STEPS + 1
"""Tokens of a call."""
_TRANSPOSED = "grouped_transposed"
"""Name under which transformers finds LiteRT's attention: grouped queries against transposed values."""
_SLIDING_MASKED = -1e4
"""Added outside the window; the runtime's own mask is added on top, and the sum must stay finite."""

AttentionInterface.register(_TRANSPOSED, transposed_attention)


def make_exportable(trained: Any) -> Any:
    """Copy a base or drafter, with norms as composites and LiteRT's attention."""
    config = type(trained.config).from_dict(trained.config.to_dict())
    config._attn_implementation = config.get_text_config()._attn_implementation = _TRANSPOSED
    with gemma4_litert_patch():
        model = type(trained)(config)
    model.load_state_dict(trained.state_dict(), strict=True)
    model.tie_weights()
    model.eval()
    return model


class DraftStep(nn.Module):
    """A drafter behind the runtime's signature."""

    def __init__(self, inner: Gemma4AssistantForCausalLM) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self, activations: Tensor, input_pos: Tensor, mask: Tensor, param_tensor: Tensor, **caches: Tensor
    ) -> dict[str, Tensor]:
        """One draft step.

        Args:
            activations: ``[1, 1, 2 * backbone]`` float32, the scaled embedding, then the hidden state.
            input_pos: ``[1]`` int32.
            mask: ``[1, 1, 1, CACHE]`` bool, true where the cache may be read.
            param_tensor: ``[1, 1, 1, 7]`` int32, for GPU kernels; unused here.

        Returns:
            ``logits`` ``[1, 1, vocab]`` and ``projected_activations`` ``[1, 1, backbone]``, float32.
        """
        del param_tensor
        positions = torch.arange(mask.shape[-1], dtype=torch.int32)
        in_window = (input_pos >= positions) & (input_pos < positions + WINDOW)
        zero, hidden = torch.tensor(0.0), torch.tensor(MASKED)
        masks = {
            FULL: torch.where(mask, zero, hidden),
            SLIDING: torch.where(mask & in_window.reshape(1, 1, 1, -1), zero, hidden),
        }
        normed = self.inner.model(
            inputs_embeds=self.inner.pre_projection(activations),
            position_ids=input_pos[None],
            attention_mask=masks,
            shared_kv_states={
                kind: (caches[f"kv_cache_k_{layer}"], caches[f"kv_cache_v_{layer}"])
                for kind, layer in KV_LAYERS.items()
            },
            use_cache=False,
            k_ts_idx=2,
            v_ts_idx=3,
        ).last_hidden_state
        # A barrier keeps the division by the soft cap an op of its own, which the converter would fold into the LM
        # head. One of a single operand raises TypeError in litert-torch 0.10.0, so both outputs pass it.
        logits, projected = optimization_barrier(self.inner.lm_head(normed), self.inner.post_projection(normed))
        return {"logits": torch.tanh(logits / SOFT_CAP) * SOFT_CAP, "projected_activations": projected}


class _Cache:
    """Key and value caches as plain tensors, written in place of ``transformers``' cache while tracing."""

    def __init__(self, tensors: Mapping[str, Tensor], first_position: Tensor) -> None:
        self.tensors, self.first_position = dict(tensors), first_position

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the new positions and returns the whole caches of a layer."""
        at, zero = self.first_position, torch.zeros_like(self.first_position)
        for name, new, place in (
            (f"kv_cache_k_{layer_idx}", keys, [zero, zero, at, zero]),
            (f"kv_cache_v_{layer_idx}", values.transpose(2, 3), [zero, zero, zero, at]),
        ):
            self.tensors[name] = dynamic_update_slice(self.tensors[name], new, place)
        return self.tensors[f"kv_cache_k_{layer_idx}"], self.tensors[f"kv_cache_v_{layer_idx}"]

    def get_seq_length(self, *_: Any) -> int:
        """Unused: positions are always passed."""
        return 0


class BaseStep(nn.Module):
    """One call of the base over a fixed number of tokens.

    Args:
        with_logits: return ``logits`` and ``activations`` too (decode, verify), or the caches only (prefill).
    """

    def __init__(self, model: Gemma4ForConditionalGeneration, *, with_logits: bool) -> None:
        super().__init__()
        self.model, self.with_logits = model, with_logits

    def forward(
        self, embeddings: Tensor, per_layer_embeddings: Tensor, input_pos: Tensor, mask: Tensor, **caches: Tensor
    ) -> dict[str, Tensor]:
        """Runs T tokens.

        Args:
            embeddings: ``[1, T, width]``, already scaled.
            per_layer_embeddings: ``[1, T, layers, per-layer width]``, already scaled.
            input_pos: ``[T]`` int32, consecutive.
            mask: ``[1, 1, T, CACHE]`` float32, added to the attention scores.
            caches: ``kv_cache_{k,v}_i`` of every layer that owns one.
        """
        key = torch.arange(mask.shape[-1], dtype=torch.int32)[None]
        in_window = key > input_pos[:, None] - WINDOW
        sliding = torch.where(in_window, torch.tensor(0.0), torch.tensor(_SLIDING_MASKED))[None, None]
        cache = _Cache(caches, input_pos[0])
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
        if not self.with_logits:
            return cache.tensors
        logits = torch.tanh(self.model.lm_head(hidden) / SOFT_CAP) * SOFT_CAP
        return {**cache.tensors, "logits": logits, "activations": hidden}


class Embedder(nn.Module):
    """``token_ids`` ``[1, 1]`` int32 → ``embeddings``, scaled: ``[1, 1, width]``, or of every layer ``[1, 1, layers,
    per-layer width]``."""

    def __init__(self, model: Gemma4ForConditionalGeneration, *, per_layer: bool) -> None:
        super().__init__()
        self.language_model, self.per_layer = model.model.language_model, per_layer

    def forward(self, token_ids: Tensor) -> dict[str, Tensor]:
        """Looks them up; negative ids (images, audio) read row 0."""
        if self.per_layer:
            return {"embeddings": self.language_model.get_per_layer_inputs(token_ids, None)}
        return {"embeddings": self.language_model.embed_tokens(torch.clamp(token_ids, min=0))}


def make_caches(model: Gemma4ForConditionalGeneration) -> dict[str, Tensor]:
    """Make empty caches, by the name of the signature's input."""
    caches: dict[str, Tensor] = {}
    for index, layer in enumerate(model.model.language_model.layers):
        attention = layer.self_attn
        if not attention.is_kv_shared_layer:
            heads = attention.k_proj.out_features // attention.head_dim
            caches[f"kv_cache_k_{index}"] = torch.zeros(1, heads, CACHE, attention.head_dim)
            caches[f"kv_cache_v_{index}"] = torch.zeros(1, heads, attention.head_dim, CACHE)
    return caches


def export(signatures: Mapping[str, tuple[nn.Module, Mapping[str, Tensor]]], path: Path) -> None:
    """Writes a float TFLite model: by signature, a module and inputs of its shapes."""
    converter: Any = litert_torch
    for name, (module, inputs) in signatures.items():
        converter = converter.signature(name, module.eval(), sample_kwargs=dict(inputs))
    converter.convert(strict_export=False).export(str(path))


def export_base(model: Gemma4ForConditionalGeneration, folder: Path) -> dict[str, Path]:
    """Writes the float sections of an :func:`make_exportable` base; their paths by model type."""
    paths = {kind: folder / f"{kind}.float.tflite" for kind in ("prefill_decode", "embedder", "per_layer_embedder")}
    prefill, decode = BaseStep(model, with_logits=False), BaseStep(model, with_logits=True)
    steps = {f"prefill_{PREFILL}": (prefill, PREFILL), "decode": (decode, 1), "verify": (decode, VERIFY)}
    caches, ids = make_caches(model), {"token_ids": torch.zeros(1, 1, dtype=torch.int32)}
    export(
        {
            name: (module, feed_base(model, torch.zeros(1, count, dtype=torch.long), 0, caches))
            for name, (module, count) in steps.items()
        },
        paths["prefill_decode"],
    )
    export({"embedder": (Embedder(model, per_layer=False), ids)}, paths["embedder"])
    export({"per_layer_embedder": (Embedder(model, per_layer=True), ids)}, paths["per_layer_embedder"])
    return paths


def convert_to_arrays(tensors: Mapping[str, Tensor]) -> Inputs:
    """Convert the tensors to NumPy arrays."""
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


@torch.no_grad()
def feed_base(
    model: Gemma4ForConditionalGeneration, ids: Tensor, first: int, caches: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Make the inputs of a :class:`BaseStep` over token ids ``[1, T]`` at positions from ``first``."""
    language = model.model.language_model
    positions = torch.arange(first, first + ids.shape[1], dtype=torch.int32)
    visible = torch.arange(CACHE)[None] <= positions[:, None]
    return {
        "embeddings": language.embed_tokens(ids),
        "per_layer_embeddings": language.get_per_layer_inputs(ids, None),
        "input_pos": positions,
        "mask": torch.where(visible, 0.0, _SLIDING_MASKED)[None, None].to(torch.float32),
        **caches,
    }


def _cut_text(tokens: Tensor, start: int, length: int) -> Tensor:
    ids = tokens[start : start + length][None].clone()
    ids[0, 0] = corpus.BOS
    return ids


@torch.no_grad()
def make_base_inputs(model: Gemma4ForConditionalGeneration, tokens: Tensor, count: int) -> list[dict[str, Tensor]]:
    """Inputs of a ``count``-token step of an :func:`make_exportable` base after no, some and many tokens."""
    step, feeds = BaseStep(model, with_logits=False), []
    for start, history in ((0, 0), (300, 21), (900, 96)):
        ids, caches = _cut_text(tokens, start, history + count), make_caches(model)
        if history:
            caches = step(**feed_base(model, ids[:, :history], 0, caches))
        feeds.append(feed_base(model, ids[:, history:], history, caches))
    return feeds


@torch.no_grad()
def make_drafter_inputs(model: Gemma4ForConditionalGeneration, tokens: Tensor, count: int) -> list[dict[str, Tensor]]:
    """Inputs of a draft step after ``count`` texts of different lengths, by an :func:`make_exportable` base."""
    step, feeds = BaseStep(model, with_logits=True), []
    for index in range(count):
        position = 2 + (index * 37) % (CACHE - 8)
        ids = _cut_text(tokens, index * 1000, position + 1)
        run = step(**feed_base(model, ids[:, :position], 0, make_caches(model)))
        embedded = model.model.language_model.embed_tokens(ids[:, position:])
        inputs = {
            "activations": torch.cat([embedded, run["activations"][:, -1:]], dim=-1),
            "input_pos": torch.tensor([position - 1], dtype=torch.int32),
            "mask": (torch.arange(CACHE) < position)[None, None, None],
            "param_tensor": torch.zeros(1, 1, 1, 7, dtype=torch.int32),
        }
        inputs["param_tensor"][..., 1:3] = position
        inputs |= {f"kv_cache_{which}_{n}": run[f"kv_cache_{which}_{n}"] for n in KV_LAYERS.values() for which in "kv"}
        feeds.append(inputs)
    return feeds
