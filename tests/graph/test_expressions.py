"""Expressions compute what NumPy computes, and equal functions are the same object."""

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


def compute(expr: Expr) -> Array:
    """Return the numbers of an expression, from the definition of its kind."""
    parts = expr.parts
    if expr.kind == "input":
        return NUMBERS[parts[0]]
    if expr.kind == "product":
        return math.prod((compute(e) ** power for e, power in expr.powers.items()), start=np.ones(1))
    if expr.kind == "sum":
        return sum((factor * compute(e) for e, factor in expr.terms.items()), start=np.zeros(1))
    inner = compute(parts[-2] if expr.kind in ("each", "tiled", "part", "groups") else parts[-1])
    if expr.kind == "function":
        return np.tanh(parts[1] * inner)
    if expr.kind == "groups":
        return inner.reshape(-1, parts[1]).sum(1)
    return {"each": np.repeat, "tiled": np.tile, "part": np.take}[expr.kind](
        inner, expr.element_ids if expr.kind == "part" else parts[1]
    )


def compute_term(term: Term) -> Array:
    return term.factor * np.broadcast_to(compute(term.expr), term.expr.size)[term.ids]


def tanh(expressions: Expressions, term: Term) -> Term:
    return Term(1.0, expressions.make_expr("function", "TANH", term.factor, term.expr, size=term.expr.size), term.ids)


def move(term: Term, ids: Array) -> Term:
    return Term(term.factor, term.expr, ids, term.numbers)


def sum_rows(expressions: Expressions, term: Term) -> Term:
    sums = expressions.sum_groups(term, term.ids.shape[-1], mean=False)
    return move(sums, sums.ids.reshape(*term.ids.shape[:-1], 1))


Step = tuple[str, int, int, int]
STEPS = st.tuples(
    st.sampled_from(["add", "sub", "mul", "number", "square", "tanh", "reshape", "transpose", "slice", "sum"]),
    *[st.integers(0, 11)] * 3,
)


def run(expressions: Expressions, steps: Sequence[Step]) -> list[tuple[Term, Array]]:
    """Run a small program; return each of its values as a term and as NumPy computes it."""
    terms = [
        Term(1.0, expressions.make_expr("input", n, size=s), np.arange(s).reshape(1, -1, 3)) for n, s in SIZES.items()
    ]
    known = [(term, NUMBERS[name].reshape(1, -1, 3)) for term, name in zip(terms, SIZES, strict=True)]
    for kind, first, second, third in steps:
        (left, x), (right, y) = known[first % len(known)], known[second % len(known)]
        try:
            if kind in ("add", "sub", "mul"):
                function: Callable[..., Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[kind]
                numbers = function(x, y)
                sign = 1 if kind == "add" else -1
                term = expressions.multiply(left, right) if kind == "mul" else expressions.add(left, right, sign)
            elif kind == "number":
                term, numbers = expressions.multiply(left, expressions.make_number(third + 0.5)), x * (third + 0.5)
            elif kind == "square":
                term, numbers = expressions.multiply(left, left), x * x
            elif kind == "tanh":
                term, numbers = tanh(expressions, left), np.tanh(x)
            elif kind == "sum":
                if not left.is_complete:
                    continue
                term, numbers = sum_rows(expressions, left), x.sum(-1, keepdims=True)
            else:
                shape = x.shape[::-1] if kind == "reshape" else None
                function = {
                    "reshape": lambda a, shape=shape: a.reshape(shape),
                    "transpose": lambda a, third=third: np.moveaxis(a, third % a.ndim, -1),
                    "slice": lambda a, third=third: a[..., third % a.shape[-1] :],
                }[kind]
                term, numbers = move(left, function(left.ids)), function(x)
        except (UnreadableError, ValueError):
            continue  # The terms cancel out, or the shapes do not fit.
        if numbers.size <= 64:
            known.append((term, numbers))
    return known


@given(st.lists(STEPS, max_size=12))
@settings(max_examples=400, deadline=None)
def test_terms_are_what_numpy_computes(steps: list[Step]) -> None:
    expressions = Expressions()
    for term, numbers in run(expressions, steps):
        assert term.ids.shape == numbers.shape
        np.testing.assert_allclose(compute_term(term), numbers, rtol=1e-9, atol=1e-9)
    # The same program again adds no expression.
    count = len(expressions.exprs)
    run(expressions, steps)
    assert len(expressions.exprs) == count


def terms(expressions: Expressions) -> list[Term]:
    return [expressions.make_vector("input", name, size=6) for name in "abe"]


def mul(expressions: Expressions, *operands: Term) -> Term:
    product = operands[0]
    for operand in operands[1:]:
        product = expressions.multiply(product, operand)
    return product


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (lambda m, a, b, c: m.multiply(a, b), lambda m, a, b, c: m.multiply(b, a)),
        (lambda m, a, b, c: mul(m, mul(m, a, b), c), lambda m, a, b, c: mul(m, a, mul(m, c, b))),
        (lambda m, a, b, c: m.add(a, b), lambda m, a, b, c: m.add(b, a)),
        (lambda m, a, b, c: m.raise_to(m.multiply(a, a), 1), lambda m, a, b, c: m.raise_to(a, 2)),
        (lambda m, a, b, c: mul(m, a, a, a), lambda m, a, b, c: m.raise_to(a, 3)),
        (lambda m, a, b, c: m.add(a, a), lambda m, a, b, c: m.multiply(a, m.make_number(2.0))),
        (lambda m, a, b, c: tanh(m, move(a, a.ids[2:5])), lambda m, a, b, c: move(tanh(m, a), a.ids[2:5])),
    ],
)
def test_equal_functions_are_the_same_object(left: Callable[..., Term], right: Callable[..., Term]) -> None:
    expressions = Expressions()
    pair = left(expressions, *terms(expressions)), right(expressions, *terms(expressions))
    parts = [expressions.take_elements(term.expr, term.ids) for term in pair]
    assert parts[0] is parts[1]
    assert pair[0].factor == pair[1].factor


def test_different_functions_are_different_objects() -> None:
    expressions = Expressions()
    a, b, c = terms(expressions)
    different = [
        a,
        b,
        expressions.add(a, b),
        expressions.add(a, b, -1),
        expressions.multiply(a, b),
        expressions.multiply(a, a),
        tanh(expressions, a),
    ]
    different += [expressions.add(expressions.add(a, b), c), tanh(expressions, expressions.add(a, b))]
    different += [expressions.sum_groups(a, width, mean=True) for width in (2, 3)]
    assert len({term.expr for term in different}) == len(different)


def test_terms_that_cancel_out_are_refused() -> None:
    expressions = Expressions()
    a, *_ = terms(expressions)
    with pytest.raises(UnreadableError):
        expressions.add(a, a, -1)


def test_roots_are_taken_of_positive_terms_only() -> None:
    """Such as a mean of squares plus an epsilon; without the epsilon, minus it, or of no squares, it is refused."""
    expressions = Expressions()
    a, b, _ = terms(expressions)
    squares = expressions.sum_groups(expressions.multiply(a, a), 6, mean=True)
    expressions.raise_to(expressions.add(squares, expressions.make_number(1e-6)), -0.5)
    for term in (
        squares,
        expressions.add(squares, expressions.make_number(-1e-6)),
        expressions.add(squares, expressions.make_number(1e-6), -1),
        expressions.add(
            expressions.sum_groups(expressions.multiply(a, b), 6, mean=True), expressions.make_number(1e-6)
        ),
        expressions.multiply(expressions.add(squares, expressions.make_number(1e-6)), expressions.make_number(-1.0)),
        a,
    ):
        with pytest.raises(UnreadableError):
            expressions.raise_to(term, -0.5)
