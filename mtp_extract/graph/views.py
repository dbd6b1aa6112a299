"""Which elements of a cache, or of rows and slots, a tensor holds: told per axis, without holding them.

A cache of 32 003 slots × 512 dimensions is moved about by operators as labels. The place of an element along a label
(KV head, slot, dimension, row) is a base plus what every axis adds at the element's index. Where a window of slots was
taken, the position says where it begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mtp_extract.graph.expressions import Ids, UnreadableError

Label = str | int

_LARGEST_AXIS = 1 << 20


class Along(NamedTuple):
    """What one axis runs along: a label, the places there, and the table that says by position where they begin."""

    label: Label | None
    places: Ids
    window: int | None


def _make_error() -> UnreadableError:
    return UnreadableError("moves elements in a way that cannot be followed")


@dataclass(frozen=True, eq=False)
class View:
    """Elements by axes."""

    labels: tuple[Label, ...]  # along which elements have places
    base: Ids  # ``[labels]``, the place of the first element
    axes: tuple[Ids, ...]  # per axis ``[labels, size]``, what each index adds; the first adds nothing
    starts: Mapping[Label, int]  # by label, the number of the table that says, by position, where its window begins

    @staticmethod
    def of_shape(labels: Sequence[Label], shape: Sequence[int]) -> View:
        """All elements of ``shape``, an axis a label."""
        axes = (np.outer(np.arange(len(labels)) == i, np.arange(n)) for i, n in enumerate(shape))
        return View(tuple(labels), np.zeros(len(labels), np.int64), tuple(axes), {})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.shape[1] for axis in self.axes)

    def with_axis(self, axis: int, added: Ids) -> View:
        """With the axis ``axis`` as ``added`` says, which need not begin with 0."""
        axes = (*self.axes[:axis], added - added[:, :1], *self.axes[axis + 1 :])
        return replace(self, axes=axes, base=self.base + added[:, 0])

    def along(self, axis: int) -> Along:
        """Where the elements of an axis lie along which one label runs; no label for an axis of one element."""
        if self.shape[axis] == 1:
            return Along(None, np.zeros(1, np.int64), None)
        running = np.flatnonzero(self.axes[axis].any(1))
        if running.size != 1:
            raise _make_error()
        column = int(running[0])
        label = self.labels[column]
        return Along(label, self.base[column] + self.axes[axis][column], self.starts.get(label))

    def places(self, axes: Sequence[int], label: Label) -> Ids:
        """The places along ``label`` by the indices of ``axes``, along which nothing else runs."""
        column = self.labels.index(label)
        if not self.running(axes) <= {label}:
            raise _make_error()
        places: Ids = self.base[column].reshape((1,) * len(axes))
        for number, axis in enumerate(axes):
            places = places + self.axes[axis][column].reshape([-1 if i == number else 1 for i in range(len(axes))])
        return places

    def only(self, label: Label) -> int:
        """The one axis that ``label`` runs along."""
        axes = [axis for axis in range(len(self.axes)) if label in self.running([axis])]
        if len(axes) != 1:
            raise _make_error()
        return axes[0]

    def running(self, axes: Sequence[int]) -> set[Label]:
        """The labels that run along ``axes``."""
        return {self.labels[column] for axis in axes for column in np.flatnonzero(self.axes[axis].any(1))}

    def same(self, other: View) -> bool:
        """Whether it holds the same elements in the same places."""
        return (
            (self.labels, self.shape, self.starts) == (other.labels, other.shape, other.starts)
            and np.array_equal(self.base, other.base)
            and all(map(np.array_equal, self.axes, other.axes))
        )

    # How operators move them.

    def reshaped(self, shape: Sequence[int]) -> View:
        """Row-major, as RESHAPE has it: axes are joined, and split where what is added is a sum.

        New axes are filled from the first on. ``remaining`` is what is left of the axes taken so far: what its indices
        add, where the new axes before it are at 0. Another axis is joined to it (the index of a joined axis is that of
        the first times the size of the second, plus that of the second) until the next size divides it. Then
        ``table[i, j]``, what the index ``i`` of the new axis and the index ``j`` of the rest add together, has to be
        ``outer[i] + remaining[j]``: only so is one a new axis, and the other what is left.
        """
        if math.prod(shape) != math.prod(self.shape):
            raise _make_error()
        remaining = self._make_unit_axis()
        queue = list(self.axes)
        axes = list[Ids]()
        for size in shape:
            while remaining.shape[1] % size:
                remaining = (remaining[:, :, None] + queue.pop(0)[:, None]).reshape(len(remaining), -1)
                if remaining.shape[1] > _LARGEST_AXIS:
                    raise _make_error()
            table = remaining.reshape(len(remaining), size, -1)
            outer, remaining = table[:, :, 0], table[:, 0]
            if not np.array_equal(table, outer[:, :, None] + remaining[:, None]):
                raise _make_error()
            axes.append(outer)
        return replace(self, axes=tuple(axes))

    def _make_unit_axis(self) -> Ids:
        """An axis of one element."""
        return np.zeros((len(self.labels), 1), np.int64)

    def transposed(self, order: Sequence[int]) -> View:
        return replace(self, axes=tuple(self.axes[axis] for axis in order))

    def broadcast(self, sizes: Sequence[int]) -> View:
        """Axes of one element repeated, as BROADCAST_TO has it."""
        view = self.reshaped((1,) * (len(sizes) - len(self.axes)) + self.shape)
        for axis, size in enumerate(sizes):
            if view.shape[axis] not in (1, size):
                raise _make_error()
            view = view.with_axis(axis, np.tile(view.axes[axis], size // view.shape[axis]))
        return view

    def picked(self, axis: int, chosen: Ids) -> View:
        """Some indices of an axis, in any order."""
        if not chosen.size or not ((chosen >= 0) & (chosen < self.shape[axis])).all():
            raise _make_error()
        return self.with_axis(axis, self.axes[axis][:, chosen])

    def window(self, axis: int, size: int, table: int) -> View:
        """``size`` indices of a whole axis, from where the table ``table`` says."""
        label, places, window = self.along(axis)
        if label is None or window is not None or not np.array_equal(places, np.arange(places.size)):
            raise _make_error()
        return replace(self.with_axis(axis, self.axes[axis][:, :size]), starts={**self.starts, label: table})

    def without(self, axis: int, *, keeps: bool) -> View:
        """Reduced over ``axis``, which stays as one element if ``keeps``."""
        return replace(
            self, axes=(*self.axes[:axis], *([self._make_unit_axis()] if keeps else []), *self.axes[axis + 1 :])
        )
