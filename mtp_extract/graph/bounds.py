"""How large a value of the graph can be, whatever the activations and caches are: an interval for each.

What is known of sizes is what bounds them: a norm's result by its weight, a cache of integers by its grid, a softmax by
1. Everything else follows by the arithmetic of intervals, or is unbounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from mtp_extract.graph.call import code_range, grid_of
from mtp_extract.graph.flat import FlatGraph, Node, Value
from mtp_extract.graph.patterns import PASSES, strip
from mtp_extract.litertlm.quantized import QuantizedTensor, stored_floats
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES

Range = tuple[float, float]
"""Smallest and largest number that an element can be."""

ANYTHING: Range = (-math.inf, math.inf)
NEVER_REACHED = 1e30
"""A bound so far out that numbers beyond it would be no result in float32 either."""

_LARGEST_READ = 1 << 20
_RESHAPES = frozenset({"RESHAPE", "SQUEEZE", "EXPAND_DIMS"})


@dataclass
class Bounds:
    """Intervals of the values of ``graph``, found when they are asked for; ``known`` (by ``id``) are given."""

    graph: FlatGraph
    known: Mapping[int, Range]
    _found: dict[int, Range] = field(default_factory=dict)

    def of(self, value: Value) -> Range:
        """The interval of ``value``."""
        queue = [value]
        while queue:
            current = queue[-1]
            node = current.producer
            waiting = [v for v in (node.inputs if node else ()) if v is not None and id(v) not in self._found]
            if id(current) in self._found or not waiting or id(current) in self.known:
                self._found.setdefault(id(current), self._interval(current))
                queue.pop()
            else:
                queue.extend(waiting)
        return self._found[id(value)]

    def never_binds(self, node: Node) -> bool:
        """Whether ``node`` (a bound, or an absolute value) hands its operand on as it is, or always its bound."""
        kind = node.kind
        low, high = self.of(node.operand(0))
        if kind in ("MAXIMUM", "MINIMUM") and node.binary:
            other_low, other_high = self.of(node.operand(1))
            if kind == "MINIMUM":
                low, high, other_low, other_high = -high, -low, -other_high, -other_low
            return low >= other_high or other_low >= high or other_high <= -NEVER_REACHED or high <= -NEVER_REACHED
        if kind == "ABS" and _only_squared(node):
            return True
        ends = _ENDS.get(kind)
        return ends is not None and low >= ends[0] and high <= ends[1]

    def _interval(self, value: Value) -> Range:
        if id(value) in self.known:
            return self.known[id(value)]
        if value.constant:
            return self._constant(value)
        node = value.producer
        if node is None:
            grid = grid_of(value.tensor)
            if grid is None or value.tensor.type is None:
                return ANYTHING
            lowest, highest = code_range(value.tensor.type)
            return (lowest - grid[1]) * grid[0], (highest - grid[1]) * grid[0]
        rule = _RULES.get(node.kind)
        if rule is None or node.op.activation:
            return ANYTHING
        operands = [self._found.get(id(v), ANYTHING) for v in node.inputs if v is not None]
        low, high = rule(node, operands) if operands else ANYTHING
        return (low, high) if low <= high else ANYTHING

    def _constant(self, value: Value) -> Range:
        tensor = value.tensor
        if not tensor.elements or tensor.type not in NUMBER_TYPES:
            return ANYTHING
        if tensor.elements <= _LARGEST_READ:
            if tensor.type in FLOAT_TYPES:
                # As they are: a masked score may be −∞.
                numbers = stored_floats(self.graph.model.locate(tensor).read(), tensor)
            else:
                numbers = self.graph.floats(value)
            return float(numbers.min()), float(numbers.max())
        chunks = [(c.min(), c.max()) for c in QuantizedTensor.of(self.graph.model, tensor).chunks()]
        return float(np.min([low for low, _ in chunks])), float(np.max([high for _, high in chunks]))


Rule = Callable[[Node, list[Range]], Range]


def _products(one: Range, other: Range) -> Range:
    # Nothing times anything is nothing: an interval of 0 alone has no infinite products.
    made = [0.0 if 0 in (a, b) else a * b for a in one for b in other]
    return min(made), max(made)


def _sum(count: int, interval: Range) -> Range:
    return count * interval[0], count * interval[1]


def _squares(node: Node) -> bool:
    """Whether a MUL multiplies every element by itself, perhaps in another shape."""
    sizes = {v.tensor.elements for v in (*node.inputs, *node.outputs) if v is not None}
    return node.binary and len(sizes) == 1 and len({id(strip(node.operand(i), _RESHAPES)) for i in (0, 1)}) == 1


def _only_squared(node: Node) -> bool:
    """Whether whatever reads an absolute value squares it."""

    def squares(reader: Node) -> bool:
        made = [strip(v, _RESHAPES).producer for v in reader.inputs if v is not None]
        of = [strip(m.operand(0), _RESHAPES) for m in made if m is not None and m.kind == "ABS"]
        same_size = len({v.tensor.elements for v in (*reader.inputs, *reader.outputs) if v is not None}) == 1
        return reader.kind == "SQUARE" or (reader.kind == "MUL" and same_size and len(of) == 2 and of[0] is of[1])

    readers = [reader for reader, _ in node.outputs[0].consumers]
    return bool(readers) and all(map(squares, readers))


def _mul(node: Node, operands: list[Range]) -> Range:
    if _squares(node):
        largest = max(map(abs, operands[0]))
        return 0.0, largest * largest
    return _products(*operands)


def _div(node: Node, operands: list[Range]) -> Range:
    low, high = operands[1]
    return ANYTHING if low <= 0 <= high else _products(operands[0], (1 / high, 1 / low))


def _power(node: Node, operands: list[Range]) -> Range:
    (low, high), (exponent, same) = operands
    if exponent == same == 2:
        return 0.0, max(abs(low), abs(high)) ** 2
    if exponent != same or low <= 0:
        return ANYTHING
    ends = low**exponent, high**exponent
    return min(ends), max(ends)


def _matmul(node: Node, operands: list[Range]) -> Range:
    return _sum(node.operand(0).tensor.shape[-1] if node.operand(0).tensor.shape else 1, _products(*operands[:2]))


def _summed(node: Node, operands: list[Range]) -> Range:
    return _sum(node.operand(0).tensor.elements // max(node.outputs[0].tensor.elements, 1), operands[0])


def _union(node: Node, operands: list[Range]) -> Range:
    return min(low for low, _ in operands), max(high for _, high in operands)


def _exp(number: float) -> float:
    return math.exp(number) if number < 700 else math.inf


def _increasing(function: Callable[[float], float]) -> Rule:
    return lambda node, operands: (function(operands[0][0]), function(operands[0][1]))


def _fixed(low: float, high: float) -> Rule:
    return lambda node, operands: (low, high)


_ENDS: MappingProxyType[str, Range] = MappingProxyType(
    {"RELU": (0.0, math.inf), "ABS": (0.0, math.inf), "RELU6": (0.0, 6.0), "RELU_N1_TO_1": (-1.0, 1.0)}
)

_PARTS = ("SLICE", "STRIDED_SLICE", "GATHER", "TILE", "SPLIT_V", "UNPACK")
_WITHIN_FIRST = (*PASSES, *_PARTS, "MEAN", "REDUCE_MAX", "REDUCE_MIN")
"""Operators whose results lie within the interval of their first operand."""

_RULES: MappingProxyType[str, Rule] = MappingProxyType(
    {
        **dict.fromkeys(_WITHIN_FIRST, lambda node, operands: operands[0]),
        **dict.fromkeys(("CONCATENATION", "PACK", "DYNAMIC_UPDATE_SLICE"), _union),
        "SELECT": lambda node, operands: _union(node, operands[1:]),
        "SELECT_V2": lambda node, operands: _union(node, operands[1:]),
        "SPLIT": lambda node, operands: operands[-1],
        "SOFTMAX": _fixed(0, 1),
        "LOGISTIC": _fixed(0, 1),
        "TANH": _fixed(-1, 1),
        "SIN": _fixed(-1, 1),
        "COS": _fixed(-1, 1),
        "EXP": _increasing(_exp),
        "LOG": _increasing(lambda x: math.log(x) if 0 < x < math.inf else x if x == math.inf else -math.inf),
        "SQRT": _increasing(lambda x: math.sqrt(max(x, 0.0))),
        "RSQRT": lambda node, operands: (
            (1 / math.sqrt(operands[0][1]), 1 / math.sqrt(operands[0][0])) if operands[0][0] > 0 else ANYTHING
        ),
        "NEG": lambda node, operands: (-operands[0][1], -operands[0][0]),
        "ADD": lambda node, operands: (operands[0][0] + operands[1][0], operands[0][1] + operands[1][1]),
        "SUB": lambda node, operands: (operands[0][0] - operands[1][1], operands[0][1] - operands[1][0]),
        "MUL": _mul,
        "DIV": _div,
        "POW": _power,
        "SQUARE": lambda node, operands: (0.0, max(map(abs, operands[0])) ** 2),
        "SUM": _summed,
        "BATCH_MATMUL": _matmul,
        "FULLY_CONNECTED": _matmul,
        "MAXIMUM": lambda node, operands: (max(o[0] for o in operands), max(o[1] for o in operands)),
        "MINIMUM": lambda node, operands: (min(o[0] for o in operands), min(o[1] for o in operands)),
        "RELU": _increasing(lambda x: max(x, 0.0)),
        "ABS": lambda node, operands: (0.0, max(map(abs, operands[0]))),
    }
)
