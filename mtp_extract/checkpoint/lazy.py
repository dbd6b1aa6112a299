"""Weights that are not in memory: what every format writes from, and reading a checkpoint gives back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import CheckpointError, FormatError
from mtp_extract.graph.roles import FoundRole
from mtp_extract.litertlm.storage import Floats, Integers, Packing, QuantizedTensor, gathered
from mtp_extract.litertlm.tflite import TfliteModel

ROW_STEP = 8
"""Where a range of rows may begin: at a multiple of this, so that it begins on a byte whatever the codes' width."""


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

    def floats(self, codes: Integers, first: int = 0) -> Floats:
        """The real numbers of rows ``[first, first + len(codes))``, flat."""
        rows = slice(first, first + len(codes))
        values = codes.reshape(len(codes), -1, self.block).astype(np.float32)
        if self.zero_point[rows].any():
            values -= self.zero_point[rows, :, None].astype(np.float32)
        values *= self.size[rows, :, None]
        return divided(values.reshape(-1), self.factor)


class LazyTensor(Protocol):
    """A weight of a role, read when asked for.

    ``rows`` are those of the first axis of a matrix, and one row for anything else; a range of them begins at a
    multiple of :data:`ROW_STEP`. Chunks come flat and in order, each perhaps a view that the next one overwrites.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """``[out, in]`` of a matrix, ``[size]`` of a vector."""

    @property
    def scheme(self) -> Packing | None:
        """Width and sign of its codes; None for a tensor that has only floats."""

    @property
    def scale(self) -> Floats:
        """float32: ``[1]``, ``[channels]`` or ``[…, blocks]``; empty for floats."""

    @property
    def zero_point(self) -> npt.NDArray[np.int64]:
        """int64, shaped like ``scale``."""

    @property
    def steps(self) -> Steps | None:
        """What its codes are worth; None where it has none, or where that is no matter of rows and blocks of them."""

    @property
    def origin(self) -> object:
        """Equal for tensors that are one stored constant; None where the question makes no sense."""

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        """The real numbers of rows ``[first, last)``, float32."""

    def integers(self, first: int = 0, last: int | None = None) -> Iterator[Integers]:
        """The codes of rows ``[first, last)``, int8 or uint8; only where there is a ``scheme``."""


def rows_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, elements in a row) of a tensor of ``shape``."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, math.prod(shape) // rows if rows else 0


def read_floats(tensor: LazyTensor) -> Floats:
    """All of ``tensor``, float32, in its shape."""
    return gathered(tensor.floats(), tensor.shape)


class FloatsOnly:
    """What a tensor without integers answers."""

    scheme = None
    steps = None

    @property
    def origin(self) -> object:
        return None

    @property
    def scale(self) -> Floats:
        return np.empty(0, np.float32)

    @property
    def zero_point(self) -> npt.NDArray[np.int64]:
        return np.empty(0, np.int64)

    def integers(self, first: int = 0, last: int | None = None) -> Iterator[Integers]:
        raise CheckpointError("a tensor of floats was asked for integers")


@dataclass(frozen=True)
class ConstantTensor:
    """A constant of a graph, less what the converter folded into it: stored = factor × (weight − offset).

    A ``transposed`` one is stored ``[in, out]``, and is in memory as a whole while it is turned. ``source`` may be some
    rows of a constant that holds several weights.
    """

    shape: tuple[int, ...]
    source: QuantizedTensor
    factor: float = 1.0
    transposed: bool = False
    offset: float = 0.0

    @classmethod
    def of(cls, model: TfliteModel, found: FoundRole) -> ConstantTensor:
        """The constant of a role that has one.

        Raises:
            UnsupportedError: weights this release cannot read.
            FormatError: damaged quantization.
        """
        assert found.tensor is not None
        source = QuantizedTensor.of(model, found.tensor)
        if found.first is not None:
            source = source.rows(found.first, found.shape[0])
        return cls(found.shape, source, found.factor, found.transposed, found.offset)

    @property
    def folded(self) -> bool:
        """Whether one number is stored for a vector of equal ones, as converters do."""
        return self.source.tensor.elements != math.prod(self.shape)

    @property
    def by_rows(self) -> bool:
        """Whether rows, or blocks of them, have scales of their own and lie in the order of the weight."""
        return not (self.transposed or self.folded or self.offset) and self.source.storage.by_rows

    @property
    def scheme(self) -> Packing | None:
        turned_blocks = self.transposed and self.source.kind == "blockwise"
        return None if turned_blocks or self.offset else self.source.packing

    @property
    def scale(self) -> Floats:
        return self.source.scale

    @property
    def zero_point(self) -> npt.NDArray[np.int64]:
        return self.source.zero_point

    @property
    def steps(self) -> Steps | None:
        if self.scheme is None:
            return None
        (rows, columns), neighbours = rows_of(self.shape), self.source.storage.columns
        sizes, zeros = self.source.scale.reshape(-1), self.source.zero_point.reshape(-1)
        block = columns
        places: npt.NDArray[np.int64] | None = None
        if sizes.size == 1:
            places = np.zeros((rows, 1), np.int64)
        elif self.transposed or neighbours == 1:
            # Channels along one of the two axes.
            if sizes.size == (rows if self.transposed == (neighbours == 1) else -1):
                places = np.arange(rows)[:, None]
            elif sizes.size == columns:
                return Steps.across(sizes, zeros, self.shape, self.factor)
        elif columns % neighbours == 0:
            block = neighbours
            places = np.arange(rows * (columns // block)).reshape(rows, -1) % sizes.size
        elif neighbours % columns == 0:
            places = (np.arange(rows) // (neighbours // columns) % sizes.size)[:, None]
        return None if places is None else Steps(block, sizes[places], zeros[places], self.factor)

    @property
    def origin(self) -> object:
        location = self.source.location
        return self.source.tensor.subgraph, self.source.tensor.index, location.offset, location.length

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        if self.folded:
            chunks = iter([np.repeat(self.source.dequantize().reshape(-1)[:1], math.prod(self.shape))])
        elif self.transposed:
            chunks = iter([self._turned(self.source.dequantize(), first, last)])
        else:
            chunks = self.source.chunks(*self._stored_rows(first, last))
        yield from self.weights(chunks)

    def weights(self, stored: Iterable[Floats]) -> Iterator[Floats]:
        """The numbers of the weight that the graph makes of ``stored`` ones."""
        for chunk in stored:
            values = divided(chunk, self.factor)
            # A sum in float32, as the graph has it.
            yield values + np.float32(self.offset) if self.offset else values

    def integers(self, first: int = 0, last: int | None = None) -> Iterator[Integers]:
        if self.folded:
            yield np.repeat(self.source.codes().reshape(-1)[:1], math.prod(self.shape))
        elif self.transposed:
            yield self._turned(self.source.codes(), first, last)
        else:
            yield from self.source.code_chunks(*self._stored_rows(first, last))

    def _turned(self, stored: npt.NDArray[Any], first: int, last: int | None) -> npt.NDArray[Any]:
        """Rows ``[first, last)`` of what is stored ``[in, out]``, flat."""
        return np.ascontiguousarray(stored.reshape(self.shape[::-1]).T[first:last]).reshape(-1)

    def _stored_rows(self, first: int, last: int | None) -> tuple[int, int]:
        """The source's own rows, which share a scale and may be shorter than these."""
        rows, columns = rows_of(self.shape)
        shared = max(self.source.storage.columns, 1)
        return first * columns // shared, (rows if last is None else last) * columns // shared


@dataclass(frozen=True)
class FilledTensor(FloatsOnly):
    """A tensor of one number that nothing stores: a factor or weight of 1 that the converter folded away."""

    shape: tuple[int, ...]
    value: float = 1.0

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        rows, columns = rows_of(self.shape)
        yield np.full(((rows if last is None else last) - first) * columns, self.value, np.float32)


@dataclass(frozen=True)
class ArrayTensor(FloatsOnly):
    """A weight in memory, float32: what a training made."""

    array: Floats

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def origin(self) -> object:
        return id(self.array)

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        rows, columns = rows_of(self.shape)
        yield np.ascontiguousarray(self.array).reshape(rows, columns)[first:last].reshape(-1)


@dataclass(frozen=True)
class IndexTensor(FloatsOnly):
    """The indices of an ordered head in memory, int64."""

    array: npt.NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def floats(self, first: int = 0, last: int | None = None) -> Iterator[Floats]:
        raise CheckpointError("a tensor of indices was asked for floats")

    def indices(self) -> npt.NDArray[np.int64]:
        """All of it."""
        return self.array


@runtime_checkable
class _Indexed(Protocol):
    def indices(self) -> npt.NDArray[np.int64]: ...


def read_indices(tensor: LazyTensor) -> npt.NDArray[np.int64]:
    """All of ``tensor``, int64, in its shape.

    Raises:
        CheckpointError: it holds no indices.
    """
    if not isinstance(tensor, _Indexed):
        raise CheckpointError("a tensor of numbers was asked for indices")
    return tensor.indices()


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
