"""K and V inside of an attention: moved about, cut out, scaled, and as the matrix that a product takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from mtp_extract.graph.call import Call, axis_of, ints
from mtp_extract.graph.evaluate import moved
from mtp_extract.graph.expressions import Ids, UnreadableError
from mtp_extract.graph.flat import Depends, FlatGraph, Node
from mtp_extract.graph.forms import Cache, CacheAxes, Operand, ReadGraph, ScoreView, broadcast_shape, operand_shape
from mtp_extract.graph.views import Label, View
from mtp_extract.litertlm.storage import FLOAT_TYPES

_Viewed = TypeVar("_Viewed", bound=Cache | ScoreView)


@dataclass(frozen=True)
class CacheMatrix:
    """A cache as a product takes it: ``[*batch, slots, dimensions]``, or the last two the other way round.

    Attributes:
        axes: of the input.
        heads: ``[*batch]``, the KV head.
        slots, dimensions: which of the input they are.
        window: the table that says, by position, at which slot they begin; None for slots that stay.
    """

    axes: CacheAxes
    heads: Ids
    slots: Ids
    dimensions: Ids
    window: int | None


def move_view(graph: FlatGraph, node: Node, form: _Viewed) -> _Viewed:
    """A cache or scores with the axes in another order, joined, split, repeated, or some elements chosen."""
    kind = node.kind
    view = form.view
    if kind in ("RESHAPE", "SQUEEZE", "EXPAND_DIMS"):
        # Sizes alone: NumPy reshapes a view of one byte.
        (reshaped,) = moved(graph, node, [np.broadcast_to(np.zeros((), np.int8), view.shape)])
        return replace(form, view=view.reshaped(reshaped.shape))
    if kind not in ("TRANSPOSE", "BROADCAST_TO", "GATHER"):
        raise UnreadableError("moves elements of a cache or of scores otherwise than a drafter does")
    numbers = graph.integers(node.operand(1))
    if kind == "TRANSPOSE":
        return replace(form, view=view.transposed(ints(numbers)))
    if kind == "BROADCAST_TO":
        return replace(form, view=view.broadcast(ints(numbers)))
    axis, batch = (Call(graph, node).option(slot, "i") for slot in (0, 1))
    if batch or len(node.operand(1).tensor.shape) != 1:
        raise UnreadableError("chooses otherwise in each batch, or makes axes")
    return replace(form, view=view.picked(axis_of(axis, len(view.shape)), numbers))


def slice_view(reading: ReadGraph, node: Node, form: _Viewed) -> _Viewed:
    """SLICE, from where a constant or the position says: whole axes, and some slots."""
    if node.operand(1).depends & ~Depends.POSITION or node.operand(2).depends:
        raise UnreadableError("chooses elements by what is computed")
    begins = reading.positions.table(node.operand(1))
    sizes = reading.graph.integers(node.operand(2)).tolist()
    view = form.view
    for axis, (begin, size, length) in enumerate(zip(begins.T, sizes, view.shape, strict=True)):
        if not ((begin >= 0) & (begin + size <= length)).all():
            raise UnreadableError("takes elements that its operand lacks")
        view = _slice_axis(reading, view, axis, begin, size)
    if isinstance(form, ScoreView) and view.starts and (form.stage != "weights" or set(view.starts) != {"slot"}):
        raise UnreadableError(f"takes some {form.stage} scores by the position")
    return replace(form, view=view)


def _slice_axis(reading: ReadGraph, view: View, axis: int, begin: Ids, size: int) -> View:
    """``size`` indices of an axis, from where ``begin`` says by position."""
    if (begin == begin[0]).all():
        return view.picked(axis, np.arange(begin[0], begin[0] + size, dtype=np.int64))
    return view.window(axis, size, reading.positions.window(begin))


def scale_cache(reading: ReadGraph, node: Node, cache: Cache, operands: Sequence[Operand]) -> Cache:
    """A cache times a number: of codes, the scale."""
    at = next((i for i, operand in enumerate(operands) if operand is not cache), 0)
    number = reading.expressions.number_of(operands[at])
    makes_floats = node.outputs[0].tensor.type in FLOAT_TYPES
    is_scaled = len(operands) == 2 and (node.kind == "MUL" or (node.kind == "DIV" and at == 1))
    if not (number and makes_floats and is_scaled) or operand_shape(cache) != broadcast_shape(operands):
        raise UnreadableError("computes something of a cache")
    return replace(cache, factor=cache.factor * number if node.kind == "MUL" else cache.factor / number)


def cache_matrix(reading: ReadGraph, cache: Cache, slot_axis: int, dimension_axis: int) -> CacheMatrix:
    """``cache`` as a matrix a KV head, whose last two axes run along slots and dimensions."""
    dimensions = cache.view.along(dimension_axis)
    slots = cache.view.along(slot_axis)
    batch = range(len(cache.view.axes) - 2)
    axes = _axes_of(cache, slots.label, dimensions.label, cache.view.running(batch))
    shape = reading.graph.inputs[cache.name].tensor.shape
    others = {size for axis, size in enumerate(shape) if axis not in axes}
    has_all_slots = shape[axes[1]] == reading.positions.slots and others <= {1}
    if not has_all_slots or not set(cache.view.starts) <= {slots.label}:
        raise UnreadableError(f"takes some of {cache.name} alone, or by the position")
    heads = np.zeros(cache.view.shape[:-2], np.int64) if axes[0] is None else cache.view.places(batch, axes[0])
    return CacheMatrix(axes, heads, slots.places, dimensions.places, slots.window)


def _axes_of(cache: Cache, slot: Label | None, dimension: Label | None, heads: set[Label]) -> CacheAxes:
    """The axes of a cache by what runs along those of its matrices, and along those in front of them."""
    if not isinstance(slot, int) or not isinstance(dimension, int) or slot == dimension:
        raise UnreadableError(f"takes {cache.name} otherwise than by slots and dimensions")
    if heads & {slot, dimension} or len(heads) > 1:
        raise UnreadableError(f"takes {cache.name} otherwise than by KV heads, slots and dimensions")
    return next((int(label) for label in heads), None), slot, dimension
