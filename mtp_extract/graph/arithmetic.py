"""Operators of the evaluator that compute numbers: elementwise, reductions, activations."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.errors import FormatError
from mtp_extract.graph.arrays import Array, Coded, Numbers, array_of, gelu
from mtp_extract.graph.call import Call, Kernel, one


def _strict(function: Callable[..., Any], *, activation: bool = False) -> Kernel:
    """An elementwise operator of one or two operands of the same type."""

    def kernel(call: Call, *operands: Numbers) -> Array:
        if len({call.tensor(i).type_id for i in range(len(operands))}) > 1:
            names = sorted({call.tensor(i).type_name for i in range(len(operands))})
            raise call.refuse(f"mixes {' and '.join(names)}")
        result = function(*map(array_of, operands))
        return call.activate(result) if activation else result

    return kernel


def _divide(left: Array, right: Array) -> Array:
    if left.dtype.kind == "f":
        return np.asarray(left / right)
    # C's division of integers cuts towards zero.
    if not right.all():
        raise FormatError("A DIV of the graph divides an integer by zero.")
    quotient = np.abs(left.astype(np.int64)) // np.abs(right.astype(np.int64))
    return np.asarray(quotient * np.sign(left) * np.sign(right), left.dtype)


_MUL = _strict(np.multiply, activation=True)


def _scaled(call: Call, left: Numbers, right: Numbers) -> Numbers:
    """MUL. A quantized cache times one number stays quantized."""
    for coded, factor in ((left, right), (right, left)):
        if not isinstance(coded, Coded) or not isinstance(factor, np.ndarray) or call.node.op.activation:
            continue
        if factor.size == 1 and factor.dtype == np.float32 and factor.ndim <= len(coded.shape):
            return Coded(coded.codes, coded.scale * float(factor.reshape(-1)[0]), coded.zero_point)
    return np.asarray(_MUL(call, left, right))


def _softmax(call: Call, x: Numbers) -> Array:
    values = array_of(x) * np.float32(call.option(0, "f", 0.0))
    raised = np.exp(values - values.max(-1, keepdims=True))
    return np.asarray(raised / raised.sum(-1, keepdims=True, dtype=np.float32))


def _log_softmax(call: Call, x: Numbers) -> Array:
    values = array_of(x)
    shifted = values - values.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


def _reduce(function: Callable[..., Any]) -> Kernel:
    def kernel(call: Call, x: Numbers, axes: Numbers) -> Array:
        values = array_of(x)
        chosen = tuple({int(a) % max(values.ndim, 1) for a in array_of(axes).reshape(-1)})
        if any(not -values.ndim <= a < values.ndim for a in array_of(axes).reshape(-1)):
            raise call.refuse("reduces along an axis that its operand lacks")
        result = function(values, axis=chosen, keepdims=bool(call.option(0, "?", False)))
        return np.asarray(result, values.dtype)

    return kernel


def _arg(function: Callable[..., Any]) -> Kernel:
    def kernel(call: Call, x: Numbers, axis: Numbers) -> Array:
        return np.asarray(function(array_of(x), axis=one(axis)), call.index_type)

    return kernel


def _cumsum(call: Call, x: Numbers, axis: Numbers) -> Array:
    values, along = array_of(x), one(axis)
    exclusive, backwards = call.option(0, "?", False), call.option(1, "?", False)
    values = np.flip(values, along) if backwards else values
    summed = np.cumsum(values, along, dtype=values.dtype)
    summed = summed - values if exclusive else summed
    return np.flip(summed, along) if backwards else summed


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "ABS": np.abs,
    "CEIL": np.ceil,
    "COS": np.cos,
    "ELU": lambda x: np.where(x < 0, np.expm1(np.minimum(x, 0)), x),
    "EQUAL": np.equal,
    "EXP": np.exp,
    "FLOOR": np.floor,
    "FLOOR_DIV": np.floor_divide,
    "FLOOR_MOD": np.mod,
    "GREATER": np.greater,
    "GREATER_EQUAL": np.greater_equal,
    "LESS": np.less,
    "LESS_EQUAL": np.less_equal,
    "LOG": np.log,
    "LOGICAL_AND": np.logical_and,
    "LOGICAL_NOT": np.logical_not,
    "LOGICAL_OR": np.logical_or,
    "LOGISTIC": lambda x: 1 / (1 + np.exp(-x)),
    "MAXIMUM": np.maximum,
    "MINIMUM": np.minimum,
    "NEG": np.negative,
    "NOT_EQUAL": np.not_equal,
    "POW": np.power,
    "RELU": lambda x: np.maximum(x, 0).astype(x.dtype),
    "RELU6": lambda x: np.clip(x, 0, 6).astype(x.dtype),
    "ROUND": np.rint,
    "RSQRT": lambda x: 1 / np.sqrt(x),
    "SIGN": np.sign,
    "SIN": np.sin,
    "SQRT": np.sqrt,
    "SQUARE": np.square,
    "SQUARED_DIFFERENCE": lambda x, y: np.square(x - y),
    "TANH": np.tanh,
}

ARITHMETIC: MappingProxyType[str, Kernel] = MappingProxyType(
    {name: _strict(function) for name, function in _ELEMENTWISE.items()}
    | {
        "ADD": _strict(np.add, activation=True),
        "SUB": _strict(np.subtract, activation=True),
        "DIV": _strict(_divide, activation=True),
        "MUL": _scaled,
        "GELU": lambda call, x: gelu(array_of(x), tanh=bool(call.option(0, "?", False))),
        "SOFTMAX": _softmax,
        "LOG_SOFTMAX": _log_softmax,
        "MEAN": _reduce(np.mean),
        "SUM": _reduce(np.sum),
        "REDUCE_MAX": _reduce(np.max),
        "REDUCE_MIN": _reduce(np.min),
        "REDUCE_PROD": _reduce(np.prod),
        "REDUCE_ANY": _reduce(np.any),
        "REDUCE_ALL": _reduce(np.all),
        "ARG_MAX": _arg(np.argmax),
        "ARG_MIN": _arg(np.argmin),
        "CUMSUM": _cumsum,
    }
)
"""Operators that compute numbers from numbers, except products of matrices."""

STRICT = frozenset({*_ELEMENTWISE, "ADD", "SUB", "DIV", "MUL"})
"""Those that compute element by element."""
