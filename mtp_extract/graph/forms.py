"""What a value inside an attention may be. Each has exactly one of these forms; anything else is refused.

========  =============================================================================================================
cache     K or V: which elements of an input, times a number
rotated   the query: per element, a sum of number · query element · what the position decides
scored    a number for each row (a query head) and slot, or each row, in a stage: score, weights, or between
========  =============================================================================================================

Operators that move elements keep the form. What is done to a score on its way through the masks is a tree; it says
slot by slot what becomes of the score. Its leaves are numbers, and values that positions and masks decide::

    tree := SCORE | ("add", tree, leaf, ±1) | ("select", leaf, tree|leaf, tree|leaf)
          | ("window", tree, its window, what stands elsewhere) | ("within", tree, lowest, highest)
    leaf := number | ("leaf", value, its axis of slots or None)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mtp_extract.graph.expressions import Expr, Ids, Term, UnreadableError
from mtp_extract.graph.flat import Node, Value
from mtp_extract.graph.views import View

MaskTree = tuple[Any, ...]
SCORE: MaskTree = ("score",)

_MOST_TERMS = 64

CacheAxes = tuple[int | None, int, int]
"""Of a cache's shape, the axes of KV heads (None where there is one), slots and dimensions."""


def heads_and_width(shape: Sequence[int], axes: CacheAxes) -> tuple[int, int]:
    """KV heads and dimensions of a cache."""
    return 1 if axes[0] is None else shape[axes[0]], shape[axes[2]]


class SlotWindow(NamedTuple):
    """Some slots from where the position says: the number of its table of first slots, and how many."""

    table: int
    size: int


@dataclass(frozen=True, eq=False)
class Cache:
    """``factor`` × elements of the input ``name``; the axes of the input are the labels of ``view``."""

    name: str
    view: View
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Rotated:
    """Elements of a query: Σ over terms of ``number · query[element] · position value[by]``.

    Attributes:
        query: the expression of the normed query.
        terms: records of the three, ``terms["number"]`` being ``[*shape, terms]``; ``by`` 0 stands for the number 1.
    """

    query: Expr
    terms: npt.NDArray[np.void]

    @staticmethod
    def of(query: Expr, number: npt.NDArray[np.float64], element: Ids, by: Ids) -> Rotated:
        """Each ``[*shape, terms]``."""
        kinds = [(name, kind, number.shape[-1:]) for name, kind in (("number", "f8"), ("element", "i8"), ("by", "i8"))]
        terms = np.zeros(number.shape[:-1], kinds)
        terms["number"] = number
        terms["element"] = element
        terms["by"] = by
        return Rotated(query, terms)

    @property
    def number(self) -> npt.NDArray[np.float64]:
        return self.terms["number"]

    @property
    def element(self) -> Ids:
        return self.terms["element"]

    @property
    def by(self) -> Ids:
        return self.terms["by"]

    def times(self, numbers: npt.NDArray[np.float64] | float) -> Rotated:
        """The same, every number multiplied."""
        return Rotated.of(self.query, self.number * numbers, self.element, self.by)

    def plus(self, other: Rotated) -> Rotated:
        """The terms of both.

        Raises:
            UnreadableError: there are more than any rotation has.
        """
        if self.number.shape[-1] + other.number.shape[-1] > _MOST_TERMS:
            raise UnreadableError("adds elements of a query again and again")
        number = np.concatenate([self.number, other.number], -1)
        element, by = np.concatenate([self.element, other.element], -1), np.concatenate([self.by, other.by], -1)
        return Rotated.of(self.query, number, element, by)

    def with_terms(self, count: int) -> Rotated:
        """The same, with terms of 0 up to ``count``."""
        widths = [(0, 0)] * self.terms.ndim + [(0, count - self.number.shape[-1])]
        return Rotated.of(
            self.query, np.pad(self.number, widths), np.pad(self.element, widths), np.pad(self.by, widths)
        )


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
    tree: MaskTree


@dataclass(frozen=True, eq=False)
class Scored:
    """Numbers of ``scores`` in a stage; ``view`` has the labels "row" and, but where it is summed over, "slot".

    Attributes:
        stage: "score" (query · K, and what masks do to it), "weights" (SOFTMAX of that, or spelled out), or what stands
            between the two where a softmax is spelled out: :mod:`mtp_extract.graph.attention` lists them.
    """

    stage: str
    scores: Scores
    view: View

    @property
    def slot_axis(self) -> int:
        return self.view.only("slot")

    def within(self, lowest: float, highest: float) -> Scored:
        """The same on a grid from ``lowest`` to ``highest``, which cuts off what a mask wrote for what it hides."""
        if self.stage != "score" or self.scores.tree == SCORE:
            return self
        tree = ("within", self.scores.tree, lowest, highest)
        return replace(self, scores=replace(self.scores, tree=tree))


class OutputGuard(NamedTuple):
    """A selection between what heads mixed and 0, by whether a mask shows any slot.

    JAX attentions end in ``where(any(mask), mixed, 0)``, for rows that are hidden altogether.

    Attributes:
        condition: what the selection chooses by.
        reduced: the largest number of the mask, or whether any is true; ``condition`` is computed of this alone.
        mask: the leaf that is reduced, a number for each slot.
        keeps: the condition's truth that chooses what heads mixed.
    """

    condition: Value
    reduced: Value
    mask: MaskTree
    keeps: bool


@dataclass(frozen=True, eq=False)
class Attention:
    """What the o projection reads: rows of ``scores`` that took of V, the input ``value``.

    Attributes:
        axes: of V.
        window: the slots whose weights alone meet V; None for all.
        guard: what chooses between the result and 0; None for nothing.
    """

    scores: Scores
    value: str
    axes: CacheAxes
    window: SlotWindow | None
    guard: OutputGuard | None = None

    @property
    def mask_values(self) -> list[Value]:
        """The values that positions and masks decide, of its scores and of its output guard."""
        guards = [] if self.guard is None else [self.guard.mask[1]]
        return list({id(value): value for value in (*leaves_of(self.scores.tree), *guards)}.values())

    @property
    def all_windows(self) -> list[SlotWindow]:
        """Those of its scores and of its weights."""
        return sorted({part for part in (*parts_of(self.scores.tree), self.window) if isinstance(part, SlotWindow)})


Inside = Cache | Rotated | Scored
Form = Inside | Term
"""Of a value that an activation or a cache decides."""


def form_shape(form: Form) -> tuple[int, ...]:
    if isinstance(form, Cache | Scored):
        return form.view.shape
    return form.terms.shape if isinstance(form, Rotated) else form.ids.shape


def broadcast_shape(node: Node, operands: Sequence[Form | None]) -> tuple[int, ...]:
    """The shape that ``operands`` of ``node`` have together."""
    pairs = zip(operands, node.inputs, strict=True)
    return np.broadcast_shapes(
        *(form_shape(f) if f is not None else tuple(v.tensor.shape) for f, v in pairs if v is not None)
    )


def parts_of(tree: MaskTree) -> Iterator[Value | SlotWindow]:
    """The values that positions and masks decide, in a tree, and its windows."""
    for part in tree[1:]:
        if isinstance(part, Value | SlotWindow):
            yield part
        elif isinstance(part, tuple):
            yield from parts_of(part)


def leaves_of(tree: MaskTree) -> list[Value]:
    """The values that positions and masks decide, each once."""
    return list({id(part): part for part in parts_of(tree) if isinstance(part, Value)}.values())
