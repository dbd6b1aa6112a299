"""``pair.json``: base and drafter as the parts of one model, by the names of the seed's plan for a speculative pair.

Sizes follow from the two configurations, times from the measurement: what is planned, not what one engine allocates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.drafter.load import Network
from mtp_extract.speculate.target import Base
from mtp_extract.validate.acceptance.drafters import DrafterFacts
from mtp_extract.validate.acceptance.generation import GenerationResult

_EXPORT = "target_hidden_stream"


def pair_of(
    base: Base, name: str, drafter: Network, facts: DrafterFacts, found: GenerationResult, positions: int
) -> dict[str, Any]:
    """What a pair holds for one sequence, and what its rounds took.

    Args:
        name: what to call the base.
        found: with what was drafted; the buffers are those of the longest chain.
        positions: tokens of the longest text, prompt included.
    """
    needs, drafts = drafter.needs, max(worth.drafts for worth in found.worth.values() if worth.tree is None)
    streams = needs.final_hidden + len(needs.layers)
    draft = {"name": facts.name, "assistant_role": "eagle3_head" if needs.own_cache else "mtp_drafter"}
    return {
        "version": 2,
        "model": "gemma4_speculative_pair",
        "target": {"name": name, "hidden_export": _EXPORT, "layers": base.num_layers, **_side(base.model, base.width)},
        "draft": {**draft, "backbone_hidden_size": base.width, **_side(drafter, drafter.config.hidden_size)},
        "bridge": {
            "source": _EXPORT,
            "dest": "draft.backbone_stream",
            "shape": ["T", streams * base.width],
            "layers": list(needs.layers) or None,
            "embedding": needs.embedding,
            "shared_kv": {kind: {"heads": heads, "head_dim": dim} for kind, (heads, dim) in needs.shared_kv.items()},
        },
        "verify": {
            "rule": "greedy",
            "T": drafts + 1,
            "inputs": ["draft_candidate_tokens", "target_logits"],
            "outputs": ["accepted_tokens", "rejected_token"],
        },
        "buffers": _buffers(base, drafter, drafts + 1, positions),
        "metrics": {
            drafted: {
                "backbone_only_tok_per_sec": worth.base_tokens_per_s,
                "speculative_tok_per_sec": worth.tokens_per_s,
                "draft_tokens_per_batch": worth.drafts,
                "accepted_tokens/drafted_tokens": worth.accepted / worth.drafted if worth.drafted else None,
                "target_verify_ms": worth.verify_ms,
                "assistant_draft_ms": worth.draft_ms,
            }
            for drafted, worth in found.worth.items()
        },
    }


def _side(model: nn.Module, width: int) -> dict[str, Any]:
    weights = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    dtype = max(weights, key=lambda tensor: tensor.numel()).dtype
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in weights)
    return {"hidden_size": width, "dtype": str(dtype).removeprefix("torch."), "bytes": nbytes}


def _buffers(base: Base, drafter: Network, fed: int, positions: int) -> dict[str, Any]:
    """Of a round that feeds the base ``fed`` tokens after at most ``positions`` of them."""
    needs, width, size = drafter.needs, drafter.config.hidden_size, next(base.model.parameters()).element_size()
    config = drafter.config
    own = [2, positions, config.num_kv_heads, config.head_dim] if isinstance(config, Eagle3Config) else []
    return {
        "target_main_stream": _buffer([fed, base.width], size),
        "target_kv_cache": _buffer([2, sum(_slots(base, positions))], size),
        "target_logits": _buffer([fed, base.vocab_size], 4),
        "draft_backbone_stream": _buffer([fed if needs.layers else 1, len(needs.layers) or 1, base.width], size),
        "draft_main_stream": _buffer([1, width], size),
        "draft_kv_cache": _buffer(own, size) if own else {"shared_with": "target_kv_cache", "bytes": 0},
        "draft_logits": _buffer([1, needs.vocab_size], 4),
        "candidate_tokens": _buffer([fed - 1], 8),
        "accepted_tokens": _buffer([fed], 8),
        "verifier_scratch": _buffer([fed], 8),
    }


def _buffer(shape: Sequence[int], size: int) -> dict[str, Any]:
    return {"shape": list(shape), "bytes": size * math.prod(shape)}


def _slots(base: Base, positions: int) -> Iterator[int]:
    """Of each layer of the base that computes keys of its own, how many numbers they are."""
    for module in base.model.modules():
        if hasattr(module, "is_sliding") and getattr(module, "k_proj", None) is not None:
            yield module.k_proj.out_features * min(positions, module.sliding_window or positions)
