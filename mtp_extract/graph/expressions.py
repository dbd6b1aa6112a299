"""Expressions of the activations, in one canonical form: equal functions are the same object.

Outside of attentions every value of a drafter is ``factor × expression``, its elements in some order. Expressions are
products of powers, sums, sums over groups, products with matrices, a few functions, and parts of these. Each is made
once, so "computes the same" is ``is``, and an expression can be taken apart from its outputs to its inputs.
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
"""No number of a drafter is this many times larger or smaller than one of ordinary size."""

_DEEPEST_SHOWN = 2
_LONGEST_SHOWN = 48

Ids = npt.NDArray[np.int64]
"""Numbers of elements, in the shape of a tensor."""

Doubles = npt.NDArray[np.float64]


class UnreadableError(Exception):
    """An operator does what no drafter does; the message follows the operator's name."""


@dataclass(frozen=True, eq=False)
class Expr:
    """A function of the activations: a vector of ``size``. Made by :class:`Expressions` alone.

    ==========  =====================================================================================================
    kind        parts
    ==========  =====================================================================================================
    input       the name of the signature's input
    weight      the :class:`Value` of a constant vector
    matrix      the :class:`Value` of a constant matrix ``[out, in]``, what it multiplies
    product     a frozenset of (expression, power); the empty one is the number 1
    sum         a frozenset of (expression, factor)
    groups      expression, width: the sum of every ``width`` elements
    function    name, factor, expression: the function of factor × expression, element by element
    each        expression, times: every element ``format_multiple`` in a row
    tiled       expression, times: all elements, ``format_multiple`` in a row
    part        expression, the bytes of the int64 numbers of its elements
    mixed       the scores of an attention, the name of V, its axes and its window: what heads mix of V
    unread      the :class:`Value` of what is not looked into, and why
    ==========  =====================================================================================================
    """

    kind: str
    # Shown, every expression would be a tree of all those it is made of.
    parts: tuple[Any, ...] = field(repr=False)
    size: int
    number: int  # in the order in which they were made, so that sets of them have an order

    def __str__(self) -> str:
        """As algebra, outermost first and shortened where it goes deep: ``norm(0.5·M[64,128]·activations)·w[64]``."""
        text = _format_expr(self, _DEEPEST_SHOWN)
        return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 1]}…"

    @property
    def terms(self) -> dict[Expr, float]:
        """Of a sum, the factor of each expression."""
        return self._sort_parts("sum")

    @property
    def powers(self) -> dict[Expr, float]:
        """Of a product, the power of each expression."""
        return self._sort_parts("product")

    def _sort_parts(self, kind: str) -> dict[Expr, float]:
        if self.kind != kind:
            return {self: 1.0}
        return dict(sorted(self.parts[0], key=lambda part: part[0].number))

    @property
    def chosen(self) -> Ids:
        """Of a part, the numbers of its elements."""
        return np.frombuffer(self.parts[1], np.int64)


@dataclass(frozen=True)
class Term:
    """``factor × expr``, its elements in the order of ``ids``; ``numbers`` are the constants that make the factor."""

    factor: float
    expr: Expr
    ids: Ids
    numbers: tuple[Value, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether it is all elements in order."""
        return self.ids.size == self.expr.size and bool((self.ids.reshape(-1) == np.arange(self.expr.size)).all())


class Expressions:
    """All expressions of a graph."""

    def __init__(self) -> None:
        self.made: dict[tuple[Any, ...], Expr] = {}
        self.one = self.product({}, 1)

    def expr(self, kind: str, *parts: Any, size: int) -> Expr:
        key = kind, *parts
        if key not in self.made:
            self.made[key] = Expr(kind, parts, size, len(self.made))
        return self.made[key]

    def vector(self, kind: str, *parts: Any, size: int) -> Term:
        """An expression, its elements in order."""
        return Term(1.0, self.expr(kind, *parts, size=size), np.arange(size))

    def product(self, powers: Mapping[Expr, float], size: int) -> Expr:
        remaining = {expr: power for expr, power in powers.items() if power}
        if list(remaining.values()) == [1]:
            return next(iter(remaining))
        return self.expr("product", frozenset(remaining.items()), size=size)

    def number(self, number: float, *constants: Value) -> Term:
        """A number, and the constants that it is made of."""
        return Term(number, self.one, np.zeros((), np.int64), constants)

    # Constants.

    def is_constant(self, form: object) -> bool:
        return isinstance(form, Term) and (form.expr is self.one or form.expr.kind == "weight")

    def number_of(self, form: object) -> float | None:
        """The one number that a constant is; None for anything else."""
        return form.factor if isinstance(form, Term) and form.expr is self.one else None

    def numbers_of(self, graph: FlatGraph, term: Term) -> Doubles:
        """What a constant is, in its own shape."""
        if term.expr is self.one:
            return np.full(term.ids.shape, term.factor)
        stored = graph.floats(term.expr.parts[0]).astype(np.float64)
        return np.asarray(term.factor * stored[term.ids])

    # Arithmetic, element by element.

    def multiply(self, term: Term, other: Term) -> Term:
        first, right, ids = self._align(term, other)
        powers = first.powers
        for expr, power in right.powers.items():
            powers[expr] = powers.get(expr, 0.0) + power
        expr = self.product(powers, max(first.size, right.size))
        if expr is self.one and first is not self.one:
            raise UnreadableError("divides a value by itself")
        # The constants of a product are those that multiply all of it.
        numbers = (*term.numbers, *other.numbers) if self.one in (first, right) else ()
        return Term(term.factor * other.factor, expr, ids, numbers)

    def add(self, term: Term, other: Term, sign: float = 1.0) -> Term:
        if other.factor == 0 and other.expr is self.one:
            return replace(term, ids=np.broadcast_arrays(term.ids, other.ids)[0])
        first, right, ids = self._align(term, other)
        factors = {first: term.factor}
        factors[right] = factors.get(right, 0.0) + sign * other.factor
        if not all(factor and math.isfinite(factor) for factor in factors.values()):
            raise UnreadableError("adds nothing or no number, or takes all of a value away")
        if len(factors) == 1:
            return Term(factors[first], first, ids)
        return Term(1.0, self.expr("sum", frozenset(factors.items()), size=max(first.size, right.size)), ids)

    def power(self, term: Term, exponent: float) -> Term:
        """A root or a quotient only of what is above 0: a mean of squares plus an epsilon."""
        above = term.factor > 0 and all(self.is_positive(expr) for expr in term.expr.powers)
        if not exponent or ((exponent != int(exponent) or exponent < 0) and not above):
            raise UnreadableError("takes a root or a quotient of what may be negative")
        powers = {expr: power * exponent for expr, power in term.expr.powers.items()}
        return Term(term.factor**exponent, self.product(powers, term.expr.size), term.ids)

    def is_positive(self, expr: Expr) -> bool:
        """Whether it is a sum of even powers and a positive number."""
        if expr.kind in ("each", "part"):
            return self.is_positive(expr.parts[0])
        squares = [
            term
            for term in expr.terms
            if term.kind == "groups" and all(p > 0 and p % 2 == 0 for p in term.parts[0].powers.values())
        ]
        others = [term for term in expr.terms if term not in squares]
        return others == [self.one] and all(factor > 0 for factor in expr.terms.values())

    def groups(self, term: Term, width: int, *, mean: bool) -> Term:
        """The sum, or mean, of every ``width`` elements."""
        count = term.expr.size // width
        expr = self.expr("groups", term.expr, width, size=count)
        return Term(term.factor / (width if mean else 1), expr, np.arange(count), term.numbers)

    # Elements.

    def _align(self, term: Term, other: Term) -> tuple[Expr, Expr, Ids]:
        """Both as vectors of the same size, element by element, and the order of the result's elements in them."""
        first, right = np.broadcast_arrays(term.ids, other.ids)
        if other.expr is self.one:
            return term.expr, other.expr, first
        if term.expr is self.one:
            return term.expr, other.expr, right
        if term.expr.size == other.expr.size == first.size and np.array_equal(first, right):
            return term.expr, other.expr, first
        if other.expr.size > term.expr.size:
            follower, leader, ids = self._align(other, term)
            return leader, follower, ids
        # The one of more elements leads: its elements stay in their order, and the other's are taken in that order.
        leader, order, ids = self._order_by_leader(term.expr, first.reshape(-1))
        return leader, self.part(other.expr, right.reshape(-1)[order]), ids.reshape(first.shape)

    def _order_by_leader(self, leader: Expr, ids: Ids) -> tuple[Expr, Ids, Ids]:
        """The vector that ``ids`` are elements of, per element of it where it stands in ``ids``, and the other way
        round; of one that does not have every element once, a vector of its own.
        """
        if np.array_equal(np.sort(ids), np.arange(leader.size)):
            return leader, np.argsort(ids), ids
        in_order = np.arange(ids.size)
        return self.part(leader, ids), in_order, in_order

    def part(self, expr: Expr, ids: Ids) -> Expr:
        """Elements ``ids`` of ``expr``, as a vector of its own."""
        if expr is self.one or (ids.size == expr.size and (ids == np.arange(expr.size)).all()):
            return expr
        if expr.kind == "product":
            return self.product({self.part(e, ids): power for e, power in expr.powers.items()}, ids.size)
        count, odd = divmod(ids.size, expr.size)
        if count and not odd:
            places = np.arange(ids.size)
            for kind, repeated in (("each", places // count), ("tiled", places % expr.size)):
                if (ids == repeated).all():
                    return self.expr(kind, expr, count, size=ids.size)
        if expr.kind == "part":
            return self.part(expr.parts[0], expr.chosen[ids])
        return self.expr("part", expr, np.ascontiguousarray(ids, np.int64).tobytes(), size=ids.size)

    def origin(self, expr: Expr, ids: Ids) -> tuple[Expr, Ids]:
        """The expression whose elements the elements ``ids`` of a part are, and which."""
        while expr.kind in ("part", "each", "tiled"):
            inner, times = expr.parts[0], expr.parts[1]
            ids = expr.chosen[ids] if expr.kind == "part" else ids // times if expr.kind == "each" else ids % inner.size
            expr = inner
        return expr, ids


def _format_expr(expr: Expr, depth: int) -> str:
    """``expr`` as text; what lies more than ``depth`` steps inside is "…" with its size."""
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
    """A product; over the root of a sum of squares it is a norm."""

    def vector(e: Expr) -> Expr:
        return cast(Expr, e.parts[0]) if e.kind in ("each", "tiled") else e

    def raised(text: str, power: float) -> str:
        if power == 1:
            return text
        return f"({text})^{power:g}" if "·" in text and not text.startswith("(") else f"{text}^{power:g}"

    powers = expr.powers
    roots = [e for e, p in powers.items() if p == -0.5 and any(term.kind == "groups" for term in vector(e).terms)]
    weights = [e for e, power in powers.items() if power == 1 and vector(e).kind == "weight"]
    normed = [e for e in powers if e not in (*roots, *weights)]
    factors = {e: raised(_format_expr(e, depth - 1), power) for e, power in powers.items()}
    if len(roots) == 1 and normed:
        return "·".join([f"norm({'·'.join(factors[e] for e in normed)})", *(factors[e] for e in weights)])
    return "·".join(factors.values())


def format_multiple(factor: float, text: str) -> str:
    """``factor`` times what ``text`` says, as text."""
    if text == "1":
        return f"{factor:.4g}"
    return text if factor == 1 else f"{factor:.4g}·{text}"
