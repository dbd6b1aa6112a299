"""Views give every element the place along each label that NumPy gives it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_extract.graph.expressions import UnreadableError
from mtp_extract.graph.views import View

Places = dict[Any, np.ndarray]


def compute_places(view: View) -> Places:
    """Return label → the place of every element, which is the base plus the sum over all axes."""
    return {
        label: base + functools.reduce(np.add.outer, [axis[column] for axis in view.axes], np.zeros((), np.int64))
        for column, (label, base) in enumerate(zip(view.labels, view.base, strict=True))
    }


def step(view: View, kind: str, a: int, b: int) -> tuple[View, Callable[[np.ndarray], np.ndarray]]:
    """Apply an operator with parameters drawn from ``a`` and ``b``; return the view and the same NumPy function."""
    shape, rank = view.shape, len(view.axes)
    axis, size = a % rank, view.shape[a % rank]
    if kind == "RESHAPE":
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        parts = [divisors[b % len(divisors)], size // divisors[b % len(divisors)]]
        flat = [n for n in shape if n > 1] or [1]
        target = [[*shape[:axis], *parts, *shape[axis + 1 :]], flat, [int(np.prod(shape))], shape[::-1]][b % 4]
        return view.reshape(target), lambda x: x.reshape(target)
    if kind == "TRANSPOSE":
        order = [int(n) for n in np.roll(np.arange(rank)[:: 1 if b % 2 else -1], a)]
        return view.transpose(order), lambda x: np.transpose(x, order)
    if kind == "BROADCAST_TO":
        sizes = [1 + a % 3, *(1 + b % 3 if n == 1 else n for n in shape)]
        return view.broadcast(sizes), lambda x: np.broadcast_to(x, sizes)
    chosen = np.arange(1 + b % 5) * (1 + a) % size if kind == "GATHER" else np.arange(b % size, size)
    return view.take(axis, chosen), lambda x: np.take(x, chosen, axis)


KINDS = ["RESHAPE", "TRANSPOSE", "SLICE", "GATHER", "BROADCAST_TO"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=6)


@given(st.sampled_from([(1, 2, 6, 4), (2, 1, 12, 1), (3, 4), (1, 1, 8, 2)]), STEPS)
@settings(max_examples=250, deadline=None)
def test_views_follow_numpy(shape: tuple[int, ...], steps: list[tuple[str, int, int]]) -> None:
    view = View.from_shape(range(len(shape)), shape)
    for kind, a, b in steps:
        try:
            result, move = step(view, kind, a, b)
        except UnreadableError:
            continue  # A view cannot describe the result.
        for label, places in compute_places(result).items():
            np.testing.assert_array_equal(places, move(compute_places(view)[label]), f"{kind} of {view.shape}")
        view = result
        if not 0 < len(view.axes) <= 6 or np.prod(view.shape) > 1000:
            break


@pytest.mark.parametrize("kind", KINDS)
def test_every_operator_is_followed_on_a_complete_cache(kind: str) -> None:
    followed = 0
    for a, b in np.ndindex(4, 4):
        with suppress(UnreadableError):
            followed += step(View.from_shape(range(4), (1, 2, 6, 4)), kind, a, b)[0].shape != ()
    assert followed >= 8


def test_views_with_other_places_are_different() -> None:
    view = View.from_shape("abcd", (1, 2, 6, 4))
    assert view.equals(view.transpose([1, 0, 2, 3]).transpose([1, 0, 2, 3]))
    assert view.equals(view.reshape([12, 4]).reshape([1, 2, 6, 4]))
    different = [view.transpose([0, 1, 3, 2]), view.take(1, np.array([1, 0]))]
    different += [view.take_window(2, 6, 0), view.take(2, np.arange(5))]
    assert not any(map(view.equals, different))


def test_a_window_is_taken_of_complete_axes_only() -> None:
    view = View.from_shape("abcd", (1, 2, 6, 4))
    assert view.take_window(2, 3, 7).locate_axis(2)[2] == 7
    for odd in (view.take(2, np.arange(5, -1, -1)), view.take_window(2, 3, 7), view.reshape([1, 12, 4, 1])):
        with pytest.raises(UnreadableError):
            odd.take_window(1 if odd.shape[1] == 12 else 2, 2, 8)
