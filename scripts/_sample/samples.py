"""Inputs with real contents: texts run through the base give the states and caches a runtime passes."""

# The tools below carry no type hints, and are not installed where the types are checked.
# mypy: disable-error-code="import-not-found, import-untyped, misc, no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Gemma4ForConditionalGeneration

from . import corpus
from .base import SLIDING_MASKED, BaseStep, cache_shapes
from .drafter import DrafterGeometry, sample_inputs

Inputs = dict[str, NDArray[Any]]


def as_arrays(tensors: dict[str, Tensor]) -> Inputs:
    """The tensors as NumPy arrays."""
    return {name: tensor.detach().numpy() for name, tensor in tensors.items()}


def run_torch(model: torch.nn.Module, inputs: Inputs) -> Inputs:
    """One forward pass without gradients."""
    with torch.no_grad():
        return as_arrays(model(**{name: torch.from_numpy(value) for name, value in inputs.items()}))


def _empty_caches(model: Gemma4ForConditionalGeneration, cache_length: int) -> dict[str, Tensor]:
    return {name: torch.zeros(shape) for name, shape in cache_shapes(model, cache_length).items()}


def _feed(
    model: Gemma4ForConditionalGeneration,
    ids: Tensor,
    first: int,
    caches: dict[str, Tensor],
    cache_length: int,
) -> dict[str, Tensor]:
    """Inputs of a :class:`BaseStep` over token ids ``[1, T]`` at positions ``first`` and on."""
    language = model.model.language_model
    positions = torch.arange(first, first + ids.shape[1], dtype=torch.int32)
    visible = torch.arange(cache_length)[None] <= positions[:, None]
    return {
        "embeddings": language.embed_tokens(ids),
        "per_layer_embeddings": language.get_per_layer_inputs(ids, None),
        "input_pos": positions,
        "mask": torch.where(visible, 0.0, SLIDING_MASKED)[None, None].to(torch.float32),
        **caches,
    }


def _text(tokens: Tensor, start: int, length: int) -> Tensor:
    ids = tokens[start : start + length][None].clone()
    ids[0, 0] = corpus.BOS
    return ids


@torch.no_grad()
def base_samples(model: Gemma4ForConditionalGeneration, tokens: Tensor, count: int, cache_length: int) -> list[Inputs]:
    """Inputs of a ``count``-token step after no, some and many tokens.

    Args:
        model: the base, built for export.
    """
    step = BaseStep(model, with_logits=False)
    samples = []
    for start, history in ((0, 0), (300, 21), (900, 96)):
        ids = _text(tokens, start, history + count)
        caches = _empty_caches(model, cache_length)
        if history:
            caches = step(**_feed(model, ids[:, :history], 0, caches, cache_length))
        samples.append(as_arrays(_feed(model, ids[:, history:], history, caches, cache_length)))
    return samples


@torch.no_grad()
def drafter_samples(
    model: Gemma4ForConditionalGeneration,
    geometry: DrafterGeometry,
    tokens: Tensor,
    count: int,
    cache_length: int,
) -> list[Inputs]:
    """Drafter inputs after ``count`` texts of different lengths.

    Args:
        model: the base, built for export.
    """
    step = BaseStep(model, with_logits=True)
    samples = []
    for index in range(count):
        position = 2 + (index * 37) % (cache_length - 8)
        ids = _text(tokens, index * 1000, position + 1)
        run = step(**_feed(model, ids[:, :position], 0, _empty_caches(model, cache_length), cache_length))
        embedded = model.model.language_model.embed_tokens(ids[:, position:])
        inputs = sample_inputs(geometry, cache_length)
        inputs["activations"] = torch.cat([embedded, run["activations"][:, -1:]], dim=-1)
        inputs["input_pos"] = torch.tensor([position - 1], dtype=torch.int32)
        inputs["mask"] = (torch.arange(cache_length) < position)[None, None, None]
        inputs["param_tensor"][..., 1:3] = position
        inputs |= {name: run[name] for name in inputs if name.startswith("kv_cache_")}
        samples.append(as_arrays(inputs))
    return samples
