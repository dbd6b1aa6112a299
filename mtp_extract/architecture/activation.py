"""Static quantization of what a network computes in between, as files for NPUs and packed directories state it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Activation:
    """Static quantization of an activation: ``real = scale · (code − zero_point)``."""

    type: str  # TFLite's name
    scale: float  # what a step of its codes is worth
    zero_point: int  # the code that stands for 0
