"""The drafters in ``tests/variants``, made with Google's tools, and the truth about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
VARIANTS: dict[str, Any] = json.loads((HERE / "variants" / "truth.json").read_text())
REFUSED = {"jax_hadamard"}
"""Those that must not be extracted: rotated weights."""


def variant(name: str) -> Path:
    """The drafter called ``name``."""
    return HERE / "variants" / f"{name}.tflite"
