"""How weights are held, where formats agree on it."""

from __future__ import annotations

from mtp_extract.checkpoint.checkpoint import FLOATS, Holding
from mtp_extract.checkpoint.dtypes import DTYPES, ROUNDED_TO
from mtp_extract.checkpoint.lazy import LazyTensor


def hold_floats(tensor: LazyTensor, dtype: str, why: str = "the format holds floats only") -> Holding:
    """In ``dtype``, "f32", "bf16" or "f16"; ``why`` says why codes, if there are any, are not kept."""
    rounded_to = ROUNDED_TO[dtype]
    return Holding(
        FLOATS, rounded_to, DTYPES[dtype].roundoff if rounded_to else 0.0, why if tensor.scheme is not None else ""
    )
