"""The operators that the evaluator knows: a kernel a kind, each with LiteRT's own semantics.

The table is an allow-list. A number of a quantized tensor is the real number that its code stands for. Kernels of
:data:`ELEMENTWISE` take ``[*shape, samples]`` and broadcast, the others one sample, ``[*shape]``. Integers are exact or
refused: none wraps around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.errors import FormatError
from mtp_extract.graph.call import DTYPES, Array, Call, Kernel, ints, one
from mtp_extract.graph.flat import FlatGraph, Node
from mtp_extract.litertlm.tflite import TensorType

_SMALL_INTEGERS = frozenset({"INT8", "UINT8", "INT16"})
_SURE = float(1 << 62)  # an integer that leaves int64 is larger, however float64 rounds it


# Operators that move elements: plain arrays of any dtype, numbers, numbers of elements, or records.


def _broadcast(call: Call, x: Array, shape: Array) -> Array:
    call.check_size(*ints(shape))
    return np.broadcast_to(x, ints(shape))


def _slice(call: Call, x: Array, begin: Array, size: Array) -> Array:
    starts = ints(begin)
    ends = [d if n == -1 else b + n for b, n, d in zip(starts, ints(size), x.shape, strict=True)]
    if any(not 0 <= b <= e <= d for b, e, d in zip(starts, ends, x.shape, strict=True)):
        raise call.refuse(f"takes {starts} to {ends} of {list(x.shape)}")
    return x[tuple(map(slice, starts, ends))]


def _strided_slice(call: Call, x: Array, begin: Array, end: Array, strides: Array) -> Array:
    no_begin, no_end, ellipsis, new_axis, drops = (call.option(slot, "i") for slot in range(5))
    if ellipsis or new_axis or call.option(5, "?", False):
        raise call.refuse("adds axes, or counts its ends from its begins")
    index: list[Any] = []
    for i, (first, last, step) in enumerate(zip(ints(begin), ints(end), ints(strides), strict=True)):
        start, stop = None if no_begin >> i & 1 else first, None if no_end >> i & 1 else last
        index.append(start or 0 if drops >> i & 1 else slice(start, stop, step))
    return np.asarray(x[tuple(index)])


def _gather(call: Call, x: Array, chosen: Array) -> Array:
    axis = call.option(0, "i")
    if call.option(1, "i"):
        raise call.refuse("chooses otherwise in each batch")
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < x.shape[axis]):
        raise call.refuse("takes elements that its operand lacks")
    call.check_size(x.size // max(x.shape[axis], 1), chosen.size)
    return np.take(x, chosen, axis)


def _joined(join: Callable[..., Array], slot: int) -> Kernel:
    def kernel(call: Call, *operands: Array) -> Array:
        call.check_size(sum(x.size for x in operands))
        return join(operands, call.option(slot, "i"))

    return kernel


def _reshape(call: Call, x: Array, shape: Array | None = None) -> Array:
    sizes = list(call.numbers(0)) if shape is None else ints(shape)
    if min(sizes, default=0) < -1 or (shape is not None and shape.ndim != 1):
        raise call.refuse(f"gives its operand the shape {sizes}")
    return x.reshape(sizes)


_ALL = tuple(range(256))
_LAYOUT: dict[str, tuple[tuple[int, ...], Kernel]] = {
    "BROADCAST_TO": ((0,), _broadcast),
    "CONCATENATION": (_ALL, _joined(np.concatenate, 0)),
    "EXPAND_DIMS": ((0,), lambda call, x, axis: np.expand_dims(x, one(axis))),
    "GATHER": ((0,), _gather),
    "PACK": (_ALL, _joined(np.stack, 1)),
    "RESHAPE": ((0,), _reshape),
    "SLICE": ((0,), _slice),
    "SPLIT": ((1,), lambda call, axis, x: tuple(np.split(x, call.option(0, "i"), one(axis)))),
    "SQUEEZE": ((0,), lambda call, x: np.squeeze(x, call.numbers(0) or None)),
    "STRIDED_SLICE": ((0,), _strided_slice),
    "TRANSPOSE": ((0,), lambda call, x, order: np.transpose(x, ints(order))),
    "UNPACK": ((0,), lambda call, x: tuple(np.moveaxis(x, call.option(1, "i"), 0))),
}
MOVING: MappingProxyType[str, Kernel] = MappingProxyType({kind: made for kind, (_, made) in _LAYOUT.items()})
"""Kind → kernel."""

LAYOUT: MappingProxyType[str, tuple[int, ...]] = MappingProxyType(
    {**{kind: at for kind, (at, _) in _LAYOUT.items()}, "DYNAMIC_UPDATE_SLICE": (0, 1)}
)
"""Kind → which operands are moved; the others say where to. The last has no kernel: only scores may be written so."""


# Operators that compute.


def _within(call: Call, values: Array, kind: np.dtype[Any]) -> Array:
    """Integers as ``kind``; refused where it does not hold them."""
    limits = np.iinfo(kind)
    if values.size and not (values.min() >= limits.min and values.max() <= limits.max):
        raise call.refuse(f"makes integers that {kind.name} does not hold")
    return values.astype(kind)


def _whole(call: Call, function: Callable[..., Any], *operands: Array) -> Array:
    """What ``function`` makes of integers, in their own type; what divides by zero is refused with what wraps."""
    if not (np.abs(function(*(x.astype(np.float64) for x in operands))) < _SURE).all():
        raise call.refuse("makes integers that int64 does not hold")
    return _within(call, function(*(x.astype(np.int64) for x in operands)), operands[0].dtype)


def _elementwise(function: Callable[..., Any], count: int, *, whole: bool = False) -> Kernel:
    """An operator of ``count`` operands of one type; ``whole`` where it makes integers of integers."""

    def kernel(call: Call, *operands: Array) -> Array:
        if len(operands) != count:
            raise FormatError(f"{call.node.op.label} has {len(operands)} operands and should have {count}.")
        names = {call.tensor(i).type_name for i in range(count)}
        made = {result.tensor.type_name for result in call.node.outputs} - {"BOOL"}
        if names & _SMALL_INTEGERS:
            raise call.refuse(
                f"computes with {' and '.join(sorted(names))}, as LiteRT's kernels do in ways of their own"
            )
        if len(names) > 1 or (made and made != names):
            raise call.refuse(f"mixes {' and '.join(sorted(names | made))}")
        if whole and operands[0].dtype.kind != "f":
            return _whole(call, function, *operands)
        return np.asarray(function(*operands))

    return kernel


def _select(call: Call, condition: Array, yes: Array, no: Array) -> Array:
    if call.node.kind == "SELECT" and 1 < condition.ndim < yes.ndim:
        raise call.refuse("chooses whole rows by a vector")
    return np.where(condition, yes, no)


def _cast(call: Call, x: Array) -> Array:
    """To floats, bools, or integers of integers; to float64, which the evaluator refuses, where a type is unknown."""
    kind = np.dtype(DTYPES.get(call.node.outputs[0].tensor.type))
    if kind.kind in "bf" or x.dtype.kind == "b":
        return x.astype(kind)
    if x.dtype.kind == "f":
        raise call.refuse("makes integers of floats")
    return _within(call, x, kind)


def _batch_matmul(call: Call, left: Array, right: Array) -> Array:
    if {call.tensor(0).type, call.tensor(1).type} != {TensorType.FLOAT32}:
        raise call.refuse("multiplies matrices of other types than FLOAT32")
    a, b = (np.swapaxes(x, -1, -2) if call.option(i, "?", False) else x for i, x in enumerate((left, right)))
    call.check_size(*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return np.asarray(np.matmul(a, b))


_FUNCTIONS: tuple[np.ufunc, ...] = (np.cos, np.exp, np.log, np.sin, np.sqrt, np.maximum, np.minimum, np.equal)
_FUNCTIONS += (np.not_equal, np.greater, np.greater_equal, np.less, np.less_equal)
_FUNCTIONS += (np.logical_not, np.logical_and, np.logical_or)
_WHOLE = {"ABS": np.abs, "ADD": np.add, "FLOOR_DIV": np.floor_divide, "MUL": np.multiply, "NEG": np.negative}
_WHOLE |= {"POW": np.power, "SQUARE": np.square, "SUB": np.subtract}
_ELEMENTWISE: dict[str, Kernel] = {
    **{function.__name__.upper(): _elementwise(function, function.nin) for function in _FUNCTIONS},
    **{kind: _elementwise(function, function.nin, whole=True) for kind, function in _WHOLE.items()},
    "CAST": _cast,
    "DIV": _elementwise(np.divide, 2),
    "RSQRT": _elementwise(lambda x: 1 / np.sqrt(x), 1),
    "DEQUANTIZE": lambda call, x: x,
    **dict.fromkeys(("SELECT", "SELECT_V2"), _select),
}
KERNELS: MappingProxyType[str, Kernel] = MappingProxyType(
    {
        **MOVING,
        **_ELEMENTWISE,
        "BATCH_MATMUL": _batch_matmul,
    }
)
"""Kind → kernel. What is not here is refused."""

ELEMENTWISE = frozenset(_ELEMENTWISE)
"""Those whose result is, element by element, what its operands decide there, broadcast as NumPy does."""


def moved(graph: FlatGraph, node: Node, arrays: Iterable[Array]) -> tuple[Array, ...]:
    """What an operator that moves elements makes of ``arrays``, which stand for its operands that are moved."""
    moving, places = iter(arrays), LAYOUT[node.kind]
    given = [
        next(moving) if i in places else graph.integers(value).reshape(value.tensor.shape)
        for i, value in enumerate(node.inputs)
        if value is not None
    ]
    made = MOVING[node.kind](Call(graph, node), *given)
    return tuple(map(np.asarray, made)) if isinstance(made, tuple) else (np.asarray(made),)
