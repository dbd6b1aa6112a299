"""Kernels: what an operator computes, in NumPy, with LiteRT's semantics.

:data:`KERNELS` is an allow-list. Arrays are ``[*shape, samples]``, or ``[*shape, 1]`` if all samples share a value, as
:mod:`~mtp_extract.graph.evaluate` computes them. Integers are exact: an operator whose result would wrap around is
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.errors import FormatError
from mtp_extract.graph.call import NUMPY_TYPES, Array, Call, Kernel, read_ints
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import TensorType

_SMALL_INTEGERS = frozenset({"INT8", "UINT8", "INT16"})
_SAFE_LIMIT = float(1 << 62)  # below it a float64 result is certain to fit int64, in spite of rounding


# Kernels that move elements. Their arrays may have any dtype: numbers, element indices, or records of samples.


def _broadcast(call: Call, x: Array, shape: Array) -> Array:
    call.check_size(*read_ints(shape))
    return np.broadcast_to(x, read_ints(shape))


def _fill(call: Call, shape: Array, number: Array) -> Array:
    if number.ndim:
        raise call.refuse("repeats more than one number")
    return _broadcast(call, number, shape)


def _slice(call: Call, x: Array, begin: Array, size: Array) -> Array:
    starts = read_ints(begin)
    ends = [d if n == -1 else b + n for b, n, d in zip(starts, read_ints(size), x.shape, strict=True)]
    if any(not 0 <= b <= e <= d for b, e, d in zip(starts, ends, x.shape, strict=True)):
        raise call.refuse(f"takes {starts} to {ends} of {list(x.shape)}")
    return x[tuple(map(slice, starts, ends))]


def _slice_with_strides(call: Call, x: Array, begin: Array, end: Array, strides: Array) -> Array:
    no_begin, no_end, ellipsis, new_axis, drops = (call.read_option(slot, "i") for slot in range(5))
    if ellipsis or new_axis or call.read_option(5, "?", False):
        raise call.refuse("adds axes, or has ends that are offsets from its begins")
    if drops and min(read_ints(strides)) < 0:
        raise call.refuse("drops an axis that it reads backwards, for which LiteRT reads beyond its operand")
    index: list[Any] = []
    for axis, bounds in enumerate(zip(read_ints(begin), read_ints(end), read_ints(strides), strict=True)):
        bit = 1 << axis
        start = None if no_begin & bit else bounds[0]
        index.append(start or 0 if drops & bit else slice(start, None if no_end & bit else bounds[1], bounds[2]))
    return np.asarray(x[tuple(index)])


def _gather(call: Call, x: Array, chosen: Array) -> Array:
    axis = call.read_option(0, "i")
    if call.read_option(1, "i"):
        raise call.refuse("has other indices in each batch")
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < x.shape[axis]):
        raise call.refuse("takes elements that its operand lacks")
    call.check_size(x.size // max(x.shape[axis], 1), chosen.size)
    return np.take(x, chosen, axis)


def _make_joining_kernel(join: Callable[..., Array], slot: int) -> Kernel:
    def kernel(call: Call, *operands: Array) -> Array:
        call.check_size(sum(x.size for x in operands))
        return join(operands, call.read_option(slot, "i"))

    return kernel


def _reshape(call: Call, x: Array, shape: Array | None = None) -> Array:
    sizes = list(call.read_axes()) if shape is None else read_ints(shape)
    if min(sizes, default=0) < -1 or (shape is not None and shape.ndim != 1):
        raise call.refuse(f"gives its operand the shape {sizes}")
    return x.reshape(sizes)


_EVERY_OPERAND = tuple(range(256))
_LAYOUT: dict[str, tuple[tuple[int, ...], Kernel]] = {
    "BROADCAST_TO": ((0,), _broadcast),
    "CONCATENATION": (_EVERY_OPERAND, _make_joining_kernel(np.concatenate, 0)),
    "EXPAND_DIMS": ((0,), lambda call, x, axis: np.expand_dims(x, read_ints(axis)[0])),
    "FILL": ((1,), _fill),
    "GATHER": ((0,), _gather),
    "PACK": (_EVERY_OPERAND, _make_joining_kernel(np.stack, 1)),
    "RESHAPE": ((0,), _reshape),
    "SLICE": ((0,), _slice),
    "SPLIT": ((1,), lambda call, axis, x: tuple(np.split(x, call.read_option(0, "i"), read_ints(axis)[0]))),
    "SQUEEZE": ((0,), lambda call, x: np.squeeze(x, call.read_axes() or None)),
    "STRIDED_SLICE": ((0,), _slice_with_strides),
    "TRANSPOSE": ((0,), lambda call, x, order: np.transpose(x, read_ints(order))),
    "UNPACK": ((0,), lambda call, x: tuple(np.moveaxis(x, call.read_option(1, "i"), 0))),
}
LAYOUT: MappingProxyType[str, tuple[int, ...]] = MappingProxyType(
    {**{kind: at for kind, (at, _) in _LAYOUT.items()}, "DYNAMIC_UPDATE_SLICE": (0, 1)}
)
"""Kind → positions of the operands whose elements are moved; the others hold shapes, axes or indices.
DYNAMIC_UPDATE_SLICE has no kernel: only the reader of scores follows it."""


# Kernels that compute.


def _cast_exactly(call: Call, values: Array, kind: np.dtype[Any]) -> Array:
    """Return the integers as ``kind``; raise an OperatorError if one does not fit."""
    limits = np.iinfo(kind)
    if values.size and not (values.min() >= limits.min and values.max() <= limits.max):
        raise call.refuse(f"makes integers that {kind.name} does not hold")
    return values.astype(kind)


def _compute_integers(call: Call, function: Callable[..., Any], *operands: Array) -> Array:
    """Return ``function`` of integers in their own type; raise an OperatorError on overflow or division by zero."""
    if not (np.abs(function(*(x.astype(np.float64) for x in operands))) < _SAFE_LIMIT).all():
        raise call.refuse("makes integers that int64 does not hold")
    return _cast_exactly(call, function(*(x.astype(np.int64) for x in operands)), operands[0].dtype)


def _make_elementwise(function: Callable[..., Any], count: int, *, on_integers: bool = False) -> Kernel:
    """Return a kernel for ``count`` operands of one type; ``on_integers`` if it computes integers of integers."""

    def kernel(call: Call, *operands: Array) -> Array:
        if len(operands) != count:
            raise FormatError(f"{call.node.op.label} has {len(operands)} operands and should have {count}.")
        names = {call.get_input_tensor(i).type_name for i in range(count)}
        result_names = {result.tensor.type_name for result in call.node.outputs} - {"BOOL"}
        if names & _SMALL_INTEGERS:
            raise call.refuse(
                f"computes with {' and '.join(sorted(names))}, for which LiteRT's kernels have rules of their own"
            )
        if len(names) > 1 or (result_names and result_names != names):
            raise call.refuse(f"mixes {' and '.join(sorted(names | result_names))}")
        if on_integers and operands[0].dtype.kind != "f":
            return _compute_integers(call, function, *operands)
        return np.asarray(function(*operands))

    return kernel


def _select(call: Call, condition: Array, yes: Array, no: Array) -> Array:
    if call.node.kind == "SELECT" and 1 < condition.ndim < yes.ndim:
        raise call.refuse("chooses whole rows by a vector")
    return np.where(condition, yes, no)


def _cast(call: Call, x: Array) -> Array:
    target = call.node.outputs[0].tensor.type
    kind = np.dtype(NUMPY_TYPES.get(target))  # float64 for an unknown type, which is refused with the result
    if target in FLOAT_TYPES - {TensorType.FLOAT32}:
        return _round_to_half(x.astype(np.float32), target)
    if kind.kind in "bf" or x.dtype.kind == "b":
        return x.astype(kind)
    if x.dtype.kind == "f":
        raise call.refuse("makes integers of floats")
    return _cast_exactly(call, x, kind)


def _round_to_half(x: Array, kind: TensorType) -> Array:
    """Round float32 to the nearest FLOAT16 or BFLOAT16, ties to even; NaN and infinities stay."""
    if kind is TensorType.FLOAT16:
        return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
    upper = (bits + 0x7FFF + (bits >> 16 & 1)).astype(np.uint32) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), upper.view(np.float32), x)


def _multiply_matrices(call: Call, left: Array, right: Array) -> Array:
    if {call.get_input_tensor(0).type, call.get_input_tensor(1).type} != {TensorType.FLOAT32}:
        raise call.refuse("multiplies matrices of other types than FLOAT32")
    a, b = (np.swapaxes(x, -1, -2) if call.read_option(i, "?", False) else x for i, x in enumerate((left, right)))
    call.check_size(*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return np.asarray(np.matmul(a, b))


_FUNCTIONS: tuple[np.ufunc, ...] = (np.cos, np.exp, np.log, np.sin, np.sqrt, np.maximum, np.minimum, np.equal)
_FUNCTIONS += (np.not_equal, np.greater, np.greater_equal, np.less, np.less_equal)
_FUNCTIONS += (np.logical_not, np.logical_and, np.logical_or)
_EXACT_FUNCTIONS = {"ABS": np.abs, "ADD": np.add, "FLOOR_DIV": np.floor_divide, "MUL": np.multiply, "NEG": np.negative}
_EXACT_FUNCTIONS |= {"POW": np.power, "SQUARE": np.square, "SUB": np.subtract}
_ELEMENTWISE: dict[str, Kernel] = {
    **{function.__name__.upper(): _make_elementwise(function, function.nin) for function in _FUNCTIONS},
    **{kind: _make_elementwise(f, f.nin, on_integers=True) for kind, f in _EXACT_FUNCTIONS.items()},
    "CAST": _cast,
    "DIV": _make_elementwise(np.divide, 2),
    "RSQRT": _make_elementwise(lambda x: 1 / np.sqrt(x), 1),
    "DEQUANTIZE": lambda call, x: x,
    **dict.fromkeys(("SELECT", "SELECT_V2"), _select),
}
KERNELS: MappingProxyType[str, Kernel] = MappingProxyType(
    {**{kind: kernel for kind, (_, kernel) in _LAYOUT.items()}, **_ELEMENTWISE, "BATCH_MATMUL": _multiply_matrices}
)
"""Kind → kernel. Any other operator is refused."""

ELEMENTWISE = frozenset(_ELEMENTWISE)
"""Kinds that compute each element of the result from the same element of the operands, broadcast as in NumPy."""
