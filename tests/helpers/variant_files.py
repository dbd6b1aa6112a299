"""The drafters in ``tests/variants``, made with Google's tools, and the truth about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
_TRUTH: dict[str, Any] = json.loads((HERE / "variants" / "truth.json").read_text())
STATIC = {name: truth for name, truth in _TRUTH.items() if name.startswith("static_")}
"""Static exports of a drafter of two layers in plain operators, as ``make_drafter.py`` writes it."""
VARIANTS = {name: truth for name, truth in _TRUTH.items() if name not in STATIC}
"""Drafters of four layers, of two exporters."""
REFUSED = {"jax_hadamard"}
"""Those that must not be extracted: rotated weights."""
STORED = (
    *("jax_published", "torch_plain_norm", "torch_asymmetric", "torch_blockwise32", "torch_int2", "torch_odd_sizes"),
    *("torch_folded_softcap", "torch_static8_mix48_kv8", "twin_e4b_may"),
)
"""One of each way to store matrices and activations."""


def variant(name: str) -> Path:
    return HERE / "variants" / f"{name}.tflite"
