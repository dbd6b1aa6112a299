"""Describe activations as expressions in a canonical form: equal functions are the same object.

Outside of attentions every value of a drafter is ``factor × expression``, with its elements in some order. Expressions
are products of powers, sums, sums over groups, products with matrices, a few functions, and parts of these. Each is
created once, so two values compute the same if their expressions are identical (``is``), and an expression can be
followed from the outputs back to the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import escape
from mtp_extract.graph.flat import FlatGraph, Value

LARGEST_FACTOR = 1e6
"""Factors of a drafter are less than this many times larger or smaller than 1, and its weights are below it."""

_DEEPEST_SHOWN = 2
_LONGEST_SHOWN = 48

Ids = npt.NDArray[np.int64]
"""Indices of elements, in the shape of a tensor."""

Doubles = npt.NDArray[np.float64]


class UnreadableError(Exception):
    """An operator does something that no drafter does; the message follows the operator's name."""


@dataclass(frozen=True, eq=False)
class Expr:
    """A function of the activations whose result is a vector of ``size``. Only :class:`Expressions` creates them.

    ==========  =====================================================================================================
    kind        parts
    ==========  =====================================================================================================
    input       the name of an input of the signature
    weight      the :class:`Value` of a constant vector
    matrix      the :class:`Value` of a constant matrix ``[out, in]``, the expression that it multiplies
    product     a frozenset of (expression, power); the empty one is the number 1
    sum         a frozenset of (expression, factor)
    groups      expression, width: the sum of each ``width`` elements in a row
    function    name, factor, expression: the named function of factor × expression, element by element
    each        expression, count: every element repeated ``count`` times (a a b b)
    tiled       expression, count: the complete vector repeated ``count`` times (a b a b)
    part        expression, the bytes of the int64 indices of the elements that it takes
    mixed       the scores of an attention, the name of V, its axes and its window: the output of the heads
    unread      the :class:`Value` of a result that is not analyzed, and the reason
    ==========  =====================================================================================================
    """

    kind: str
    # Left out of the repr, which would otherwise show every expression inside this one.
    parts: tuple[Any, ...] = field(repr=False)
    size: int
    number: int  # counts expressions in the order of creation; used to sort sets of them

    def __str__(self) -> str:
        """Return the expression as algebra, shortened: ``norm(0.5·M[64,128]·activations)·w[64]``."""
        text = _format_expr(self, _DEEPEST_SHOWN)
        return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"

    @property
    def terms(self) -> dict[Expr, float]:
        """The terms of a sum with their factors; the expression itself if it is no sum."""
        return self._sort_parts("sum")

    @property
    def powers(self) -> dict[Expr, float]:
        """The factors of a product with their powers; the expression itself if it is no product."""
        return self._sort_parts("product")

    def _sort_parts(self, kind: str) -> dict[Expr, float]:
        if self.kind != kind:
            return {self: 1.0}
        return dict(sorted(self.parts[0], key=lambda part: part[0].number))

    @property
    def element_ids(self) -> Ids:
        """The indices of the elements that a part takes."""
        return np.frombuffer(self.parts[1], np.int64)


@dataclass(frozen=True)
class Term:
    """A value of the graph as ``factor × expr``, with the elements ``ids`` of the expression."""

    factor: float
    expr: Expr
    ids: Ids  # in the shape of the value
    numbers: tuple[Value, ...] = ()  # the constants that the factor was computed from

    @property
    def is_complete(self) -> bool:
        """Whether it holds all elements of the expression in order."""
        return self.ids.size == self.expr.size and bool((self.ids.reshape(-1) == np.arange(self.expr.size)).all())


class Expressions:
    """All expressions of a graph."""

    def __init__(self) -> None:
        self.exprs: dict[tuple[Any, ...], Expr] = {}
        self.one = self.make_product({}, 1)

    def make_expr(self, kind: str, *parts: Any, size: int) -> Expr:
        key = kind, *parts
        if key not in self.exprs:
            self.exprs[key] = Expr(kind, parts, size, len(self.exprs))
        return self.exprs[key]

    def make_vector(self, kind: str, *parts: Any, size: int) -> Term:
        """Return a new expression as a term with its elements in order."""
        return Term(1.0, self.make_expr(kind, *parts, size=size), np.arange(size))

    def make_product(self, powers: Mapping[Expr, float], size: int) -> Expr:
        remaining = {expr: power for expr, power in powers.items() if power}
        if list(remaining.values()) == [1]:
            return next(iter(remaining))
        return self.make_expr("product", frozenset(remaining.items()), size=size)

    def make_number(self, number: float, *constants: Value) -> Term:
        """Return a number as a term, with the constants that it was computed from."""
        return Term(number, self.one, np.zeros((), np.int64), constants)

    # Constants.

    def is_constant(self, form: object) -> bool:
        return isinstance(form, Term) and (form.expr is self.one or form.expr.kind == "weight")

    def get_number(self, form: object) -> float | None:
        """Return the number that a constant holds; None if ``form`` is anything else."""
        return form.factor if isinstance(form, Term) and form.expr is self.one else None

    def read_constant(self, graph: FlatGraph, term: Term) -> Doubles:
        """Return the numbers of a constant in its own shape."""
        if term.expr is self.one:
            return np.full(term.ids.shape, term.factor)
        stored = graph.read_small_floats(term.expr.parts[0]).astype(np.float64)
        return np.asarray(term.factor * stored[term.ids])

    # Arithmetic, element by element.

    def multiply(self, term: Term, other: Term) -> Term:
        left, right, ids = self._align(term, other)
        powers = left.powers
        for expr, power in right.powers.items():
            powers[expr] = powers.get(expr, 0.0) + power
        expr = self.make_product(powers, max(left.size, right.size))
        if expr is self.one and left is not self.one:
            raise UnreadableError("divides a value by itself")
        # Keep the constants only if they are factors of the complete product.
        numbers = (*term.numbers, *other.numbers) if self.one in (left, right) else ()
        return Term(term.factor * other.factor, expr, ids, numbers)

    def add(self, term: Term, other: Term, sign: float = 1.0) -> Term:
        if other.factor == 0 and other.expr is self.one:
            return replace(term, ids=np.broadcast_arrays(term.ids, other.ids)[0])
        left, right, ids = self._align(term, other)
        factors = {left: term.factor}
        factors[right] = factors.get(right, 0.0) + sign * other.factor
        if not all(factor and math.isfinite(factor) for factor in factors.values()):
            raise UnreadableError("adds zero or an infinite number, or subtracts a value from itself")
        if len(factors) == 1:
            return Term(factors[left], left, ids)
        return Term(1.0, self.make_expr("sum", frozenset(factors.items()), size=max(left.size, right.size)), ids)

    def raise_to(self, term: Term, exponent: float) -> Term:
        """Return ``term ** exponent``; a root or a reciprocal requires a term that is always positive, such as a mean
        of squares plus an epsilon, and is refused otherwise.
        """
        is_positive = term.factor > 0 and all(self.is_positive(expr) for expr in term.expr.powers)
        if not exponent or ((exponent != int(exponent) or exponent < 0) and not is_positive):
            raise UnreadableError("takes a root or a reciprocal of a value that may be negative")
        powers = {expr: power * exponent for expr, power in term.expr.powers.items()}
        return Term(term.factor**exponent, self.make_product(powers, term.expr.size), term.ids)

    def is_positive(self, expr: Expr) -> bool:
        """Return whether the expression is a sum of even powers and a positive number."""
        if expr.kind in ("each", "part"):
            return self.is_positive(expr.parts[0])
        squares = [
            term
            for term in expr.terms
            if term.kind == "groups" and all(p > 0 and p % 2 == 0 for p in term.parts[0].powers.values())
        ]
        others = [term for term in expr.terms if term not in squares]
        return others == [self.one] and all(factor > 0 for factor in expr.terms.values())

    def sum_groups(self, term: Term, width: int, *, mean: bool) -> Term:
        """Return the sum, or the mean, of each ``width`` elements in a row."""
        count = term.expr.size // width
        expr = self.make_expr("groups", term.expr, width, size=count)
        return Term(term.factor / (width if mean else 1), expr, np.arange(count), term.numbers)

    # Elements.

    def _align(self, term: Term, other: Term) -> tuple[Expr, Expr, Ids]:
        """Return both as vectors that correspond element by element, and the ids of the result in these vectors."""
        ids, other_ids = np.broadcast_arrays(term.ids, other.ids)
        if other.expr is self.one:
            return term.expr, other.expr, ids
        if term.expr is self.one:
            return term.expr, other.expr, other_ids
        if term.expr.size == other.expr.size == ids.size and np.array_equal(ids, other_ids):
            return term.expr, other.expr, ids
        if other.expr.size > term.expr.size:
            follower, leader, ids = self._align(other, term)
            return leader, follower, ids

        # The larger vector is the leader: it keeps its order, and the elements of the other are taken in that order.
        leader, order, led_ids = self._order_by_leader(term.expr, ids.reshape(-1))
        return leader, self.take_elements(other.expr, other_ids.reshape(-1)[order]), led_ids.reshape(ids.shape)

    def _order_by_leader(self, leader: Expr, ids: Ids) -> tuple[Expr, Ids, Ids]:
        """Return the leading vector (``leader`` if ``ids`` hold each of its elements once, else the part that they
        take), the position of each of its elements in ``ids``, and ``ids`` as indices into it.
        """
        if np.array_equal(np.sort(ids), np.arange(leader.size)):
            return leader, np.argsort(ids), ids
        in_order = np.arange(ids.size)
        return self.take_elements(leader, ids), in_order, in_order

    def take_elements(self, expr: Expr, ids: Ids) -> Expr:
        """Return the elements ``ids`` of ``expr`` as a vector of their own."""
        if expr is self.one or (ids.size == expr.size and (ids == np.arange(expr.size)).all()):
            return expr
        if expr.kind == "product":
            return self.make_product({self.take_elements(e, ids): power for e, power in expr.powers.items()}, ids.size)
        count, rest = divmod(ids.size, expr.size)
        if count and not rest:
            indices = np.arange(ids.size)
            for kind, repeated in (("each", indices // count), ("tiled", indices % expr.size)):
                if (ids == repeated).all():
                    return self.make_expr(kind, expr, count, size=ids.size)
        if expr.kind == "part":
            return self.take_elements(expr.parts[0], expr.element_ids[ids])
        return self.make_expr("part", expr, np.ascontiguousarray(ids, np.int64).tobytes(), size=ids.size)

    def find_origin(self, expr: Expr, ids: Ids) -> tuple[Expr, Ids]:
        """Return the expression that a part or a repetition was made of, and its elements for the elements ``ids``."""
        while expr.kind in ("part", "each", "tiled"):
            inner = expr.parts[0]
            if expr.kind == "part":
                ids = expr.element_ids[ids]
            else:
                ids = ids // expr.parts[1] if expr.kind == "each" else ids % inner.size
            expr = inner
        return expr, ids


def _format_expr(expr: Expr, depth: int) -> str:
    """Return ``expr`` as text; expressions more than ``depth`` levels inside become "…" with their size."""
    if expr.kind == "product" and not expr.parts[0]:
        return "1"
    match expr.kind:
        case "input":
            return escape(expr.parts[0])
        case "weight":
            return f"w[{expr.size}]"
        case "mixed":
            return f"heads of {escape(expr.parts[1])}"
        case "unread":
            value = expr.parts[0]
            return f"unread {escape(value.label) if value.producer is None else value.producer.op.label}"
    if not depth:
        return f"…[{expr.size}]"
    match expr.kind, expr.parts:
        case "matrix", (weight, inner):
            rows, columns = weight.tensor.shape
            return f"M[{rows},{columns}]·{_format_expr(inner, depth - 1)}"
        case "sum", _:
            terms = (format_multiple(factor, _format_expr(e, depth - 1)) for e, factor in expr.terms.items())
            return f"({' + '.join(terms)})"
        case "function", (name, factor, inner):
            return f"{name.lower()}({format_multiple(factor, _format_expr(inner, depth - 1))})"
        case "product", _:
            return _format_product(expr, depth)
        case "groups", (inner, width):
            return f"sum{width}({_format_expr(inner, depth - 1)})"
        case ("each" | "tiled") as kind, (inner, count):
            return f"{kind}{count}({_format_expr(inner, depth - 1)})"
    return f"{expr.kind}({_format_expr(expr.parts[0], depth - 1)})"


def _format_product(expr: Expr, depth: int) -> str:
    """Return a product as text; a product that is divided by the root of a sum of squares is a norm."""

    def unwrap(e: Expr) -> Expr:
        return cast(Expr, e.parts[0]) if e.kind in ("each", "tiled") else e

    def format_power(text: str, power: float) -> str:
        if power == 1:
            return text
        return f"({text})^{power:g}" if "·" in text and not text.startswith("(") else f"{text}^{power:g}"

    powers = expr.powers
    roots = [e for e, p in powers.items() if p == -0.5 and any(term.kind == "groups" for term in unwrap(e).terms)]
    weights = [e for e, power in powers.items() if power == 1 and unwrap(e).kind == "weight"]
    normed = [e for e in powers if e not in (*roots, *weights)]
    factors = {e: format_power(_format_expr(e, depth - 1), power) for e, power in powers.items()}
    if len(roots) == 1 and normed:
        return "·".join([f"norm({'·'.join(factors[e] for e in normed)})", *(factors[e] for e in weights)])
    return "·".join(factors.values())


def format_multiple(factor: float, text: str) -> str:
    """Return ``factor`` times the expression ``text``, as text."""
    if text == "1":
        return f"{factor:.4g}"
    return text if factor == 1 else f"{factor:.4g}·{text}"
