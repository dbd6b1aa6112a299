"""GELU, the activation of drafters' gates, in float64."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt


def gelu(x: npt.NDArray[np.float64], *, tanh: bool) -> npt.NDArray[np.float64]:
    """GELU of ``x``, float64 of any shape: exact, or in its ``tanh`` form."""
    if tanh:
        return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))
    erf = [math.erf(number) for number in (x / math.sqrt(2)).reshape(-1).tolist()]  # NumPy has none.
    return np.asarray(0.5 * x * (1 + np.reshape(erf, x.shape)))
