"""What the drafter's building blocks look like in plain operators, whichever exporter wrote them.

Each ``match_*`` function looks backwards from a value and returns what it found, or None. None of them looks at a
name. Matches say which constants they used up and why, so that the walk can account for every one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.flat import FlatGraph, Node, Value
from mtp_extract.litertlm.tflite import TensorType

__all__ = [
    "Aside",
    "RmsNorm",
    "SoftCap",
    "match_rms_norm",
    "match_soft_cap",
    "strip",
]

PASSES = frozenset({"RESHAPE", "QUANTIZE", "DEQUANTIZE", "CAST", "TRANSPOSE", "BROADCAST_TO", "EXPAND_DIMS", "SQUEEZE"})
"""Operators that hand their first operand on: the same numbers, in another shape or type."""

WEIGHT_PASSES = frozenset({"RESHAPE", "QUANTIZE", "DEQUANTIZE", "CAST", "BROADCAST_TO", "EXPAND_DIMS", "SQUEEZE"})
"""The same for weights, whose order of elements must not change."""

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
    """``x · weight / sqrt(mean(x²) + eps)`` over the last axis, which has ``size`` elements.

    ``weight`` is None where there is no multiplication: converters fold a weight of ones away. It has one element
    where they folded equal weights into one number.
    """

    x: Value
    weight: Value | None
    size: int
    eps: float
    aside: tuple[Aside, ...]


@dataclass(frozen=True)
class SoftCap:
    """``cap · tanh(scale · x)``; ``cap`` None and ``scale`` 1 when the graph has none."""

    x: Value
    cap: float | None
    scale: float
    aside: tuple[Aside, ...]


def strip(value: Value, passes: frozenset[str] = PASSES) -> Value:
    """``value`` without the operators that only hand it on."""
    while value.producer is not None and value.producer.kind in passes and value.producer.inputs:
        operand = value.producer.inputs[0]
        if operand is None:
            break
        value = operand
    return value


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


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_RELATIVE)


def _factors(value: Value, stop: Value | None = None) -> Iterator[Value]:
    """The factors of a product, multiplications opened up, down to ``stop``."""
    queue, opened = [value], 0
    while queue:
        root = strip(queue.pop())
        node = root.producer
        # Squares of squares have exponentially many factors; what remains of them is handed out unopened.
        if (
            root is stop
            or node is None
            or node.kind != "MUL"
            or node.op.activation
            or opened == _MOST_FACTORS
            or not node.binary
        ):
            yield root
        else:
            opened += 1
            queue.extend(node.operand(i) for i in (0, 1))


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
    if node.kind == "DIV" and node.binary and not node.op.activation:
        numerator, denominator = node.operand(0), strip(node.operand(1))
        if denominator.producer is None or denominator.producer.kind != "SQRT" or not denominator.producer.unary:
            return None
        return _norm_from(graph, numerator, denominator.producer.operand(0), None)
    if node.kind != "MUL":
        return None
    for factor in _factors(root):
        producer = factor.producer
        if producer is None or producer.op.activation:
            continue
        if (producer.kind == "RSQRT" and producer.unary) or (
            producer.kind == "POW" and producer.binary and scalar(graph, producer.operand(1)) == -0.5
        ):
            norm = _norm_from(graph, root, producer.operand(0), factor)
            return norm and replace(norm, aside=(*norm.aside, *_exponent(producer)))
        if producer.kind == "DIV" and producer.binary:
            below = strip(producer.operand(1))
            if below.producer is not None and below.producer.kind == "SQRT" and below.producer.unary:
                if scalar(graph, producer.operand(0)) == 1.0:
                    return _norm_from(graph, root, below.producer.operand(0), factor)
                return _norm_from(graph, root, below.producer.operand(0), factor, producer.operand(0))
    return None


def _norm_from(
    graph: FlatGraph, product: Value, variance: Value, inverse: Value | None, quotient: Value | None = None
) -> RmsNorm | None:
    """The norm whose variance (with epsilon) is ``variance``; ``inverse`` is the factor that divides by its root."""
    summed = _mean_of_squares(graph, variance)
    if summed is None:
        return None
    x, size, eps, aside = summed
    rest = [f for f in _factors(product, x) if f is not inverse]
    if inverse is None or quotient is None:
        if sum(f is x for f in rest) != 1:
            return None
        rest = [f for f in rest if f is not x]
    elif strip(quotient) is not x:
        return None
    if not rest:
        return RmsNorm(x, None, size, eps, aside)
    weight = constant_under(rest[0])
    if len(rest) != 1 or weight is None or weight.tensor.elements not in (1, size):
        return None
    # As many elements along another axis would be something else.
    if weight.tensor.elements == size and size > 1 and weight.tensor.shape[-1] != size:
        return None
    return RmsNorm(x, weight, size, eps, aside)


def _exponent(power: Node) -> tuple[Aside, ...]:
    constant = constant_under(power.operand(1)) if power.kind == "POW" else None
    return (Aside(constant, "exponent of an RMSNorm"),) if constant is not None else ()


def _mean_of_squares(graph: FlatGraph, variance: Value) -> tuple[Value, int, float, tuple[Aside, ...]] | None:
    """The ``x`` of mean(x²) + epsilon, the size of the axis averaged over, and epsilon."""
    node = strip(variance).producer
    if node is None or node.kind != "ADD" or not node.binary or node.op.activation:
        return None
    for position in (1, 0):
        eps, constant = scalar(graph, node.operand(position)), constant_under(node.operand(position))
        if eps is None or constant is None:
            continue
        mean = _mean(graph, node.operand(1 - position))
        if mean is None:
            return None
        squared, aside = mean
        x = _squared(graph, squared)
        if x is None:
            return None
        return x, squared.tensor.shape[-1], eps, (Aside(constant, "epsilon of an RMSNorm"), *aside)
    return None


def _mean(graph: FlatGraph, value: Value) -> tuple[Value, tuple[Aside, ...]] | None:
    """What ``value`` is the mean of, over the last axis."""
    root = strip(value)
    node = root.producer
    if node is None:
        return None
    if node.kind == "MEAN":
        return (node.operand(0), ()) if _over_last_axis(graph, node) else None
    scaled = split_scalar(graph, node)
    if scaled is None:
        return None
    inner, constant, factor = scaled
    total = strip(inner).producer
    if total is None or total.kind != "SUM" or not _over_last_axis(graph, total):
        return None
    if not _close(factor * total.operand(0).tensor.shape[-1], 1.0):
        return None
    return total.operand(0), (Aside(constant, "1/N of an RMSNorm's mean"),)


def _over_last_axis(graph: FlatGraph, node: Node) -> bool:
    if not node.binary:
        return False
    shape, axes = node.operand(0).tensor.shape, constant_under(node.operand(1))
    if axes is None or not shape:
        return False
    return {int(a) % len(shape) for a in graph.integers(axes)} == {len(shape) - 1}


def _squared(graph: FlatGraph, value: Value) -> Value | None:
    node = strip(value).producer
    if node is None or node.op.activation:
        return None
    if node.kind == "SQUARE" and node.unary:
        return strip(node.operand(0))
    if not node.binary:
        return None
    if node.kind == "MUL" and strip(node.operand(0)) is strip(node.operand(1)):
        return strip(node.operand(0))
    if node.kind == "POW" and scalar(graph, node.operand(1)) == 2.0:
        return strip(node.operand(0))
    return None


def match_soft_cap(graph: FlatGraph, value: Value) -> SoftCap:
    """``cap · tanh(scale · x)``, with or without either factor, or no soft cap at all."""
    aside: list[Aside] = []
    root = strip(value)
    scaled = split_scalar(graph, root.producer) if root.producer else None
    above = strip(scaled[0]) if scaled else root
    if above.producer is None or above.producer.kind != "TANH" or not above.producer.unary:
        x = _unclamped(graph, root, aside)
        return SoftCap(x, None, 1.0, tuple(aside))
    cap = scaled[2] if scaled else 1.0
    if scaled:
        aside.append(Aside(scaled[1], "soft cap: the factor after tanh"))
    inner = strip(above.producer.operand(0))
    scale = 1.0
    while inner.producer is not None and (below := split_scalar(graph, inner.producer)) is not None:
        inner, constant, factor = strip(below[0]), below[1], below[2]
        scale *= factor
        aside.append(Aside(constant, "soft cap: the factor before tanh"))
    if not (1 / _LARGEST_CAP < cap < _LARGEST_CAP and 1 / _LARGEST_CAP < scale < _LARGEST_CAP):
        raise UnsupportedError(
            f"The logits are {cap:g} · tanh({scale:g} · x); no drafter has such a soft cap. The file is damaged."
        )
    x = _unclamped(graph, inner, aside)
    return SoftCap(x, cap, scale, tuple(aside))


def _unclamped(graph: FlatGraph, value: Value, aside: list[Aside]) -> Value:
    """``value`` without a lower or upper bound so far out that it never binds."""
    node = value.producer
    if node is not None and node.kind in ("MAXIMUM", "MINIMUM") and node.binary:
        for position in (1, 0):
            bound, constant = scalar(graph, node.operand(position)), constant_under(node.operand(position))
            if bound is None or constant is None:
                continue
            if abs(bound) < 1e30 or (bound < 0) != (node.kind == "MAXIMUM"):
                raise UnsupportedError(
                    f"{node.op.label} bounds the logits at {bound:g}; no drafter is known to do that."
                )
            aside.append(Aside(constant, "a bound on the logits that never binds"))
            return strip(node.operand(1 - position))
    return value
