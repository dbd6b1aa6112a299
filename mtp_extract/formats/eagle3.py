"""The directory of an EAGLE-3 head that SpecForge writes, and that SGLang and vLLM load.

The layers of the base are named twice, because engines count otherwise: at the top level as vLLM does (the layer that a
state enters), in ``eagle_config`` as SGLang and SpecForge do (the layer it leaves). Each prefers the place that is its.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.checkpoint.keys import is_text, some
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


class _Eagle(Struct):
    eagle_aux_hidden_state_layer_ids: llama.Layers | None = None
    norm_before_fc: bool | None = None
    use_aux_hidden_state: bool = True


class _Config(Struct):
    eagle_aux_hidden_state_layer_ids: llama.Layers | None = None
    eagle_config: _Eagle | None = None
    norm_before_fc: bool | None = None
    base_model_name_or_path: Any = None


def parse_config(document: Mapping[str, Any], own_embedding: bool) -> Eagle3Config:
    """As :attr:`HeadFormat.parse <mtp_extract.formats.llama.HeadFormat.parse>`."""
    found = reading.fields(document, _Config)
    eagle = found.eagle_config or _Eagle()
    leaving = eagle.eagle_aux_hidden_state_layer_ids or []
    layers = found.eagle_aux_hidden_state_layer_ids or [layer + 1 for layer in leaving]
    if not layers:
        raise CheckpointError(
            f"expected {IDS}, found none; engines take 2, n // 2 and n − 3 of a base of n layers: write those that the "
            "head was trained with"
        )
    return llama.parse_llama(
        document,
        document,
        base_layers=tuple(layers),
        norm_before_fc=bool(found.norm_before_fc if eagle.norm_before_fc is None else eagle.norm_before_fc),
        own_embedding=own_embedding,
        base=llama.named_base(found.base_model_name_or_path),
    )


_TOLERATED = {
    **llama.TOLERATED,
    _BASE: is_text,
    "architectures": some(["Eagle3LlamaForCausalLM"]),
    "eagle_config": some(None),
    "eagle_config.norm_before_fc": some(True, False),
    "eagle_config.use_aux_hidden_state": some(None),
    **dict.fromkeys((IDS, f"eagle_config.{IDS}"), some(None)),
}

FORMAT = llama.HeadFormat("eagle3", config_document, parse_config, _TOLERATED)
