"""What more than one command says of a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_extract.cli.terminal import say

__all__ = ["found_in", "say_geometry"]


def found_in(section: int | None, found_by: str) -> str:
    """Where it lies and how it was found."""
    where = f"section {section}, " if section is not None else ""
    return f"{where}found by {found_by}" if found_by != "bare model" else "a bare model"


def say_geometry(geometry: Mapping[str, Any], parameters: int) -> None:
    """Two lines of sizes; ``geometry`` as in ``extraction.json``."""
    types = geometry["layer_types"]
    sliding, full = types.count("sliding_attention"), types.count("full_attention")
    layers = [f"{sliding} sliding (window {geometry['sliding_window']})"] if sliding else []
    layers += [f"{full} full"] if full else []
    dims, kv = ("/".join(map(str, sorted(set(geometry[key])))) for key in ("head_dims", "num_kv_heads"))
    say(
        f"  {parameters / 1e6:.2f} M parameters, {geometry['num_layers']} layers: {' + '.join(layers)}, "
        f"{geometry['num_heads']} heads of {dims}, {kv} KV heads"
    )
    cap = geometry["final_logit_softcap"]
    say(
        f"  hidden {geometry['hidden_size']}, feed-forward {geometry['intermediate_size']}, backbone "
        f"{geometry['backbone_hidden_size']}, vocabulary {geometry['vocab_size']}, "
        + (f"soft cap {cap:g}" if cap else "no soft cap")
    )
