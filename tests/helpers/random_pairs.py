"""The sample's trained pair, and random tiny bases with random drafters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from accelerate import Accelerator

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.config import FULL, SLIDING, DrafterConfig, LayerConfig, RopeConfig
from mtp_extract.drafter.load import Network
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.drafter.network import build_network
from mtp_extract.speculate.loop import SpeculativeGenerator
from mtp_extract.speculate.target import Base
from mtp_extract.tuning.plan import TuningPlan

PROMPTS = (
    "class Foo(object):",
    "import os\n",
    "def main():\n    ",
    "for i in range(10):\n",
    'if __name__ == "__main__":',
    "raise ValueError(",
)

# What is particular to each kind of Gemma 4 stays inside the base: attention without a scale, K for V, RoPE of a part
# of the head, two kinds of caches, embeddings per layer, caches that the last layers share, experts.
_LARGE = {"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
_EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    "E4B": {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    "31B": _LARGE,
    "26B": _LARGE | _EXPERTS,
}


@dataclass(frozen=True)
class Pair:
    """A base, its drafter and its tokenizer."""

    base: Any
    drafter: MtpDrafter
    tokenizer: Any

    @property
    def generator(self) -> SpeculativeGenerator:
        return SpeculativeGenerator(self.base, self.drafter, self.tokenizer)

    def prompts(self) -> list[tuple[int, ...]]:
        """As Google's runtime feeds them: BOS first."""
        return [(2, *self.tokenizer(text)["input_ids"]) for text in PROMPTS]

    def alone(self, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """What the base writes by itself, by transformers' own greedy generation."""
        return base_alone(self.base, prompt, tokens)


@cache
def base_alone(base: Any, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    out = base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


def random_base(seed: int = 0, **changes: Any) -> Any:
    """A random text-only Gemma 4 of width 32: sliding window 5, embeddings by layer, one KV-shared layer a type."""
    settings = {
        "vocab_size": 40,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 12,
        "sliding_window": 5,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 40,
        "final_logit_softcapping": 30.0,
        "eos_token_id": None,
    }
    config = transformers.Gemma4TextConfig(**(settings | changes))
    torch.manual_seed(seed)
    model = transformers.Gemma4ForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    return model


def drafter_from(config: DrafterConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> MtpDrafter:
    """Of an assistant's tensors, under the names that transformers gives them."""
    roles = list_shapes(config)
    state = {role.path: tensors[role.names["transformers"]] for role in roles}
    return build_network(
        MtpDrafter, config, {path: t.to(dtype) if t.is_floating_point() else t.long() for path, t in state.items()}
    )


def random_drafter(base: Any, seed: int = 1, **changes: Any) -> MtpDrafter:
    """A random drafter that fits ``base``."""
    text = base.config.get_text_config()
    rope = {SLIDING: RopeConfig(1e4), FULL: RopeConfig(1e6, partial_rotary_factor=0.25)}

    def layer(kind: str) -> LayerConfig:
        shape = text.per_layer_config[text.layer_types.index(kind)]
        window = text.sliding_window if kind == SLIDING else None
        return LayerConfig(kind, shape.head_dim, shape.num_key_value_heads, window, rope[kind])

    settings = {
        "backbone_hidden_size": text.hidden_size,
        "hidden_size": 16,
        "intermediate_size": 24,
        "vocab_size": text.vocab_size,
        "num_heads": 4,
        "layers": tuple(layer(kind) for kind in dict.fromkeys(text.layer_types)),
    }
    torch.manual_seed(seed)
    return MtpDrafter(DrafterConfig(**(settings | changes))).eval().requires_grad_(False)


def beside(plan: TuningPlan, base: Base, drafter: Network | None, **more: Any) -> Any:
    """Both in memory, in the place of a :class:`~mtp_extract.tuning.pair.Pair` that is loaded from directories."""
    parts = {"plan": plan, "base": base, "drafter": drafter, "accelerator": Accelerator(cpu=True), **more}
    return SimpleNamespace(**parts)
