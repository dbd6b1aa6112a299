"""RoPE frequencies as a graph has them, and the parameters behind them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from mtp_extract.architecture.config import RopeConfig
from mtp_extract.errors import UnsupportedError

_MOST_THETA_DIGITS = 7
_LARGEST_THETA_EXPONENT = 12
# A frequency in float32, made by a power, a reciprocal or a sine, is right to this share of itself.
_EXACT = 2e-6
_HALF = 2.0**-11
_HALF_SUBNORMAL = 2.0**-25

Doubles = npt.NDArray[np.float64]


def frequencies(rope: RopeConfig, head_dim: int) -> Doubles:
    """``theta^(−2i / head_dim)``, 0 past the rotated share; float64 ``[head_dim / 2]``."""
    index = np.arange(head_dim // 2)
    rotated = int(rope.partial_rotary_factor * head_dim // 2)
    made: Doubles = rope.theta ** (-2.0 * index / head_dim) / rope.factor * (index < rotated)
    return made


def rounding_of(table: Doubles, doubt: Doubles) -> Doubles:
    """How far each entry of ``table``, which is known up to ``doubt``, may be from the number it stands for: it was
    computed in F32, or stored in F16 by models of half precision.
    """
    # Converters turn constants of half precision into float32: that all of them are representable in half is no chance.
    with np.errstate(over="ignore"):
        half = table.astype(np.float16).astype(np.float64)
    if (np.abs(table - half) <= doubt).all():
        return np.maximum(doubt, np.abs(table) * _HALF + _HALF_SUBNORMAL)
    return np.maximum(doubt, np.abs(table) * _EXACT)


def read_rope(name: str, table: Doubles, allowed: Doubles, head_dim: int) -> RopeConfig:
    """Theta and the rotated share behind a table of ``head_dim / 2`` frequencies, checked against the whole table.

    ``allowed`` is how far an entry may be off, as :func:`rounding_of` says.

    Raises:
        UnsupportedError: no theta and share make this table.
    """
    seen = int(np.count_nonzero(table))
    if (
        seen < 2
        or np.any(table[seen:])
        or bool(((table < 0) | (table > 1 + allowed)).any())
        or abs(table[0] - 1.0) > _EXACT + allowed[0]
    ):
        raise UnsupportedError(f"{name}: its RoPE table is neither default nor proportional.")
    index = np.arange(1, seen)
    # The entry whose rounding leaves the least doubt of theta: far from 1, and far above its rounding.
    doubt = allowed[1:seen] / table[1:seen] / index
    best = int(index[np.argmin(doubt)])
    exponent = -math.log10(table[best]) * head_dim / (2 * best)
    if exponent > _LARGEST_THETA_EXPONENT:
        raise UnsupportedError(f"{name}: its RoPE table would need a theta of 1e{exponent:.0f}.")
    # The roundest number first: a coarse grid leaves room for several.
    for digits in range(_MOST_THETA_DIGITS + 1):
        theta = float(f"{10**exponent:.{digits - 1}e}") if digits else 10.0 ** round(exponent)
        # What follows may be not rotated, or rotated by so little that the grid has no step for it.
        for rotated in (head_dim // 2, seen):
            rope = RopeConfig(theta, 2 * rotated / head_dim)
            expected = frequencies(rope, head_dim)
            if bool((np.abs(table - expected) <= np.maximum(allowed, expected * _EXACT)).all()):
                return rope
    raise UnsupportedError(f"{name}: its RoPE table does not follow theta^(-2i/{head_dim}) for any theta.")
