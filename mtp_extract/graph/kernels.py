"""The operators that the evaluator knows: one function a kind, each with LiteRT's own semantics.

The table is an allow-list. A function takes a :class:`Call` and the operands, and returns the results. Option slots are
those of the TFLite schema, in the order in which it declares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.errors import FormatError, UnsupportedError
from mtp_extract.graph.arrays import Array, Coded, Lazy, Numbers, Weight, array_of, gelu, matmul
from mtp_extract.graph.flat import FlatGraph, Node
from mtp_extract.litertlm.tflite import Tensor, TensorType

__all__ = ["DTYPES", "KERNELS", "Call", "grid_of", "operator_names"]

DTYPES: MappingProxyType[TensorType, type[np.generic]] = MappingProxyType(
    {
        TensorType.FLOAT32: np.float32,
        TensorType.FLOAT16: np.float32,
        TensorType.BFLOAT16: np.float32,
        TensorType.BOOL: np.bool_,
        TensorType.INT8: np.int8,
        TensorType.UINT8: np.uint8,
        TensorType.INT16: np.int16,
        TensorType.UINT16: np.uint16,
        TensorType.INT32: np.int32,
        TensorType.UINT32: np.uint32,
        TensorType.INT64: np.int64,
    }
)
"""NumPy types of plain tensors; half precision is computed in float32."""

_GRIDS = frozenset({TensorType.INT8, TensorType.UINT8, TensorType.INT16, TensorType.INT4, TensorType.UINT4})


def grid_of(tensor: Tensor) -> tuple[float, int] | None:
    """Scale and zero point of an activation stored as integers; None where its numbers are what they are.

    Raises:
        UnsupportedError: more than one scale.
    """
    quantization = tensor.quantization
    if tensor.type not in _GRIDS or quantization is None or not quantization.scale_count:
        return None
    if quantization.scale_count != 1:
        raise UnsupportedError(f"{tensor.label}: an activation with {quantization.scale_count} scales.")
    return float(quantization.scale[0]), int(quantization.zero_point[0]) if quantization.zero_point.size else 0


@dataclass(frozen=True)
class Call:
    """The operator at hand: its options, and what its operands' tensors say."""

    graph: FlatGraph
    node: Node

    def option(self, slot: int, code: str, default: int | float | bool = 0) -> Any:
        """The option in ``slot``; the schema's default when it is not stored."""
        options = self.node.op.options
        return default if options is None else options.scalar(slot, code, default)

    def numbers(self, slot: int) -> tuple[int, ...]:
        """The option in ``slot``, a vector of int32."""
        return self.node.op.options.integers(slot, "i") if self.node.op.options else ()

    def tensor(self, position: int) -> Tensor:
        """The tensor that the operator itself names as input ``position``."""
        return self.graph.model.tensor(self.node.op.subgraph, self.node.op.inputs[position])

    @property
    def result(self) -> Tensor:
        """The tensor of the first result."""
        return self.node.outputs[0].tensor

    def refuse(self, why: str) -> UnsupportedError:
        """What to raise when the operator does something the evaluator does not."""
        return UnsupportedError(f"{self.node.op.label} {why}; what the graph computes cannot be checked.")

    def activate(self, values: Array) -> Array:
        """``values`` after the fused activation function."""
        bounds = {0: None, 1: (0, None), 2: (-1, 1), 3: (0, 6)}
        kind = self.node.op.activation
        if kind not in bounds:
            raise self.refuse(f"has the fused activation {kind}")
        bound = bounds[kind]
        return values if bound is None else np.clip(values, *bound).astype(values.dtype)


Kernel = Callable[..., Any]


def _strict(function: Callable[..., Any], *, activation: bool = False) -> Kernel:
    """An elementwise operator of one or two operands of the same type."""

    def kernel(call: Call, *operands: Numbers) -> Array:
        types = {call.tensor(i).type for i in range(len(operands))}
        if len(types) > 1:
            raise call.refuse("mixes " + " and ".join(sorted(str(t and t.name) for t in types)))
        result = function(*map(array_of, operands))
        return call.activate(result) if activation else result

    return kernel


def _scaled(call: Call, left: Numbers, right: Numbers) -> Numbers:
    """MUL. A quantized cache times one number stays quantized."""
    for coded, factor in ((left, right), (right, left)):
        if isinstance(coded, Coded) and isinstance(factor, np.ndarray) and factor.size == 1:
            if factor.dtype == np.float32 and factor.ndim <= len(coded.shape) and not call.node.op.activation:
                return Coded(coded.codes, coded.scale * float(factor.reshape(-1)[0]), coded.zero_point)
    result: Array = _MUL(call, left, right)
    return result


def _divide(left: Array, right: Array) -> Array:
    if left.dtype.kind == "f":
        return left / right
    # C's division of integers cuts towards zero.
    if not right.all():
        raise FormatError("A DIV of the graph divides an integer by zero.")
    quotient = np.abs(left.astype(np.int64)) // np.abs(right.astype(np.int64))
    return (quotient * np.sign(left) * np.sign(right)).astype(left.dtype)


_MUL = _strict(np.multiply, activation=True)


def _gelu(call: Call, x: Numbers) -> Array:
    return gelu(array_of(x), tanh=bool(call.option(0, "?", False)))


def _softmax(call: Call, x: Numbers) -> Array:
    values = array_of(x) * np.float32(call.option(0, "f", 0.0))
    raised = np.exp(values - values.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True, dtype=np.float32)


def _log_softmax(call: Call, x: Numbers) -> Array:
    values = array_of(x)
    shifted = values - values.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


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
        wide = call.option(0, "b") == TensorType.INT64
        return np.asarray(function(array_of(x), axis=_one(axis)), np.int64 if wide else np.int32)

    return kernel


def _one(numbers: Numbers) -> int:
    return int(array_of(numbers).reshape(-1)[0])


def _ints(numbers: Numbers) -> list[int]:
    return [int(n) for n in array_of(numbers).reshape(-1)]


def _cast(call: Call, x: Numbers) -> Numbers:
    source, target = call.tensor(0), call.result
    kind = DTYPES.get(target.type) if target.type is not None else None
    if kind is None:
        raise call.refuse(f"casts to {target.type_name}")
    if isinstance(x, Weight):
        if x.source.packing is None:
            return x
        return x.source.codes().reshape(x.shape).astype(kind)
    grid = grid_of(source)
    if grid is None:
        values: Numbers = x
    elif isinstance(x, Coded):
        # The codes themselves, as integers: a cache may be scaled by a MUL instead of a DEQUANTIZE.
        values = Coded(x.codes, 1.0) if kind is np.float32 else x.codes
    else:
        values = array_of(x) / np.float32(grid[0]) + np.float32(grid[1])
    if not isinstance(values, Lazy):
        with np.errstate(invalid="ignore"):
            values = values != 0 if kind is np.bool_ else values.astype(kind)
    made = grid_of(target)
    if made is None:
        return values
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        return Coded(values, *made)
    raise call.refuse("casts to codes")


# Operators that move elements. They hand codes on as they are, lazily, and never look at them.
def _moves(function: Callable[..., Any]) -> Kernel:
    def kernel(call: Call, x: Numbers, *rest: Numbers) -> Any:
        source, target = grid_of(call.tensor(0)) if not isinstance(x, Weight) else None, call.result
        if source is not None and source != grid_of(target):
            raise call.refuse(f"hands the codes of {call.tensor(0).label} on with another scale")
        if isinstance(x, Coded):
            return x.of(function(call, x.codes, *rest))
        return function(call, array_of(x), *rest)

    return kernel


def _reshape(call: Call, x: Numbers, shape: Numbers | None = None) -> Numbers:
    sizes = _ints(shape) if shape is not None else list(call.numbers(0))
    if isinstance(x, Weight):
        known = -math.prod(sizes) if -1 in sizes else 0
        sizes = [math.prod(x.shape) // max(known, 1) if s == -1 else s for s in sizes]
        if sizes and x.shape and sizes[-1] == x.shape[-1] and math.prod(sizes) == math.prod(x.shape):
            return Weight(x.source, tuple(sizes), x.through_dequantize)
    try:
        made: Numbers = _moves(lambda _, values: values.reshape(sizes))(call, x)
    except ValueError as error:
        raise call.refuse(f"cannot give its operand the shape {sizes}") from error
    return made


def _transpose(call: Call, x: Array, order: Numbers) -> Array:
    return x.transpose(_ints(order))


def _slice(call: Call, x: Array, begin: Numbers, size: Numbers) -> Array:
    starts, sizes = _ints(begin), _ints(size)
    ends = [d if n == -1 else b + n for b, n, d in zip(starts, sizes, x.shape, strict=True)]
    if any(not 0 <= b <= e <= d for b, e, d in zip(starts, ends, x.shape, strict=True)):
        raise call.refuse(f"takes {starts} to {ends} of {list(x.shape)}")
    return x[tuple(slice(b, e) for b, e in zip(starts, ends, strict=True))]


def _strided_slice(call: Call, x: Array, begin: Numbers, end: Numbers, strides: Numbers) -> Array:
    begin_mask, end_mask, ellipsis, new_axis, shrink = (call.option(slot, "i") for slot in range(5))
    relative = call.option(5, "?", False)
    index: list[Any] = []
    for i, (first, last, step) in enumerate(zip(_ints(begin), _ints(end), _ints(strides), strict=True)):
        if ellipsis >> i & 1:
            index.append(...)
        elif new_axis >> i & 1:
            index.append(None)
        elif shrink >> i & 1:
            index.append(0 if begin_mask >> i & 1 else first)
        else:
            stop = first + last if relative else last
            index.append(slice(None if begin_mask >> i & 1 else first, None if end_mask >> i & 1 else stop, step))
    try:
        return np.asarray(x[tuple(index)])
    except IndexError as error:
        raise call.refuse("takes elements that its operand lacks") from error


def _gather(call: Call, x: Array, indices: Numbers) -> Array:
    axis, batch = call.option(0, "i"), call.option(1, "i")
    chosen = array_of(indices)
    axis, batch = axis % max(x.ndim, 1), batch % max(chosen.ndim, 1) if batch < 0 else batch
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < x.shape[axis]):
        raise call.refuse("takes elements that its operand lacks")
    if not batch:
        return np.take(x, chosen, axis)
    flat_x, flat_i = x.reshape(-1, *x.shape[batch:]), chosen.reshape(-1, *chosen.shape[batch:])
    made = [np.take(a, i, axis - batch) for a, i in zip(flat_x, flat_i, strict=True)]
    return np.stack(made).reshape(*x.shape[:batch], *made[0].shape)


def _gather_nd(call: Call, x: Array, indices: Numbers) -> Array:
    chosen = array_of(indices)
    depth = chosen.shape[-1] if chosen.ndim else 0
    sizes = np.array(x.shape[:depth])
    if not 0 < depth <= x.ndim or (chosen.size and not ((chosen >= 0) & (chosen < sizes)).all()):
        raise call.refuse("takes elements that its operand lacks")
    return x[tuple(np.moveaxis(chosen, -1, 0))]


def _squeeze(call: Call, x: Array) -> Array:
    axes = tuple(call.numbers(0)) or tuple(i for i, d in enumerate(x.shape) if d == 1)
    return np.squeeze(x, axes)


def _joined(call: Call, join: Callable[..., Array], operands: Sequence[Numbers], axis: int) -> Numbers:
    for position in range(len(operands)):
        grid = grid_of(call.tensor(position))
        if grid is not None and grid != grid_of(call.result):
            raise call.refuse(f"hands the codes of {call.tensor(position).label} on with another scale")
    if call.tensor(0).type is not None and len({call.tensor(i).type for i in range(len(operands))}) > 1:
        raise call.refuse("joins tensors of different types")
    return call.activate(join([array_of(v) for v in operands], axis))


def _concatenate(call: Call, *operands: Numbers) -> Numbers:
    return _joined(call, np.concatenate, operands, call.option(0, "i"))


def _pack(call: Call, *operands: Numbers) -> Numbers:
    return _joined(call, np.stack, operands, call.option(1, "i"))


def _split(call: Call, axis: Numbers, x: Numbers) -> tuple[Array, ...]:
    return tuple(np.split(array_of(x), call.option(0, "i"), _one(axis)))


def _split_v(call: Call, x: Numbers, sizes: Numbers, axis: Numbers) -> tuple[Array, ...]:
    values, lengths, along = array_of(x), _ints(sizes), _one(axis)
    if -1 in lengths:
        lengths[lengths.index(-1)] = values.shape[along] - sum(lengths) - 1
    return tuple(np.split(values, np.cumsum(lengths)[:-1], along))


def _unpack(call: Call, x: Numbers) -> tuple[Array, ...]:
    return tuple(np.moveaxis(array_of(x), call.option(1, "i"), 0))


def _update_slice(call: Call, x: Numbers, update: Numbers, starts: Numbers) -> Array:
    values, new = array_of(x).copy(), array_of(update)
    at = [min(max(s, 0), d - n) for s, d, n in zip(_ints(starts), values.shape, new.shape, strict=True)]
    values[tuple(slice(s, s + n) for s, n in zip(at, new.shape, strict=True))] = new
    return values


def _select(call: Call, condition: Numbers, yes: Numbers, no: Numbers) -> Array:
    chosen, a, b = array_of(condition), array_of(yes), array_of(no)
    if call.node.kind == "SELECT" and chosen.ndim == 1 and a.ndim > 1:
        # The first version chooses whole rows by a vector, and broadcasts nothing else.
        chosen = chosen.reshape(-1, *(1,) * (a.ndim - 1))
    if a.dtype != b.dtype:
        raise call.refuse("chooses between numbers of different types")
    return np.where(chosen, a, b)


def _pad(call: Call, x: Numbers, sizes: Numbers, value: Numbers | None = None) -> Array:
    pads = array_of(sizes).reshape(-1, 2).tolist()
    fill = 0 if value is None else array_of(value).reshape(-1)[0]
    return np.pad(array_of(x), pads, constant_values=fill)


def _one_hot(call: Call, indices: Numbers, depth: Numbers, on: Numbers, off: Numbers) -> Array:
    axis = call.option(0, "i")
    hot = np.equal(array_of(indices)[..., None], np.arange(_one(depth)))
    made = np.where(hot, array_of(on), array_of(off))
    return np.moveaxis(made, -1, axis)


def _cumsum(call: Call, x: Numbers, axis: Numbers) -> Array:
    values, along = array_of(x), _one(axis)
    exclusive, backwards = call.option(0, "?", False), call.option(1, "?", False)
    values = np.flip(values, along) if backwards else values
    summed = np.cumsum(values, along, dtype=values.dtype)
    summed = summed - values if exclusive else summed
    return np.flip(summed, along) if backwards else summed


def _shape(call: Call, x: Numbers) -> Array:
    return np.array(x.shape, np.int64 if call.option(0, "b") == TensorType.INT64 else np.int32)


def _range(call: Call, start: Numbers, limit: Numbers, delta: Numbers) -> Array:
    numbers = [array_of(v).reshape(-1)[0] for v in (start, limit, delta)]
    return np.arange(*numbers, dtype=array_of(start).dtype)


def _fill(call: Call, shape: Numbers, value: Numbers) -> Array:
    return np.full(_ints(shape), array_of(value).reshape(-1)[0])


def _dequantize(call: Call, x: Numbers) -> Numbers:
    if isinstance(x, Weight):
        return Weight(x.source, x.shape, through_dequantize=True)
    if isinstance(x, Coded) and call.result.type not in (TensorType.FLOAT32, TensorType.FLOAT16):
        # From one grid to another, as reals.
        return x.floats()
    return x


def _quantize(call: Call, x: Numbers) -> Numbers:
    """The same real numbers: on the grid of calibrated activations, random inputs would tell nothing about weights."""
    readers = call.node.outputs[0].consumers
    if grid_of(call.tensor(0)) is None and readers and all(node.kind == "DEQUANTIZE" for node, _ in readers):
        raise call.refuse("rounds to a grid what no integer operator reads")
    return _dequantize(call, x)


def _lookup(call: Call, ids: Numbers, table: Numbers) -> Array:
    chosen = array_of(ids)
    values = array_of(table)
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < values.shape[0]):
        raise call.refuse("takes rows that its table lacks")
    return values[chosen]


def _batch_matmul(call: Call, left: Numbers, right: Numbers) -> Array:
    a = array_of(left)
    if call.option(0, "?", False):
        a = np.swapaxes(a, -1, -2)
    b = right if isinstance(right, Coded) else array_of(right)
    made = matmul(a, b, bool(call.option(1, "?", False)))
    # A matrix of integers is summed in the type of the result.
    return made


def _fully_connected(call: Call, x: Numbers, weight: Numbers, bias: Numbers | None = None) -> Array:
    values = array_of(x)
    if call.option(1, "b"):
        raise call.refuse("stores its weight shuffled")
    rows, columns = weight.shape[-2:] if len(weight.shape) >= 2 else (0, 0)
    if len(weight.shape) != 2 or not columns or values.size % columns:
        raise call.refuse(f"multiplies {list(values.shape)} with a weight of {list(weight.shape)}")
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, columns)
    if isinstance(weight, Weight):
        _check_weight(call, weight)
        made = np.empty((flat.shape[0], rows), np.float32)
        at = 0
        for block in weight.rows():
            np.matmul(flat, block.T, out=made[:, at : at + len(block)])
            at += len(block)
    else:
        made = matmul(flat, weight, transposed=True)
    if bias is not None:
        made = _biased(call, made, bias)
    keeps = bool(call.option(2, "?", False))
    return call.activate(made.reshape((*values.shape[:-1], rows) if keeps else (-1, rows)))


def _check_weight(call: Call, weight: Weight) -> None:
    """What LiteRT's kernel makes of a quantized weight must be what its scales and zero points say."""
    source = weight.source
    if weight.through_dequantize or source.kind == "none":
        return
    if source.packing is not None and not source.packing.signed:
        raise call.refuse(f"reads {source.tensor.label}, which LiteRT takes for signed codes")
    if source.kind == "per_channel" and source.axis != 0:
        raise call.refuse(
            f"reads {source.tensor.label}, whose scales run along axis {source.axis}: LiteRT applies them along axis 0"
        )
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


def _lazily(function: Callable[[Array], Array]) -> Kernel:
    """A function of one operand's shape alone."""
    return lambda call, x, *rest: function(np.broadcast_to(np.zeros((), array_of(x).dtype), x.shape))


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

KERNELS: MappingProxyType[str, Kernel] = MappingProxyType(
    {name: _strict(function) for name, function in _ELEMENTWISE.items()}
    | {
        "ADD": _strict(np.add, activation=True),
        "SUB": _strict(np.subtract, activation=True),
        "DIV": _strict(_divide, activation=True),
        "MUL": _scaled,
        "GELU": _gelu,
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
        "CAST": _cast,
        "RESHAPE": _reshape,
        "TRANSPOSE": _moves(_transpose),
        "SLICE": _moves(_slice),
        "STRIDED_SLICE": _moves(_strided_slice),
        "GATHER": _moves(_gather),
        "GATHER_ND": _moves(_gather_nd),
        "SQUEEZE": _moves(_squeeze),
        "EXPAND_DIMS": _moves(lambda call, x, axis: np.expand_dims(x, _one(axis))),
        "BROADCAST_TO": _moves(lambda call, x, shape: np.broadcast_to(x, _ints(shape))),
        "TILE": _moves(lambda call, x, times: np.tile(x, _ints(times))),
        "REVERSE_V2": _moves(lambda call, x, axes: np.flip(x, _ints(axes))),
        "PAD": _pad,
        "PADV2": _pad,
        "CONCATENATION": _concatenate,
        "PACK": _pack,
        "SPLIT": _split,
        "SPLIT_V": _split_v,
        "UNPACK": _unpack,
        "DYNAMIC_UPDATE_SLICE": _update_slice,
        "SELECT": _select,
        "SELECT_V2": _select,
        "ONE_HOT": _one_hot,
        "CUMSUM": _cumsum,
        "SHAPE": _shape,
        "RANK": lambda call, x: np.array(len(x.shape), np.int32),
        "RANGE": _range,
        "FILL": _fill,
        "ZEROS_LIKE": _lazily(np.zeros_like),
        "EMBEDDING_LOOKUP": _lookup,
        "DEQUANTIZE": _dequantize,
        "QUANTIZE": _quantize,
        "BATCH_MATMUL": _batch_matmul,
        "FULLY_CONNECTED": _fully_connected,
    }
)
"""Operator → what it computes. What is not here is refused."""


def operator_names() -> tuple[str, ...]:
    """The allow-list, sorted."""
    return tuple(sorted(KERNELS))
