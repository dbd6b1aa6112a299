"""``pair.json``: base and drafter as the parts of one model, sizes by the networks, times as measured."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from mtp_extract.architecture import architecture_of
from mtp_extract.drafter.load import Network
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.validation.result import Validation
from mtp_extract.validation.worth import Worth


def pair_of(pair: SpeculativeGenerator, validation: Validation, positions: int) -> dict[str, Any]:
    """What base and drafter of ``validation`` hold for one sequence of so many ``positions``, and what rounds took."""
    base = pair.base
    drafter = pair.drafter
    facts = validation.base
    worth = validation.drafters[0].worth
    assert isinstance(drafter, Network) and facts is not None
    fed = 1 + max(drafted.drafts for drafted in worth.values() if drafted.tree is None)
    role = architecture_of(drafter.config).pair_role
    return {
        "version": 2,
        "model": "gemma4_speculative_pair",
        "target": {"name": facts.name, "hidden_export": "target_hidden_stream", **_side(base.model, base.width)},
        "draft": {"name": validation.drafter, "assistant_role": role, **_side(drafter, drafter.config.hidden_size)},
        "bridge": _bridge(base, drafter),
        "verify": {
            "rule": "greedy",
            "T": fed,
            "inputs": ["draft_candidate_tokens", "target_logits"],
            "outputs": ["accepted_tokens", "rejected_token"],
        },
        "buffers": _buffers(base, drafter, fed, positions),
        "metrics": {name: _metrics(drafted, facts.tokens_per_s) for name, drafted in worth.items()},
    }


def _side(model: nn.Module, width: int) -> dict[str, Any]:
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    dtype = str(max(tensors, key=lambda tensor: tensor.numel()).dtype).removeprefix("torch.")
    return {"hidden_size": width, "dtype": dtype, "bytes": sum(t.numel() * t.element_size() for t in tensors)}


def _bridge(base: Base, drafter: Network) -> dict[str, Any]:
    """What the drafter reads of its base."""
    needs = drafter.needs
    return {
        "source": "target_hidden_stream",
        "dest": "draft.backbone_stream",
        "shape": ["T", (len(needs.layers) or 1) * base.width],
        "layers": list(needs.layers),
        "embedding": not getattr(drafter.config, "own_embedding", False),
        "shared_kv": {kind: {"heads": heads, "head_dim": dim} for kind, (heads, dim) in needs.shared_kv.items()},
    }


def _metrics(drafted: Worth, backbone_only: float | None) -> dict[str, Any]:
    return {
        "backbone_only_tok_per_sec": backbone_only,
        "speculative_tok_per_sec": drafted.tokens_per_s,
        "draft_tokens_per_batch": drafted.drafts,
        "accepted_tokens/drafted_tokens": drafted.accepted / drafted.drafted if drafted.drafted else None,
        "target_verify_ms": drafted.verify_ms,
        "assistant_draft_ms": drafted.draft_ms,
    }


def _buffers(base: Base, drafter: Network, fed: int, positions: int) -> dict[str, Any]:
    """Of a round that feeds the base ``fed`` tokens: the shape of each, and its bytes."""
    needs = drafter.needs
    layers = needs.layers
    config = drafter.config
    number = next(base.model.parameters()).element_size()
    # A drafter that reads the base's K and V has no cache of its own.
    own_cache = [2, positions, getattr(config, "num_kv_heads", 0), getattr(config, "head_dim", 0)]
    draft_cache = [0] if needs.shared_kv else own_cache
    shapes = {
        "target_main_stream": ([fed, base.width], number),
        "target_kv_cache": ([2, _cache_width(base, positions)], number),
        "target_logits": ([fed, base.vocab_size], 4),
        "draft_backbone_stream": ([fed if layers else 1, len(layers) or 1, base.width], number),
        "draft_main_stream": ([1, config.hidden_size], number),
        "draft_kv_cache": (draft_cache, number),
        "draft_logits": ([1, drafter.needs.vocab_size], 4),
        "candidate_tokens": ([fed - 1], 8),
        "accepted_tokens": ([fed], 8),
        "verifier_scratch": ([fed], 8),
    }
    return {name: {"shape": shape, "bytes": size * math.prod(shape)} for name, (shape, size) in shapes.items()}


def _cache_width(base: Base, positions: int) -> int:
    """Numbers of K for so many positions, over all layers of the base that have K of their own."""
    layers = [m for m in base.model.modules() if hasattr(m, "is_sliding") and getattr(m, "k_proj", None) is not None]
    return sum(layer.k_proj.out_features * min(positions, layer.sliding_window or positions) for layer in layers)
