"""A constant of a graph as a weight."""

from __future__ import annotations

import math

import numpy as np

from mtp_extract.checkpoint.weight import Rows, Steps, Weight, divided
from mtp_extract.graph.roles import FoundRole
from mtp_extract.litertlm.storage import QuantizedTensor
from mtp_extract.litertlm.tflite import TfliteModel


class Constant(Weight):
    """A constant of a graph, less what the converter folded into it: stored = factor × weight.

    Attributes:
        folded: whether one number is stored for a vector of equal ones, as converters do.
    """

    def __init__(self, shape: tuple[int, ...], source: QuantizedTensor, factor: float = 1.0) -> None:
        self.source, self.factor, self.folded = source, factor, source.tensor.elements != math.prod(shape)
        origin = (source.tensor.subgraph, source.tensor.index, source.location.begin, source.location.size)
        steps = self._spread(shape)
        if steps is None:
            super().__init__(shape, self._stored, origin=origin)
        else:
            super().__init__(shape, self._stored, source.packing, lambda: steps, origin=origin)

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

    def _spread(self, shape: tuple[int, ...]) -> Steps | None:
        """What its codes are worth; None where there are none, or none that a format holds: of 16 bits, or with scales
        across the rows."""
        source = self.source
        by_rows = source.storage.by_rows or source.storage.groups == 1
        if source.packing is None or source.packing.bits > 8 or not by_rows:
            return None
        return Steps.spread(source.scale.reshape(-1), source.zero_point.reshape(-1), shape, self.factor)

    def _stored(self, first: int, last: int) -> Rows:
        """Rows of codes, or of numbers where it has no codes."""
        read = self.source.floats if self.scheme is None else self.source.codes
        if self.folded:
            rows = np.full((last - first, self.columns), read()[0])
        else:
            rows = read(first * self.columns, last * self.columns).reshape(last - first, self.columns)
        return divided(rows, self.factor) if self.scheme is None else rows
