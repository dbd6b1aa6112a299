"""The inputs of a drafter's signature that are no caches, filled as LiteRT's runtime fills them, by their names.

One query a step; several steps side by side: every array begins with an axis of samples.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.call import DTYPES, Array
from mtp_extract.graph.flat import MASK, MASK_LOCAL
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType

# What LiteRT's runtime writes where a float mask hides a slot.
_HIDDEN = {TensorType.FLOAT32: -0.7 * float(np.finfo(np.float32).max), TensorType.FLOAT16: -45824.0}
_PARAM_NUMBERS = 3


def is_mask(name: str) -> bool:
    """Whether the runtime fills the input ``name`` with a mask."""
    return name in (MASK, MASK_LOCAL)


def fill_position(tensor: Tensor, positions: npt.NDArray[np.int64]) -> Array:
    """The position of the query, ``[samples, *shape]``.

    Raises:
        UnsupportedError: the input holds another number of elements than one.
    """
    kind = DTYPES.get(tensor.type)
    if kind is None or tensor.elements != 1:
        raise UnsupportedError(f"The input {tensor.label} does not hold the position of one query.")
    return positions.reshape(-1, *tensor.shape).astype(kind)


def fill_param(tensor: Tensor, positions: npt.NDArray[np.int64]) -> Array:
    """The slots that are written and read, ``[start, end, end]`` and zeros: ``[samples, *shape]``.

    Raises:
        UnsupportedError: the input has no room for them.
    """
    kind = DTYPES.get(tensor.type)
    if kind is None or tensor.elements < _PARAM_NUMBERS:
        raise UnsupportedError(f"The input {tensor.label} is none that this release knows how to fill.")
    values = np.zeros((positions.size, tensor.elements), kind)
    values[:, :_PARAM_NUMBERS] = positions[:, None] + np.array([0, 1, 1])
    return values.reshape(-1, *tensor.shape)


def fill_mask(tensor: Tensor, shown: npt.NDArray[np.bool_]) -> Array:
    """Masks that show the slots ``shown``, bool ``[samples, slots]``: ``[samples, *shape]``.

    Of floats, they are 0 and a large negative number.

    Raises:
        UnsupportedError: the input does not hold a mask of one query.
    """
    kind = DTYPES.get(tensor.type)
    if kind is None or tensor.elements != shown.shape[-1]:
        raise UnsupportedError(f"The mask {tensor.label} does not cover the {shown.shape[-1]} slots of the caches.")
    rows = shown.reshape(-1, *tensor.shape)
    if tensor.type in FLOAT_TYPES:
        hidden = np.float32(_HIDDEN.get(tensor.type, _HIDDEN[TensorType.FLOAT32]))
        return np.asarray(np.where(rows, np.float32(0), hidden))
    return np.asarray(rows, kind)
