"""Kernels of the operators that move elements and compute none.

They take plain arrays of any dtype: numbers, the numbers of elements, or records of what an element is in thousands of
samples. Operands that say where to are integers. Options stand in the slots that the TFLite schema gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.graph.call import Array, Call, Kernel, ints, one


def _broadcast(call: Call, x: Array, shape: Array) -> Array:
    call.check_size(*ints(shape))
    return np.broadcast_to(x, ints(shape))


def _tile(call: Call, x: Array, times: Array) -> Array:
    call.check_size(x.size, *ints(times))
    return np.tile(x, ints(times))


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


def _split_v(call: Call, x: Array, sizes: Array, axis: Array) -> tuple[Array, ...]:
    lengths, along = ints(sizes), one(axis)
    if -1 in lengths:
        lengths[lengths.index(-1)] = x.shape[along] - sum(lengths) - 1
    if min(lengths, default=-1) < 0 or sum(lengths) != x.shape[along]:
        raise call.refuse("splits its operand in parts that do not make it up")
    return tuple(np.split(x, np.cumsum(lengths)[:-1], along))


_ALL = tuple(range(256))
_KERNELS: dict[str, tuple[tuple[int, ...], Kernel]] = {
    "BROADCAST_TO": ((0,), _broadcast),
    "CONCATENATION": (_ALL, _joined(np.concatenate, 0)),
    "EXPAND_DIMS": ((0,), lambda call, x, axis: np.expand_dims(x, one(axis))),
    "GATHER": ((0,), _gather),
    "PACK": (_ALL, _joined(np.stack, 1)),
    "RESHAPE": ((0,), _reshape),
    "SLICE": ((0,), _slice),
    "SPLIT": ((1,), lambda call, axis, x: tuple(np.split(x, call.option(0, "i"), one(axis)))),
    "SPLIT_V": ((0,), _split_v),
    "SQUEEZE": ((0,), lambda call, x: np.squeeze(x, call.numbers(0) or None)),
    "STRIDED_SLICE": ((0,), _strided_slice),
    "TILE": ((0,), _tile),
    "TRANSPOSE": ((0,), lambda call, x, order: np.transpose(x, ints(order))),
    "UNPACK": ((0,), lambda call, x: tuple(np.moveaxis(x, call.option(1, "i"), 0))),
}
MOVING: MappingProxyType[str, Kernel] = MappingProxyType({kind: made for kind, (_, made) in _KERNELS.items()})
"""Kind → kernel."""

LAYOUT: MappingProxyType[str, tuple[int, ...]] = MappingProxyType(
    {**{kind: at for kind, (at, _) in _KERNELS.items()}, "DYNAMIC_UPDATE_SLICE": (0, 1)}
)
"""Kind → which operands are moved; the others say where to. The last has no kernel: only scores may be written so."""
