"""Which elements of a cache, or of rows and slots, a tensor holds: told per axis, without holding them.

A cache of 32 003 slots × 512 dimensions is moved about by operators as labels. The place of an element along a label
(KV head, slot, dimension, row) is a base plus what every strand of that label adds. Where a window of slots was taken,
the position says where it begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mtp_extract.graph.call import Call, Kernel
from mtp_extract.graph.expressions import Ids, UnreadableError

Label = str | int


def _tangled() -> UnreadableError:
    return UnreadableError("moves elements in a way that cannot be followed")


@dataclass(frozen=True, eq=False)
class Strand:
    """What each index of (part of) an axis adds to the place along ``label``; None where equal copies lie."""

    label: Label | None
    steps: Ids

    def same(self, other: Strand) -> bool:
        return self.label == other.label and np.array_equal(self.steps, other.steps)


Axis = tuple[Strand, ...]
"""The strands of an axis, the outermost first."""


@dataclass(frozen=True, eq=False)
class View:
    """Elements by axes.

    Attributes:
        axes: the strands of every axis.
        base: by label, where it begins.
        starts: by label, the number of the table that says, by position, where its window begins.
    """

    axes: tuple[Axis, ...]
    base: Mapping[Label, int]
    starts: Mapping[Label, int]

    @staticmethod
    def whole(labels: Sequence[Label], shape: Sequence[int]) -> View:
        """All elements of ``shape``, an axis a label."""
        axes = tuple((Strand(a, np.arange(n)),) if n > 1 else () for a, n in zip(labels, shape, strict=True))
        return View(axes, dict.fromkeys(labels, 0), {})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(s.steps.size for s in axis) for axis in self.axes)

    def with_axis(self, axis: int, strands: Axis) -> View:
        return replace(self, axes=(*self.axes[:axis], strands, *self.axes[axis + 1 :]))

    def along(self, axis: int) -> tuple[Label | None, Ids, int | None]:
        """Label, places and window of an axis along which one label runs; no label for an axis of one element."""
        strands = _merged(self.axes[axis])
        if not strands:
            return None, np.zeros(1, np.int64), None
        label = strands[0].label
        if len(strands) > 1 or label is None:
            raise _tangled()
        return label, self.base[label] + strands[0].steps, self.starts.get(label)

    def places(self, axes: Sequence[int], label: Label) -> Ids:
        """The places along ``label`` by the indices of ``axes``, along which nothing else runs."""
        made: Ids = np.full((1,) * len(axes), self.base[label], np.int64)
        for number, axis in enumerate(axes):
            own = np.zeros(1, np.int64)
            for strand in self.axes[axis]:
                if strand.label not in (label, None):
                    raise _tangled()
                own = (own[:, None] + (strand.steps if strand.label == label else 0 * strand.steps)).reshape(-1)
            made = made + own.reshape([-1 if i == number else 1 for i in range(len(axes))])
        return made

    def only(self, label: Label) -> int:
        """The one axis that ``label`` runs along."""
        found = [axis for axis in range(len(self.axes)) if label in self.labels([axis])]
        if len(found) != 1:
            raise _tangled()
        return found[0]

    def labels(self, axes: Sequence[int]) -> set[Label]:
        return {s.label for a in axes for s in self.axes[a] if s.label is not None}

    def same(self, other: View) -> bool:
        """Whether it holds the same elements in the same places."""
        return (
            len(self.axes) == len(other.axes)
            and (self.base, self.starts) == (other.base, other.starts)
            and all(map(_same, self.axes, other.axes))
        )

    # How operators move them.

    def reshaped(self, shape: Sequence[int]) -> View:
        """Row-major, as RESHAPE has it."""
        if math.prod(shape) != math.prod(self.shape):
            raise _tangled()
        queue = [strand for axis in self.axes for strand in axis if strand.steps.size > 1]
        axes: list[Axis] = []
        for size in shape:
            axis, left = list[Strand](), size
            while left > 1:
                strand = queue.pop(0)
                if strand.steps.size > left:
                    strand, rest = _split(strand, left)
                    queue.insert(0, rest)
                left, odd = divmod(left, strand.steps.size)
                if odd:
                    raise _tangled()
                axis.append(strand)
            axes.append(_merged(tuple(axis)))
        return replace(self, axes=tuple(axes))

    def transposed(self, order: Sequence[int]) -> View:
        return replace(self, axes=tuple(self.axes[axis] for axis in order))

    def picked(self, axis: int, chosen: Ids) -> View:
        """Some indices of an axis, in any order."""
        if np.array_equal(chosen, np.arange(self.shape[axis])):
            return self
        strands = self.axes[axis] or (Strand(None, np.zeros(1, np.int64)),)
        digits = np.unravel_index(chosen, [s.steps.size for s in strands])
        kept = [np.unique(digit) for digit in digits] if len(strands) > 1 else [np.asarray(digits[0])]
        grid = np.meshgrid(*kept, indexing="ij")
        if any(not np.array_equal(g.reshape(-1), digit) for g, digit in zip(grid, digits, strict=True)):
            raise _tangled()
        made, base = [], dict(self.base)
        for strand, indices in zip(strands, kept, strict=True):
            steps = strand.steps[indices]
            if steps.size > 1:
                made.append(Strand(strand.label, steps))
            elif strand.label is not None:
                base[strand.label] += int(steps[0])
        return replace(self.with_axis(axis, tuple(made)), base=base)

    def repeated(self, axis: int, times: int) -> View:
        """``times`` copies of an axis, one after the other."""
        if times == 1:
            return self
        return self.with_axis(axis, (Strand(None, np.zeros(times, np.int64)), *self.axes[axis]))

    def window(self, axis: int, size: int, table: int) -> View:
        """``size`` indices of a whole axis, from where the table ``table`` says."""
        label, places, started = self.along(axis)
        if label is None or started is not None or not np.array_equal(places, np.arange(places.size)):
            raise _tangled()
        strands = (Strand(label, np.arange(size)),) if size > 1 else ()
        return replace(self.with_axis(axis, strands), starts={**self.starts, label: table})

    def without(self, axis: int, *, keeps: bool) -> View:
        """Reduced over ``axis``, which stays as one element if ``keeps``."""
        return replace(self, axes=(*self.axes[:axis], *(((),) if keeps else ()), *self.axes[axis + 1 :]))


def stacked(views: Sequence[View], axis: int) -> View:
    """The views one after the other along ``axis``: equal ones, or neighbours along one label."""
    first = views[0]
    own = [_merged(view.axes[axis]) for view in views]
    rest = [[_merged(a) for i, a in enumerate(view.axes) if i != axis] for view in views]
    alike = all(
        view.starts == first.starts and all(map(_same, r, rest[0])) for view, r in zip(views, rest, strict=True)
    )
    if not alike or {len(r) for r in rest} != {len(rest[0])}:
        raise _tangled()
    if all(view.base == first.base and _same(a, own[0]) for view, a in zip(views, own, strict=True)):
        return first.repeated(axis, len(views))
    labels: set[Label | None] = {
        label for view in views for label in view.base if view.base[label] != first.base[label]
    }
    labels |= {strand.label for a in own for strand in a}
    label = labels.pop() if len(labels) == 1 else None
    if label is None or label in first.starts or any(len(a) > 1 for a in own):
        raise _tangled()
    single = np.zeros(1, np.int64)
    places = [view.base[label] + (a[0].steps if a else single) for view, a in zip(views, own, strict=True)]
    return replace(first.with_axis(axis, (Strand(label, np.concatenate(places)),)), base={**first.base, label: 0})


def _same(one: Axis, other: Axis) -> bool:
    return len(one) == len(other) and all(s.same(t) for s, t in zip(one, other, strict=True))


def _split(strand: Strand, outer: int) -> tuple[Strand, Strand]:
    """A strand as ``outer`` runs of equal steps: the first of each run, and the steps within one."""
    if strand.steps.size % outer:
        raise _tangled()
    table = strand.steps.reshape(outer, -1)
    inner, apart = table[0], table[:, 0] - table[0, 0]
    if not np.array_equal(table, apart[:, None] + inner):
        raise _tangled()
    return Strand(strand.label, apart), Strand(strand.label, inner)


def _merged(axis: Axis) -> Axis:
    """Neighbouring strands of one label as one."""
    made: list[Strand] = []
    for strand in axis:
        if strand.steps.size == 1 and not strand.steps.any():
            continue
        if made and made[-1].label == strand.label:
            made[-1] = Strand(strand.label, (made[-1].steps[:, None] + strand.steps).reshape(-1))
        else:
            made.append(strand)
    return tuple(made)


# Operators.


def moved(call: Call, kernel: Kernel, views: Sequence[View], constants: Sequence[Ids]) -> list[View]:
    """What an operator that moves elements makes of ``views``; ``constants`` are its other operands."""
    kind, first = call.node.kind, views[0]
    rank, shape = len(first.axes), first.shape
    if kind == "CONCATENATION":
        return [stacked(views, call.option(0, "i") % rank)]
    if kind == "PACK":
        axis = call.option(1, "i") % (rank + 1)
        return [stacked([view.reshaped((*shape[:axis], 1, *shape[axis:])) for view in views], axis)]
    if kind == "UNPACK":
        axis = call.option(1, "i") % rank
        parts = [first.picked(axis, np.array([i])) for i in range(shape[axis])]
        return [part.reshaped((*shape[:axis], *shape[axis + 1 :])) for part in parts]
    if kind in ("RESHAPE", "SQUEEZE", "EXPAND_DIMS"):
        # Sizes alone: NumPy reshapes a view of one byte.
        return [first.reshaped(_shape_of(kernel(call, np.broadcast_to(np.zeros((), np.int8), shape), *constants)))]
    if kind == "TRANSPOSE":
        return [first.transposed(constants[0].reshape(-1).tolist())]
    if kind in ("BROADCAST_TO", "TILE"):
        return [_copied(first, constants[0].reshape(-1).tolist(), to=kind == "BROADCAST_TO")]
    if kind == "GATHER":
        return [_gathered(first, constants[0], call.option(0, "i") % rank, call.option(1, "i"))]
    if kind in ("SLICE", "STRIDED_SLICE", "SPLIT", "SPLIT_V"):
        return _cut(call, kernel, first, constants)
    raise _tangled()


def _shape_of(array: Any) -> tuple[int, ...]:
    return tuple(array.shape)


def _copied(view: View, sizes: list[int], *, to: bool) -> View:
    grown = replace(view, axes=((),) * (len(sizes) - len(view.axes)) + view.axes)
    for axis, size in enumerate(sizes):
        grown = grown.repeated(axis, size // grown.shape[axis] if to else size)
    if to and grown.shape != tuple(sizes):
        raise _tangled()
    return grown


def _gathered(view: View, indices: Ids, axis: int, batch: int) -> View:
    if batch or not indices.size or indices.min() < 0 or indices.max() >= view.shape[axis]:
        raise _tangled()
    made = view.picked(axis, indices.reshape(-1))
    return made.reshaped((*made.shape[:axis], *indices.shape, *made.shape[axis + 1 :]))


def _cut(call: Call, kernel: Kernel, view: View, constants: Sequence[Ids]) -> list[View]:
    """Operators that take indices of each axis by itself: which, is asked axis by axis."""
    found: list[View] = []
    for axis, size in enumerate(view.shape):
        numbers = np.arange(size).reshape([-1 if a == axis else 1 for a in range(len(view.shape))])
        index = np.broadcast_to(numbers, view.shape)
        made = kernel(call, constants[0], index) if call.node.kind == "SPLIT" else kernel(call, index, *constants)
        parts = made if isinstance(made, tuple) else (made,)
        found = found or [view] * len(parts)
        if any(part.ndim != len(view.shape) for part in parts):
            raise _tangled()
        chosen = [part[tuple(slice(None) if a == axis else 0 for a in range(part.ndim))] for part in parts]
        found = [own.picked(axis, np.asarray(c)) for own, c in zip(found, chosen, strict=True)]
    return found
