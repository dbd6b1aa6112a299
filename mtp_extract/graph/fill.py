"""The inputs of a drafter's signature that are no caches, filled as LiteRT's runtime fills them, by their names."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.call import DTYPES, Array
from mtp_extract.graph.flat import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR, Value
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import TensorType

# What LiteRT's runtime writes where a float mask hides a slot.
_HIDDEN = {TensorType.FLOAT32: -0.7 * float(np.finfo(np.float32).max), TensorType.FLOAT16: -45824.0}


def is_mask(name: str) -> bool:
    """Whether the runtime fills the input ``name`` with a mask."""
    return name in (MASK, MASK_LOCAL)


def fill_position(value: Value, positions: npt.NDArray[np.int64]) -> Array:
    """The input that says the position of the query, or the slots that are written and read, ``[start, end, end]`` and
    zeros: ``[samples, *shape]``.

    Raises:
        UnsupportedError: it has another size.
    """
    if value.input_name == PARAM_TENSOR:
        numbers = np.zeros((positions.size, max(value.tensor.elements, 3)), np.int64)
        numbers[:, :3] = positions[:, None] + np.array([0, 1, 1])
        return _shaped(value, numbers)
    assert value.input_name == INPUT_POS
    return _shaped(value, positions[:, None])


def fill_mask(value: Value, shown: npt.NDArray[np.bool_]) -> Array:
    """The mask ``value`` that shows the slots ``shown``, bool ``[samples, slots]``: ``[samples, *shape]``.

    Of floats it is 0 and a large negative number.

    Raises:
        UnsupportedError: it is no mask of one query.
    """
    type_ = value.tensor.type
    if type_ not in FLOAT_TYPES:
        return _shaped(value, shown)
    return _shaped(value, np.where(shown, 0, _HIDDEN.get(type_, _HIDDEN[TensorType.FLOAT32])))


def _shaped(value: Value, numbers: npt.NDArray[np.generic]) -> Array:
    kind = DTYPES.get(value.tensor.type)
    if kind is None or value.tensor.elements != numbers.shape[1]:
        raise UnsupportedError(
            f"The input {value.label} does not hold the {numbers.shape[1]} numbers that runtimes fill."
        )
    return np.asarray(numbers, kind).reshape(-1, *value.tensor.shape)
