"""What ``report.json`` holds, for tests that measure nothing."""

from __future__ import annotations

from typing import Any

__all__ = ["REPORT"]

_APART = {"logits": 1e-6, "state": 1e-6, "correlation": 0.9991, "top1": 1}
_RATES = {"top1": 0.7, "top5": 0.9, "conditional": 0.7, "unconditional": 0.7}
_STEP = {"step": 1, **_RATES, "n": 100, "n_conditional": 100, "ci95": {name: [0.6, 0.95] for name in _RATES}}
_FIGURES = {
    "texts": 7,
    "n": 100,
    "mean_accepted_length": 2.98,
    "mean_accepted_length_ci95": [2.9, 3.1],
    "steps": [_STEP],
}

_GENERATION = {
    "3": {
        "tree": None,
        "paths": None,
        "drafts": 3,
        "depth": 3,
        "accepted": 66,
        "drafted": 100,
        "rounds": 33,
        "acceptance": 0.66,
        "mean_accepted_length": 2.98,
        "mean_accepted_length_ci95": [2.9, 3.1],
        "expected_mean_accepted_length": 2.97,
        "chosen_on": 0,
        "mean_accepted_length_elsewhere": None,
        "steps": [{"step": 1, "accepted": 0.7, "conditional": 0.7, "unconditional": 0.7, "n": 33, "n_conditional": 33}],
        "identical": True,
        "identical_prompts": 7,
        "prompts": 7,
        "divergences": [],
        "base_tokens_per_s": 30.0,
        "speculative_tokens_per_s": 60.0,
        "verify_ms": 33.0,
        "draft_ms": None,
    }
}
_ARITHMETIC = {
    "base_ms": 33.0,
    "best_draft_steps": 3,
    "predicted_speedup": 2.0,
    "break_even_draft_steps": 3,
    "timed_prompts": 5,
    "speedups": {"3": {"predicted": 2.0, "measured": 2.0}},
}
_AGREEMENT = {**_FIGURES, "workloads": {"code": _FIGURES}}

REPORT: dict[str, Any] = {
    "version": 2,
    "tool": {"name": "mtp-extract", "version": "1.2.3"},
    "verdict": "Proven: it is what it is" + ", and so on" * 30 + ".",
    "proven": True,
    "refuted": False,
    "findings": [],
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
    "parity": {
        "agrees": True,
        "in_floats": _APART,
        "as_it_is": _APART,
        "cases": ["random"],
    },
    "agreement": _AGREEMENT,
    "trivial": {"bigram": {"top1": 0.3, "difference": 0.4, "difference_ci95": [0.3, 0.5]}},
    "controls": {
        "shuffled_kv": {
            "what": "K and V of another text",
            "suspect": "the base's K and V",
            "skipped": None,
            "standing": "below",
            "difference": 0.65,
            "difference_ci95": [0.6, 0.7],
            "changed": 90,
            "better": 1,
            "worse": 66,
            "mean_accepted_length": 1.1,
            "mean_accepted_length_ci95": [1.0, 1.2],
            "steps": [_STEP],
            "why": "below the real drafter",
        }
    },
    "generation": _GENERATION,
    "arithmetic": _ARITHMETIC,
    "drafters": [
        {
            "name": "drafter",
            "format": "transformers",
            "made": "extracted",
            "mode": None,
            "ordered_head": None,
            "bytes_a_step": {"body": 387528, "head": 65536, "once_a_round": 0, "stored": 453064, "total": 453064},
            "parameters_a_step": {"body": 90000, "head": 16384, "once_a_round": 0, "stored": 106384, "total": 106384},
            "change": {"mean": 0.0, "ci95": [0.0, 0.0]},
            "changes": {"code": {"mean": 0.0, "ci95": [0.0, 0.0]}},
            "agreement": _AGREEMENT,
            "generation": _GENERATION,
            "arithmetic": _ARITHMETIC,
        }
    ],
}
