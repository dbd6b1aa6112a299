"""What ``report.json`` holds, for tests that measure nothing."""

from __future__ import annotations

from typing import Any

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
    "same_text": 5,
    "tokens_per_s": 60.0,
    "verify_ms": 33.0,
    "draft_ms": None,
    "predicted_speedup": 2.0,
    "measured_speedup": 2.0,
}
_CHANGE = {"mean": 0.0, "interval": [0.0, 0.0], "texts": 7}

REPORT: dict[str, Any] = {
    "version": 8,
    "tool": {"name": "mtp-extract", "version": "1.2.3"},
    "run": {
        "when": "2026-01-02T03:04:05+00:00",
        "command": "mtp-validate drafter",
        "prompts_sha256": "0" * 64,
        "versions": {"python": "3.11.7"},
    },
    "verdict": "Verified: it is what it is" + ", and so on" * 30 + ".",
    "verified": True,
    "refuted": False,
    "drafter": "/somewhere/drafter",
    "source": "sample.litertlm",
    "base": {
        "name": "a base",
        "dtype": "float32",
        "devices": ["cpu"],
        "chat_template": False,
        "timed": 5,
        "tokens_per_s": 30.0,
        "forward_ms": 33.0,
    },
    "settings": {"prompts": {"code": 7}, "new_tokens": 64},
    "notes": [],
    "checks": [{"name": "config", "what": "every number", "passed": True, "evidence": "28 values agree"}],
    "drafters": [
        {
            "name": "drafter",
            "tuned": None,
            "agreement": _WORKLOAD,
            "workloads": {"code": _WORKLOAD},
            "worth": {"3": _WORTH},
            "best": "3",
            "change": _CHANGE,
            "changes": {"code": _CHANGE},
        }
    ],
    "controls": [
        {
            "name": "shuffled_kv",
            "what": "K and V of another text",
            "suspect": "the base's K and V",
            "top1": {"value": 0.05, "n": 100, "ci95": [0.01, 0.1]},
            "difference": {"value": 0.65, "n": 100, "ci95": [0.6, 0.7]},
            "standing": "below",
        }
    ],
    "pair": None,
}
