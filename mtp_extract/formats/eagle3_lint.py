"""What engines compute otherwise than a trained EAGLE-3 head, and do not say so.

Each rule was read in the sources of vLLM 0.33.0 (``llama_eagle3.py``, ``speculators``) and SGLang 0.5.23
(``llama_eagle3.py``), for which the layouts are made; and of llama.cpp 0c1e570 (``conversion/llama.py``), which
converts both, and mlx-vlm 0.7.10 (``speculative/drafters/eagle3``), which loads one. What an engine refuses by itself
is not listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mtp_extract.architecture.eagle3 import FUSED, Eagle3Config

IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA = "transformer_layer_config"
"""Key of a ``speculators`` configuration under which that of the layer lies."""

WRONG, CHECK = "loads it wrongly", "loads it as it stands"
"""What an engine does with it: another function, or what only its maker can judge."""

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"
LLAMA_CPP, MLX = "llama.cpp 0c1e570", "mlx-vlm 0.7.10"
_READERS = {"eagle3": (VLLM, SGLANG, LLAMA_CPP), "speculators": (VLLM, LLAMA_CPP, MLX)}


@dataclass(frozen=True)
class Finding:
    """One thing that an engine makes of a head.

    Attributes:
        effect: WRONG or CHECK.
        what: why, and what to do.
    """

    engine: str
    effect: str
    what: str

    @property
    def is_error(self) -> bool:
        """Whether an engine for which the layout is made takes another function for it."""
        return self.effect == WRONG and self.engine in (VLLM, SGLANG)

    def __str__(self) -> str:
        return f"{self.engine} {self.effect}: {self.what}"


def lint(layout: str, document: Mapping[str, Any], config: Eagle3Config) -> tuple[Finding, ...]:
    """What engines that read ``layout`` make of a head.

    Args:
        layout: "eagle3" or "speculators".
        document: its ``config.json``.
        config: what was read of that.
    """
    found = [*_layout_findings(document, config)] if layout == "eagle3" else []
    return tuple(finding for finding in (*found, *_findings(config)) if finding.engine in _READERS[layout])


def _layout_findings(document: Mapping[str, Any], config: Eagle3Config) -> Iterator[Finding]:
    default = "2, n // 2 and n − 3 of a base of n layers"
    if not document.get(IDS):
        what = f"{IDS} is not at the top level, and it takes those of eagle_config for layers entered, not left, or"
        yield Finding(VLLM, WRONG, f"{what} {default}; write each plus 1 there")
        yield Finding(LLAMA_CPP, WRONG, f"{IDS} is not at the top level, and it takes {default}; write them there")
    if not (document.get("eagle_config") or {}).get(IDS):
        what = f"{IDS} is missing in eagle_config, and it takes {default}; write each less 1 there"
        yield Finding(SGLANG, WRONG, what)
    if config.norm_before_residual:
        what = "norm_before_residual is true, and it begins the residual before the norm all the same"
        yield Finding(SGLANG, WRONG, what)
    if config.norm_output:
        what = "norm_output is true: engines feed back the normed state; SpecForge trains with the other and writes it"
        yield from (Finding(engine, CHECK, what) for engine in (VLLM, SGLANG))
    if "draft_vocab_size" in document and document["draft_vocab_size"] is None:
        what = "draft_vocab_size is null, for which it takes the base's LM head, not this one"
        yield Finding(SGLANG, WRONG, what)
    if config.hidden_size == FUSED * config.backbone_hidden_size:
        what = f"the head is as wide as {FUSED} states of the base, {config.hidden_size}, and it leaves fc out then"
        yield Finding(SGLANG, WRONG, what)
    if config.own_embedding and config.hidden_size == config.backbone_hidden_size:
        what = "it takes the base's embeddings for embed_tokens.weight; leave it out if they are the base's"
        yield Finding(SGLANG, WRONG, what)


def _findings(config: Eagle3Config) -> Iterator[Finding]:
    if config.norm_output:
        what = "norm_output is true, and it feeds back the state before the norm"
        yield from (Finding(engine, WRONG, what) for engine in (LLAMA_CPP, MLX))
    if 0 in config.base_layers:
        yield Finding(MLX, WRONG, "it reads what leaves layer 0 for what enters it")
    if config.reduced:
        what = "it takes the base's best token among the head's for the base's best, so the text changes"
        yield Finding(MLX, WRONG, what)
