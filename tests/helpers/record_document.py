"""What ``extraction.json`` holds, for tests that extract nothing."""

from __future__ import annotations

from typing import Any

__all__ = ["RECORD", "TUNING", "ordered_head", "tuning"]


_LENGTH = {"teacher_forced": 1.5, "interval": [1.4, 1.6], "tokens_per_round": 1.4}
_CHANGED = {"mean": 0.1, "interval": None}
_CHANGE = {
    **{"texts": 7, "before": _LENGTH, "after": _LENGTH, "change": _CHANGED},
    "rounds": {"ratio": 1.1, "interval": [1.0, 1.2]},
}


def tuning(name: str) -> dict[str, Any]:
    """What a card reads of a tuning; every text in it is ``name``."""
    return {
        "mode": "norms",
        "base": name,
        "interrupted": True,
        "refused": [name],
        "recipe": {"draft_steps": 3},
        "workloads": {name: _CHANGE},
        "overall": _CHANGE,
        "unseen": {"texts": 7, "anchors": 90, "change": _CHANGED},
        "worst": [{"workload": name, "name": name, "before": 1.5, "after": 1.4}],
        "texts": {"held_out": 10},
    }


def ordered_head(name: str) -> dict[str, Any]:
    """What a card reads of an ordered head that was made; every text in it is ``name``."""
    counts = ("states", "top_k", "centroids", "rows_read", "rows_dense", "draft_steps", "tokens_used", "tokens_seen")
    kept = {"share": 0.99, "interval": [0.98, 1.0]}
    return {**tuning(name), **dict.fromkeys(counts, 1000), "kinds": {name: kept}}


RECORD: dict[str, Any] = {
    "format_version": 5,
    "tool": {"name": "mtp-extract", "version": "1.2.3"},
    "source": {
        "name": "gemma-4-E4B-it.litertlm",
        "size": 3659530240,
        "kind": "litertlm",
        "version": "1.7.0",
        "provenance": {
            "repository": "litert-community/gemma-4-E4B-it-litert-lm",
            "path": "gemma-4-E4B-it.litertlm",
            "revision": "main",
            "commit": "c" * 40,
        },
        "section": {
            "index": 11,
            "model_type": "mtp_drafter",
            "items": {},
            "begin": 3614392320,
            "end": 3659530240,
            "sha256": "5" * 64,
            "found_by": "model_type",
            "signature": "serving_default",
        },
    },
    "converted_from": [],
    "known_as": "Gemma 4 E4B",
    "layout": "transformers",
    "dtype": "bf16",
    "rounded": {"BF16": 3},
    "made_codes": None,
    "geometry": {
        "backbone_hidden_size": 2560,
        "hidden_size": 256,
        "intermediate_size": 2048,
        "vocab_size": 262144,
        "num_layers": 1,
        "num_heads": 4,
        "head_dims": [256],
        "num_kv_heads": [1],
        "layer_types": ["sliding_attention"],
        "sliding_window": 512,
        "rope": {"sliding_attention": {"theta": 10000.0, "partial_rotary_factor": 1.0}},
        "final_logit_softcap": None,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "files": {},
    "counts": {
        "held": {"BF16": 3},
        "stored": {"FLOAT32": 1, "INT4": 1, "implied": 1},
        "names_confirmed": 2,
        "set_aside": 1,
        "static": 0,
    },
    "shared": [],
    "activations": {},
    "notes": [],
    "proof": None,
}


_LENGTHS = {
    **{"teacher_forced": 3.0, "interval": None, "conditional": [0.9, 0.8]},
    **{"rounds": 1.0, "tokens_per_round": 3.0, "tokens_per_round_interval": None},
}
TUNING: dict[str, Any] = {
    "mode": "qat",
    "base": "a base",
    "base_xxh3": "0" * 32,
    "recipe": {
        **dict.fromkeys(("steps", "draft_steps", "batch", "anchors"), 1),
        **{"objective": "ce", "temperature": 0.0, "learning_rate": None, "seed": 0},
    },
    "numbers": 1,
    "texts": {"trained": 1},
    "text_from": None,
    "steps_done": 1,
    "best_step": 1,
    "interrupted": False,
    "accepted": True,
    "refused": [],
    "overall": {
        "texts": 1,
        "anchors": 1,
        "trained_on_its_kind": True,
        "before": _LENGTHS,
        "after": _LENGTHS,
        "change": {"mean": 0.0, "interval": None},
        "rounds": {"ratio": 1.0, "interval": None},
    },
    "workloads": {},
    "unseen": None,
    "worst": [],
    "tuned_from": {},
}
"""A tuning, whole."""
