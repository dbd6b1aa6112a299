"""A constant of a graph as a weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.weight import Steps, Weight, divided
from mtp_extract.graph.roles import FoundRole
from mtp_extract.litertlm.storage import Floats, Integers, QuantizedTensor
from mtp_extract.litertlm.tflite import TfliteModel


class Constant(Weight):
    """A constant of a graph, less what the converter folded into it: stored = factor × weight.

    Attributes:
        folded: whether one number is stored for a vector of equal ones, as converters do.
    """

    def __init__(self, shape: tuple[int, ...], source: QuantizedTensor, factor: float = 1.0) -> None:
        tensor, location = source.tensor, source.location
        super().__init__(shape, origin=(tensor.subgraph, tensor.index, location.begin, location.size))
        self.source, self.factor, self.folded = source, factor, tensor.elements != math.prod(shape)
        # No format holds codes of 16 bits.
        self.scheme = source.packing if source.packing is not None and source.packing.bits <= 8 else None

    @classmethod
    def of(cls, model: TfliteModel, found: FoundRole) -> Constant:
        """The constant of a role that has one.

        Raises:
            UnsupportedError: weights this release cannot read.
            FormatError: damaged quantization.
        """
        assert found.tensor is not None
        return cls(found.shape, QuantizedTensor.of(model, found.tensor), found.factor)

    @property
    def by_rows(self) -> bool:
        """Whether rows, or blocks of them, have scales of their own and lie in the order of the weight."""
        return not self.folded and self.source.storage.by_rows

    def floats(self, first: int = 0, last: int | None = None) -> Floats:
        return divided(self._rows(self.source.floats, first, last), self.factor)

    def codes(self, first: int = 0, last: int | None = None) -> Integers:
        return self._rows(self.source.codes, first, last)

    def _rows(self, read: Callable[..., npt.NDArray[Any]], first: int, last: int | None) -> npt.NDArray[Any]:
        """Rows ``[first, last)`` of what ``read`` gives of elements ``[begin, end)``, flat."""
        last = self.rows if last is None else last
        if self.folded:
            return np.full((last - first, self.columns), read()[0])
        return read(first * self.columns, last * self.columns).reshape(last - first, self.columns)

    @cached_property
    def steps(self) -> Steps | None:
        if self.scheme is None:
            return None
        rows, columns, neighbours = self.rows, self.columns, self.source.storage.columns
        sizes, zeros = self.source.scale.reshape(-1), self.source.zero_point.reshape(-1)
        block = columns
        if sizes.size == 1:
            places = np.zeros((rows, 1), np.int64)
        elif neighbours == 1 and sizes.size == columns:
            return Steps.across(sizes, zeros, self.shape, self.factor)
        elif neighbours > 1 and columns % neighbours == 0:
            block = neighbours
            places = np.arange(rows * (columns // block)).reshape(rows, -1) % sizes.size
        elif neighbours > 1 and neighbours % columns == 0:
            places = (np.arange(rows) // (neighbours // columns) % sizes.size)[:, None]
        else:
            return None
        return Steps(block, sizes[places], zeros[places], self.factor)
