"""A weight is an array that can be asked for rows: ``floats(first, last)``, ``codes(first, last)`` and ``steps``.

Nothing is read before it is asked for. What is large is looped over by :func:`row_ranges`, so that no tensor has to be
in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import CheckpointError, FormatError, NoCodesError
from mtp_extract.litertlm.storage import CHUNK_ELEMENTS, Floats, Integers, Packing

ROW_STEP = 8
"""A range of rows begins at a multiple of this, and so on a byte whatever the width of the codes."""

_WIDTHS = (2, 4, 8)

Indices = npt.NDArray[np.int64]


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
    def across(cls, size: Floats, zero_point: npt.NDArray[np.int64], shape: tuple[int, ...], factor: float) -> Steps:
        """A step for each column of a matrix of ``shape``."""
        return cls(1, np.broadcast_to(size, shape), np.broadcast_to(zero_point, shape), factor)

    def by_row(self) -> Steps:
        """The same, with one step a row where the blocks of every row share it: a format may have repeated it."""
        if self.size.shape[1] < 2 or (self.size != self.size[:, :1]).any() or self.zero_point.any():
            return self
        return replace(
            self, block=self.block * self.size.shape[1], size=self.size[:, :1], zero_point=self.zero_point[:, :1]
        )

    def in_blocks(self, block: int) -> Floats:
        """Its size for every ``block`` neighbours, a divisor of its own: float32 ``[rows, columns / block]``."""
        return np.repeat(self.size, self.block // block, axis=1)

    def floats(self, codes: Integers, first: int = 0) -> Floats:
        """The real numbers of ``codes``, rows ``[first, first + len(codes))``, in their shape."""
        rows = slice(first, first + len(codes))
        values = codes.reshape(len(codes), -1, self.block).astype(np.float32)
        if self.zero_point[rows].any():
            values -= self.zero_point[rows, :, None].astype(np.float32)
        values *= self.size[rows, :, None]
        return divided(values.reshape(codes.shape), self.factor)


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight of a role: the rows of the first axis of a matrix, and one row for anything else.

    Attributes:
        shape: ``[out, in]`` of a matrix, ``[size]`` of a vector.
        read_floats: float32 of rows ``[first, last)``, ``[last − first, columns]``; ``first`` is a multiple of
            :data:`ROW_STEP`.
        scheme: width and sign of its codes; None for a weight that has only floats.
        read_codes: the codes of such rows, int8 or uint8.
        read_steps: what the codes are worth; called once. None where that is no matter of rows and blocks of them.
        read_indices: all indices of an ordered head, int64 in its shape; None for a weight of numbers.
        origin: equal for weights that are one stored constant; None where the question makes no sense.
        source: what it was made of, for those that ask for more than numbers.
        whole: whether its rows are to be read together: they are stored the other way round.
    """

    shape: tuple[int, ...]
    read_floats: Callable[[int, int], Floats] = field(repr=False)
    scheme: Packing | None = None
    read_codes: Callable[[int, int], Integers] | None = field(default=None, repr=False)
    read_steps: Callable[[], Steps | None] = field(default=lambda: None, repr=False)
    read_indices: Callable[[], Indices] | None = field(default=None, repr=False)
    origin: object = None
    source: object = field(default=None, repr=False)
    whole: bool = False

    @property
    def rows(self) -> int:
        """Of a matrix; 1 for anything else."""
        return rows_of(self.shape)[0]

    @property
    def columns(self) -> int:
        """Elements in a row."""
        return rows_of(self.shape)[1]

    @property
    def bits(self) -> int:
        """Of a code; 0 where there are none."""
        return self.scheme.bits if self.scheme is not None else 0

    @cached_property
    def steps(self) -> Steps | None:
        """What its codes are worth; None where it has none, or where that is no matter of rows and blocks of them."""
        return self.read_steps()

    def floats(self, first: int = 0, last: int | None = None) -> Floats:
        """The real numbers of rows ``[first, last)``: float32 ``[last − first, columns]``."""
        return self.read_floats(first, self.rows if last is None else last)

    def codes(self, first: int = 0, last: int | None = None) -> Integers:
        """The codes of rows ``[first, last)``: int8 or uint8 ``[last − first, columns]``.

        Raises:
            CheckpointError: it has only floats.
        """
        if self.read_codes is None:
            raise CheckpointError("a tensor of floats was asked for integers")
        return self.read_codes(first, self.rows if last is None else last)

    def chunks(self) -> Iterator[Floats]:
        """All numbers in order, float32, flat, some rows at a time."""
        return (self.floats(*rows).reshape(-1) for rows in row_ranges(self))

    def code_chunks(self) -> Iterator[Integers]:
        """All codes in order, flat, some rows at a time."""
        return (self.codes(*rows).reshape(-1) for rows in row_ranges(self))

    def array(self) -> Floats:
        """All of it, float32, in its shape."""
        result = np.empty((self.rows, self.columns), np.float32)
        for first, last in row_ranges(self):
            result[first:last] = self.floats(first, last)
        return result.reshape(self.shape)

    def indices(self) -> Indices:
        """All indices of an ordered head, int64, in its shape.

        Raises:
            CheckpointError: it holds numbers.
        """
        if self.read_indices is None:
            raise CheckpointError("a tensor of numbers was asked for indices")
        return self.read_indices()


class RowCodes(Weight):
    """A matrix of codes whose steps are known, a row's or a block's."""

    @cached_property
    def steps(self) -> Steps:
        """What its codes are worth."""
        found = self.read_steps()
        assert found is not None
        return found


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, elements in a row) of a tensor of ``shape``."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // rows if rows else 0


def row_ranges(*weights: Weight, elements: int = CHUNK_ELEMENTS) -> Iterator[tuple[int, int]]:
    """Rows ``[first, last)`` after each other, about ``elements`` elements at a time, of weights of one shape."""
    rows, columns = rows_of(weights[0].shape)
    count = rows if any(weight.whole for weight in weights) else elements // max(columns, 1) // ROW_STEP * ROW_STEP
    count = max(count, ROW_STEP)
    return ((first, min(first + count, rows)) for first in range(0, rows, count))


def of_codes(
    shape: tuple[int, ...],
    scheme: Packing,
    codes: Callable[[int, int], Integers],
    steps: Callable[[], Steps],
    *,
    origin: object = None,
    source: object = None,
    whole: bool = False,
) -> RowCodes:
    """A matrix of codes, whose floats are made of them; ``steps`` is called once."""

    def floats(first: int, last: int) -> Floats:
        return weight.steps.floats(codes(first, last), first)

    weight = RowCodes(shape, floats, scheme, codes, steps, origin=origin, source=source, whole=whole)
    return weight


def filled(shape: tuple[int, ...], value: float = 1.0) -> Weight:
    """A weight of one number that nothing stores: a factor or weight of 1 that the converter folded away."""
    columns = rows_of(shape)[1]
    return Weight(shape, lambda first, last: np.full((last - first, columns), value, np.float32))


def of_array(array: Floats) -> Weight:
    """A weight in memory, float32: what a training made."""
    rows = np.ascontiguousarray(array).reshape(rows_of(array.shape))
    return Weight(array.shape, lambda first, last: rows[first:last], origin=id(array), source=array)


def of_indices(array: Indices) -> Weight:
    """The indices of an ordered head in memory, int64."""

    def floats(first: int, last: int) -> Floats:
        raise CheckpointError("a tensor of indices was asked for floats")

    return Weight(array.shape, floats, read_indices=lambda: array)


def row_codes(weight: Weight) -> RowCodes:
    """``weight`` as every format that keeps integers writes it: signed codes less their zero points, of the least of 2,
    4 and 8 bits that hold every code the stored type can have, and steps without the factor folded into them.

    Raises:
        NoCodesError: it is stored as floats, has scales across its rows, or codes that do not fit 8 bits around zero.
    """
    scheme, steps = weight.scheme, weight.steps
    if scheme is None or len(weight.shape) != 2:
        raise NoCodesError("it is stored as floats")
    if steps is None or (steps.block == 1 and weight.shape[1] > 1):
        raise NoCodesError("its scales run across the rows")
    low, high = scheme.lowest - int(steps.zero_point.max()), scheme.highest - int(steps.zero_point.min())
    bits = next((b for b in _WIDTHS if low >= -(1 << b - 1) and high < 1 << b - 1), None)
    if bits is None:
        raise NoCodesError("its zero points are not 0, and what is left of the codes does not fit 8 bits")
    size, zeros, block = divided_steps(steps), steps.zero_point[:, :, None], steps.block

    def codes(first: int, last: int) -> Integers:
        stored = weight.codes(first, last)
        if not zeros[first:last].any():
            return stored.astype(np.int8, copy=False)
        shaped = stored.reshape(len(stored), -1, block).astype(np.int16) - zeros[first:last]
        return shaped.reshape(stored.shape).astype(np.int8)

    grid = Steps.around_zero(block, size)
    return of_codes(
        weight.shape, Packing(bits, True), codes, lambda: grid, origin=weight.origin, source=weight, whole=weight.whole
    )


def divided_steps(steps: Steps) -> Floats:
    """The size of every step without the factor that was folded into it, rounded once; float32."""
    if steps.factor == 1.0:
        return steps.size
    return (steps.size.astype(np.float64) / steps.factor).astype(np.float32)


def has_exact_steps(weight: Weight) -> bool:
    """Whether the steps of its codes are the stored scales, to the bit: nothing was folded into them."""
    return weight.steps is None or weight.steps.factor == 1.0


def same_codes(one: Weight, other: Weight) -> bool:
    """Whether both hold the same codes, whatever the steps."""
    return _same(one, other, lambda weight, rows: weight.codes(*rows))


def same_floats(one: Weight, other: Weight) -> bool:
    """Whether both hold the same numbers, to the bit."""
    return _same(one, other, lambda weight, rows: weight.floats(*rows).view(np.uint32))


def _same(one: Weight, other: Weight, read: Callable[[Weight, tuple[int, int]], Integers]) -> bool:
    return one.shape == other.shape and all(
        np.array_equal(read(one, rows), read(other, rows)) for rows in row_ranges(one, other)
    )


def same_weight(made: Weight, found: Weight) -> bool:
    """Whether ``found`` is ``made``, to the bit: of a weight with codes, the codes and their scales, which a format may
    have repeated along a row; of any other the numbers."""
    if found.scheme is None:
        return same_floats(made, found)
    # Codes with scales across the rows, or whose zero points leave 8 bits, are compared as they are stored.
    with suppress(NoCodesError):
        made, found = row_codes(made), row_codes(found)
    one, other = made.steps, found.steps
    if one is None or other is None or one.factor != other.factor or not same_codes(made, found):
        return False
    if not (one.zero_point.any() or other.zero_point.any()):
        block = math.gcd(one.block, other.block)
        return np.array_equal(one.in_blocks(block), other.in_blocks(block))
    return np.array_equal(one.size, other.size) and np.array_equal(one.zero_point, other.zero_point)


def divided(values: Floats, factor: float) -> Floats:
    """``values`` as stored, without the ``factor`` that was folded into them.

    Raises:
        FormatError: they leave float32.
    """
    if factor == 1.0:
        return values
    # The stored value, as LiteRT sees it, is a float32; it is divided in float64 and rounded once.
    with np.errstate(over="ignore"):
        result = (values.astype(np.float64) / factor).astype(np.float32)
    if not np.isfinite(result).all():
        raise FormatError(f"Values divided by the folded factor {factor:g} leave float32: the file is damaged.")
    return result
