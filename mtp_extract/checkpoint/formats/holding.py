"""How weights are held, where formats agree on it."""

from __future__ import annotations

from types import MappingProxyType

from mtp_extract.checkpoint.checkpoint import Holding
from mtp_extract.checkpoint.lazy import LazyTensor

__all__ = ["UNIT_ROUNDOFF", "hold_floats"]

UNIT_ROUNDOFF = MappingProxyType({"f32": 0.0, "bf16": 2.0**-8, "f16": 2.0**-11})
"""The most by which rounding float32 to a type changes a number, as a share of it (FP16: while it is normal)."""

_NAMES = MappingProxyType({"f32": "", "bf16": "BF16", "f16": "FP16"})


def hold_floats(tensor: LazyTensor, dtype: str, why: str = "the format holds floats only") -> Holding:
    """In ``dtype``, "f32", "bf16" or "f16"; ``why`` says why codes, if there are any, are not kept."""
    return Holding("floats", _NAMES[dtype], UNIT_ROUNDOFF[dtype], why if tensor.scheme is not None else "")
