"""The operators that the evaluator knows: a kernel a kind, each with LiteRT's own semantics.

The table is an allow-list. A number of a quantized tensor is the real number that its code stands for. Kernels of
:data:`ELEMENTWISE` take ``[*shape, samples]`` and broadcast, the others one sample, ``[*shape]``. Integers are exact or
refused: none wraps around.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.errors import FormatError
from mtp_extract.graph.call import DTYPES, Array, Call, Kernel, grid_of
from mtp_extract.graph.moving import LAYOUT, MOVING
from mtp_extract.litertlm.tflite import TensorType

_SMALL_INTEGERS = frozenset({"INT8", "UINT8", "INT16"})
_SURE = float(1 << 62)  # an integer that leaves int64 is larger, however float64 rounds it


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
    target = call.node.outputs[0].tensor
    kind = np.dtype(DTYPES.get(target.type))
    if grid_of(call.tensor(0)) is not None or grid_of(target) is not None:
        raise call.refuse("takes codes for numbers")
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
    **dict.fromkeys(("DEQUANTIZE", "QUANTIZE"), lambda call, x: x),
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

_CHOOSE = {"SELECT": (1, 2), "SELECT_V2": (1, 2), "MAXIMUM": (0, 1), "MINIMUM": (0, 1)}
COPIES: MappingProxyType[str, tuple[int, ...]] = MappingProxyType({**LAYOUT, **_CHOOSE})
"""Those that hand the stored bytes of these operands on, whose types and scales must then be the result's."""
