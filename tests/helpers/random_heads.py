"""Random EAGLE-3 heads for the random bases of :mod:`helpers.random_pairs`, in memory and in directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mtp_extract.architecture.roles import shapes_of
from mtp_extract.checkpoint.formats import eagle3, speculators
from mtp_extract.drafter import Eagle3Config, Eagle3Drafter

__all__ = ["LAYOUTS", "edit", "head_config", "random_head", "write_head"]

LAYOUTS = {"eagle3": eagle3.config_document, "speculators": speculators.config_document}


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
    tensors = {role.names[layout]: state[role.path].contiguous() for role in shapes_of(head.config)}
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
