"""Views hold the elements that NumPy moves: each by its place along every label."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from graph.test_evaluate import index, number, options
from helpers.one_op import OneOp
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_extract.graph.call import Call
from mtp_extract.graph.expressions import UnreadableError
from mtp_extract.graph.kernels import KERNELS
from mtp_extract.graph.views import View, moved

Places = dict[Any, np.ndarray]


def explicit(view: View) -> Places:
    """Per label, the place of every element: what all axes add, one by one."""
    found = {}
    for column, label in enumerate(view.labels):
        added = [axis[column] for axis in view.axes]
        found[label] = view.base[column] + functools.reduce(np.add.outer, added, np.zeros((), np.int64))
    return found


def op(kind: str, shape: Sequence[int], count: int, *constants: Any, made: Any = None, results: int = 1) -> Call:
    """The operator ``kind`` of ``count`` operands of ``shape``."""
    operands = [np.zeros(shape, np.int8)] * count
    both = (*constants, *operands) if kind == "SPLIT" else (*operands, *constants)
    graph = OneOp(kind, both, made, ("int8",) * results).flat()
    return Call(graph, graph.nodes[0])


def apply(views: list[View], call: Call, *constants: Any) -> list[tuple[View, Places]]:
    """What the operator makes of views, and of their explicit places."""
    kernel, numbers = KERNELS[call.node.kind], [constant.values for constant in constants]
    found = moved(call, kernel, views, numbers)
    truth: list[Places] = [{} for _ in found]
    for label in views[0].labels:
        arrays = [explicit(view)[label] for view in views]
        results = kernel(call, *((*numbers, *arrays) if call.node.kind == "SPLIT" else (*arrays, *numbers)))
        for own, result in zip(truth, results if isinstance(results, tuple) else (results,), strict=True):
            own[label] = result
    return list(zip(found, truth, strict=True))


def step(view: View, kind: str, a: int, b: int) -> list[tuple[View, Places]]:
    """One operator on ``view``, its numbers drawn from ``a`` and ``b``."""
    shape, rank = view.shape, len(view.axes)
    axis, size = a % rank, view.shape[a % rank]
    if kind == "RESHAPE":
        flat, at = [n for n in shape if n > 1], a % rank
        split = [d for d in range(1, shape[at] + 1) if shape[at] % d == 0]
        parts = [split[b % len(split)], shape[at] // split[b % len(split)]]
        wanted = [[*shape[:at], *parts, *shape[at + 1 :]], flat, [*flat[:-2], -1], list(shape[::-1])][b % 4]
        constants = (index(*wanted),)
        return apply([view], op(kind, shape, 1, *constants), *constants)
    if kind == "TRANSPOSE":
        constants = (index(*np.roll(np.arange(rank)[:: 1 if b % 2 else -1], a)),)
        return apply([view], op(kind, shape, 1, *constants), *constants)
    if kind == "SLICE":
        begin, wide = np.zeros(rank, int), np.array(shape)
        begin[axis] = b % size
        wide[axis] = max(1, (size - b % size) // (1 + a % 2))
        constants = (index(*begin), index(*wide))
        return apply([view], op(kind, shape, 1, *constants), *constants)
    if kind == "STRIDED_SLICE":
        begin, steps = np.zeros(rank, int), np.ones(rank, int)
        begin[axis], steps[axis] = b % size, 1 + a % 3
        constants = (index(*begin), index(*shape), index(*steps))
        return apply([view], op(kind, shape, 1, *constants, made=options("StridedSlice")), *constants)
    if kind == "GATHER":
        constants = (index(*(np.arange(1 + b % 5) * (1 + a) % size)),)
        return apply([view], op(kind, shape, 1, *constants, made=options("Gather", axis=axis)), *constants)
    if kind in ("CONCATENATION", "PACK"):
        half = max(1, size // 2)
        others = [[view, view], [view.picked(axis, np.arange(half)), view.picked(axis, np.arange(size - half, size))]]
        views = others[b % 2]
        named = {"Concatenation": {"axis": axis}, "Pack": {"axis": axis, "valuesCount": 2}}[kind.capitalize()]
        return apply(views, op(kind, views[0].shape, 2, made=options(kind.capitalize(), **named)))
    if kind == "UNPACK":
        return apply([view], op(kind, shape, 1, made=options("Unpack", num=size, axis=axis), results=size))
    if kind == "SPLIT":
        constants, count = (number(axis),), size if b % 2 else 1
        return apply([view], op(kind, shape, 1, *constants, made=options("Split", numSplits=count)), *constants)
    if kind == "TILE":
        times = np.ones(rank, int)
        times[axis] = 1 + b % 3
        constants = (index(*times),)
        return apply([view], op(kind, shape, 1, *constants), *constants)
    if kind == "BROADCAST_TO":
        constants = (index(1 + a % 3, *[1 + b % 3 if n == 1 else n for n in shape]),)
        return apply([view], op(kind, shape, 1, *constants), *constants)
    constants = (number(axis),)
    return apply([view], op("EXPAND_DIMS", shape, 1, *constants), *constants)


KINDS = ["RESHAPE", "TRANSPOSE", "SLICE", "STRIDED_SLICE", "GATHER", "CONCATENATION", "PACK", "UNPACK", "SPLIT"]
KINDS += ["TILE", "BROADCAST_TO", "EXPAND_DIMS"]
STEPS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=6)


@given(st.sampled_from([(1, 2, 6, 4), (2, 1, 12, 1), (3, 4), (1, 1, 8, 2)]), STEPS)
@settings(max_examples=250, deadline=None)
def test_views_are_what_numpy_moves(shape: tuple[int, ...], steps: list[tuple[str, int, int]]) -> None:
    view = View.whole(range(len(shape)), shape)
    for kind, a, b in steps:
        try:
            made = step(view, kind, a, b)
        except UnreadableError:
            continue  # What cannot be followed is refused.
        for found, truth in made:
            assert all(found.shape == places.shape for places in truth.values())
            for label, places in explicit(found).items():
                np.testing.assert_array_equal(places, truth[label], f"{kind} of {view.shape}")
        view = made[a % len(made)][0]
        if not 0 < len(view.axes) <= 6 or np.prod(view.shape) > 1000:
            break


@pytest.mark.parametrize("kind", KINDS)
def test_every_operator_is_followed_on_a_whole_cache(kind: str) -> None:
    followed = 0
    for a, b in np.ndindex(4, 4):
        with suppress(UnreadableError):
            followed += len(step(View.whole(range(4), (1, 2, 6, 4)), kind, a, b)) > 0
    assert followed >= 8


def test_the_same_elements_elsewhere_are_another_view() -> None:
    view = View.whole("abcd", (1, 2, 6, 4))
    assert view.same(view.transposed([1, 0, 2, 3]).transposed([1, 0, 2, 3]))
    assert view.same(view.reshaped([12, 4]).reshaped([1, 2, 6, 4]))
    others = [view.transposed([0, 1, 3, 2]), view.picked(1, np.array([1, 0]))]
    others += [view.window(2, 6, 0), view.picked(2, np.arange(5))]
    assert not any(view.same(other) for other in others)


def test_a_window_is_taken_of_whole_axes_alone() -> None:
    view = View.whole("abcd", (1, 2, 6, 4))
    assert view.window(2, 3, 7).along(2)[2] == 7
    for odd in (view.picked(2, np.arange(5, -1, -1)), view.window(2, 3, 7), view.reshaped([1, 12, 4, 1])):
        with pytest.raises(UnreadableError):
            odd.window(1 if odd.shape[1] == 12 else 2, 2, 8)
