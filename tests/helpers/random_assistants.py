"""Random tiny assistants, built by transformers itself: the official implementation is the yardstick."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers


@dataclass(frozen=True)
class Geometry:
    """A drafter's shape; the defaults are small, odd numbers where oddness is allowed."""

    backbone: int = 24
    hidden: int = 16
    intermediate: int = 28
    layers: tuple[str, ...] = ("sliding_attention", "sliding_attention", "full_attention")
    heads: int = 4
    kv_heads: int = 2
    full_kv_heads: int | None = None
    head_dim: int = 8
    full_head_dim: int = 12
    window: int = 5
    vocabulary: int = 60
    centroids: int | None = None
    top_k: int = 3
    partial: float = 0.25

    def config(self) -> dict[str, Any]:
        """As an extraction writes it: explicit ``global_head_dim``."""
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "backbone_hidden_size": self.backbone,
            "use_ordered_embeddings": self.centroids is not None,
            "num_centroids": self.centroids or 2048,
            "centroid_intermediate_top_k": self.top_k,
            "tie_word_embeddings": True,
            "text_config": {
                "model_type": "gemma4_text",
                "vocab_size": self.vocabulary,
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "num_hidden_layers": len(self.layers),
                "layer_types": list(self.layers),
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "num_global_key_value_heads": self.full_kv_heads,
                "attention_k_eq_v": self.full_kv_heads is not None,
                "head_dim": self.head_dim,
                "global_head_dim": self.full_head_dim,
                "num_kv_shared_layers": len(self.layers),
                "sliding_window": self.window,
                "hidden_size_per_layer_input": 0,
                "vocab_size_per_layer_input": 0,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                    "full_attention": {
                        "rope_type": "proportional",
                        "rope_theta": 1e6,
                        "partial_rotary_factor": self.partial,
                    },
                },
                "final_logit_softcapping": None,
                "pad_token_id": 0,
                "max_position_embeddings": 4096,
            },
        }


GEOMETRIES = {
    "dense": Geometry(),
    "ordered": Geometry(centroids=12),
    "wide-window": Geometry(window=64),
    "k-eq-v": Geometry(heads=8, kv_heads=4, full_kv_heads=1, head_dim=6, full_head_dim=16, partial=0.5),
    "deep-ordered": Geometry(
        layers=("full_attention", *("sliding_attention", "full_attention") * 2),
        heads=2, kv_heads=1, window=1, vocabulary=48, centroids=8, top_k=8, hidden=20,
    ),
}  # fmt: skip


def random_assistant(geometry: Geometry, seed: int = 0) -> Any:
    """Transformers' model of that shape, all weights random (norms around 1, scalars not 1)."""
    config = transformers.AutoConfig.for_model(**geometry.config())
    model = transformers.Gemma4AssistantForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(tensor.numel(), generator=generator))
            elif name.endswith("layer_scalar"):
                tensor.uniform_(0.4, 1.3, generator=generator)
            elif name.endswith("norm.weight"):
                tensor.uniform_(0.3, 1.8, generator=generator)
            elif tensor.ndim == 2:
                tensor.normal_(0, 1.0 / tensor.shape[1] ** 0.5, generator=generator)
    return model
