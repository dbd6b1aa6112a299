"""What ``report.json`` holds, for tests that measure nothing."""

from __future__ import annotations

from typing import Any

__all__ = ["REPORT"]

_RATE = {"value": 0.7, "n": 100, "ci95": [0.6, 0.95]}
_STEP = {"step": 1, "top1": _RATE, "top5": {**_RATE, "value": 0.9}, "conditional": _RATE}
_WORKLOAD = {
    "texts": 7,
    "n": 100,
    "teacher_forced": {"value": 2.98, "n": 90, "ci95": [2.9, 3.1]},
    "steps": [_STEP],
}
_WORTH = {
    "tree": None,
    "drafts": 3,
    "depth": 3,
    "rounds": 33,
    "drafted": 100,
    "accepted": 66,
    "tokens_per_round": {"value": 2.98, "n": 33, "ci95": [2.9, 3.1]},
    "prompts": 7,
    "same_text": 7,
    "divergences": [],
    "base_tokens_per_s": 30.0,
    "tokens_per_s": 60.0,
    "verify_ms": 33.0,
    "draft_ms": None,
    "predicted_speedup": 2.0,
    "measured_speedup": 2.0,
}
_CHANGE = {"mean": 0.0, "interval": [0.0, 0.0], "texts": 7}
_APART = {"logits": 1e-7, "state": 1e-7, "correlation": 0.9991, "top1": 64}

REPORT: dict[str, Any] = {
    "version": 5,
    "tool": {"name": "mtp-extract", "version": "1.2.3"},
    "verdict": "Verified: it is what it is" + ", and so on" * 30 + ".",
    "verified": True,
    "refuted": False,
    "drafter": "/somewhere/drafter",
    "source": "sample.litertlm",
    "base": {
        "name": "a base",
        "dtype": "float32",
        "devices": ["cpu"],
        "drafter_dtype": "float32",
        "chat_template": False,
    },
    "settings": {"prompts": {"code": 7}, "seed": 0},
    "notes": [],
    "checks": [{"name": "config", "what": "every number", "passed": True, "evidence": "28 values agree"}],
    "parity": {"in_floats": _APART, "as_it_is": _APART, "cases": 64},
    "drafters": [
        {
            "name": "drafter",
            "tuned": None,
            "agreement": _WORKLOAD,
            "workloads": {"code": _WORKLOAD},
            "generation": {"worth": {"3": _WORTH}, "best": "3", "timed": 5, "base_ms": 33.0},
            "change": _CHANGE,
            "changes": {"code": _CHANGE},
        }
    ],
    "controls": [
        {
            "name": "shuffled_kv",
            "what": "K and V of another text",
            "suspect": "the base's K and V",
            "skipped": None,
            "agreement": _WORKLOAD,
            "difference": {"value": 0.65, "n": 100, "ci95": [0.6, 0.7]},
            "changed": 90,
            "better": 1,
            "worse": 66,
            "standing": "below",
        }
    ],
    "pair": None,
}
