"""A matrix as signed integers with a step a row, or a block of a row: what every format that keeps integers writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.lazy import LazyTensor, Steps
from mtp_extract.checkpoint.packing import Codes
from mtp_extract.checkpoint.stored import CodesOfRows
from mtp_extract.errors import NoCodesError
from mtp_extract.litertlm.storage import rechunked

Numbers = TypeVar("Numbers", bound=np.generic)

_WIDTHS = (2, 4, 8)


@dataclass(frozen=True)
class RowCodes(CodesOfRows):
    """The codes of ``tensor`` less their zero points, so that ``value = code · step``."""

    shape: tuple[int, ...]
    bits: int
    """The least width, of 2, 4 and 8, that holds every code the stored type can have."""
    grid: Steps
    """Around zero; what was folded into the stored scales is divided out."""
    exact: bool
    """Whether the steps are the stored scales, to the bit."""
    tensor: LazyTensor
    signed = True

    @property
    def steps(self) -> Steps:
        return self.grid

    @property
    def origin(self) -> object:
        return self.tensor.origin

    def row_blocks(self, first: int, last: int) -> Iterator[tuple[int, Codes]]:
        """As there; of as many rows for equal shapes."""
        stored = self.tensor.steps
        assert stored is not None
        for codes in in_rows(self.tensor.integers(first, last), self.shape[1]):
            zeros = stored.zero_point[first : first + len(codes), :, None]
            if zeros.any():
                shaped = codes.reshape(len(codes), -1, stored.block).astype(np.int16) - zeros
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
    low, high = scheme.lowest - int(steps.zero_point.max()), scheme.highest - int(steps.zero_point.min())
    bits = next((b for b in _WIDTHS if low >= -(1 << b - 1) and high < 1 << b - 1), None)
    if bits is None:
        raise NoCodesError("its zero points are not 0, and what is left of the codes does not fit 8 bits")
    sizes = steps.size
    if steps.factor != 1.0:
        sizes = (sizes.astype(np.float64) / steps.factor).astype(np.float32)
    return RowCodes(tensor.shape, bits, Steps.around_zero(steps.block, sizes), steps.factor == 1.0, tensor)


def same_codes(one: RowCodes, other: RowCodes) -> bool:
    """Whether both hold the same codes, whatever the steps."""
    return one.shape == other.shape and all(
        np.array_equal(a, b) for a, b in zip(one.integers(), other.integers(), strict=True)
    )
