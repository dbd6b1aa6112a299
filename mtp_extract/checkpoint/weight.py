"""A weight is an array that can be asked for rows: ``floats(first, last)``, ``codes(first, last)`` and ``steps``.

Nothing is read before it is asked for. What is large is looped over by :func:`row_ranges`, so that no tensor has to be
in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, NoCodesError
from mtp_extract.graph.roles import FoundRole
from mtp_extract.litertlm.quantized import QuantizedTensor
from mtp_extract.litertlm.storage import CHUNK_ELEMENTS, Floats, Integers, Packing
from mtp_extract.litertlm.tflite import TfliteModel

ROW_STEP = 8
"""A range of rows begins at a multiple of this, and so on a byte whatever the width of the codes."""

Indices = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class Steps:
    """What a code is worth, by place: ``(code − zero point) · size / factor``.

    Attributes:
        block: neighbouring elements of a row that share a step.
        size: float32 ``[rows, columns / block]``, as stored.
        zero_point: int64, shaped like ``size``.
        factor: what a converter folded into the stored numbers; 1 where nothing is.
    """

    block: int
    size: Floats
    zero_point: npt.NDArray[np.int64]
    factor: float = 1.0

    @classmethod
    def around_zero(cls, block: int, size: Floats) -> Steps:
        """Steps of codes whose zero points are all 0."""
        return cls(block, size, np.broadcast_to(np.int64(0), size.shape))

    @classmethod
    def spread(
        cls, size: Floats, zero_point: npt.NDArray[np.int64], shape: tuple[int, ...], factor: float
    ) -> Steps | None:
        """Flat steps in the order of a matrix of ``shape``, each for a row, several rows or a part of one; None where
        there are not as many."""
        rows, columns = find_matrix_shape(shape)
        each, blocks = max(rows // max(size.size, 1), 1), max(size.size // max(rows, 1), 1)
        if each * size.size != rows * blocks or columns % blocks:
            return None

        def by_row(flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.broadcast_to(flat[:, None], (flat.size, each)).reshape(rows, blocks)

        return cls(columns // blocks, by_row(size), by_row(zero_point), factor)

    def by_row(self) -> Steps:
        """The same, with one step a row where the blocks of every row share it: a format may have repeated it."""
        if self.size.shape[1] < 2 or (self.size != self.size[:, :1]).any() or self.zero_point.any():
            return self
        return Steps(self.block * self.size.shape[1], self.size[:, :1], self.zero_point[:, :1], self.factor)

    def floats(self, codes: Integers, first: int = 0) -> Floats:
        """The real numbers of ``codes``, rows ``[first, first + len(codes))``, in their shape."""
        rows = slice(first, first + len(codes))
        values = codes.reshape(len(codes), -1, self.block).astype(np.float32)
        if self.zero_point[rows].any():
            values -= self.zero_point[rows, :, None].astype(np.float32)
        # What leaves float32 is refused where the numbers are used.
        with np.errstate(over="ignore", invalid="ignore"):
            values *= self.size[rows, :, None]
        return unfold_factor(values.reshape(codes.shape), self.factor)


class Weight:
    """A weight of a role: the rows of the first axis of a matrix, and one row for anything else.

    Args:
        shape: ``[out, in]`` of a matrix, ``[size]`` of a vector.
        read: rows ``[first, last)``, ``[last − first, columns]``: codes, int8 or uint8, where there is a ``scheme``;
            else float32, or the int64 indices of an ordered head. ``first`` is a multiple of :data:`ROW_STEP`.
        scheme: width and sign of its codes; None where it has none.
        steps: what its codes are worth, or makes that when it is first asked for.
        origin: equal for weights that are one stored constant; None where the question makes no sense.
        rule: the name of the rule by which its codes were made here of floats.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        read: Callable[[int, int], Rows],
        scheme: Packing | None = None,
        steps: Steps | Callable[[], Steps] | None = None,
        *,
        origin: object = None,
        rule: str = "",
    ) -> None:
        self.shape = shape
        self.scheme = scheme
        self.origin = origin
        self.rule = rule
        self.rows, self.columns = find_matrix_shape(shape)
        self._read, self._steps = read, steps

    @property
    def bits(self) -> int:
        """Of a code; 0 where there are none."""
        return self.scheme.bits if self.scheme is not None else 0

    @cached_property
    def steps(self) -> Steps:
        """What its codes are worth; of a weight that has a scheme."""
        assert self._steps is not None
        return self._steps if isinstance(self._steps, Steps) else self._steps()

    def floats(self, first: int = 0, last: int | None = None) -> Floats:
        """The real numbers of rows ``[first, last)``: float32 ``[last − first, columns]``; not of indices."""
        rows = self._read(first, self.rows if last is None else last)
        assert rows.dtype == np.float32 or self.scheme is not None
        return rows if self.scheme is None else self.steps.floats(rows, first)

    def codes(self, first: int = 0, last: int | None = None) -> Integers:
        """The codes of rows ``[first, last)``: int8 or uint8 ``[last − first, columns]``; of a weight with a scheme."""
        assert self.scheme is not None
        return self._read(first, self.rows if last is None else last)

    def indices(self) -> Indices:
        """All indices of an ordered head, int64, in its shape; of no other weight."""
        indices: Indices = self._read(0, self.rows).reshape(self.shape)
        assert indices.dtype == np.int64
        return indices

    def array(self) -> Floats:
        """All of it, float32, in its shape."""
        result = np.empty((self.rows, self.columns), np.float32)
        for first, last in row_ranges(self):
            result[first:last] = self.floats(first, last)
        return result.reshape(self.shape)


class Constant(Weight):
    """The constant of a role that has one, less what the converter folded into it: stored = factor × weight.

    Raises:
        UnsupportedError: weights this release cannot read.
        FormatError: damaged quantization.
    """

    def __init__(self, model: TfliteModel, found: FoundRole) -> None:
        assert found.tensor is not None
        self.source, self.factor = QuantizedTensor.of(model, found.tensor), found.factor
        # Converters store one number for a vector of equal ones.
        self.folded = found.tensor.elements != math.prod(found.shape)
        source, steps = self.source, None
        # Codes of 16 bits, or with scales across the rows, are held by no format: they are floats.
        if source.packing and source.packing.bits <= 8 and (source.storage.by_rows or source.storage.groups == 1):
            steps = Steps.spread(source.scale.reshape(-1), source.zero_point.reshape(-1), found.shape, self.factor)
        origin = (found.tensor.subgraph, found.tensor.index, source.location.begin, source.location.size)
        super().__init__(found.shape, self._stored, source.packing if steps else None, steps, origin=origin)

    @property
    def by_rows(self) -> bool:
        """Whether rows, or blocks of them, have scales of their own and lie in the order of the weight."""
        return not self.folded and self.source.storage.by_rows

    def _stored(self, first: int, last: int) -> Rows:
        read = self.source.floats if self.scheme is None else self.source.codes
        if self.folded:
            rows = np.full((last - first, self.columns), read()[0])
        else:
            rows = read(first * self.columns, last * self.columns).reshape(last - first, self.columns)
        return unfold_factor(rows, self.factor) if self.scheme is None else rows


def constant_weight(shape: tuple[int, ...], value: float = 1.0) -> Weight:
    """A weight of one number that nothing stores, such as a factor of 1 that the converter folded away."""
    columns = find_matrix_shape(shape)[1]
    return Weight(shape, lambda first, last: np.full((last - first, columns), value, np.float32))


def of_array(array: Floats | Indices) -> Weight:
    """A weight in memory, float32, or the indices of an ordered head, int64: what a training made."""
    rows = np.ascontiguousarray(array).reshape(find_matrix_shape(array.shape))

    def read(first: int, last: int, kept: Rows = array) -> Rows:  # so that no other array gets its id
        return rows[first:last]

    return Weight(array.shape, read, origin=id(array))


def of_codes(codes: Integers, scheme: Packing, steps: Steps, origin: object = None) -> Weight:
    """A matrix of codes in memory, int8 or uint8 ``[out, in]``."""
    return Weight(codes.shape, lambda first, last: codes[first:last], scheme, steps, origin=origin)


def find_matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, elements in a row) of a tensor of ``shape``."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // rows if rows else 0


def row_ranges(weight: Weight, elements: int = CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Rows ``[first, last)`` after each other, about ``elements`` elements at a time."""
    count = max(elements // max(weight.columns, 1) // ROW_STEP * ROW_STEP, ROW_STEP)
    return ((first, min(first + count, weight.rows)) for first in range(0, weight.rows, count))


def row_codes(weight: Weight) -> Weight:
    """``weight`` as formats write it: signed codes less their zero points, in the least of 2, 4 and 8 bits that hold
    all that the stored type has, and steps without the factor folded into them.

    Raises:
        NoCodesError: it is stored as floats, or as codes that do not fit 8 bits around zero.
        FormatError: its steps leave float32.
    """
    if weight.scheme is None or len(weight.shape) != 2:
        raise NoCodesError("it is stored as floats")
    scheme, steps = weight.scheme, weight.steps
    low, high = scheme.lowest - int(steps.zero_point.max()), scheme.highest - int(steps.zero_point.min())
    bits = next((b for b in (2, 4, 8) if low >= -(1 << b - 1) and high < 1 << b - 1), None)
    if bits is None:
        raise NoCodesError("its zero points are not 0, and what is left of the codes does not fit 8 bits")

    def codes(first: int, last: int) -> Integers:
        stored, zeros = weight.codes(first, last), steps.zero_point[first:last, :, None]
        if not zeros.any():
            return stored.astype(np.int8, copy=False)
        shaped = stored.reshape(len(stored), -1, steps.block).astype(np.int16) - zeros
        return shaped.reshape(stored.shape).astype(np.int8)

    grid = Steps.around_zero(steps.block, unfold_factor(steps.size, steps.factor))
    return Weight(weight.shape, codes, Packing(bits, True), grid, origin=weight.origin)


def has_exact_steps(weight: Weight) -> bool:
    """Whether the steps of its codes are the stored scales, to the bit: nothing was folded into them."""
    return weight.scheme is None or weight.steps.factor == 1.0


def same_weight(made: Weight, found: Weight) -> bool:
    """Whether ``found`` is ``made``, to the bit: the codes and their scales, which a format may have repeated along a
    row; of a ``found`` without codes the numbers."""
    if found.scheme is None:
        return _has_same_floats(made, found, row_ranges(made))
    # Codes whose zero points leave 8 bits are compared as they are stored.
    with suppress(NoCodesError):
        made, found = row_codes(made), row_codes(found)
    if made.scheme is None or made.shape != found.shape or made.steps.factor != found.steps.factor:
        return False
    block = math.gcd(made.steps.block, found.steps.block)

    def by_block(steps: Steps) -> list[npt.NDArray[Any]]:
        return [np.repeat(part, steps.block // block, axis=1) for part in (steps.size, steps.zero_point)]

    return all(map(np.array_equal, by_block(made.steps), by_block(found.steps))) and all(
        np.array_equal(made.codes(*rows), found.codes(*rows)) for rows in row_ranges(made)
    )


def has_same_ends(made: Weight, read_back: Weight) -> bool:
    """Whether the first and the last rows of two weights in floats are the same, to the bit; of one row, all of it."""
    last = max(made.rows - 1, 0) // ROW_STEP * ROW_STEP
    return _has_same_floats(made, read_back, {(0, min(ROW_STEP, made.rows)), (last, made.rows)})


def _has_same_floats(first: Weight, second: Weight, ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether two weights have one shape and, in ``ranges`` of their rows, the same floats, to the bit."""
    return first.shape == second.shape and all(
        np.array_equal(first.floats(*rows).view(np.uint32), second.floats(*rows).view(np.uint32)) for rows in ranges
    )


def unfold_factor(values: Floats, factor: float) -> Floats:
    """``values`` as stored, without the ``factor`` folded into them; FormatError where they leave float32."""
    if factor == 1.0:
        return values
    # The stored value, as LiteRT sees it, is a float32; it is divided in float64 and rounded once.
    with np.errstate(over="ignore"):
        result = (values.astype(np.float64) / factor).astype(np.float32)
    if not np.isfinite(result).all():
        raise FormatError(f"Values divided by the folded factor {factor:g} leave float32: the file is damaged.")
    return result
