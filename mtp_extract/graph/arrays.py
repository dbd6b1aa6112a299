"""What flows through the evaluator: arrays, and numbers that are made only where they are used.

Three kinds of things stand for a tensor's numbers:

- a NumPy array: float32 for every floating-point type, bool and integers as they are;
- :class:`Coded`, an array of integers with one scale: a quantized cache of tens of thousands of slots never becomes
  floats as a whole;
- :class:`Weight`, a constant in the file, dequantized row by row: an LM head of 262 144 rows never exists whole.

A tensor of a quantized type is its *real* numbers, in float32, on no grid: QUANTIZE and DEQUANTIZE are identities. On
the grid of calibrated activations random inputs would leave the range and tell nothing about the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, UnsupportedError
from mtp_extract.litertlm.quantized import QuantizedTensor

__all__ = ["Array", "Coded", "Floats", "Lazy", "Numbers", "Weight", "array_of", "gelu", "matmul", "row_blocks"]

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_ERF_TERMS = np.polynomial.legendre.leggauss(24)
_LARGEST = 1 << 25
_BLOCK = 1 << 18
"""Elements converted at a time: 1 MiB of float32, which stays in a core's own cache."""


@dataclass(frozen=True, eq=False)
class Coded:
    """``scale · (codes − zero_point)``, codes an integer array of any strides."""

    codes: Array
    scale: float
    zero_point: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array it stands for."""
        return self.codes.shape

    def of(self, codes: Array) -> Coded:
        """The same grid with other codes."""
        return replace(self, codes=codes)

    def integers(self, part: tuple[Any, ...] = ()) -> Floats:
        """``codes − zero_point`` of ``part``, as float32, C-contiguous: the numbers up to the scale."""
        values = np.ascontiguousarray(self.codes[part], np.float32)
        if self.zero_point:
            values = values - np.float32(self.zero_point)
        return values

    def floats(self) -> Floats:
        """All the numbers."""
        _bound(self.shape)
        values = self.integers() * np.float32(self.scale)
        return values.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Weight:
    """A constant as stored, of ``shape``, which keeps the last axis of the tensor; transposed in its last two if so."""

    source: QuantizedTensor
    shape: tuple[int, ...]
    through_dequantize: bool = False

    def rows(self) -> Iterator[Floats]:
        """Blocks ``[rows, shape[-1]]`` in order; each may be overwritten by the next."""
        return row_blocks(self.source.chunks(), self.shape[-1] if self.shape else 1)

    def floats(self) -> Floats:
        """All the numbers."""
        _bound(self.shape)
        return self.source.dequantize().reshape(self.shape)


Lazy = (Coded, Weight)
Numbers = Array | Coded | Weight


def _bound(shape: tuple[int, ...]) -> None:
    if np.prod(shape, dtype=np.float64) > _LARGEST:
        raise UnsupportedError(f"An array of {list(shape)} is larger than any a drafter computes with.")


def array_of(numbers: Numbers) -> Array:
    """``numbers`` as an array."""
    return numbers.floats() if isinstance(numbers, Lazy) else numbers


def row_blocks(chunks: Iterable[Floats], columns: int) -> Iterator[Floats]:
    """Flat chunks put together to blocks of whole rows, ``[rows, columns]``.

    Raises:
        FormatError: what is left over at the end is not a whole row.
    """
    rest: Floats = np.empty(0, np.float32)
    for chunk in chunks:
        flat = chunk if not rest.size else np.concatenate([rest, chunk])
        whole = flat.size // columns * columns
        if whole:
            yield flat[:whole].reshape(-1, columns)
        rest = flat[whole:].copy()
    if rest.size:
        raise FormatError(f"A weight ends within a row: {rest.size} elements of {columns}.")


def matmul(left: Floats, right: Coded | Array, transposed: bool) -> Floats:
    """``left @ right`` (``right`` with its last two axes exchanged if ``transposed``), batches broadcast.

    Integers are converted block by block along the longer axis of ``right``, so that it is read once and never
    exists as floats.
    """
    if not isinstance(right, Coded):
        return np.matmul(left, np.swapaxes(right, -1, -2) if transposed else right)
    codes = np.swapaxes(right.codes, -1, -2) if transposed else right.codes
    inner, outer = codes.shape[-2:]
    batch = np.broadcast_shapes(left.shape[:-2], codes.shape[:-2])
    lefts = np.broadcast_to(left, (*batch, *left.shape[-2:]))
    rights = right.of(np.broadcast_to(codes, (*batch, inner, outer)))
    result = np.zeros((*batch, left.shape[-2], outer), np.float32)
    along_inner = inner >= outer
    step = max(1, _BLOCK // max(1, min(inner, outer)))
    for index in np.ndindex(*batch):
        for start in range(0, inner if along_inner else outer, step):
            span = slice(start, start + step)
            if along_inner:
                if not lefts[(*index, slice(None), span)].any():
                    # Weights of attention outside a window are exactly 0, and integers are finite.
                    continue
                result[index] += lefts[(*index, slice(None), span)] @ _block(rights, (*index, span, slice(None)))
            else:
                result[(*index, slice(None), span)] = lefts[index] @ _block(rights, (*index, slice(None), span))
    result *= np.float32(right.scale)
    return result


def _block(coded: Coded, part: tuple[Any, ...]) -> Floats:
    """A two-dimensional part of ``coded`` as floats, converted in the order in which it lies in memory."""
    view = coded.codes[part]
    if view.strides[0] < view.strides[1]:
        return coded.of(view.T).integers().T
    return coded.of(view).integers()


def gelu(x: Floats, *, tanh: bool) -> Floats:
    """GELU, exact or in its tanh form."""
    if tanh:
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        return np.float32(0.5) * x * (1 + np.tanh(inner))
    return (x * (0.5 + 0.5 * _erf(x.astype(np.float64) / math.sqrt(2)))).astype(np.float32)


def _erf(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The error function, by Gauss-Legendre quadrature."""
    nodes, weights = _ERF_TERMS
    half = np.clip(x, -6, 6)[..., None] / 2
    # Two halves of the interval, so that 24 points are exact to float64's last digits.
    parts = sum((np.exp(-((half * (0.5 * nodes + shift)) ** 2)) * weights).sum(-1) for shift in (0.5, 1.5))
    return np.asarray(parts * half[..., 0] / math.sqrt(math.pi))
