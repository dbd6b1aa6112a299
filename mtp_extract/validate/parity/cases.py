"""Inputs for parity: one draft step each, in the terms of the model rather than of either program that runs it.

Random cases need no base: positions from the first to well past the window, numbers as large as the drafter's
own quantization expects (a quarter of what it can hold), or of unit size where it records none. Cases from the
base are what a runtime would pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtp_extract.architecture.config import DrafterConfig
from mtp_extract.drafter.arguments import DraftArguments
from mtp_extract.drafter.masks import position_masks
from mtp_extract.graph.drafter import ACTIVATIONS
from mtp_extract.graph.flat import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR
from mtp_extract.litertlm.storage import Floats
from mtp_extract.validate.parity.interface import Cache, Interface

if TYPE_CHECKING:
    from mtp_extract.speculate.target import Base
    from mtp_extract.speculate.teacher import Text


# A cache of a published file declares 32003 slots; random contents of all of them prove nothing more.
_LONGEST = 768
_PARAM_SHAPE = 7
# Queries are normalized to length sqrt(head_dim): keys of this much over that spread attention logits by 3.
_KEY_SPREAD = 3.0
_SHARE_OF_RANGE = 0.25


@dataclass(frozen=True)
class Case:
    label: str  # where it is from
    embedding: Floats  # [base width], scaled
    hidden: Floats  # [base width]
    kv: Mapping[str, tuple[Floats, Floats]]  # layer type → K and V, each [KV heads, position + 1, head_dim]
    position: int  # the query's, and the last visible slot


def random_cases(config: DrafterConfig, interface: Interface, count: int, seed: int) -> list[Case]:
    """``count`` random cases at positions spread from 1 to the end of the caches; the same for the same seed."""
    random = np.random.default_rng(seed)

    def draw(shape: tuple[int, ...], spread: float) -> Floats:
        return (random.standard_normal(shape) * spread).astype(np.float32)

    last = min(interface.slots, _LONGEST) - 1
    wide = interface.activations_largest
    unit = wide * _SHARE_OF_RANGE if wide is not None else 1.0
    spread = np.geomspace(1, last, count).round().astype(int).tolist()
    return [
        Case(
            f"random {index}",
            draw((config.backbone_hidden_size,), unit),
            draw((config.backbone_hidden_size,), unit),
            {
                kind: (
                    draw((layer.num_kv_heads, position + 1, layer.head_dim), _spread(key, layer.head_dim)),
                    draw((layer.num_kv_heads, position + 1, layer.head_dim), _spread(value, None)),
                )
                for kind, layer in config.kv_layers.items()
                for key, value in [interface.caches[kind]]
            },
            position,
        )
        for index, position in enumerate(spread)
    ]


def _spread(cache: Cache, head_dim: int | None) -> float:
    if cache.codes is not None:
        return cache.codes.largest * _SHARE_OF_RANGE
    return _KEY_SPREAD / head_dim**0.5 if head_dim else 1.0


@torch.inference_mode()
def base_cases(
    base: Base, config: DrafterConfig, interface: Interface, texts: Sequence[Text], count: int
) -> list[Case]:
    """Cases from the base's states over ``texts``, at ``count`` anchors spread over them, where they fit the caches."""
    anchors = [(i, n) for i, text in enumerate(texts) for n in text.anchors if n <= interface.slots]
    chosen = [anchors[round(k)] for k in np.linspace(0, len(anchors) - 1, min(count, len(anchors))).tolist()]
    cases = []
    for index in sorted({i for i, _ in chosen}):
        tokens = torch.tensor([texts[index].tokens], device=base.device)
        full = base.full_pass(tokens)
        embedded = base.embed(tokens)
        for _, anchor in (pair for pair in chosen if pair[0] == index):
            cases.append(
                Case(
                    f"text {index}, token {anchor}",
                    _array(embedded[0, anchor]),
                    _array(full.hidden[0, anchor - 1]),
                    {
                        kind: (_array(k[0, :, :anchor]), _array(v[0, :, :anchor]))
                        for kind in config.kv_layers
                        for k, v in [full.shared_kv[kind]]
                    },
                    anchor - 1,
                )
            )
    return cases


def _array(tensor: Tensor) -> Floats:
    return tensor.detach().float().cpu().numpy()


def signature_inputs(case: Case, interface: Interface) -> dict[str, NDArray[Any]]:
    """The inputs of the signature for ``case``, quantized where it takes integers."""
    slots = np.arange(interface.slots)
    seen = slots <= case.position
    activations = np.concatenate([case.embedding, case.hidden])[None, None]
    local = seen & (slots > case.position - interface.window) if interface.window is not None else seen
    # [start, end, end]: the newest slot, and one past the last that may be read.
    param = np.zeros((1, 1, 1, _PARAM_SHAPE), np.int32)
    param[..., :3] = case.position, case.position + 1, case.position + 1
    known: dict[str, NDArray[Any]] = {
        ACTIVATIONS: interface.activations.encode(activations) if interface.activations else activations,
        INPUT_POS: np.array([case.position], np.int32),
        MASK: seen[None, None, None],
        MASK_LOCAL: local[None, None, None],
        PARAM_TENSOR: param,
    }
    inputs = {name: known[name] for name in interface.others}
    for kind, pair in interface.caches.items():
        for cache, values in zip(pair, case.kv[kind], strict=True):
            inputs[cache.name] = _fill(cache, values)
    return inputs


def _fill(cache: Cache, values: Floats) -> NDArray[Any]:
    """The whole cache, zero past the visible slots."""
    full = np.zeros(cache.shape, cache.codes.dtype if cache.codes else np.float32)
    seen = cache.codes.encode(values) if cache.codes else values
    if cache.transposed:
        full[0, :, :, : values.shape[1]] = seen.transpose(0, 2, 1)
    else:
        full[0, :, : values.shape[1]] = seen
    return full


def reference_arguments(case: Case, config: DrafterConfig, interface: Interface, *, as_stored: bool) -> DraftArguments:
    """The same for the reference drafter, without the invisible slots.

    Args:
        as_stored: K, V and activations as they come back from the integers the signature takes.
    """

    def seen(cache: Cache, values: Floats) -> Tensor:
        known = cache.codes.decode(cache.codes.encode(values)) if as_stored and cache.codes else values
        return torch.from_numpy(np.ascontiguousarray(known))[None]

    embedding, hidden = case.embedding, case.hidden
    if as_stored and (codes := interface.activations) is not None:
        embedding, hidden = (codes.decode(codes.encode(part)) for part in (embedding, hidden))
    slots = torch.arange(case.position + 1)[None]
    newest = torch.tensor([[case.position]])
    return DraftArguments(
        embedding=torch.from_numpy(embedding)[None, None],
        hidden=torch.from_numpy(hidden)[None, None],
        shared_kv={
            kind: (seen(key, case.kv[kind][0]), seen(value, case.kv[kind][1]))
            for kind, (key, value) in interface.caches.items()
        },
        position_ids=newest,
        masks=position_masks(config, dict.fromkeys(config.kv_layers, slots), newest),
    )
