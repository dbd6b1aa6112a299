"""The floating-point types of checkpoints, and the conversions between them and float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError

Floats = npt.NDArray[np.float32]
Stored = npt.NDArray[np.generic]


def _to_f32(values: Floats, name: str) -> Stored:
    return values


def _to_bf16(values: Floats, name: str) -> Stored:
    """Round to the nearest bfloat16, ties to even; as uint16. Values are finite.

    The sum cannot wrap: the largest finite magnitude, with the sign bit, is 0xFF7FFFFF.
    """
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    result: npt.NDArray[np.uint16] = np.ascontiguousarray(rounded.view(np.uint16)[1::2])
    if ((result & np.uint16(0x7FFF)) == np.uint16(0x7F80)).any():
        raise UnsupportedError(f"{name} holds values beyond bfloat16's range. Choose f32.", remedies=("dtype=f32",))
    return result


def _to_f16(values: Floats, name: str) -> Stored:
    with np.errstate(over="ignore"):
        result = values.astype(np.float16)
    if not np.isfinite(result).all():
        raise UnsupportedError(
            f"{name} holds values beyond float16's range. Choose bf16 or f32.", remedies=("dtype=bf16", "dtype=f32")
        )
    return result


def _from_f32(stored: bytes) -> Floats:
    return np.frombuffer(stored, "<f4")


def _from_bf16(stored: bytes) -> Floats:
    # A bfloat16 is the upper half of a float32.
    return (np.frombuffer(stored, "<u2").astype(np.uint32) << 16).view(np.float32)


def _from_f16(stored: bytes) -> Floats:
    return np.frombuffer(stored, "<f2").astype(np.float32)


@dataclass(frozen=True)
class Dtype:
    """A floating-point type.

    Attributes:
        safetensors, transformers: its names there.
        size: bytes.
        roundoff: the most by which rounding to it changes a number, as a share of it (FP16: while it is normal).
        narrow: rounds float32 to it; takes the tensor's name for the message when it does not fit.
        widen: stored little-endian bytes as float32, exactly.
    """

    safetensors: str
    transformers: str
    size: int
    roundoff: float
    narrow: Callable[[Floats, str], Stored]
    widen: Callable[[bytes], Floats]


DTYPES = MappingProxyType(
    {
        "f32": Dtype("F32", "float32", 4, 2.0**-24, _to_f32, _from_f32),
        "bf16": Dtype("BF16", "bfloat16", 2, 2.0**-8, _to_bf16, _from_bf16),
        "f16": Dtype("F16", "float16", 2, 2.0**-11, _to_f16, _from_f16),
    }
)
"""Output types by their name on the command line."""

ROUNDED_TO = MappingProxyType({"f32": "", "bf16": "BF16", "f16": "FP16"})
"""What is said to have been rounded to where a type is written; nothing of F32, which everything is computed in."""
