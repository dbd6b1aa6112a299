"""The inputs of a drafter's signature that are no caches, filled as LiteRT's runtime fills them, by their names."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.arrays import Numbers
from mtp_extract.graph.call import DTYPES
from mtp_extract.graph.flat import MASK, MASK_LOCAL
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType

# What LiteRT's runtime writes where a float mask hides a slot.
_HIDDEN = {TensorType.FLOAT32: -0.7 * float(np.finfo(np.float32).max), TensorType.FLOAT16: -45824.0}


def is_mask(name: str) -> bool:
    """Whether the runtime fills the input ``name`` with a mask."""
    return name in (MASK, MASK_LOCAL)


def fill_position(tensor: Tensor, positions: npt.NDArray[Any]) -> Numbers:
    """The positions of the queries, or of the first where the input holds one number.

    Raises:
        UnsupportedError: it holds another number of elements.
    """
    kind = DTYPES.get(tensor.type)
    if kind is None or tensor.elements not in (1, positions.size):
        raise UnsupportedError(f"The input {tensor.label} cannot hold the positions of {positions.size} queries.")
    filled: Numbers = positions[: tensor.elements].reshape(tensor.shape).astype(kind)
    return filled


def fill_param(tensor: Tensor, positions: npt.NDArray[Any]) -> Numbers:
    """The slots that are written and read: [start, end, end], then zeros.

    Raises:
        UnsupportedError: it has no room for them.
    """
    kind = DTYPES.get(tensor.type)
    if kind is None or tensor.elements < 3:
        raise UnsupportedError(f"The input {tensor.label} is none that this release knows how to fill.")
    values = np.zeros(tensor.elements, kind)
    values[:3] = positions[0], positions[-1] + 1, positions[-1] + 1
    return values.reshape(tensor.shape)


def fill_mask(tensor: Tensor, shown: npt.NDArray[np.bool_], additive: bool = True) -> Numbers:
    """Masks that show the slots ``shown``, bool ``[…, queries, slots]``: ``[…, *shape]``.

    Of floats, they are 0 and a large negative number if ``additive``, else 1 and 0.

    Raises:
        UnsupportedError: it does not cover the slots.
    """
    kind = DTYPES.get(tensor.type)
    *several, queries, slots = shown.shape
    if kind is None or tensor.elements not in (queries * slots, slots):
        raise UnsupportedError(f"The mask {tensor.label} does not cover the {shown.shape[-1]} slots of the caches.")
    rows = (shown if tensor.elements == queries * slots else shown[..., :1, :]).reshape(*several, *tensor.shape)
    if tensor.type in FLOAT_TYPES and additive:
        hidden = np.float32(_HIDDEN.get(tensor.type, _HIDDEN[TensorType.FLOAT32]))
        return np.asarray(np.where(rows, np.float32(0), hidden))
    return np.asarray(rows, kind)
