"""The inputs of a drafter's signature, as LiteRT's runtime fills them: by their names."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.arrays import Array
from mtp_extract.graph.kernels import DTYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType

__all__ = [
    "INPUT_POS",
    "MASK",
    "MASK_LOCAL",
    "PARAM_TENSOR",
    "fill_mask",
    "fill_param",
    "fill_position",
    "is_float",
    "is_mask",
    "numpy_type",
]

INPUT_POS = "input_pos"
MASK = "mask"
MASK_LOCAL = "mask_local"
PARAM_TENSOR = "param_tensor"

_FLOATS = frozenset({TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16})
# What LiteRT's runtime writes where a float mask hides a slot.
_HIDDEN = {TensorType.FLOAT32: -0.7 * float(np.finfo(np.float32).max), TensorType.FLOAT16: -45824.0}


def is_mask(name: str) -> bool:
    """Whether the runtime fills the input ``name`` with a mask."""
    return name in (MASK, MASK_LOCAL)


def is_float(tensor: Tensor) -> bool:
    """Whether ``tensor`` is stored in a floating-point type."""
    return tensor.type in _FLOATS


def numpy_type(tensor: Tensor) -> type[np.generic]:
    """The type that the evaluator computes ``tensor`` in.

    Raises:
        UnsupportedError: it has none.
    """
    kind = DTYPES.get(tensor.type) if tensor.type is not None else None
    if kind is None:
        raise UnsupportedError(f"The input {tensor.label} is {tensor.type_name}, which this release cannot fill.")
    return kind


def fill_position(tensor: Tensor, positions: npt.NDArray[np.int64]) -> Array:
    """``input_pos`` for queries at ``positions``.

    Raises:
        UnsupportedError: it has room for another number of queries.
    """
    if tensor.elements not in (1, positions.size):
        raise UnsupportedError(f"The input {tensor.label} cannot hold the positions of {positions.size} queries.")
    return positions[: tensor.elements].reshape(tensor.shape).astype(numpy_type(tensor))


def fill_param(tensor: Tensor, positions: npt.NDArray[np.int64]) -> Array:
    """``param_tensor``: the slots that are written and read, [start, end, end], then zeros.

    Raises:
        UnsupportedError: it has fewer elements.
    """
    if tensor.elements < 3:
        raise UnsupportedError(f"The input {tensor.label} is none that this release knows how to fill.")
    values = np.zeros(tensor.elements, numpy_type(tensor))
    values[:3] = positions[0], positions[-1] + 1, positions[-1] + 1
    return values.reshape(tensor.shape)


def fill_mask(tensor: Tensor, shown: npt.NDArray[np.bool_], *, additive: bool) -> Array:
    """A mask that shows the slots ``shown``, bool ``[queries, slots]``.

    Args:
        additive: whether a mask of floats is 0 and a large negative number, or 1 and 0.

    Raises:
        UnsupportedError: it does not cover these slots.
    """
    kind = numpy_type(tensor)
    if tensor.elements not in (shown.size, shown.shape[-1]):
        raise UnsupportedError(f"The mask {tensor.label} does not cover the {shown.shape[-1]} slots of the caches.")
    rows = shown if tensor.elements == shown.size else shown[:1]
    if is_float(tensor) and additive:
        hidden = np.float32(_HIDDEN.get(tensor.type, _HIDDEN[TensorType.FLOAT32]) if tensor.type is not None else 0)
        return np.where(rows, np.float32(0), hidden).reshape(tensor.shape)
    return rows.reshape(tensor.shape).astype(kind)
