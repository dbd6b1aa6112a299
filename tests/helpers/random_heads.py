"""Random EAGLE-3 heads for the random bases of :mod:`helpers.random_pairs`, in memory and in directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mtp_extract.architecture import list_shapes
from mtp_extract.architecture.eagle3 import Eagle3Config
from mtp_extract.drafter.eagle3 import Eagle3Drafter
from mtp_extract.formats.eagle3 import EAGLE, SPECULATORS

LAYOUTS = {layout.name: layout.build_config for layout in (EAGLE, SPECULATORS)}


# What the loaders ask for, read in their sources: vLLM 0.33.0 model_executor/models/llama_eagle3.py (names before its
# mapper: "midlayer." becomes "layers.0.", q, k, v and gate, up are stacked there) and SGLang 0.5.23
# srt/models/llama_eagle3.py (likewise). H: width of the head, T: of the base, Q, K: all query and KV heads, F: of the
# feed-forward block, D: the draft vocabulary. vLLM skips t2d, SGLang whatever it does not know.
_ASKED_FOR: dict[str, tuple[str, ...]] = {
    "fc.weight": ("H", "3T"),
    "midlayer.hidden_norm.weight": ("H",),
    "midlayer.input_layernorm.weight": ("H",),
    "midlayer.post_attention_layernorm.weight": ("H",),
    "midlayer.self_attn.q_proj.weight": ("Q", "2H"),
    "midlayer.self_attn.k_proj.weight": ("K", "2H"),
    "midlayer.self_attn.v_proj.weight": ("K", "2H"),
    "midlayer.self_attn.o_proj.weight": ("H", "Q"),
    "midlayer.mlp.gate_proj.weight": ("F", "H"),
    "midlayer.mlp.up_proj.weight": ("F", "H"),
    "midlayer.mlp.down_proj.weight": ("H", "F"),
    "norm.weight": ("H",),
    "lm_head.weight": ("D", "H"),
}
_IF_ASKED: dict[str, dict[str, tuple[str, ...]]] = {
    "fc_norm": {f"fc_norm.{i}.weight": ("T",) for i in range(3)},
    "norm_before_fc": {"input_norm.weight": ("3T",)},
    "reduced": {"d2t": ("D",)},
    "own_embedding": {"embed_tokens.weight": ("V", "H")},
}


def asked_for(config: Eagle3Config, layout: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what loaders ask for of a head of ``config``, beside ``t2d``, which they skip."""
    width, base = config.hidden_size, config.backbone_hidden_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"H": width, "2H": 2 * width, "T": base, "3T": 3 * base, "Q": queries, "K": keys}
    sizes |= {"F": config.intermediate_size, "D": config.draft_vocab_size, "V": config.vocab_size}
    table = dict(_ASKED_FOR)
    for flag, more in _IF_ASKED.items():
        table |= more if getattr(config, flag) else {}
    first = "midlayer." if layout == "eagle3" else "layers.0."
    return {name.replace("midlayer.", first): tuple(sizes[size] for size in shape) for name, shape in table.items()}


def head_config(**changes: Any) -> Eagle3Config:
    """Of a small head, 24 of 40 tokens, for a base of width 32 and five layers; it reads what leaves the last, too."""
    settings: dict[str, Any] = {
        "backbone_hidden_size": 32,
        "hidden_size": 32,
        "intermediate_size": 40,
        "vocab_size": 40,
        "draft_vocab_size": 24,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 8,
        "base_layers": (1, 3, 5),
        "rope_theta": 1e6,
    }
    return Eagle3Config(**(settings | changes))


def random_head(config: Eagle3Config, seed: int = 0) -> Eagle3Drafter:
    """With weights of a size at which every part of it counts, and three steps do not make F32 lose 1e-5."""
    torch.manual_seed(seed)
    head = Eagle3Drafter(config)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 1.4 * parameter.shape[1] ** -0.5)
            else:
                parameter.uniform_(0.5, 2)
    if config.reduced:
        targets = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
        head.get_buffer("d2t").copy_(targets - torch.arange(config.draft_vocab_size))
    return head.eval().requires_grad_(False)


def write_head(directory: Path, head: Eagle3Drafter, layout: str = "eagle3", *, marks: bool = True) -> Path:
    """``head`` as its trainers write it, F32."""
    directory.mkdir()
    state = head.state_dict()
    tensors = {role.names[layout]: state[role.path].contiguous() for role in list_shapes(head.config)}
    if head.config.reduced and marks:
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
        tensors["t2d"][head.targets] = True
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(LAYOUTS[layout](head.config, "float32")))
    return directory


def edit(directory: Path, **changes: Any) -> Path:
    """Change keys of the ``config.json`` in ``directory``; ``...`` takes one away."""
    path = directory / "config.json"
    document = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))
    return directory
