"""Operators of the evaluator that move elements and compute none."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from mtp_extract.graph.arrays import Array, Coded, Numbers, Weight, array_of
from mtp_extract.graph.call import Call, Kernel, grid_of, ints, one


def _check_scale(call: Call, position: int) -> None:
    """The codes of operand ``position`` are handed on as they are: they must mean the same in the result."""
    grid = grid_of(call.tensor(position))
    if grid is not None and grid != grid_of(call.result):
        raise call.refuse(f"hands the codes of {call.tensor(position).label} on with another scale")


def _moves(function: Callable[..., Any]) -> Kernel:
    """An operator that moves elements. It hands codes on as they are, lazily, and never looks at them."""

    def kernel(call: Call, x: Numbers, *rest: Numbers) -> Any:
        if not isinstance(x, Weight):
            _check_scale(call, 0)
        if isinstance(x, Coded):
            return x.of(function(call, x.codes, *rest))
        return function(call, array_of(x), *rest)

    return kernel


def _reshape(call: Call, x: Numbers, shape: Numbers | None = None) -> Numbers:
    sizes = ints(shape) if shape is not None else list(call.numbers(0))
    if isinstance(x, Weight):
        known = -math.prod(sizes) if -1 in sizes else 0
        sizes = [math.prod(x.shape) // max(known, 1) if s == -1 else s for s in sizes]
        # Rows stay rows.
        if not x.exchanged and sizes[-1:] == list(x.shape[-1:]) and math.prod(sizes) == math.prod(x.shape):
            return replace(x, shape=tuple(sizes))
    try:
        made: Numbers = _moves(lambda _, values: values.reshape(sizes))(call, x)
    except ValueError as error:
        raise call.refuse(f"cannot give its operand the shape {sizes}") from error
    return made


def _transpose(call: Call, x: Numbers, order: Numbers) -> Numbers:
    axes = ints(order)
    if isinstance(x, Weight) and x.matrix and axes == [*range(len(axes) - 2), len(axes) - 1, len(axes) - 2]:
        return replace(x, shape=tuple(x.shape[axis] for axis in axes), exchanged=not x.exchanged)
    moved: Numbers = _moves(lambda _, values: np.transpose(values, axes))(call, x)
    return moved


def _slice(call: Call, x: Array, begin: Numbers, size: Numbers) -> Array:
    starts, sizes = ints(begin), ints(size)
    ends = [d if n == -1 else b + n for b, n, d in zip(starts, sizes, x.shape, strict=True)]
    if any(not 0 <= b <= e <= d for b, e, d in zip(starts, ends, x.shape, strict=True)):
        raise call.refuse(f"takes {starts} to {ends} of {list(x.shape)}")
    return x[tuple(slice(b, e) for b, e in zip(starts, ends, strict=True))]


def _strided_slice(call: Call, x: Array, begin: Numbers, end: Numbers, strides: Numbers) -> Array:
    begin_mask, end_mask, ellipsis, new_axis, shrink = (call.option(slot, "i") for slot in range(5))
    relative = call.option(5, "?", False)
    index: list[Any] = []
    for i, (first, last, step) in enumerate(zip(ints(begin), ints(end), ints(strides), strict=True)):
        if ellipsis >> i & 1:
            index.append(...)
        elif new_axis >> i & 1:
            index.append(None)
        elif shrink >> i & 1:
            index.append(0 if begin_mask >> i & 1 else first)
        else:
            stop = first + last if relative else last
            index.append(slice(None if begin_mask >> i & 1 else first, None if end_mask >> i & 1 else stop, step))
    try:
        return np.asarray(x[tuple(index)])
    except IndexError as error:
        raise call.refuse("takes elements that its operand lacks") from error


def _check_within(call: Call, indices: Array, size: int, beyond: str) -> None:
    if indices.size and not (indices.min() >= 0 and indices.max() < size):
        raise call.refuse(f"takes {beyond}")


def _gather(call: Call, x: Array, indices: Numbers) -> Array:
    axis, batch = call.option(0, "i"), call.option(1, "i")
    chosen = array_of(indices)
    axis, batch = axis % max(x.ndim, 1), batch % max(chosen.ndim, 1) if batch < 0 else batch
    _check_within(call, chosen, x.shape[axis], "elements that its operand lacks")
    if not batch:
        return np.take(x, chosen, axis)
    flat_x, flat_i = x.reshape(-1, *x.shape[batch:]), chosen.reshape(-1, *chosen.shape[batch:])
    made = [np.take(a, i, axis - batch) for a, i in zip(flat_x, flat_i, strict=True)]
    return np.stack(made).reshape(*x.shape[:batch], *made[0].shape)


def _gather_nd(call: Call, x: Array, indices: Numbers) -> Array:
    chosen = array_of(indices)
    depth = chosen.shape[-1] if chosen.ndim else 0
    sizes = np.array(x.shape[:depth])
    if not 0 < depth <= x.ndim or (chosen.size and not ((chosen >= 0) & (chosen < sizes)).all()):
        raise call.refuse("takes elements that its operand lacks")
    return np.asarray(x[tuple(np.moveaxis(chosen, -1, 0))])


def _squeeze(call: Call, x: Array) -> Array:
    axes = tuple(call.numbers(0)) or tuple(i for i, d in enumerate(x.shape) if d == 1)
    return np.squeeze(x, axes)


def _joined(call: Call, join: Callable[..., Array], operands: Sequence[Numbers], axis: int) -> Numbers:
    for position in range(len(operands)):
        _check_scale(call, position)
    if call.tensor(0).type is not None and len({call.tensor(i).type for i in range(len(operands))}) > 1:
        raise call.refuse("joins tensors of different types")
    return call.activate(join([array_of(v) for v in operands], axis))


def _split_v(call: Call, x: Numbers, sizes: Numbers, axis: Numbers) -> tuple[Array, ...]:
    values, lengths, along = array_of(x), ints(sizes), one(axis)
    if -1 in lengths:
        lengths[lengths.index(-1)] = values.shape[along] - sum(lengths) - 1
    return tuple(np.split(values, np.cumsum(lengths)[:-1], along))


def _update_slice(call: Call, x: Numbers, update: Numbers, starts: Numbers) -> Array:
    values, new = np.array(array_of(x)), array_of(update)
    at = [min(max(s, 0), d - n) for s, d, n in zip(ints(starts), values.shape, new.shape, strict=True)]
    values[tuple(slice(s, s + n) for s, n in zip(at, new.shape, strict=True))] = new
    return values


def _select(call: Call, condition: Numbers, yes: Numbers, no: Numbers) -> Array:
    chosen, a, b = array_of(condition), array_of(yes), array_of(no)
    if call.node.kind == "SELECT" and chosen.ndim == 1 and a.ndim > 1:
        # The first version chooses whole rows by a vector, and broadcasts nothing else.
        chosen = chosen.reshape(-1, *(1,) * (a.ndim - 1))
    if a.dtype != b.dtype:
        raise call.refuse("chooses between numbers of different types")
    return np.where(chosen, a, b)


def _pad(call: Call, x: Numbers, sizes: Numbers, value: Numbers | None = None) -> Array:
    pads = array_of(sizes).reshape(-1, 2).tolist()
    fill = 0 if value is None else array_of(value).reshape(-1)[0]
    return np.pad(array_of(x), pads, constant_values=fill)


def _lookup(call: Call, ids: Numbers, table: Numbers) -> Array:
    chosen, values = array_of(ids), array_of(table)
    _check_within(call, chosen, values.shape[0], "rows that its table lacks")
    return values[chosen]


_OF_ONE: dict[str, Callable[..., Array]] = {
    "SLICE": _slice,
    "STRIDED_SLICE": _strided_slice,
    "GATHER": _gather,
    "GATHER_ND": _gather_nd,
    "SQUEEZE": _squeeze,
    "EXPAND_DIMS": lambda call, x, axis: np.expand_dims(x, one(axis)),
    "BROADCAST_TO": lambda call, x, shape: np.broadcast_to(x, ints(shape)),
    "TILE": lambda call, x, times: np.tile(x, ints(times)),
    "REVERSE_V2": lambda call, x, axes: np.flip(x, tuple(ints(axes))),
}
"""Operators that move the elements of their first operand; the other operands say where to."""

MOVING: MappingProxyType[str, Kernel] = MappingProxyType(
    {
        **{name: _moves(function) for name, function in _OF_ONE.items()},
        "RESHAPE": _reshape,
        "TRANSPOSE": _transpose,
        "PAD": _pad,
        "PADV2": _pad,
        "CONCATENATION": lambda call, *operands: _joined(call, np.concatenate, operands, call.option(0, "i")),
        "PACK": lambda call, *operands: _joined(call, np.stack, operands, call.option(1, "i")),
        "SPLIT": lambda call, axis, x: tuple(np.split(array_of(x), call.option(0, "i"), one(axis))),
        "SPLIT_V": _split_v,
        "UNPACK": lambda call, x: tuple(np.moveaxis(array_of(x), call.option(1, "i"), 0)),
        "DYNAMIC_UPDATE_SLICE": _update_slice,
        "SELECT": _select,
        "SELECT_V2": _select,
        "EMBEDDING_LOOKUP": _lookup,
    }
)
"""Operators that move, join and choose elements."""

_ALL = tuple(range(256))
LAYOUT: MappingProxyType[str, tuple[int, ...]] = MappingProxyType(
    {
        **dict.fromkeys((*_OF_ONE, "RESHAPE", "TRANSPOSE", "SPLIT_V", "UNPACK"), (0,)),
        "SPLIT": (1,),
        "CONCATENATION": _ALL,
        "PACK": _ALL,
        "DYNAMIC_UPDATE_SLICE": (0, 1),
    }
)
"""Those whose results are elements of their operands and nothing else, and which operands are moved so; the others say
where to.
"""
