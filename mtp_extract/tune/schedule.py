"""How a learning rate falls."""

from __future__ import annotations

import math

_LEAST = 0.02
"""Of the learning rate, at the end."""


def cosine(turned: float) -> float:
    """The factor on a learning rate after the share ``turned`` of its way, along half a cosine: from 1 to 0.02."""
    return _LEAST + (1 - _LEAST) * 0.5 * (1 + math.cos(math.pi * turned))
