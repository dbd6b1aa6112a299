"""Gemma 4's multi-token-prediction drafters: what this package says and knows of their architecture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtp_extract.architecture.architecture import Architecture
from mtp_extract.architecture.config import DrafterConfig, known_drafter
from mtp_extract.architecture.roles import GEMMA4_MTP, Shapes, roles_of, with_shapes


def mtp_shapes(config: DrafterConfig) -> Shapes:
    """The roles of a drafter of this shape, in order, each with the shape of its tensor."""
    head = config.ordered_head
    sizes = {
        "one": 1,
        "hidden": config.hidden_size,
        "ffn": config.intermediate_size,
        "vocab": config.vocab_size,
        "backbone": config.backbone_hidden_size,
        "input": 2 * config.backbone_hidden_size,
        "centroids": head.num_centroids if head else 0,
    }
    roles = roles_of(config.num_layers, ordered_head=head is not None)
    return with_shapes(roles, sizes, config.num_heads, config.head_dims)


def describe_mtp(geometry: Mapping[str, Any]) -> list[str]:
    """Its layers, then its widths and vocabulary."""
    sliding, full = (geometry["layer_types"].count(f"{kind}_attention") for kind in ("sliding", "full"))
    layers = f"{geometry['num_layers']} layers: {sliding} sliding (window {geometry['sliding_window']}) + {full} full"
    dims, kv = ("/".join(map(str, sorted(set(geometry[key])))) for key in ("head_dims", "num_kv_heads"))
    cap = f"soft cap {geometry['final_logit_softcap']:g}" if geometry["final_logit_softcap"] else "no soft cap"
    return [
        f"{layers}, {geometry['num_heads']} heads of {dims}, {kv} KV heads",
        f"hidden {geometry['hidden_size']}, feed-forward {geometry['intermediate_size']}, backbone "
        f"{geometry['backbone_hidden_size']}, vocabulary {geometry['vocab_size']}, {cap}",
    ]


def mtp_serving(engines: Sequence[str], geometry: Mapping[str, Any]) -> list[str]:
    """A block for each engine that loads the directory, and how to come to llama.cpp, which loads a file of its own."""
    return [*(engines or ("none",)), *(() if "llama.cpp" in engines else ("other",))]


def _known_name(config: DrafterConfig) -> str | None:
    geometry = known_drafter(config)
    return geometry["name"] if geometry else None


MTP = Architecture(
    name=GEMMA4_MTP,
    title="MTP drafter",
    long_title="multi-token prediction (MTP) drafter",
    config=DrafterConfig,
    shapes=mtp_shapes,
    network="mtp_extract.drafter.mtp:MtpDrafter",
    describe=describe_mtp,
    tags=("multi-token-prediction", "mtp", "litert-lm"),
    serving=mtp_serving,
    pair_role="mtp_drafter",
    known_as=_known_name,
    is_bundled=True,
    faults="mtp_extract.validation.controls:CONTROLS",
)
