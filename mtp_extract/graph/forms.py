"""What a value inside an attention may be. Each has exactly one of these forms; anything else is refused.

========  =============================================================================================================
cache     K or V: which elements of an input, times a number
rotated   the query: per element, a sum of number · query element · what the position decides
scored    a number for each row (a query head) and slot, or each row, in a stage: score, weights, or between
========  =============================================================================================================

Operators that move elements keep the form. What is done to a score on its way through the masks is a tree; it says
slot by slot what becomes of the score. Its leaves are numbers, and values that positions and masks decide::

    tree := SCORE | ("add", tree, leaf, ±1) | ("times" or "over", tree, leaf) | ("select", leaf, tree|leaf, tree|leaf)
          | ("window", tree, number of its table of first slots, slots, what stands elsewhere)
    leaf := number | ("leaf", value, its axis of slots or None)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.graph.expressions import Expr, Ids, Term, UnreadableError
from mtp_extract.graph.flat import Value
from mtp_extract.graph.views import View

Tree = tuple[Any, ...]
SCORE: Tree = ("score",)

_MOST_TERMS = 64

CacheAxes = tuple[int | None, int, int]
"""Of a cache's shape, the axes of KV heads (None where there is one), slots and dimensions."""


@dataclass(frozen=True, eq=False)
class Cache:
    """``factor`` × elements of the input ``name`` + ``added``; the axes of the input are the labels of ``view``."""

    name: str
    view: View
    factor: float = 1.0
    added: float = 0.0


@dataclass(frozen=True, eq=False)
class Rotated:
    """Elements of a query: Σ over the last axis of ``number · query[element] · position value[by]``.

    Attributes:
        query: the expression of the normed query.
        number, element, by: ``[*shape, terms]``; ``by`` 0 stands for the number 1.
    """

    query: Expr
    number: npt.NDArray[np.float64]
    element: Ids
    by: Ids

    @property
    def shape(self) -> tuple[int, ...]:
        return self.element.shape[:-1]

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.number, self.element, self.by

    def moved(self, move: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Rotated:
        """The same numbers with their elements moved."""
        return Rotated(self.query, *(np.stack([move(a[..., t]) for t in range(a.shape[-1])], -1) for a in self.arrays))

    def plus(self, other: Rotated, sign: float = 1.0) -> Rotated:
        """The terms of both.

        Raises:
            UnreadableError: there are more than any rotation has.
        """
        if self.number.shape[-1] + other.number.shape[-1] > _MOST_TERMS:
            raise UnreadableError("adds elements of a query again and again")
        signed = sign * other.number, other.element, other.by
        return Rotated(self.query, *(np.concatenate(pair, -1) for pair in zip(self.arrays, signed, strict=True)))

    def with_terms(self, count: int) -> Rotated:
        """The same, with terms of 0 up to ``count``."""
        widths = [(0, 0)] * len(self.shape) + [(0, count - self.number.shape[-1])]
        return Rotated(self.query, *(np.pad(a, widths) for a in self.arrays))


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of some rows, each a rotated query head against one head of K.

    Attributes:
        key: the input that holds K.
        axes: of K.
        head: per row, the KV head.
        rotated: per row and dimension of K, ``[rows, dimensions, terms]``.
        tree: what masks do to them.
    """

    key: str
    axes: CacheAxes
    head: Ids
    rotated: Rotated
    tree: Tree


@dataclass(frozen=True, eq=False)
class Scored:
    """Numbers of ``scores`` in a stage; ``view`` has the labels "row" and, but where it is summed over, "slot".

    Attributes:
        stage: "score" (query · K, and what masks do to it), "weights" (SOFTMAX of that, or spelled out), or what stands
            between the two where a softmax is spelled out: :mod:`mtp_extract.graph.scoring` lists them.
    """

    stage: str
    scores: Scores
    view: View

    @property
    def slot_axis(self) -> int:
        return self.view.only("slot")


@dataclass(frozen=True, eq=False)
class Attention:
    """What the o projection reads: rows of ``scores`` that took of V, the input ``value``.

    Attributes:
        axes: of V.
        windows: the parts of the slots whose weights alone meet V: number of the table of first slots, and slots.
    """

    scores: Scores
    value: str
    axes: CacheAxes
    windows: frozenset[tuple[int, int]]


Inside = Cache | Rotated | Scored
Form = Inside | Term
"""Of a value that an activation or a cache decides."""


def shape_of(form: Form) -> tuple[int, ...]:
    if isinstance(form, Cache | Scored):
        return form.view.shape
    return form.shape if isinstance(form, Rotated) else tuple(form.ids.shape)


def leaves_of(tree: Tree) -> Iterator[Value]:
    """The values that positions and masks decide, in a tree."""
    if tree[0] == "leaf":
        yield tree[1]
    else:
        for part in tree[1:]:
            if isinstance(part, tuple):
                yield from leaves_of(part)


def windows_of(tree: Tree) -> Iterator[tuple[int, int]]:
    """The windows of a tree: number of the table of first slots, and slots."""
    if tree[0] == "window":
        yield tree[2], tree[3]
    for part in tree[1:]:
        if isinstance(part, tuple) and part[0] != "leaf":
            yield from windows_of(part)
