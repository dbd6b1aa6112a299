"""What a graph's attention looks at, measured instead of matched.

With activations of zero every score is zero, so the softmax gives every slot that is seen the same weight, and the
others none: it shows the mask as the graph applies it, however it is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError, escape
from mtp_extract.graph.arrays import Coded, Numbers
from mtp_extract.graph.call import DTYPES, grid_of
from mtp_extract.graph.evaluate import Samples, evaluate, inputs_of
from mtp_extract.graph.fill import INPUT_POS, MASK, MASK_LOCAL, PARAM_TENSOR, fill_mask, fill_param, fill_position
from mtp_extract.graph.flat import FlatGraph, Value

__all__ = ["seen_slots", "windows"]

_SEEN = 1e-3


def seen_slots(graph: FlatGraph, weights: Sequence[Value], positions: Sequence[int]) -> list[npt.NDArray[np.bool_]]:
    """Which slots a query sees when the mask inputs show it all up to its own.

    Args:
        graph: the operators.
        weights: results of softmaxes over all slots of a cache, one a layer.
        positions: of the query.

    Returns:
        per softmax, bool ``[positions, slots]``.

    Raises:
        UnsupportedError: an operator or an input that cannot be evaluated.
    """
    slots = weights[0].tensor.shape[-1]
    shown = np.arange(slots) <= np.array(positions)[:, None]
    fed: dict[str, Samples] = {}
    for name in inputs_of(weights):
        tensor = graph.inputs[name].tensor
        if name == INPUT_POS:
            fed[name] = tuple(fill_position(tensor, np.array([p])) for p in positions)
        elif name == PARAM_TENSOR:
            fed[name] = tuple(fill_param(tensor, np.array([p])) for p in positions)
        elif name in (MASK, MASK_LOCAL):
            fed[name] = tuple(fill_mask(tensor, row[None]) for row in shown)
        else:
            fed[name] = (_zeros(graph.inputs[name]),)
    found = evaluate(graph, fed, weights)
    return [np.array([_seen(sample, slots) for sample in samples]) for samples in found]


def windows(graph: FlatGraph, weights: Sequence[Value]) -> tuple[int | None, ...]:
    """Per softmax, how many slots a query sees, its own included; None where it sees all before it.

    Raises:
        UnsupportedError: what it sees is no window that ends at its own slot, or a window of changing length.
    """
    last = weights[0].tensor.shape[-1] - 1
    positions = sorted({last // 3, 2 * last // 3, last})
    return tuple(_window(index, seen, positions) for index, seen in enumerate(seen_slots(graph, weights, positions)))


def _window(index: int, seen: npt.NDArray[np.bool_], positions: Sequence[int]) -> int | None:
    lengths: set[int] = set()
    whole = 0
    for position, row in zip(positions, seen, strict=True):
        slots = np.flatnonzero(row)
        if not slots.size or slots[-1] != position or slots.size != position - slots[0] + 1:
            shown = f"slots {slots[0]} to {slots[-1]}, {slots.size} of them" if slots.size else "no slot"
            raise UnsupportedError(
                f"layers.{index}: at position {position} its attention sees {shown}; expected those up to its own, or "
                "a window of them."
            )
        if slots[0]:
            lengths.add(int(slots.size))
        else:
            whole = position + 1
    # A position within the window sees all before it.
    if len(lengths) > 1 or any(length < whole for length in lengths):
        raise UnsupportedError(f"layers.{index}: its window is not as long at every position: {sorted(lengths)}.")
    return lengths.pop() if lengths else None


def _seen(weights: npt.NDArray[np.float32], slots: int) -> npt.NDArray[np.bool_]:
    flat = weights.reshape(-1, slots)
    seen: npt.NDArray[np.bool_] = (flat > _SEEN * flat.max(-1, keepdims=True)).any(0)
    return seen


def _zeros(value: Value) -> Numbers:
    """Zeros in the shape of an input, which take no memory."""
    tensor = value.tensor
    kind = DTYPES.get(tensor.type) if tensor.type is not None else None
    if kind is None:
        raise UnsupportedError(f"The input {escape(value.input_name)!r} is {tensor.type_name}: it cannot be filled.")
    grid = grid_of(tensor)
    if len(tensor.shape) == 4:
        codes = np.broadcast_to(np.array(grid[1] if grid else 0, np.int8 if kind is np.float32 else kind), tensor.shape)
        return Coded(codes, *(grid or (1.0, 0))) if grid or kind is np.float32 else codes
    return np.zeros(tensor.shape, np.float32 if grid else kind)
