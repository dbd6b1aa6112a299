"""What the drafter's building blocks look like in plain operators, whichever exporter wrote them.

Each ``match_*`` function looks backwards from a value and returns what it found, or None. None of them looks at a
name. Matches say which constants they used up and why, so that the walk can account for every one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.flat import Edge, FlatGraph, Node, Value, walk_back
from mtp_extract.litertlm.tflite import TensorType

PASSES = frozenset({"RESHAPE", "QUANTIZE", "DEQUANTIZE", "CAST", "TRANSPOSE", "BROADCAST_TO", "EXPAND_DIMS", "SQUEEZE"})
"""Operators that hand their first operand on: the same numbers, in another shape or type."""

WEIGHT_PASSES = PASSES - {"TRANSPOSE"}
"""The same for weights, whose order of elements must not change."""

MATRICES = frozenset({"FULLY_CONNECTED", "BATCH_MATMUL", "CONV_2D"})
"""Operators that multiply by a matrix."""

SHAPE_OPERANDS = {
    "RESHAPE": (1,),
    "SLICE": (1, 2),
    "STRIDED_SLICE": (1, 2, 3),
    "TRANSPOSE": (1,),
    "BROADCAST_TO": (1,),
    "EXPAND_DIMS": (1,),
    "PAD": (1,),
    "PADV2": (1,),
    "TILE": (1,),
    "MEAN": (1,),
    "SUM": (1,),
    "REDUCE_MAX": (1,),
    "SPLIT": (0,),
    "SPLIT_V": (1, 2),
    "GATHER": (1,),
    "FILL": (0,),
    "ARG_MAX": (1,),
}
"""Operand positions that hold shapes, axes, permutations or offsets."""

_ROOTS = {"RSQRT": -0.5, "SQRT": 0.5}

_RELATIVE = 1e-5
_MOST_FACTORS = 32
_LARGEST_CAP = 1e6


@dataclass(frozen=True)
class Aside:
    """A constant set aside, and why."""

    value: Value
    reason: str


@dataclass(frozen=True)
class RmsNorm:
    """``x · (weight + offset) / sqrt(mean(x²) + eps)`` over the last axis, which has ``size`` elements."""

    x: Value
    # None where there is no multiplication: converters fold a weight of ones away. Of one element where they folded
    # equal weights into one number.
    weight: Value | None
    size: int
    eps: float
    aside: tuple[Aside, ...]
    offset: float = 0.0


@dataclass(frozen=True)
class SoftCap:
    """``cap · tanh(scale · x)``; ``cap`` None and ``scale`` 1 when the graph has none."""

    x: Value
    cap: float | None
    scale: float
    aside: tuple[Aside, ...]


def strip(value: Value, passes: frozenset[str] = PASSES) -> Value:
    """``value`` without the operators that only hand it on."""
    while True:
        node = value.producer
        operand = node.inputs[0] if node is not None and node.kind in passes and node.inputs else None
        further = value.same or operand
        if further is None:
            return value
        value = further


def constant_under(value: Value) -> Value | None:
    """The constant that ``value`` is, perhaps reshaped, dequantized or cast; None when it is computed."""
    root = strip(value, WEIGHT_PASSES)
    return root if root.constant else None


def scalar(graph: FlatGraph, value: Value) -> float | None:
    """The number ``value`` holds if it is a constant of one floating-point element; else None."""
    constant = constant_under(value)
    if constant is None or constant.tensor.elements != 1:
        return None
    if constant.tensor.type in (TensorType.INT32, TensorType.INT64, TensorType.BOOL):
        return None
    return float(graph.floats(constant)[0])


def split_scalar(graph: FlatGraph, node: Node) -> tuple[Value, Value, float] | None:
    """For a MUL or DIV by a constant of one element: the other operand, the constant, and the factor it applies."""
    if node.kind not in ("MUL", "DIV") or node.op.activation or not node.binary:
        return None
    for position in (1, 0) if node.kind == "MUL" else (1,):
        number = scalar(graph, node.operand(position))
        constant = constant_under(node.operand(position))
        if number is not None and constant is not None:
            factor = number if node.kind == "MUL" else (1 / number if number else math.inf)
            return node.operand(1 - position), constant, factor
    return None


def scale_downstream(graph: FlatGraph, value: Value) -> float | None:
    """The number that integers without a scale of their own are multiplied by once they are cast to float."""
    for node, position in value.consumers:
        if node.kind == "MUL" and node.binary:
            return scalar(graph, node.operand(1 - position))
        if node.kind in (*PASSES, "SLICE", "STRIDED_SLICE") and position == 0 and node.outputs:
            found = scale_downstream(graph, node.outputs[0])
            if found is not None:
                return found
    return None


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_RELATIVE)


def _factors(graph: FlatGraph, value: Value, stop: Value | None = None) -> Iterator[tuple[Value, int]]:
    """The factors of a product, multiplications and divisions opened up, down to ``stop``; -1 with a divisor."""
    queue, opened = [(value, 1)], 0
    while queue:
        found, sign = queue.pop()
        root = strip(found)
        node = root.producer
        # Squares of squares have exponentially many factors; what remains of them is handed out unopened.
        if (
            root is stop
            or node is None
            or node.kind not in ("MUL", "DIV")
            or node.op.activation
            or opened == _MOST_FACTORS
            or not node.binary
        ):
            yield root, sign
            continue
        opened += 1
        if node.kind == "MUL" or scalar(graph, node.operand(0)) != 1.0:
            queue.append((node.operand(0), sign))
        queue.append((node.operand(1), sign if node.kind == "MUL" else -sign))


def match_rms_norm(graph: FlatGraph, value: Value) -> RmsNorm | None:
    """RMSNorm, as plain operators or as a composite ``…rms_norm`` without a body."""
    root = strip(value)
    node = root.producer
    if node is None:
        return None
    if node.kind.startswith("COMPOSITE:") and "rms_norm" in node.kind:
        raise UnsupportedError(
            f"{node.op.label} has no decomposition, so its epsilon is unknown. "
            "Export the drafter with the bodies of its composites."
        )
    if node.kind not in ("MUL", "DIV"):
        return None
    for factor, sign in _factors(graph, root):
        variance, exponent, aside = _as_power(graph, factor)
        norm = _norm_from(graph, root, variance, factor) if sign * exponent == -0.5 else None
        if norm is not None:
            return replace(norm, aside=(*norm.aside, *aside))
    return None


def walk_to_norms(
    graph: FlatGraph, start: list[Value], stops: Callable[[Node], bool]
) -> tuple[list[tuple[RmsNorm, Value]], list[Edge], list[Value]]:
    """Walk back from ``start`` to the first RMSNorms, and no further than ``stops`` says of other operators.

    Returns:
        the norms with their results; the edges and the leaves of :func:`walk_back`.
    """
    norms: dict[int, tuple[RmsNorm, Value]] = {}

    def at_norm(found: Value, node: Node) -> bool:
        norm = match_rms_norm(graph, found) if node.kind in ("MUL", "DIV") or "rms_norm" in node.kind else None
        if norm is not None:
            norms[id(norm.x)] = (norm, found)
        return norm is not None or stops(node)

    edges, leaves = walk_back(start, at_norm)
    return list(norms.values()), edges, leaves


def _as_power(graph: FlatGraph, value: Value) -> tuple[Value, float, tuple[Aside, ...]]:
    """``value`` as a number above 0 raised to an exponent: that number, the exponent, and its constants."""
    base, exponent, aside = strip(value), 1.0, tuple[Aside, ...]()
    while (node := base.producer) is not None and not node.op.activation:
        constant: Value | None = None
        if node.kind in _ROOTS and node.unary:
            inner, power = node.operand(0), _ROOTS[node.kind]
        elif node.kind == "POW" and node.binary and (number := scalar(graph, node.operand(1))) is not None:
            inner, power, constant = node.operand(0), number, constant_under(node.operand(1))
        elif node.kind == "DIV" and node.binary and scalar(graph, node.operand(0)) == 1.0:
            inner, power, constant = node.operand(1), -1.0, constant_under(node.operand(0))
        elif node.kind == "EXP" and node.unary and (found := _multiple_of_logarithm(graph, node)) is not None:
            inner, power, constant = found
        else:
            break
        base, exponent = strip(inner), exponent * power
        aside += (Aside(constant, "exponent of an RMSNorm"),) if constant is not None else ()
    return base, exponent, aside


def _multiple_of_logarithm(graph: FlatGraph, node: Node) -> tuple[Value, float, Value] | None:
    """For EXP(c · LOG(v)): v and c."""
    product = strip(node.operand(0)).producer
    scaled = split_scalar(graph, product) if product is not None else None
    logarithm = strip(scaled[0]).producer if scaled is not None else None
    if scaled is None or logarithm is None or logarithm.kind != "LOG" or not logarithm.unary:
        return None
    return logarithm.operand(0), scaled[2], scaled[1]


def _norm_from(graph: FlatGraph, product: Value, variance: Value, inverse: Value) -> RmsNorm | None:
    """The norm whose variance (with epsilon) is ``variance``; ``inverse`` is the factor that divides by its root."""
    summed = _mean_of_squares(graph, variance)
    if summed is None:
        return None
    x, size, eps, aside = summed
    factors = list(_factors(graph, product, x))
    rest = [f for f, sign in factors if sign > 0 and f is not x and f is not inverse]
    divisors = [f for f, sign in factors if sign < 0 and f is not inverse]
    if divisors or sum(f is x for f, _ in factors) != 1 or sum(f is inverse for f, _ in factors) != 1 or len(rest) > 1:
        return None
    if not rest:
        return RmsNorm(x, None, size, eps, aside)
    weight, offset, one = _stored_weight(graph, rest[0])
    if weight is None or weight.tensor.elements not in (1, size):
        return None
    # As many elements along another axis would be something else.
    if weight.tensor.elements == size and size > 1 and weight.tensor.shape[-1] != size:
        return None
    return RmsNorm(x, weight, size, eps, (*aside, *one), offset)


def _stored_weight(graph: FlatGraph, value: Value) -> tuple[Value | None, float, tuple[Aside, ...]]:
    """A norm's weight: the constant, and the 1 that is added to it where it is stored less that."""
    node = strip(value, WEIGHT_PASSES).producer
    if node is None or node.kind != "ADD" or not node.binary or node.op.activation:
        return constant_under(value), 0.0, ()
    for position in (0, 1):
        weight, one = constant_under(node.operand(1 - position)), constant_under(node.operand(position))
        if weight is not None and one is not None and one is not weight and scalar(graph, one) == 1.0:
            return weight, 1.0, (Aside(one, "what is added to the weight of an RMSNorm"),)
    return None, 0.0, ()


def _mean_of_squares(graph: FlatGraph, variance: Value) -> tuple[Value, int, float, tuple[Aside, ...]] | None:
    """The ``x`` of mean(x²) + epsilon, the size of the axis averaged over, and epsilon."""
    node = strip(variance).producer
    if node is None or node.kind != "ADD" or not node.binary or node.op.activation:
        return None
    for position in (1, 0):
        eps, constant = scalar(graph, node.operand(position)), constant_under(node.operand(position))
        if eps is None or constant is None:
            continue
        total, share, outer = _multiple(graph, node.operand(1 - position))
        summed = _summed(graph, total)
        squares, part, inner = _multiple(graph, summed[0]) if summed is not None else (total, 0.0, ())
        squared = _squared(graph, squares)
        if summed is None or squared is None:
            return None
        size = summed[0].tensor.shape[-1]
        if not _close(share * summed[1] * part * squared[1] * size, 1.0):
            return None
        aside = (Aside(constant, "epsilon of an RMSNorm"), *outer, *summed[2], *inner, *squared[2])
        return squared[0], size, eps, aside
    return None


def _multiple(graph: FlatGraph, value: Value) -> tuple[Value, float, tuple[Aside, ...]]:
    """``value``, squares or a sum of them, as a multiple of another: that, the factor, and the constants on the way.

    Of what is not negative a bound at 0 is no bound.
    """
    root, factor, aside = strip(value), 1.0, tuple[Aside, ...]()
    while (node := root.producer) is not None and not node.op.activation:
        scaled = split_scalar(graph, node)
        if scaled is not None and scaled[2] > 0:
            inner, constant, factor = scaled[0], scaled[1], factor * scaled[2]
            aside += (Aside(constant, "1/N of an RMSNorm's mean"),)
        elif (node.kind == "RELU" and node.unary) or (
            node.kind == "MAXIMUM" and node.binary and scalar(graph, node.operand(1)) == 0.0
        ):
            inner = node.operand(0)
        else:
            break
        root = strip(inner)
    return root, factor, aside


def _summed(graph: FlatGraph, value: Value) -> tuple[Value, float, tuple[Aside, ...]] | None:
    """What ``value`` is a sum of over the last axis, times the factor: 1/N for a mean."""
    node = value.producer
    if node is None or node.op.activation or len(node.inputs) < 2:
        return None
    terms, constant = node.operand(0), constant_under(node.operand(1))
    size = terms.tensor.shape[-1] if terms.tensor.shape else 0
    if constant is None or not size:
        return None
    if node.kind in ("MEAN", "SUM"):
        axes = {int(a) % len(terms.tensor.shape) for a in graph.integers(constant)}
        return (terms, 1 / size if node.kind == "MEAN" else 1.0, ()) if axes == {len(terms.tensor.shape) - 1} else None
    # A product with a row of equal numbers.
    others = [v for v in node.inputs[2:] if v is not None]
    if node.kind not in ("FULLY_CONNECTED", "BATCH_MATMUL") or others or constant.tensor.elements != size:
        return None
    row = graph.floats(constant)
    if (row != row[0]).any() or node.outputs[0].tensor.elements * size != terms.tensor.elements:
        return None
    return terms, float(row[0]), (Aside(constant, "1/N of an RMSNorm's mean"),)


def _squared(graph: FlatGraph, value: Value) -> tuple[Value, float, tuple[Aside, ...]] | None:
    """For squares: of what, times the factor, and their constants."""
    node = value.producer
    if node is None or node.op.activation:
        return None
    if node.kind == "SQUARE" and node.unary:
        return _absolute(node.operand(0)), 1.0, ()
    if not node.binary:
        return None
    left, right = (strip(node.operand(i)) for i in (0, 1))
    if node.kind == "MUL":
        aside: tuple[Aside, ...] = ()
        factor = 1.0
        # x · (x · 1/N): a factor that is no square itself may have any sign.
        for one, other in ((left, right), (right, left)):
            scaled = split_scalar(graph, one.producer) if one.producer is not None and one is not other else None
            if scaled is not None and strip(scaled[0]) is other:
                left = right = other
                factor, aside = scaled[2], (Aside(scaled[1], "1/N of an RMSNorm's mean"),)
                break
        if left is not right and _absolute(left) is not left and _absolute(right) is not right:
            left, right = _absolute(left), _absolute(right)
        return (_absolute(left), factor, aside) if left is right else None
    number, constant = scalar(graph, right), constant_under(right)
    if constant is not None and (node.kind, number) in (("POW", 2.0), ("SQUARED_DIFFERENCE", 0.0)):
        return _absolute(left), 1.0, (Aside(constant, "the square of an RMSNorm"),)
    return None


def _absolute(value: Value) -> Value:
    """What ``value`` is the absolute value of, which has the same square; ``value`` where it is none."""
    node = value.producer
    return strip(node.operand(0)) if node is not None and node.kind == "ABS" and node.unary else strip(value)


def match_soft_cap(graph: FlatGraph, value: Value) -> SoftCap:
    """``cap · tanh(scale · x)``, with or without either factor, or no soft cap at all."""
    root = strip(value)
    above, cap, outer = without_factors(graph, root, "soft cap: the factor after tanh")
    if above.producer is None or above.producer.kind != "TANH" or not above.producer.unary:
        _refuse_bound(graph, root)
        return SoftCap(root, None, 1.0, ())
    x, scale, inner = without_factors(graph, above.producer.operand(0), "soft cap: the factor before tanh")
    if not (1 / _LARGEST_CAP < cap < _LARGEST_CAP and 1 / _LARGEST_CAP < scale < _LARGEST_CAP):
        raise UnsupportedError(
            f"The logits are {cap:g} · tanh({scale:g} · x); no drafter has such a soft cap. The file is damaged."
        )
    _refuse_bound(graph, x)
    return SoftCap(x, cap, scale, (*outer, *inner))


def without_factors(graph: FlatGraph, value: Value, reason: str = "") -> tuple[Value, float, tuple[Aside, ...]]:
    """``value`` without the numbers it is multiplied by: what is left, their product, and the constants.

    ``reason`` is why the constants are set aside.
    """
    root, factor, aside = strip(value), 1.0, tuple[Aside, ...]()
    while root.producer is not None and (found := split_scalar(graph, root.producer)) is not None:
        root, factor = strip(found[0]), factor * found[2]
        aside += (Aside(found[1], reason),)
    return root, factor, aside


def _refuse_bound(graph: FlatGraph, value: Value) -> None:
    """A bound that may bind: one that never does was passed over."""
    node = value.producer
    if node is not None and node.kind in ("MAXIMUM", "MINIMUM") and node.binary:
        for position in (1, 0):
            bound = scalar(graph, node.operand(position))
            if bound is not None:
                raise UnsupportedError(
                    f"{node.op.label} bounds the logits at {bound:g}; no drafter is known to do that."
                )
