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
from mtp_extract.litertlm.storage import Floats

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]

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

    def integers(self) -> Floats:
        """``codes − zero_point`` as float32, C-contiguous: the numbers up to the scale."""
        values = np.ascontiguousarray(self.codes, np.float32)
        if self.zero_point:
            values = values - np.float32(self.zero_point)
        return values

    def floats(self) -> Floats:
        """All the numbers."""
        _refuse_large(self.shape)
        values: Floats = (self.integers() * np.float32(self.scale)).reshape(self.shape)
        return values


@dataclass(frozen=True, eq=False)
class Weight:
    """A constant as stored, dequantized where it is used."""

    source: QuantizedTensor
    shape: tuple[int, ...]  # of the array it stands for
    exchanged: bool = False  # whether the last two axes of ``shape`` are stored the other way round
    through_dequantize: bool = False  # whether an operator made floats of it, or a kernel is left to

    def floats(self) -> Floats:
        """All the numbers."""
        _refuse_large(self.shape)
        if not self.exchanged:
            return self.source.dequantize().reshape(self.shape)
        stored = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return np.swapaxes(self.source.dequantize().reshape(stored), -1, -2)

    @property
    def matrix(self) -> bool:
        """Whether it has two axes longer than one at most, the last ones."""
        return len(self.shape) >= 2 and all(size == 1 for size in self.shape[:-2])

    def times(self, x: Floats, transposed: bool) -> Floats:
        """``x`` ``[n, in]`` times the matrix, or its transpose, row by row as they are stored."""
        inner, outer = self.shape[:-3:-1] if transposed else self.shape[-2:]
        made = np.zeros((len(x), outer), np.float32)
        at, outputs = 0, transposed != self.exchanged
        for block in row_blocks(self.source.chunks(), inner if outputs else outer):
            span = slice(at, at + len(block))
            if outputs:
                np.matmul(x, block.T, out=made[:, span])
            else:
                made += x[:, span] @ block
            at += len(block)
        return made


Lazy = (Coded, Weight)
Numbers = Array | Coded | Weight


def _refuse_large(shape: tuple[int, ...]) -> None:
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
        product: Floats = np.matmul(left, np.swapaxes(right, -1, -2) if transposed else right)
        return product
    codes = np.swapaxes(right.codes, -1, -2) if transposed else right.codes
    inner, outer = codes.shape[-2:]
    batch = np.broadcast_shapes(left.shape[:-2], codes.shape[:-2])
    lefts = np.broadcast_to(left, (*batch, *left.shape[-2:]))
    rights = np.broadcast_to(codes, (*batch, inner, outer))
    down, across = codes.strides[-2:]
    # The same number all along an axis, as caches with one number a slot have.
    if inner > 1 and not down:
        return np.asarray(left.sum(-1, keepdims=True) * right.of(codes[..., :1, :]).floats(), np.float32)
    if outer > 1 and not across:
        made = np.matmul(left, right.of(codes[..., :1]).floats())
        return np.broadcast_to(made, (*made.shape[:-1], outer))
    result = np.zeros((*batch, left.shape[-2], outer), np.float32)
    if not left.any():
        return result
    longer = max(inner, outer)
    step = max(1, _BLOCK // max(1, min(inner, outer)))
    for index in np.ndindex(*batch):
        rows, matrix, made = lefts[index], rights[index], result[index]
        for span in (slice(start, start + step) for start in range(0, longer, step)):
            if inner < outer:
                made[:, span] = rows @ _block(right.of(matrix[:, span]))
            # Weights of attention outside a window are exactly 0, and integers are finite.
            elif rows[:, span].any():
                made += rows[:, span] @ _block(right.of(matrix[span]))
    result *= np.float32(right.scale)
    return result


def _block(coded: Coded) -> Floats:
    """The integers of a matrix, converted in the order in which they lie in memory."""
    down, across = coded.codes.strides
    return coded.of(coded.codes.T).integers().T if down < across else coded.integers()


def gelu(x: Floats, *, tanh: bool) -> Floats:
    """GELU, exact or in its tanh form."""
    if tanh:
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)), np.float32)
    return np.asarray(x * (0.5 + 0.5 * _erf(x.astype(np.float64) / math.sqrt(2))), np.float32)


def _erf(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The error function: its integral by Gauss' rule, from 0 to x, where 6 is as good as infinity."""
    nodes, weights = _ERF_TERMS
    half = np.clip(x, -6, 6)[..., None] / 2
    # Two halves of the interval, so that 24 points are exact to float64's last digits.
    parts = sum((np.exp(-((half * (0.5 * nodes + shift)) ** 2)) * weights).sum(-1) for shift in (0.5, 1.5))
    return np.asarray(parts * half[..., 0] / math.sqrt(math.pi))
