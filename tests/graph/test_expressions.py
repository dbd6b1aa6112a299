"""Expressions are what NumPy computes, and equal functions are the same object."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtp_extract.graph.expressions import Expr, Expressions, Term, UnreadableError

Array = np.ndarray
RNG = np.random.default_rng(3)
SIZES = {"a": 6, "b": 6, "c": 3, "d": 12}
NUMBERS: dict[str, Array] = {name: RNG.uniform(0.5, 2, size) for name, size in SIZES.items()}


def computed(expr: Expr) -> Array:
    """What an expression is, by its own definition."""
    parts = expr.parts
    if expr.kind == "input":
        return NUMBERS[parts[0]]
    if expr.kind == "product":
        return math.prod((computed(e) ** power for e, power in expr.powers.items()), start=np.ones(1))
    if expr.kind == "sum":
        return sum((factor * computed(e) for e, factor in expr.terms.items()), start=np.zeros(1))
    inner = computed(parts[-2] if expr.kind in ("each", "tiled", "part", "groups") else parts[-1])
    if expr.kind == "function":
        return np.tanh(parts[1] * inner)
    if expr.kind == "groups":
        return inner.reshape(-1, parts[1]).sum(1)
    return {"each": np.repeat, "tiled": np.tile, "part": np.take}[expr.kind](
        inner, expr.chosen if expr.kind == "part" else parts[1]
    )


def value(term: Term) -> Array:
    return term.factor * np.broadcast_to(computed(term.expr), term.expr.size)[term.ids]


def tanh(made: Expressions, term: Term) -> Term:
    return Term(1.0, made.expr("function", "TANH", term.factor, term.expr, size=term.expr.size), term.ids)


def moved(term: Term, ids: Array) -> Term:
    return Term(term.factor, term.expr, ids, term.numbers)


def summed(made: Expressions, term: Term) -> Term:
    found = made.groups(term, term.ids.shape[-1], mean=False)
    return moved(found, found.ids.reshape(*term.ids.shape[:-1], 1))


Step = tuple[str, int, int, int]
STEPS = st.tuples(
    st.sampled_from(["add", "sub", "mul", "number", "square", "tanh", "reshape", "transpose", "slice", "sum"]),
    *[st.integers(0, 11)] * 3,
)


def run(made: Expressions, steps: Sequence[Step]) -> list[tuple[Term, Array]]:
    """Small programs: what they are as terms, and as NumPy has them."""
    terms = [Term(1.0, made.expr("input", n, size=s), np.arange(s).reshape(1, -1, 3)) for n, s in SIZES.items()]
    known = [(term, NUMBERS[name].reshape(1, -1, 3)) for term, name in zip(terms, SIZES, strict=True)]
    for kind, first, second, third in steps:
        (one, x), (other, y) = known[first % len(known)], known[second % len(known)]
        try:
            if kind in ("add", "sub", "mul"):
                function: Callable[..., Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[kind]
                numbers = function(x, y)
                term = made.multiply(one, other) if kind == "mul" else made.add(one, other, 1 if kind == "add" else -1)
            elif kind == "number":
                term, numbers = made.multiply(one, made.number(third + 0.5)), x * (third + 0.5)
            elif kind == "square":
                term, numbers = made.multiply(one, one), x * x
            elif kind == "tanh":
                term, numbers = tanh(made, one), np.tanh(x)
            elif kind == "sum":
                if not one.is_complete:
                    continue
                term, numbers = summed(made, one), x.sum(-1, keepdims=True)
            else:
                shape = x.shape[::-1] if kind == "reshape" else None
                move = {
                    "reshape": lambda a, shape=shape: a.reshape(shape),
                    "transpose": lambda a, third=third: np.moveaxis(a, third % a.ndim, -1),
                    "slice": lambda a, third=third: a[..., third % a.shape[-1] :],
                }[kind]
                term, numbers = moved(one, move(one.ids)), move(x)
        except (UnreadableError, ValueError):
            continue  # Nothing is left, or shapes that do not fit.
        if numbers.size <= 64:
            known.append((term, numbers))
    return known


@given(st.lists(STEPS, max_size=12))
@settings(max_examples=400, deadline=None)
def test_terms_are_what_numpy_computes(steps: list[Step]) -> None:
    made = Expressions()
    for term, numbers in run(made, steps):
        assert term.ids.shape == numbers.shape
        np.testing.assert_allclose(value(term), numbers, rtol=1e-9, atol=1e-9)
    # Read again, everything is there already.
    count = len(made.made)
    run(made, steps)
    assert len(made.made) == count


def terms(made: Expressions) -> list[Term]:
    return [made.vector("input", name, size=6) for name in "abe"]


def mul(made: Expressions, *operands: Term) -> Term:
    product = operands[0]
    for operand in operands[1:]:
        product = made.multiply(product, operand)
    return product


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (lambda m, a, b, c: m.multiply(a, b), lambda m, a, b, c: m.multiply(b, a)),
        (lambda m, a, b, c: mul(m, mul(m, a, b), c), lambda m, a, b, c: mul(m, a, mul(m, c, b))),
        (lambda m, a, b, c: m.add(a, b), lambda m, a, b, c: m.add(b, a)),
        (lambda m, a, b, c: m.power(m.multiply(a, a), 1), lambda m, a, b, c: m.power(a, 2)),
        (lambda m, a, b, c: mul(m, a, a, a), lambda m, a, b, c: m.power(a, 3)),
        (lambda m, a, b, c: m.add(a, a), lambda m, a, b, c: m.multiply(a, m.number(2.0))),
        (lambda m, a, b, c: tanh(m, moved(a, a.ids[2:5])), lambda m, a, b, c: moved(tanh(m, a), a.ids[2:5])),
    ],
)
def test_equal_functions_are_the_same_object(left: Callable[..., Term], right: Callable[..., Term]) -> None:
    made = Expressions()
    one, other = left(made, *terms(made)), right(made, *terms(made))
    parts = [made.part(term.expr, term.ids) for term in (one, other)]
    assert parts[0] is parts[1]
    assert one.factor == other.factor


def test_other_functions_are_others() -> None:
    made = Expressions()
    a, b, c = terms(made)
    others = [a, b, made.add(a, b), made.add(a, b, -1), made.multiply(a, b), made.multiply(a, a), tanh(made, a)]
    others += [made.add(made.add(a, b), c), tanh(made, made.add(a, b)), made.groups(a, 2, mean=True)]
    others += [made.groups(a, 3, mean=True)]
    assert len({term.expr for term in others}) == len(others)


def test_nothing_is_left_is_refused() -> None:
    made = Expressions()
    a, *_ = terms(made)
    with pytest.raises(UnreadableError):
        made.add(a, a, -1)


def test_roots_are_taken_of_what_is_positive_alone() -> None:
    """A mean of squares plus an epsilon; without it, less it, or of no squares, it is refused."""
    made = Expressions()
    a, b, _ = terms(made)
    squares = made.groups(made.multiply(a, a), 6, mean=True)
    made.power(made.add(squares, made.number(1e-6)), -0.5)
    for odd in (
        squares,
        made.add(squares, made.number(-1e-6)),
        made.add(squares, made.number(1e-6), -1),
        made.add(made.groups(made.multiply(a, b), 6, mean=True), made.number(1e-6)),
        made.multiply(made.add(squares, made.number(1e-6)), made.number(-1.0)),
        a,
    ):
        with pytest.raises(UnreadableError):
            made.power(odd, -0.5)
