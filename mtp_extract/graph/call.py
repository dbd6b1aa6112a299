"""One operator for a kernel or a reader: its options, the types of its tensors, and the errors that refuse it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, OperatorError, UnsupportedError, format_count
from mtp_extract.graph.flat import FlatGraph, Node
from mtp_extract.litertlm.storage import CODE_TYPES, FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType

Array = npt.NDArray[Any]
Kernel = Callable[..., Any]
"""``(call, *operands)`` → the result, or a tuple of results."""

LARGEST_CONSTANT = 1 << 25
"""Most elements of a constant that is computed with."""
LARGEST_COMPUTED = 1 << 22
"""Most elements of a result whose operands are smaller: some times the slots of the largest caches."""
_MOST_AXES = 64  # as in NumPy

_EXACT_TYPES = (np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64)
NUMPY_TYPES: MappingProxyType[TensorType | None, type[np.generic]] = MappingProxyType(
    {
        **dict.fromkeys(FLOAT_TYPES, np.float32),
        **{TensorType[np.dtype(kind).name.upper()]: kind for kind in _EXACT_TYPES},
    }
)
"""NumPy types of tensors without a scale; half precision is computed in float32."""

CONVERSIONS = frozenset({"QUANTIZE", "DEQUANTIZE", "CAST"})
REDUCTIONS = frozenset({"SUM", "MEAN", "REDUCE_MAX", "REDUCE_ANY"})
SELECTIONS = frozenset({"SELECT", "SELECT_V2"})


def resolve_axis(axis: int, rank: int) -> int:
    """Return ``axis`` counted from 0 (a negative axis counts from the end); raise FormatError if it does not exist."""
    if not -rank <= axis < rank:
        raise FormatError(f"Expected an axis of {rank}, found {axis}: the file is damaged.")
    return axis % rank


def holds_codes(tensor: Tensor) -> bool:
    """Return whether the tensor holds integers that scales turn into real numbers."""
    quantization = tensor.quantization
    has_scales = quantization is not None and (quantization.scales.count > 0 or quantization.blockwise is not None)
    return tensor.type in CODE_TYPES and has_scales


def read_activation_scale(tensor: Tensor) -> tuple[float, int] | None:
    """Return the scale and zero point of a tensor of codes; None if the tensor does not hold codes.

    Raises:
        UnsupportedError: there is more than one scale or zero point.
        FormatError: the scale is not above 0, or the zero point is outside the range of the codes, or not 0 for INT16.
    """
    quantization = tensor.quantization
    if quantization is None or tensor.type is None or not holds_codes(tensor):
        return None
    scales, zero_points = quantization.scales.count, quantization.zero_points.count
    if scales != 1 or zero_points > 1:
        counts = f"{format_count(scales, 'scale')} and {format_count(zero_points, 'zero point')}"
        raise UnsupportedError(f"{tensor.label}: an activation with {counts}; expected one of each.")
    scale = float(quantization.scale[0])
    zero_point = int(quantization.zero_point[0]) if quantization.zero_point.size else 0
    # LiteRT allows INT16 no zero point: some kernels refuse it, others ignore it.
    codes = CODE_TYPES[tensor.type]
    lowest, highest = (0, 0) if tensor.type is TensorType.INT16 else (codes.lowest, codes.highest)
    if not (0 < scale < math.inf and lowest <= zero_point <= highest):
        raise FormatError(f"{tensor.label} has the scale {scale:g} and the zero point {zero_point}: it is damaged.")
    return scale, zero_point


def find_representable_range(tensor: Tensor) -> tuple[float, float] | None:
    """Return the lowest and the highest number that the tensor's codes can stand for; None if it does not hold codes.
    Raises as :func:`read_activation_scale`.
    """
    activation = read_activation_scale(tensor)
    if activation is None or tensor.type is None:
        return None
    scale, zero_point = activation
    codes = CODE_TYPES[tensor.type]
    return (codes.lowest - zero_point) * scale, (codes.highest - zero_point) * scale


def has_few_bits(tensor: Tensor) -> bool:
    """Return whether the tensor holds codes or half-precision floats."""
    return holds_codes(tensor) or tensor.type in FLOAT_TYPES - {TensorType.FLOAT32}


def keeps_numbers(node: Node) -> bool:
    """Return whether a conversion keeps the numbers, apart from rounding: it does between floats, and between floats
    and the numbers that codes stand for. CAST of codes gives the codes themselves.
    """
    source, target = node.get_operand(0).tensor, node.outputs[0].tensor
    if node.kind == "CAST":
        return {source.type, target.type} <= FLOAT_TYPES
    if node.kind == "DEQUANTIZE":
        # The codes of a constant may have several scales.
        has_numbers = node.get_operand(0).constant or source.type in FLOAT_TYPES or holds_codes(source)
        return target.type is TensorType.FLOAT32 and has_numbers
    return holds_codes(target) and (source.type in FLOAT_TYPES or holds_codes(source))


@contextmanager
def convert_errors(label: str) -> Iterator[None]:
    """Turn errors of Python and NumPy into errors of this package whose message begins with ``label``.

    Raises:
        UnsupportedError: the computation is nested too deeply.
        FormatError: operands do not fit.
    """
    try:
        with np.errstate(all="ignore"):
            yield
    except RecursionError:
        raise UnsupportedError(f"{label} is nested more deeply than any drafter's.") from None
    except (ValueError, IndexError, TypeError, ArithmeticError, RuntimeError) as error:
        raise FormatError(f"{label} cannot be computed: {error}. The graph is damaged.") from error


def build_refusal(node: Node, why: str) -> OperatorError:
    """Return the error to raise if ``node`` does what no drafter does; ``why`` follows its name in the message."""
    place = node.op.subgraph, node.op.index
    return OperatorError(f"{node.op.label} {why}", place=place, label=node.op.label)


@dataclass(frozen=True)
class Call:
    """One operator, as its kernel sees it."""

    graph: FlatGraph
    node: Node
    largest: int = LARGEST_COMPUTED  # most elements of a result

    def read_option(self, slot: int, code: str, default: int | float | bool = 0) -> Any:
        """Return the option in ``slot``, or ``default`` (the schema's) if it is not stored."""
        return self.node.op.options.scalar(slot, code, default) if self.node.op.options else default

    def read_axes(self) -> tuple[int, ...]:
        """Return the int32 vector in slot 0, a shape or axes; raise FormatError if it is longer than any shape."""
        if self.node.op.options is None:
            return ()
        stored = self.node.op.options.vector(0, 4)
        if stored.count > _MOST_AXES:
            raise FormatError(f"{self.node.op.label} has an option of {stored.count} axes: the file is damaged.")
        # The count was checked here, not charged to the model's budget: the evaluator reads it many times.
        return tuple(np.frombuffer(stored.bytes(), "<i4").tolist())

    def get_input_tensor(self, position: int) -> Tensor:
        """Return the tensor that the operator names as input ``position``, inside its composite."""
        return self.graph.model.tensor(self.node.op.subgraph, self.node.op.inputs[position])

    def refuse(self, why: str) -> OperatorError:
        """Return the error to raise if the operator does something that its kernel does not support."""
        return build_refusal(self.node, f"{why}; what the graph computes cannot be checked.")

    def check_size(self, *sizes: int) -> None:
        """Raise OperatorError if a result of ``sizes`` is too large; call this before allocating it."""
        if math.prod(sizes) > self.largest:
            raise self.refuse(f"makes {math.prod(sizes)} numbers, more than any drafter's")


def read_ints(array: Array) -> list[int]:
    """Return the integers of a shape, axes or offsets; raise FormatError unless they are INT32, as LiteRT requires."""
    if array.dtype != np.int32:
        raise FormatError(f"Expected shapes, axes and offsets of INT32, found {array.dtype}.")
    return [int(n) for n in array.reshape(-1)]
