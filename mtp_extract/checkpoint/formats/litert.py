"""The seed's layout: every stored constant once, in F32, named by role, with ``mtp_drafter_config.json``."""

from __future__ import annotations

from typing import Any

from mtp_extract.checkpoint.formats.transformers import rope_parameters
from mtp_extract.graph import FoundRole
from mtp_extract.graph.config import FULL, SLIDING, Geometry
from mtp_extract.graph.roles import roles_of

__all__ = ["config", "tensor_names"]


def tensor_names(found: dict[str, FoundRole], num_layers: int) -> dict[str, str]:
    """Role → tensor name. Roles that share a constant share the name of the first of them."""
    names: dict[str, str] = {}
    first: dict[tuple[int, int], str] = {}
    for role in roles_of(num_layers):
        constant = found.get(role.name)
        if constant is None:
            continue
        if constant.tensor is None:
            names[role.name] = role.litert
        else:
            key = (constant.tensor.subgraph, constant.tensor.index)
            names[role.name] = first.setdefault(key, role.litert)
    return names


def config(geometry: Geometry, names: dict[str, str], max_position_embeddings: int) -> dict[str, Any]:
    """``mtp_drafter_config.json``; ``tensors`` maps every role to the tensor that holds it."""
    return {
        "format_version": 1,
        "backbone_hidden_size": geometry.backbone_hidden_size,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "vocab_size": geometry.vocab_size,
        "num_layers": geometry.num_layers,
        "num_heads": geometry.num_heads,
        "head_dims": list(geometry.head_dims),
        "num_kv_heads": list(geometry.num_kv_heads),
        "layer_types": list(geometry.layer_types),
        "kv_bank_ids": [(SLIDING, FULL).index(t) for t in geometry.layer_types],
        "sliding_windows": [geometry.sliding_window if t == SLIDING else None for t in geometry.layer_types],
        "attention_scale": 1.0,
        "rms_norm_eps": geometry.rms_norm_eps,
        "hidden_activation": geometry.hidden_activation,
        "final_logit_softcap": geometry.final_logit_softcap,
        "max_position_embeddings": max_position_embeddings,
        "rope": {t: p for t, p in rope_parameters(geometry).items() if t in geometry.layer_types},
        "tensors": names,
    }
