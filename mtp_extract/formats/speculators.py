"""The directory of an EAGLE-3 head that the speculators library writes, and that vLLM serves by itself.

A Llama configuration lies inside; beside it stand the head's own keys, the base ("verifier") and how many tokens to
propose. SGLang reads no such directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.checkpoint.keys import anything, is_text
from mtp_extract.formats import llama, reading
from mtp_extract.formats.eagle3_lint import IDS, LLAMA

_TOKENS = 3
"""Proposed a round; whoever serves the head may say otherwise."""


def config_document(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """As :attr:`HeadFormat.document <mtp_extract.formats.llama.HeadFormat.document>`."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "dtype": dtype,
        IDS: list(config.base_layers),
        **llama.shape_flags(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": _TOKENS}],
            "verifier": {"name_or_path": config.base, "architectures": []},
        },
        "tie_word_embeddings": False,
        LLAMA: {"architectures": ["LlamaForCausalLM"], **llama.llama_document(config)},
    }


class _Config(Struct):
    speculators_model_type: Literal["eagle3"]
    eagle_aux_hidden_state_layer_ids: llama.Layers
    norm_before_residual: bool  # speculators takes false where there is none, vLLM true
    transformer_layer_config: dict[str, Any]
    speculators_config: Any = None


def parse_config(document: Mapping[str, Any], own_embedding: bool) -> Eagle3Config:
    """As :attr:`HeadFormat.parse <mtp_extract.formats.llama.HeadFormat.parse>`."""
    found = reading.fields(document, _Config)
    verifier = found.speculators_config
    for key in ("verifier", "name_or_path"):
        verifier = verifier.get(key) if isinstance(verifier, Mapping) else None
    return llama.parse_llama(
        found.transformer_layer_config,
        document,
        base_layers=tuple(found.eagle_aux_hidden_state_layer_ids),
        own_embedding=own_embedding,
        base=llama.named_base(verifier),
    )


_TOLERATED = {
    **llama.TOLERATED,
    "speculators_version": is_text,
    f"{LLAMA}.architectures": anything,
    # Which base it is for, and how many tokens to propose.
    "speculators_config.verifier*": anything,
    "speculators_config.*proposal_method*": anything,
}

FORMAT = llama.HeadFormat("speculators", config_document, parse_config, _TOLERATED)
