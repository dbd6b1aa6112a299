"""Activations that a file holds on a grid: how much of them is left.

Rounding on such a grid is the runtime's, and outside of what is proven. A grid that cuts off what a drafter computes,
or leaves next to nothing of it, makes another function all the same. So the expressions that are held so are computed
of random inputs of ordinary size, and the grids are held against what comes out.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.call import code_range, grid_of
from mtp_extract.graph.drafter import LOGITS, Walk
from mtp_extract.graph.expressions import Expr, Term
from mtp_extract.graph.flat import FlatGraph, Value, ancestors
from mtp_extract.litertlm.storage import FLOAT_TYPES, QuantizedTensor
from mtp_extract.litertlm.tflite import Tensor

_SAMPLES = 16
_SHARE_OF_V = 0.25
"""Standard deviation of what a head mixes, of that of V: by scores with one of 1.2, of 48 slots."""
_FEWEST_CODES = 8
"""Within one standard deviation; three of Google's own files have 10 to 14."""
_MOST_CUT_OFF, _MOST_POWER_CUT_OFF = 0.2, 0.3
"""Of the numbers, and of the sum of their squares. Google's calibration leaves up to 13 % of random numbers out."""
_ROWS_AT_ONCE = 1 << 12


def hold_grids(graph: FlatGraph, walk: Walk) -> dict[str, Any]:
    """Hold every grid of an activation.

    Returns:
        how many are held in each type; of all grids, the fewest codes that lie within one standard deviation, and the
        largest share of numbers of ordinary size beyond one.

    Raises:
        UnsupportedError: one cuts off, or leaves too little of, numbers of ordinary size.
    """
    types = dict(sorted(Counter(value.tensor.type_name for value in walk.coarse).items()))
    head = next(role.result for role in walk.roles if role.role == "lm_head")
    logits = {id(v) for v in ancestors(graph.outputs[LOGITS], frozenset({id(head)}))}
    drawn, codes, cut_off = _Drawn(graph, walk), list[float](), 0.0
    for value in walk.coarse:
        term = walk.reading.forms[id(value)]
        if not isinstance(term, Term) or term.expr.kind == "weight":
            continue
        numbers = term.factor * drawn.numbers(term.expr)
        # Of logits the largest is what counts.
        share, within = _check_grid(value, numbers, exact=id(value) in logits)
        cut_off, codes = max(cut_off, share), [*codes, within]
    return {
        "activations_held_in": types,
        "fewest_codes": float(f"{min(codes):.2g}") if codes else None,
        "largest_share_cut_off": float(f"{cut_off:.1g}"),
    }


def _check_grid(value: Value, numbers: npt.NDArray[np.float64], *, exact: bool) -> tuple[float, float]:
    """The share of ``numbers`` beyond the grid of ``value``, and how many codes lie within one standard deviation."""
    tensor, grid = value.tensor, grid_of(value.tensor)
    assert grid is not None and tensor.type is not None
    low, high = ((end - grid[1]) * grid[0] for end in code_range(tensor.type))
    beyond = numbers - np.clip(numbers, low, high)
    share = float(np.mean(np.abs(beyond) > grid[0]))
    power = float(np.square(beyond).sum() / max(np.square(numbers).sum(), 1e-30))
    most, most_power = (0.0, 0.0) if exact else (_MOST_CUT_OFF, _MOST_POWER_CUT_OFF)
    if not (share <= most and power <= most_power):
        raise UnsupportedError(
            f"{tensor.label} holds {low:.4g} to {high:.4g}, and of numbers of ordinary size {share:.1%} lie beyond "
            f"({power:.1%} of the sum of their squares): they are cut off, which no checkpoint does."
        )
    within = float(numbers.std()) / grid[0]
    if not within >= _FEWEST_CODES:
        raise UnsupportedError(
            f"{tensor.label} holds multiples of {grid[0]:.4g}, and one standard deviation of numbers of ordinary size "
            f"is {within:.2g} of them: too little is left. Nothing is written."
        )
    return share, within


class _Drawn:
    """Expressions computed of random inputs, ``[samples, size]``."""

    def __init__(self, graph: FlatGraph, walk: Walk) -> None:
        self.graph, self.walk = graph, walk
        self.found: dict[Expr, npt.NDArray[np.float64]] = {}

    def numbers(self, expr: Expr) -> npt.NDArray[np.float64]:
        """What ``expr`` is."""
        if expr not in self.found:
            self.found[expr] = self._compute(expr)
        return self.found[expr]

    def _compute(self, expr: Expr) -> npt.NDArray[np.float64]:
        kind, parts = expr.kind, expr.parts
        if kind == "input":
            return np.random.default_rng(0).standard_normal((_SAMPLES, expr.size))
        if kind == "weight":
            return self.graph.floats(parts[0]).astype(np.float64)[None]
        if kind == "matrix":
            return self._product(parts[0].tensor, self.numbers(parts[1]))
        if kind == "mixed":
            # Rotations keep lengths, and heads that look at some slots more than at others take as much of V.
            random = np.random.default_rng(crc32(parts[1].encode()))
            return random.standard_normal((_SAMPLES, expr.size)) * _SHARE_OF_V * self._spread_of(parts[1])
        if kind == "product":
            factors = (self.numbers(e) ** p for e, p in expr.powers.items())
            return np.asarray(math.prod(factors, start=np.ones((1, 1))))
        if kind == "sum":
            return np.asarray(sum((f * self.numbers(e) for e, f in expr.terms.items()), start=np.zeros((1, 1))))
        if kind == "function":
            x = parts[1] * self.numbers(parts[2])
            # Both GELUs by tanh: they are within 5e-4 of one another.
            slope = 1.0 if parts[0] == "TANH" else math.sqrt(2 / math.pi) * (1 + 0.044715 * x**2)
            half = np.tanh(slope * x)
            return half if parts[0] == "TANH" else np.asarray(0.5 * x * (1 + half))
        inner = self.numbers(parts[0])
        if kind == "groups":
            return np.asarray(inner.reshape(len(inner), -1, parts[1]).sum(-1))
        if kind == "part":
            return inner[:, expr.chosen]
        return np.repeat(inner, parts[1], 1) if kind == "each" else np.tile(inner, (1, parts[1]))

    def _product(self, weight: Tensor, x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        source, (outputs, width) = QuantizedTensor.of(self.graph.model, weight), weight.shape
        made = []
        for first in range(0, outputs, _ROWS_AT_ONCE):
            rows = source.floats(first * width, min(first + _ROWS_AT_ONCE, outputs) * width).reshape(-1, width)
            made.append(x.astype(np.float32) @ rows.T)
        return np.concatenate(made, 1).astype(np.float64)

    def _spread_of(self, name: str) -> float:
        """The standard deviation of what a cache holds: of all that its grid does, evenly, or 1."""
        tensor = self.graph.inputs[name].tensor
        if tensor.type in FLOAT_TYPES or tensor.type is None:
            return 1.0
        grid = grid_of(tensor)
        return (1.0 if grid is None else abs(grid[0])) * code_range(tensor.type)[1] / 3**0.5
