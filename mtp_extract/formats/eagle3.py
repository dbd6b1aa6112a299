"""The directory of an EAGLE-3 head that SpecForge writes, and that SGLang and vLLM load.

The layers of the base are named twice, because engines count otherwise: at the top level as vLLM does (the layer that a
state enters), in ``eagle_config`` as SGLang and SpecForge do (the layer it leaves). Each prefers the place that is its.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.checkpoint.manifest import is_text, some
from mtp_extract.errors import CheckpointError
from mtp_extract.formats import llama, reading
from mtp_extract.formats.eagle3_lint import IDS

_BASE = "base_model_name_or_path"
"""Read by no engine; what a ``speculators`` directory says of its verifier."""


def config_document(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """As :attr:`HeadFormat.document <mtp_extract.formats.llama.HeadFormat.document>`."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **({_BASE: config.base} if config.base else {}),
        **llama.llama_document(config),
        **llama.shape_flags(config),
        "dtype": dtype,
        IDS: list(config.base_layers),
        "eagle_config": {IDS: [layer - 1 for layer in config.base_layers], "use_aux_hidden_state": True},
    }


def parse_config(config: Mapping[str, Any], own_embedding: bool) -> Eagle3Config:
    """As :attr:`HeadFormat.parse <mtp_extract.formats.llama.HeadFormat.parse>`."""
    eagle = reading.table(config, "eagle_config") if config.get("eagle_config") is not None else {}
    if eagle.get("use_aux_hidden_state", True) is not True:
        raise CheckpointError(
            "expected use_aux_hidden_state to be true in an EAGLE-3 head, found otherwise; it is not supported"
        )
    entering, leaving = llama.read_ids(config, IDS), llama.read_ids(eagle, IDS)
    shifted = None if leaving is None else tuple(layer + 1 for layer in leaving)
    layers = entering or shifted
    if layers is None:
        raise CheckpointError(
            f"expected {IDS} in the drafter's config, found none; engines take 2, n // 2 and n − 3 of a base of n "
            "layers: write those that the head was trained with"
        )
    if entering is not None and shifted is not None and entering != shifted:
        raise CheckpointError(
            f"expected each layer of {IDS} in eagle_config to be one less than at the top level, found "
            f"{list(leaving or ())} and {list(entering)}: SGLang and vLLM would read different states; check which of "
            "the two the head was trained with"
        )
    return llama.parse_llama(
        config,
        config,
        base_layers=layers,
        norm_before_fc=reading.flag(eagle if "norm_before_fc" in eagle else config, "norm_before_fc"),
        own_embedding=own_embedding,
        base=llama.named_base(config.get(_BASE)),
    )


_TOLERATED = {
    **llama.TOLERATED,
    _BASE: is_text,
    "architectures": some(["LlamaForCausalLMEagle3"], ["Eagle3LlamaForCausalLM"]),
    **{f"eagle_config.{key}": some(True, False, None) for key in ("norm_before_fc", "use_aux_hidden_state")},
}

FORMAT = llama.HeadFormat("eagle3", config_document, parse_config, _TOLERATED)
