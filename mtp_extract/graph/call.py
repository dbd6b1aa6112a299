"""An operator at hand: its options, its tensors' types, and the errors it ends in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import FormatError, OperatorError, UnsupportedError, several
from mtp_extract.graph.flat import FlatGraph, Node
from mtp_extract.litertlm.storage import CODE_TYPES, FLOAT_TYPES
from mtp_extract.litertlm.tflite import ELEMENT_BITS, Tensor, TensorType

Array = npt.NDArray[Any]
Kernel = Callable[..., Any]
"""``(call, *operands)`` → the result, or a tuple of results."""

LARGEST_CONSTANT = 1 << 25
"""Elements of a constant that is computed with."""
LARGEST_COMPUTED = 1 << 22
"""Elements of what is computed of smaller operands: as many slots as caches have, a few times."""
_MOST_AXES = 64  # NumPy's own bound

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


def axis_of(axis: int, rank: int) -> int:
    """``axis`` counted from 0, which a negative one is counted from the end; a FormatError if there is none such."""
    if not -rank <= axis < rank:
        raise FormatError(f"Expected an axis of {rank}, found {axis}: the file is damaged.")
    return axis % rank


def holds_codes(tensor: Tensor) -> bool:
    """Whether its integers stand for numbers by a scale, or several."""
    quantization = tensor.quantization
    has_scales = quantization is not None and (quantization.scales.count > 0 or quantization.blockwise is not None)
    return tensor.type in CODE_TYPES and has_scales


def activation_scale(tensor: Tensor) -> tuple[float, int] | None:
    """Scale and zero point of a tensor of codes; None where its numbers are what they are.

    Raises:
        UnsupportedError: more than one scale or zero point.
        FormatError: a scale that is not above 0, or a zero point that is none of its codes, or not 0 of INT16.
    """
    quantization = tensor.quantization
    if quantization is None or tensor.type is None or not holds_codes(tensor):
        return None
    if quantization.scales.count != 1 or quantization.zero_points.count > 1:
        counts = several(quantization.scales.count, "scale"), several(quantization.zero_points.count, "zero point")
        raise UnsupportedError(f"{tensor.label}: an activation with {' and '.join(counts)}; expected one of each.")
    scale = float(quantization.scale[0])
    zero_point = int(quantization.zero_point[0]) if quantization.zero_point.size else 0
    # By LiteRT's rule INT16 has none: some kernels refuse it, others ignore it.
    lowest, highest = (0, 0) if tensor.type is TensorType.INT16 else find_code_limits(tensor.type)
    if not (0 < scale < math.inf and lowest <= zero_point <= highest):
        raise FormatError(f"{tensor.label} has the scale {scale:g} and the zero point {zero_point}: it is damaged.")
    return scale, zero_point


def find_code_limits(kind: TensorType) -> tuple[int, int]:
    """The smallest and the largest code of a type of integers."""
    bits = ELEMENT_BITS[kind]
    return (0, 2**bits - 1) if kind.name.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def range_of_codes(tensor: Tensor) -> tuple[float, float] | None:
    """The lowest and the highest number that its codes stand for; None where its numbers are what they are. Scales are
    refused as :func:`activation_scale` refuses them.
    """
    activation = activation_scale(tensor)
    if activation is None or tensor.type is None:
        return None
    scale, zero_point = activation
    lowest, highest = find_code_limits(tensor.type)
    return (lowest - zero_point) * scale, (highest - zero_point) * scale


def has_few_bits(tensor: Tensor) -> bool:
    """Whether it holds codes, or floats of half precision."""
    return holds_codes(tensor) or tensor.type in FLOAT_TYPES - {TensorType.FLOAT32}


def keeps_numbers(node: Node) -> bool:
    """Whether a conversion hands the same numbers on, rounded at most: between floats, and between floats and what
    codes stand for. CAST of codes makes others: the codes themselves.
    """
    source, target = node.operand(0).tensor, node.outputs[0].tensor
    if node.kind == "CAST":
        return {source.type, target.type} <= FLOAT_TYPES
    if node.kind == "DEQUANTIZE":
        # The codes of a constant may have several scales.
        has_numbers = node.operand(0).constant or source.type in FLOAT_TYPES or holds_codes(source)
        return target.type is TensorType.FLOAT32 and has_numbers
    return holds_codes(target) and (source.type in FLOAT_TYPES or holds_codes(source))


@contextmanager
def computing(label: str) -> Iterator[None]:
    """Errors of Python and NumPy about operands that do not fit become one of ours that begins with ``label``.

    Raises:
        UnsupportedError: what is computed is nested too deeply.
        FormatError: operands do not fit.
    """
    try:
        with np.errstate(all="ignore"):
            yield
    except RecursionError:
        raise UnsupportedError(f"{label} is nested more deeply than any drafter's.") from None
    except (ValueError, IndexError, TypeError, ArithmeticError, RuntimeError) as error:
        raise FormatError(f"{label} cannot be computed: {error}. The graph is damaged.") from error


def refused(node: Node, why: str) -> OperatorError:
    """What to raise where ``node`` does what no drafter does; ``why`` follows its name."""
    place = node.op.subgraph, node.op.index
    return OperatorError(f"{node.op.label} {why}", place=place, label=node.op.label)


@dataclass(frozen=True)
class Call:
    """One operator, as its kernel sees it. ``largest`` is how many elements a result may have."""

    graph: FlatGraph
    node: Node
    largest: int = LARGEST_COMPUTED

    def option(self, slot: int, code: str, default: int | float | bool = 0) -> Any:
        """The option in ``slot``; the schema's default where it is not stored."""
        return self.node.op.options.scalar(slot, code, default) if self.node.op.options else default

    def read_axes(self, slot: int) -> tuple[int, ...]:
        """The option in ``slot``, a vector of int32: a shape, or axes; a FormatError if it is longer than any shape."""
        if self.node.op.options is None:
            return ()
        stored = self.node.op.options.vector(slot, 4)
        if stored.count > _MOST_AXES:
            raise FormatError(f"{self.node.op.label} has an option of {stored.count} axes: the file is damaged.")
        # No further element of the model: what evaluates asks for it again and again.
        return tuple(np.frombuffer(stored.bytes(), "<i4").tolist())

    def input_tensor(self, position: int) -> Tensor:
        """The tensor that the operator itself names as input ``position``."""
        return self.graph.model.tensor(self.node.op.subgraph, self.node.op.inputs[position])

    def refuse(self, why: str) -> OperatorError:
        """What to raise when the operator does something that its kernel does not."""
        return refused(self.node, f"{why}; what the graph computes cannot be checked.")

    def check_size(self, *sizes: int) -> None:
        """Ask before a result of ``sizes`` is allocated; UnsupportedError if no drafter has one so large."""
        if math.prod(sizes) > self.largest:
            raise self.refuse(f"makes {math.prod(sizes)} numbers, more than any drafter's")


def ints(array: Array) -> list[int]:
    """The integers of an operand that says shapes, axes or offsets; a FormatError if they are not INT32."""
    # LiteRT does not read a shape of another type.
    if array.dtype != np.int32:
        raise FormatError(f"Expected shapes, axes and offsets of INT32, found {array.dtype}.")
    return [int(n) for n in array.reshape(-1)]
