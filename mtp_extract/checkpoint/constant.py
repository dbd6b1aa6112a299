"""A constant of a graph as a weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.weight import Steps, Weight, divided, rows_of
from mtp_extract.graph.roles import FoundRole
from mtp_extract.litertlm.storage import Floats, Integers, QuantizedTensor
from mtp_extract.litertlm.tflite import TfliteModel


@dataclass(frozen=True)
class Constant:
    """A constant of a graph, less what the converter folded into it: stored = factor × weight.

    A ``transposed`` one is stored ``[in, out]``, and is in memory as a whole while it is turned.
    """

    shape: tuple[int, ...]
    source: QuantizedTensor
    factor: float = 1.0
    transposed: bool = False

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
    def folded(self) -> bool:
        """Whether one number is stored for a vector of equal ones, as converters do."""
        return self.source.tensor.elements != math.prod(self.shape)

    @property
    def by_rows(self) -> bool:
        """Whether rows, or blocks of them, have scales of their own and lie in the order of the weight."""
        return not (self.transposed or self.folded) and self.source.storage.by_rows

    @cached_property
    def weight(self) -> Weight:
        """The weight that it holds; :attr:`~mtp_extract.checkpoint.weight.Weight.source` is this constant."""
        source, location = self.source, self.source.location
        scheme, turned_blocks = source.packing, self.transposed and source.storage.kind == "blockwise"
        # No format holds codes of 16 bits.
        scheme = None if scheme is None or scheme.bits > 8 or turned_blocks else scheme
        return Weight(
            self.shape,
            self._floats,
            scheme,
            self._codes if scheme is not None else None,
            self._steps if scheme is not None else lambda: None,
            origin=(source.tensor.subgraph, source.tensor.index, location.begin, location.size),
            source=self,
            whole=self.transposed or self.folded,
        )

    def _floats(self, first: int, last: int) -> Floats:
        return divided(self._rows(self.source.floats, first, last), self.factor)

    def _codes(self, first: int, last: int) -> Integers:
        return self._rows(self.source.codes, first, last)

    def _rows(self, read: Callable[..., npt.NDArray[Any]], first: int, last: int) -> npt.NDArray[Any]:
        """Rows ``[first, last)`` of what ``read`` gives of elements ``[begin, end)``, flat."""
        rows, columns = rows_of(self.shape)
        if self.folded:
            return np.full((last - first, columns), read()[0])
        if self.transposed:
            return np.ascontiguousarray(read().reshape(columns, rows).T[first:last])
        return read(first * columns, last * columns).reshape(last - first, columns)

    def _steps(self) -> Steps | None:
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


def constant_of(weight: Weight) -> Constant | None:
    """The constant that ``weight`` is; None where it is none."""
    return weight.source if isinstance(weight.source, Constant) else None
