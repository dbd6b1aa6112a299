"""Track which elements of a cache, or of rows and slots, a tensor holds, without storing the elements.

The element numbers of a cache of 32 003 slots × 512 dimensions are too many to move them through every operator.
Instead, a :class:`View` gives each element a place along each label (KV head, slot, dimension, row): a base, plus what
each axis adds for the element's index. If a window of slots was taken, a table gives its first slot by position.
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


class AxisPlaces(NamedTuple):
    """The places of the elements of one axis."""

    label: Label | None  # the one label whose places change along the axis; None for an axis of one element
    places: Ids  # ``[size]``, along that label
    window: int | None  # number of the table of first slots that the places start from; None without a window


def _make_error() -> UnreadableError:
    return UnreadableError("moves elements in a way that cannot be followed")


@dataclass(frozen=True, eq=False)
class View:
    """The places of all elements of a tensor, axis by axis."""

    labels: tuple[Label, ...]
    base: Ids  # ``[labels]``, the places of the first element
    axes: tuple[Ids, ...]  # per axis ``[labels, size]``, what each index adds to the places; index 0 adds nothing
    starts: Mapping[Label, int]  # label → number of the table that gives the first place of its window by position

    @staticmethod
    def from_shape(labels: Sequence[Label], shape: Sequence[int]) -> View:
        """Return the view of a tensor of ``shape``, each axis along a label of its own."""
        axes = (np.outer(np.arange(len(labels)) == i, np.arange(n)) for i, n in enumerate(shape))
        return View(tuple(labels), np.zeros(len(labels), np.int64), tuple(axes), {})

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(axis.shape[1] for axis in self.axes)

    def replace_axis(self, axis: int, added: Ids) -> View:
        """Return a copy whose axis ``axis`` adds ``added`` ``[labels, size]``, which need not begin with 0."""
        axes = (*self.axes[:axis], added - added[:, :1], *self.axes[axis + 1 :])
        return replace(self, axes=axes, base=self.base + added[:, 0])

    def locate_axis(self, axis: int) -> AxisPlaces:
        """Return the places along an axis; raise UnreadableError unless those of exactly one label change along it."""
        if self.shape[axis] == 1:
            return AxisPlaces(None, np.zeros(1, np.int64), None)
        columns = np.flatnonzero(self.axes[axis].any(1))
        if columns.size != 1:
            raise _make_error()
        column = int(columns[0])
        label = self.labels[column]
        return AxisPlaces(label, self.base[column] + self.axes[axis][column], self.starts.get(label))

    def locate_axes(self, axes: Sequence[int], label: Label) -> Ids:
        """Return the places along ``label`` ``[*sizes of axes]``; no other label may change along ``axes``."""
        column = self.labels.index(label)
        if not self.find_labels(axes) <= {label}:
            raise _make_error()
        places: Ids = self.base[column].reshape((1,) * len(axes))
        for number, axis in enumerate(axes):
            places = places + self.axes[axis][column].reshape([-1 if i == number else 1 for i in range(len(axes))])
        return places

    def find_axis(self, label: Label) -> int:
        """Return the one axis along which the places of ``label`` change; raise UnreadableError otherwise."""
        axes = [axis for axis in range(len(self.axes)) if label in self.find_labels([axis])]
        if len(axes) != 1:
            raise _make_error()
        return axes[0]

    def find_labels(self, axes: Sequence[int]) -> set[Label]:
        """Return the labels whose places change along ``axes``."""
        return {self.labels[column] for axis in axes for column in np.flatnonzero(self.axes[axis].any(1))}

    def equals(self, other: View) -> bool:
        """Return whether both views give every element the same places."""
        return (
            (self.labels, self.shape, self.starts) == (other.labels, other.shape, other.starts)
            and np.array_equal(self.base, other.base)
            and all(map(np.array_equal, self.axes, other.axes))
        )

    # Operators that move elements.

    def reshape(self, shape: Sequence[int]) -> View:
        """Return the view after RESHAPE to ``shape``, which is row-major.

        The new axes are split off one by one, the first one first. ``remaining`` is the axis that is left to split: old
        axes are joined to it, in order, until the next size divides its length. For each label it is then a table
        ``[size, rest]``, which must be a sum, ``table[i, j] = outer[i] + inner[j]``: the axes of a view add to a place
        independently. ``outer`` becomes the new axis and ``inner`` remains. A table that is no such sum, as when
        transposed axes are joined and split at another place, is refused.
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
            outer, inner = table[:, :, 0], table[:, 0]
            if not np.array_equal(table, outer[:, :, None] + inner[:, None]):
                raise _make_error()
            axes.append(outer)
            remaining = inner
        return replace(self, axes=tuple(axes))

    def _make_unit_axis(self) -> Ids:
        return np.zeros((len(self.labels), 1), np.int64)

    def transpose(self, order: Sequence[int]) -> View:
        return replace(self, axes=tuple(self.axes[axis] for axis in order))

    def broadcast(self, sizes: Sequence[int]) -> View:
        """Return the view after BROADCAST_TO: axes of one element are repeated."""
        view = self.reshape((1,) * (len(sizes) - len(self.axes)) + self.shape)
        for axis, size in enumerate(sizes):
            if view.shape[axis] not in (1, size):
                raise _make_error()
            view = view.replace_axis(axis, np.tile(view.axes[axis], size // view.shape[axis]))
        return view

    def take(self, axis: int, chosen: Ids) -> View:
        """Return the view of some indices of an axis, in the order of ``chosen``."""
        if not chosen.size or not ((chosen >= 0) & (chosen < self.shape[axis])).all():
            raise _make_error()
        return self.replace_axis(axis, self.axes[axis][:, chosen])

    def take_window(self, axis: int, size: int, table: int) -> View:
        """Return the view of ``size`` indices of a complete axis, the first one given by the table number ``table``."""
        label, places, window = self.locate_axis(axis)
        if label is None or window is not None or not np.array_equal(places, np.arange(places.size)):
            raise _make_error()
        return replace(self.replace_axis(axis, self.axes[axis][:, :size]), starts={**self.starts, label: table})

    def reduce_axis(self, axis: int, *, keeps: bool) -> View:
        """Return the view after a reduction over ``axis``, which stays as one element if ``keeps``."""
        return replace(
            self, axes=(*self.axes[:axis], *([self._make_unit_axis()] if keeps else []), *self.axes[axis + 1 :])
        )
