"""Static quantization of activations, as in files for NPUs and in packed directories."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Activation:
    """Static quantization of an activation: ``real = scale · (code − zero_point)``."""

    type: str  # TFLite's name of the code type
    scale: float  # difference of the numbers of two neighbouring codes
    zero_point: int  # the code of 0
