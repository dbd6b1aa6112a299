"""A matrix as signed integers with a step a row, or a block of a row: what every format that keeps integers writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.lazy import LazyTensor, Steps
from mtp_extract.errors import NoCodesError
from mtp_extract.litertlm.quantized import Floats
from mtp_extract.litertlm.requantize import rechunked

Codes = npt.NDArray[np.int8]
Numbers = TypeVar("Numbers", bound=np.generic)

_WIDTHS = (2, 4, 8)


@dataclass(frozen=True)
class RowCodes:
    """``value = code · step``, every code less its zero point.

    Attributes:
        shape: ``[out, in]``.
        bits: the least width, of 2, 4 and 8, that holds every code the stored type can have.
        block: neighbouring elements of a row that share a step.
        steps: float32 ``[out, in / block]``; what was folded into the stored scales is divided out.
        exact: whether the steps are the stored scales, to the bit.
    """

    shape: tuple[int, ...]
    bits: int
    block: int
    steps: Floats
    exact: bool
    tensor: LazyTensor = field(repr=False)
    stored: Steps = field(repr=False)

    def blocks(self) -> Iterator[tuple[int, Codes]]:
        """(first row, codes ``[rows, in]``) of all rows, a little at a time; the same rows for equal shapes."""
        columns = self.shape[1]
        first = 0
        for codes in in_rows(self.tensor.integers(), columns):
            zeros = self.stored.zero_point[first : first + len(codes), :, None]
            if zeros.any():
                shaped = codes.reshape(len(codes), -1, self.block).astype(np.int16) - zeros
                yield first, shaped.reshape(codes.shape).astype(np.int8)
            else:
                yield first, codes.astype(np.int8, copy=False)
            first += len(codes)


def in_rows(chunks: Iterable[npt.NDArray[Numbers]], columns: int) -> Iterator[npt.NDArray[Numbers]]:
    """Flat chunks of any size as some rows after the other, ``[rows, columns]``; the same rows for equal shapes."""
    return (chunk.reshape(-1, columns) for chunk in rechunked(chunks, max(columns, 1)))


def row_codes(tensor: LazyTensor) -> RowCodes:
    """``tensor`` so seen.

    Raises:
        NoCodesError: it is stored as floats, has scales across its rows, or codes that do not fit 8 bits around zero.
    """
    scheme, steps = tensor.scheme, tensor.steps
    if scheme is None or len(tensor.shape) != 2:
        raise NoCodesError("it is stored as floats")
    if steps is None or (steps.block == 1 and tensor.shape[1] > 1):
        raise NoCodesError("its scales run across the rows")
    low, high = (-(1 << scheme.bits - 1), (1 << scheme.bits - 1) - 1) if scheme.signed else (0, (1 << scheme.bits) - 1)
    low, high = low - int(steps.zero_point.max()), high - int(steps.zero_point.min())
    bits = next((b for b in _WIDTHS if low >= -(1 << b - 1) and high < 1 << b - 1), None)
    if bits is None:
        raise NoCodesError("its zero points are not 0, and what is left of the codes does not fit 8 bits")
    sizes = steps.size
    if steps.factor != 1.0:
        sizes = (sizes.astype(np.float64) / steps.factor).astype(np.float32)
    return RowCodes(
        shape=tensor.shape,
        bits=bits,
        block=steps.block,
        steps=sizes,
        exact=steps.factor == 1.0,
        tensor=tensor,
        stored=steps,
    )


def same_codes(one: RowCodes, other: RowCodes) -> bool:
    """Whether both hold the same codes, whatever the steps."""
    return one.shape == other.shape and all(
        np.array_equal(mine, theirs) for (_, mine), (_, theirs) in zip(one.blocks(), other.blocks(), strict=True)
    )
