"""The directory of an EAGLE-3 head that the speculators library writes, and that vLLM serves by itself.

A Llama configuration lies inside; beside it stand the head's own keys, the base ("verifier") and how many tokens to
propose. SGLang reads no such directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.checkpoint.manifest import anything, is_text
from mtp_extract.errors import CheckpointError, escape
from mtp_extract.formats import llama, reading
from mtp_extract.formats.eagle3_lint import IDS, LLAMA

_TOKENS = 3
"""Proposed a round; whoever serves the head may say otherwise."""

_TYPE = "speculators_model_type"


def config_document(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """As :attr:`HeadFormat.document <mtp_extract.formats.llama.HeadFormat.document>`."""
    return {
        "architectures": ["Eagle3Speculator"],
        _TYPE: "eagle3",
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


def parse_config(config: Mapping[str, Any], own_embedding: bool) -> Eagle3Config:
    """As :attr:`HeadFormat.parse <mtp_extract.formats.llama.HeadFormat.parse>`."""
    if config.get(_TYPE) != "eagle3":
        raise CheckpointError(f"expected {_TYPE} eagle3, found {escape(config.get(_TYPE))}; it is not supported")
    layers = llama.read_ids(config, IDS)
    if layers is None:
        raise CheckpointError(
            f"expected {IDS} in the drafter's config, found none; vLLM takes 2, n // 2 and n − 3 of a base of n "
            "layers: write those that the head was trained with"
        )
    # speculators takes false where there is none, vLLM true.
    reading.require(config, "norm_before_residual")
    verifier = config.get("speculators_config")
    for key in ("verifier", "name_or_path"):
        verifier = verifier.get(key) if isinstance(verifier, Mapping) else None
    return llama.parse_llama(
        reading.table(config, LLAMA),
        config,
        base_layers=layers,
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
