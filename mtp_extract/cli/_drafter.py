"""What more than one command says of a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_extract.cli.terminal import say
from mtp_extract.proof.words import in_words


def found_in(section: int | None, found_by: str) -> str:
    """Where it lies and how it was found."""
    where = f"section {section}, " if section is not None else ""
    return f"{where}found by {found_by}" if found_by != "bare model" else "a bare model"


def say_geometry(geometry: Mapping[str, Any], parameters: int) -> None:
    """Two lines of sizes; ``geometry`` as in ``extraction.json``."""
    if "draft_vocab_size" in geometry:
        _say_head(geometry, parameters)
        return
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


def say_proof(claim: str, proof: Mapping[str, Any]) -> None:
    """What was held against the bundle; ``proof`` as in ``extraction.json``."""
    first, *others = in_words(proof)
    say(f"{claim}: {first}")
    for line in others:
        say(f"  {line}")


def _say_head(geometry: Mapping[str, Any], parameters: int) -> None:
    say(
        f"  EAGLE-3 head, {parameters / 1e6:.2f} M parameters, 1 layer of its own, {geometry['num_heads']} heads of "
        f"{geometry['head_dim']}, {geometry['num_kv_heads']} KV heads, RoPE {geometry['rope_theta']:g}"
    )
    say(
        f"  hidden {geometry['hidden_size']}, feed-forward {geometry['intermediate_size']}, backbone "
        f"{geometry['backbone_hidden_size']}, {geometry['draft_vocab_size']} of {geometry['vocab_size']} tokens"
    )
    layers = ", ".join(map(str, geometry["base_layers"]))
    flags = [flag for flag in _FLAGS if geometry[flag]]
    say(f"  reads what enters layers {layers} of {geometry['base'] or 'its base'}; {', '.join(flags) or 'no flags'}")


_FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output", "own_embedding")
