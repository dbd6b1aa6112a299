"""A weight is an array that is read by rows: ``floats(first, last)``, ``codes(first, last)`` and ``steps``.

Nothing is read before it is used. Large weights are read a few rows at a time by :func:`split_rows`, so that no tensor
has to fit into memory.
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
"""Ranges of rows begin at a multiple of this, and so on a byte, whatever the width of the codes."""

Indices = npt.NDArray[np.int64]
Rows = npt.NDArray[Any]


@dataclass(frozen=True)
class Steps:
    """The quantization of a matrix: a code stands for ``(code − zero point) · size / factor``.

    Attributes:
        block: elements of a row that share a step.
        size: float32 ``[rows, columns / block]``, as stored.
        zero_point: int64, shaped like ``size``.
        factor: that a converter folded into the stored numbers; 1 if none.
    """

    block: int
    size: Floats
    zero_point: npt.NDArray[np.int64]
    factor: float = 1.0

    @classmethod
    def around_zero(cls, block: int, size: Floats) -> Steps:
        """Steps with zero points of 0."""
        return cls(block, size, np.broadcast_to(np.int64(0), size.shape))

    @classmethod
    def spread(
        cls, size: Floats, zero_point: npt.NDArray[np.int64], shape: tuple[int, ...], factor: float
    ) -> Steps | None:
        """Return the steps of a matrix of ``shape`` from flat arrays, in which each element belongs to a block of a
        row, a row, or several rows. None if their number does not fit the shape."""
        rows, columns = find_matrix_shape(shape)
        rows_a_step = max(rows // max(size.size, 1), 1)
        blocks = max(size.size // max(rows, 1), 1)
        if rows_a_step * size.size != rows * blocks or columns % blocks:
            return None

        def repeat_by_row(flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.broadcast_to(flat[:, None], (flat.size, rows_a_step)).reshape(rows, blocks)

        return cls(columns // blocks, repeat_by_row(size), repeat_by_row(zero_point), factor)

    def merge_equal_blocks(self) -> Steps:
        """Return steps of rows if all blocks of each row have the same step, which a format may have repeated."""
        if self.size.shape[1] < 2 or (self.size != self.size[:, :1]).any() or self.zero_point.any():
            return self
        return Steps(self.block * self.size.shape[1], self.size[:, :1], self.zero_point[:, :1], self.factor)

    def floats(self, codes: Integers, first: int = 0) -> Floats:
        """Dequantize ``codes``, rows ``[first, first + len(codes))``: float32 in their shape."""
        rows = slice(first, first + len(codes))
        values = codes.reshape(len(codes), -1, self.block).astype(np.float32)
        if self.zero_point[rows].any():
            values -= self.zero_point[rows, :, None].astype(np.float32)
        # An overflow is refused where the numbers are used.
        with np.errstate(over="ignore", invalid="ignore"):
            values *= self.size[rows, :, None]
        return unfold_factor(values.reshape(codes.shape), self.factor)


class Weight:
    """A weight of a role. A matrix has the rows of its first axis, any other weight one row.

    Args:
        shape: ``[out, in]`` of a matrix, ``[size]`` of a vector.
        read: returns rows ``[first, last)`` as ``[last − first, columns]``: codes, int8 or uint8, if there is a
            ``scheme``; else float32, or the int64 indices of an ordered head. ``first`` is a multiple of
            :data:`ROW_STEP`.
        scheme: width and sign of its codes; None for a weight without codes.
        steps: the steps of its codes, or a function that computes them on first use.
        origin: equal for weights that are one stored constant; None if unknown.
        rule: name of the rule that rounded floats to these codes here; else empty.
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
        self._read = read
        self._steps = steps

    @property
    def bits(self) -> int:
        """Bits of a code; 0 for a weight without codes."""
        return self.scheme.bits if self.scheme is not None else 0

    @cached_property
    def steps(self) -> Steps:
        """The steps of its codes; only for a weight with a scheme."""
        assert self._steps is not None
        return self._steps if isinstance(self._steps, Steps) else self._steps()

    def floats(self, first: int = 0, last: int | None = None) -> Floats:
        """Return the real numbers of rows ``[first, last)``: float32 ``[last − first, columns]``; not for indices."""
        rows = self._read(first, self.rows if last is None else last)
        assert rows.dtype == np.float32 or self.scheme is not None
        return rows if self.scheme is None else self.steps.floats(rows, first)

    def codes(self, first: int = 0, last: int | None = None) -> Integers:
        """Return the codes of rows ``[first, last)``: int8 or uint8 ``[last − first, columns]``."""
        assert self.scheme is not None
        return self._read(first, self.rows if last is None else last)

    def indices(self) -> Indices:
        """Return all indices of an ordered head, int64, in its shape; only for that weight."""
        indices: Indices = self._read(0, self.rows).reshape(self.shape)
        assert indices.dtype == np.int64
        return indices

    def array(self) -> Floats:
        """Return all real numbers, float32, in its shape."""
        result = np.empty((self.rows, self.columns), np.float32)
        for first, last in split_rows(self):
            result[first:last] = self.floats(first, last)
        return result.reshape(self.shape)


class BundleWeight(Weight):
    """The constant of a role in a bundle, without the factor that the converter folded into it.

    Raises:
        UnsupportedError: the quantization is not supported.
        FormatError: the quantization is damaged.
    """

    def __init__(self, model: TfliteModel, role: FoundRole) -> None:
        assert role.tensor is not None
        self.source = QuantizedTensor.of(model, role.tensor)
        self.factor = role.factor
        # Converters store one number for a vector of equal ones.
        self.folded = role.tensor.elements != math.prod(role.shape)
        source = self.source
        steps = None
        # No format stores codes of 16 bits, or with scales across the rows: such weights become floats.
        if source.packing and source.packing.bits <= 8 and (source.storage.by_rows or source.storage.groups == 1):
            steps = Steps.spread(source.scale.reshape(-1), source.zero_point.reshape(-1), role.shape, self.factor)
        origin = (role.tensor.subgraph, role.tensor.index, source.location.begin, source.location.size)
        super().__init__(role.shape, self._read_stored, source.packing if steps else None, steps, origin=origin)

    @property
    def by_rows(self) -> bool:
        """Whether rows, or blocks of a row, have scales of their own and are stored in the order of the weight."""
        return not self.folded and self.source.storage.by_rows

    def _read_stored(self, first: int, last: int) -> Rows:
        read = self.source.floats if self.scheme is None else self.source.codes
        if self.folded:
            rows = np.full((last - first, self.columns), read()[0])
        else:
            rows = read(first * self.columns, last * self.columns).reshape(last - first, self.columns)
        return unfold_factor(rows, self.factor) if self.scheme is None else rows


def build_constant_weight(shape: tuple[int, ...], value: float = 1.0) -> Weight:
    """Return a weight that is ``value`` everywhere, such as a factor of 1 that the converter left out."""
    columns = find_matrix_shape(shape)[1]
    return Weight(shape, lambda first, last: np.full((last - first, columns), value, np.float32))


def wrap_array(array: Floats | Indices) -> Weight:
    """Return the weight of an array in memory: float32, or the int64 indices of an ordered head."""
    rows = np.ascontiguousarray(array).reshape(find_matrix_shape(array.shape))

    # ``kept`` keeps the array alive, so that no other array gets its id.
    def read(first: int, last: int, kept: Rows = array) -> Rows:
        return rows[first:last]

    return Weight(array.shape, read, origin=id(array))


def wrap_codes(codes: Integers, scheme: Packing, steps: Steps, origin: object = None) -> Weight:
    """Return the weight of a matrix of codes in memory, int8 or uint8 ``[out, in]``."""
    return Weight(codes.shape, lambda first, last: codes[first:last], scheme, steps, origin=origin)


def find_matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows of a tensor of ``shape`` and the elements of a row; anything but a matrix has one row."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // rows if rows else 0


def split_rows(weight: Weight, elements: int = CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Yield ranges ``[first, last)`` of consecutive rows with about ``elements`` elements each."""
    count = max(elements // max(weight.columns, 1) // ROW_STEP * ROW_STEP, ROW_STEP)
    return ((first, min(first + count, weight.rows)) for first in range(0, weight.rows, count))


def center_codes(weight: Weight) -> Weight:
    """Return ``weight`` as formats write it: signed codes of 2, 4 or 8 bits with zero points of 0, and unfolded steps.

    Raises:
        NoCodesError: it is stored as floats, or as codes that need more than 8 bits without their zero points.
        FormatError: its steps overflow float32.
    """
    if weight.scheme is None or len(weight.shape) != 2:
        raise NoCodesError("it is stored as floats")
    scheme = weight.scheme
    steps = weight.steps
    low = scheme.lowest - int(steps.zero_point.max())
    high = scheme.highest - int(steps.zero_point.min())
    bits = next((bits for bits in (2, 4, 8) if low >= -(1 << bits - 1) and high < 1 << bits - 1), None)
    if bits is None:
        raise NoCodesError("its zero points are not 0, and what is left of the codes does not fit 8 bits")

    def read_codes(first: int, last: int) -> Integers:
        stored = weight.codes(first, last)
        zero_points = steps.zero_point[first:last, :, None]
        if not zero_points.any():
            return stored.astype(np.int8, copy=False)
        blocks = stored.reshape(len(stored), -1, steps.block).astype(np.int16) - zero_points
        return blocks.reshape(stored.shape).astype(np.int8)

    unfolded = Steps.around_zero(steps.block, unfold_factor(steps.size, steps.factor))
    return Weight(weight.shape, read_codes, Packing(bits, True), unfolded, origin=weight.origin)


def has_exact_steps(weight: Weight) -> bool:
    """Whether no factor was folded into the scales of its codes: they are the steps, to the bit."""
    return weight.scheme is None or weight.steps.factor == 1.0


def is_same_weight(expected: Weight, actual: Weight) -> bool:
    """Whether ``actual`` has the codes and scales of ``expected``, even if repeated along a row, or else its floats."""
    if actual.scheme is None:
        return _has_same_floats(expected, actual, split_rows(expected))
    # Codes that need more than 8 bits without their zero points are compared as they are stored.
    with suppress(NoCodesError):
        expected, actual = center_codes(expected), center_codes(actual)
    if expected.scheme is None or expected.shape != actual.shape or expected.steps.factor != actual.steps.factor:
        return False
    block = math.gcd(expected.steps.block, actual.steps.block)

    def repeat_by_block(steps: Steps) -> list[npt.NDArray[Any]]:
        return [np.repeat(part, steps.block // block, axis=1) for part in (steps.size, steps.zero_point)]

    return all(map(np.array_equal, repeat_by_block(expected.steps), repeat_by_block(actual.steps))) and all(
        np.array_equal(expected.codes(*rows), actual.codes(*rows)) for rows in split_rows(expected)
    )


def has_same_ends(expected: Weight, actual: Weight) -> bool:
    """Whether the first and the last rows of two weights have the same floats, to the bit."""
    last = max(expected.rows - 1, 0) // ROW_STEP * ROW_STEP
    return _has_same_floats(expected, actual, {(0, min(ROW_STEP, expected.rows)), (last, expected.rows)})


def _has_same_floats(first: Weight, second: Weight, ranges: Iterable[tuple[int, int]]) -> bool:
    return first.shape == second.shape and all(
        np.array_equal(first.floats(*rows).view(np.uint32), second.floats(*rows).view(np.uint32)) for rows in ranges
    )


def unfold_factor(values: Floats, factor: float) -> Floats:
    """Divide stored ``values`` by the ``factor`` folded into them; FormatError if they overflow float32."""
    if factor == 1.0:
        return values
    # LiteRT computes with the stored float32; dividing in float64 rounds once.
    with np.errstate(over="ignore"):
        result = (values.astype(np.float64) / factor).astype(np.float32)
    if not np.isfinite(result).all():
        raise FormatError(f"Values divided by the folded factor {factor:g} leave float32: the file is damaged.")
    return result
