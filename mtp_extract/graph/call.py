"""An operator at hand, as the functions that compute it see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.arrays import Array, Numbers, array_of
from mtp_extract.graph.flat import Depends, FlatGraph, Node
from mtp_extract.litertlm.tflite import ELEMENT_BITS, Tensor, TensorType

DTYPES: MappingProxyType[TensorType | None, type[np.generic]] = MappingProxyType(
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

Kernel = Callable[..., Any]


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


def rounded(values: Array, tensor: Tensor) -> Array:
    """Real numbers as ``tensor`` holds them: FLOAT16 and BFLOAT16 round to nearest, a grid to its steps.

    Raises:
        UnsupportedError: a grid does not reach as far as the numbers.
    """
    if values.dtype.kind != "f":
        return values
    if tensor.type is TensorType.FLOAT16:
        return values.astype(np.float16).astype(np.float32)
    if tensor.type is TensorType.BFLOAT16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        return np.where(np.isfinite(values), nearest.astype(np.uint32).view(np.float32), values)
    grid = grid_of(tensor)
    if grid is None or tensor.type is None:
        return values
    scale, zero_point = grid
    lowest, highest = code_range(tensor.type)
    codes = np.rint(values / np.float32(scale)) + zero_point
    if codes.size and not (codes.min() >= lowest and codes.max() <= highest):
        raise UnsupportedError(
            f"{tensor.label} holds {(lowest - zero_point) * scale:.4g} to {(highest - zero_point) * scale:.4g}, and "
            f"numbers from {values.min():.4g} to {values.max():.4g} go into it: they are cut off, which no checkpoint "
            "does."
        )
    return np.asarray((codes - zero_point) * np.float32(scale), np.float32)


def code_range(kind: TensorType) -> tuple[int, int]:
    """The smallest and the largest code of a type of integers."""
    bits = ELEMENT_BITS[kind]
    return (0, 2**bits - 1) if kind.name.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


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
    def exact(self) -> bool:
        """Whether the result is computed from constants, the position and masks alone: such numbers are rounded as the
        file's types say. Activations are taken as the real numbers that they stand for.
        """
        return not self.node.outputs[0].depends & Depends.DATA

    @property
    def index_type(self) -> type[np.generic]:
        """The type of integers that the option in the first slot asks for."""
        return np.int64 if self.option(0, "b") == TensorType.INT64 else np.int32

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


def one(numbers: Numbers) -> int:
    """The integer that an operand of one element holds."""
    return int(array_of(numbers).reshape(-1)[0])


def ints(numbers: Numbers) -> list[int]:
    """The integers of an operand that says shapes, axes or offsets."""
    return [int(n) for n in array_of(numbers).reshape(-1)]
