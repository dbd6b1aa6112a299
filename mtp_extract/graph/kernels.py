"""The operators that the evaluator knows: one function a kind, each with LiteRT's own semantics.

The table is an allow-list. A function takes a :class:`Call` and the operands, and returns the results. Option slots are
those of the TFLite schema, in the order in which it declares them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.arithmetic import ARITHMETIC, STRICT
from mtp_extract.graph.arrays import Array, Coded, Numbers, Weight, array_of, matmul
from mtp_extract.graph.call import DTYPES, Call, Kernel, grid_of, ints, one
from mtp_extract.graph.flat import Node
from mtp_extract.graph.moving import MOVING
from mtp_extract.litertlm.tflite import TensorType


def _cast(call: Call, x: Numbers) -> Numbers:
    source, target = call.tensor(0), call.result
    kind = DTYPES.get(target.type)
    if kind is None:
        raise call.refuse(f"casts to {target.type_name}")
    grid, made = grid_of(source), grid_of(target)
    if isinstance(x, Weight):
        if x.source.packing is not None:
            return x.source.codes().reshape(x.shape).astype(kind)
        if target.type is TensorType.FLOAT32:
            return x
        x = x.floats()
    if isinstance(x, Coded):
        if grid is None:
            # A cache of floats, which integers with a scale stand for.
            return x
        # The codes themselves, as integers: a cache may be scaled by a MUL instead of a DEQUANTIZE.
        return Coded(x.codes, 1.0) if kind is np.float32 else _converted(x.codes, kind)
    values = array_of(x)
    if grid is not None:
        values = np.rint(values / np.float32(grid[0]) + np.float32(grid[1]))
    values = _converted(values, kind)
    if made is None:
        return values
    if values.dtype.kind in "iu":
        return Coded(values, *made)
    raise call.refuse("casts to codes")


def _converted(values: Array, kind: type[np.generic]) -> Array:
    """Integers wrap around; floats are cut towards zero and stop at the limits, as does what is not a number."""
    if kind is np.bool_:
        return np.not_equal(values, 0)
    if values.dtype.kind != "f" or not issubclass(kind, np.integer):
        return values.astype(kind)
    limits, wide = np.iinfo(kind), values.astype(np.float64)
    beyond = ~(wide < float(limits.max))
    cut = np.where(beyond, 0, np.maximum(wide, float(limits.min)))
    return np.where(beyond, limits.max, cut.astype(kind)).astype(kind)


def _dequantize(call: Call, x: Numbers) -> Numbers:
    """The same real numbers. What rounds them is the type of the result, where the evaluator looks at it."""
    if isinstance(x, Weight):
        if call.result.type is not TensorType.FLOAT32 and grid_of(call.result) is not None:
            return x.floats()
        return replace(x, through_dequantize=True)
    if isinstance(x, Coded) and call.result.type not in (TensorType.FLOAT32, TensorType.FLOAT16):
        # From one grid to another, as reals.
        return x.floats()
    return x


def _batch_matmul(call: Call, left: Numbers, right: Numbers) -> Array:
    a, transposed = array_of(left), bool(call.option(1, "?", False))
    if call.option(0, "?", False):
        a = np.swapaxes(a, -1, -2)
    if isinstance(right, Weight) and right.matrix and a.ndim >= len(right.shape):
        _check_weight(call, right, 1 if not transposed else 0)
        flat = np.ascontiguousarray(a, np.float32).reshape(-1, a.shape[-1])
        return right.times(flat, transposed).reshape(*a.shape[:-1], -1)
    return matmul(a, right if isinstance(right, Coded) else array_of(right), transposed)


def _fully_connected(call: Call, x: Numbers, weight: Numbers, bias: Numbers | None = None) -> Array:
    values = array_of(x)
    if call.option(1, "b"):
        raise call.refuse("stores its weight shuffled")
    rows, columns = weight.shape[-2:] if len(weight.shape) >= 2 else (0, 0)
    if len(weight.shape) != 2 or not columns or values.size % columns:
        raise call.refuse(f"multiplies {list(values.shape)} with a weight of {list(weight.shape)}")
    made = _product(call, values, weight, bias)
    keeps = bool(call.option(2, "?", False))
    return call.activate(made.reshape((*values.shape[:-1], rows) if keeps else (-1, rows)))


def _product(call: Call, values: Array, weight: Numbers, bias: Numbers | None) -> Array:
    """Rows of ``values`` times ``weight`` ``[out, …, in]``, whose axes between are of one element: ``[rows, out]``."""
    rows, columns = weight.shape[0], weight.shape[-1]
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, columns)
    if isinstance(weight, Weight):
        _check_weight(call, weight, 0, rank=len(weight.shape))
        made = replace(weight, shape=(rows, columns)).times(flat, transposed=True)
    else:
        made = matmul(flat, weight, transposed=True)
    return made if bias is None else _biased(call, made, bias)


def refuse_wide_filter(node: Node) -> None:
    """Check that a CONV_2D is a product with a matrix: a filter ``[out, 1, 1, in]``, moved by 1.

    Raises:
        UnsupportedError: it is not.
    """
    shape, options = node.operand(1).tensor.shape, node.op.options
    steps = [options.integer(slot, "i") for slot in (1, 2)] if options is not None else [0, 0]
    dilation = [options.scalar(slot, "i", 1) for slot in (4, 5)] if options is not None else [1, 1]
    if len(shape) != 4 or [*shape[1:3], *steps, *dilation] != [1] * 6:
        raise UnsupportedError(
            f"{node.op.label} has a filter of {list(shape)}, strides of {steps} and dilations of {dilation}; only a "
            "convolution of 1 by 1, which is a product with a matrix, can be read."
        )


def _convolution(call: Call, x: Numbers, weight: Numbers, bias: Numbers | None = None) -> Array:
    refuse_wide_filter(call.node)
    values = array_of(x)
    rows, columns = weight.shape[0], weight.shape[-1]
    if values.ndim != 4 or values.shape[-1] != columns:
        raise call.refuse(f"multiplies {list(values.shape)} with a filter of {list(weight.shape)}")
    if not isinstance(weight, Weight):
        weight = array_of(weight).reshape(rows, columns)
    return call.activate(_product(call, values, weight, bias).reshape(*values.shape[:-1], rows))


def _check_weight(call: Call, weight: Weight, axis: int, rank: int = 2) -> None:
    """What LiteRT's kernel makes of a quantized weight must be what its scales and zero points say.

    ``axis`` is that of the outputs, among the last ``rank``.
    """
    source = weight.source
    if weight.through_dequantize or source.kind == "none":
        return
    if source.packing is not None and not source.packing.signed:
        raise call.refuse(f"reads {source.tensor.label}, which LiteRT takes for signed codes")
    if weight.exchanged:
        raise call.refuse(f"reads {source.tensor.label} transposed, as codes")
    if source.kind == "per_channel" and source.axis != axis + len(source.tensor.shape) - rank:
        where = f"whose scales run along axis {source.axis}"
        raise call.refuse(f"reads {source.tensor.label}, {where}: LiteRT applies them to the outputs")
    if not source.symmetric:
        raise call.refuse(f"reads {source.tensor.label}, whose zero points are not 0: LiteRT ignores them")


def _biased(call: Call, made: Array, bias: Numbers) -> Array:
    kind = call.tensor(2).type
    if kind in (TensorType.INT32, TensorType.INT64):
        # Static integers: the bias' own scale is not looked at.
        if np.any(array_of(bias)):
            raise call.refuse("has a bias of integers")
        return made
    biased: Array = made + array_of(bias).reshape(-1)
    return biased


def _one_hot(call: Call, indices: Numbers, depth: Numbers, on: Numbers, off: Numbers) -> Array:
    hot = np.equal(array_of(indices)[..., None], np.arange(one(depth)))
    return np.moveaxis(np.where(hot, array_of(on), array_of(off)), -1, call.option(0, "i"))


def _range(call: Call, start: Numbers, limit: Numbers, delta: Numbers) -> Array:
    numbers = [array_of(v).reshape(-1)[0] for v in (start, limit, delta)]
    return np.arange(*numbers, dtype=array_of(start).dtype)


def _lazily(function: Callable[[Array], Array]) -> Kernel:
    """A function of one operand's shape alone."""
    return lambda call, x, *rest: function(np.broadcast_to(np.zeros((), array_of(x).dtype), x.shape))


KERNELS: MappingProxyType[str, Kernel] = MappingProxyType(
    {
        **ARITHMETIC,
        **MOVING,
        "CAST": _cast,
        "ONE_HOT": _one_hot,
        "SHAPE": lambda call, x: np.array(x.shape, call.index_type),
        "RANK": lambda call, x: np.array(len(x.shape), np.int32),
        "RANGE": _range,
        "FILL": lambda call, shape, value: np.full(ints(shape), array_of(value).reshape(-1)[0]),
        "ZEROS_LIKE": _lazily(np.zeros_like),
        "DEQUANTIZE": _dequantize,
        "QUANTIZE": _dequantize,
        "BATCH_MATMUL": _batch_matmul,
        "CONV_2D": _convolution,
        "FULLY_CONNECTED": _fully_connected,
    }
)
"""Operator → what it computes. What is not here is refused."""

ELEMENTWISE = STRICT | {
    "CAST",
    "DEQUANTIZE",
    "QUANTIZE",
    "SELECT",
    "SELECT_V2",
    "SOFTMAX",
    "LOG_SOFTMAX",
    "GELU",
    "BATCH_MATMUL",
}
"""Those that take axes in front of their operands' as they take batches: element by element, or along the last axes."""
