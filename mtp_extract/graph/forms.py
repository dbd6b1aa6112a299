"""What a value inside an attention may be. Each has exactly one of these forms; anything else is refused.

=======  ==============================================================================================================
cache    K or V: which elements of an input, times a number
query    per element, a sum of number · query element · what the position decides
score    a number for each row (a query head) and slot, or each row, in a stage: score, weights, or between
=======  ==============================================================================================================

Operators that move elements keep the form. What is done to a score on its way through the masks is a tree
(:mod:`mtp_extract.graph.mask_trees`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import MtpExtractError, UnsupportedError
from mtp_extract.graph.expressions import Doubles, Expr, Expressions, Ids, Term, UnreadableError
from mtp_extract.graph.flat import FlatGraph, Node, Value
from mtp_extract.graph.mask_trees import Clipped, MaskTree, MaskValue, Score, SlotWindow
from mtp_extract.graph.positions import Positions
from mtp_extract.graph.views import View

_MOST_TERMS = 64
_MOST_MASKS = 256
"""Nodes of the tree of what masks do to a score; those of Google's structure and of exporters have at most six."""

CacheAxes = tuple[int | None, int, int]
"""Of a cache's shape, the axes of KV heads (None where there is one), slots and dimensions."""


def heads_and_width(shape: Sequence[int], axes: CacheAxes) -> tuple[int, int]:
    """KV heads and dimensions of a cache."""
    return 1 if axes[0] is None else shape[axes[0]], shape[axes[2]]


@dataclass(frozen=True, eq=False)
class Cache:
    """``factor`` × elements of the input ``name``; the axes of the input are the labels of ``view``."""

    name: str
    view: View
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class QueryTerms:
    """Elements of a query: Σ over terms of ``number · query[element] · position value[by]``."""

    query: Expr  # the expression of the normed query
    # Records of the three, ``terms["number"]`` being ``[*shape, terms]``; ``by`` 0 stands for the number 1
    terms: npt.NDArray[np.void]

    @staticmethod
    def of(query: Expr, number: Doubles, element: Ids, by: Ids) -> QueryTerms:
        """Each ``[*shape, terms]``."""
        kinds = [(name, kind, number.shape[-1:]) for name, kind in (("number", "f8"), ("element", "i8"), ("by", "i8"))]
        terms = np.zeros(number.shape[:-1], kinds)
        terms["number"] = number
        terms["element"] = element
        terms["by"] = by
        return QueryTerms(query, terms)

    @property
    def number(self) -> Doubles:
        return self.terms["number"]

    @property
    def element(self) -> Ids:
        return self.terms["element"]

    @property
    def by(self) -> Ids:
        return self.terms["by"]

    def multiply(self, numbers: Doubles | float) -> QueryTerms:
        """The same, every number multiplied."""
        return QueryTerms.of(self.query, self.number * numbers, self.element, self.by)

    def add(self, other: QueryTerms) -> QueryTerms:
        """The terms of both; an UnreadableError if there are more than any rotation has."""
        if self.number.shape[-1] + other.number.shape[-1] > _MOST_TERMS:
            raise UnreadableError("adds elements of a query again and again")
        number = np.concatenate([self.number, other.number], -1)
        element = np.concatenate([self.element, other.element], -1)
        return QueryTerms.of(self.query, number, element, np.concatenate([self.by, other.by], -1))

    def pad_terms(self, count: int) -> QueryTerms:
        """The same, with terms of 0 up to ``count``."""
        widths = [(0, 0)] * self.terms.ndim + [(0, count - self.number.shape[-1])]
        return QueryTerms.of(
            self.query, np.pad(self.number, widths), np.pad(self.element, widths), np.pad(self.by, widths)
        )


@dataclass(frozen=True, eq=False)
class ScoreRows:
    """The scores of some rows, each a rotated query head against one head of K."""

    key: str  # the input that holds K
    axes: CacheAxes  # of K
    head: Ids  # per row, the KV head
    rotated: QueryTerms  # per row and dimension of K, ``[rows, dimensions, terms]``
    tree: MaskTree  # what masks do to them


@dataclass(frozen=True, eq=False)
class ScoreView:
    """Numbers of ``scores`` in a stage; ``view`` has the labels "row" and, but where it is summed over, "slot"."""

    # "score" (query · K, and what masks do to it), "weights" (SOFTMAX of that, or spelled out), or what stands
    # between the two where a softmax is spelled out: :mod:`mtp_extract.graph.scores` lists them
    stage: str
    scores: ScoreRows
    view: View

    @property
    def slot_axis(self) -> int:
        return self.view.only("slot")

    def replace_tree(self, tree: MaskTree, view: View) -> ScoreView:
        """A score of which masks make ``tree``.

        Raises:
            UnsupportedError: it is larger than any drafter's: where each selection is between one score and itself, the
                time doubles with each.
        """
        if tree.size > _MOST_MASKS:
            raise UnsupportedError(
                f"Expected at most {_MOST_MASKS} numbers, masks and operators between a score and its softmax, found "
                f"{tree.size}, each counted wherever it is used. Please report the file."
            )
        return ScoreView("score", replace(self.scores, tree=tree), view)

    def clipped(self, lowest: float, highest: float) -> ScoreView:
        """The same on a grid from ``lowest`` to ``highest``; scores that no mask has met are rounded alone."""
        if self.stage != "score" or isinstance(self.scores.tree, Score):
            return self
        return self.replace_tree(Clipped(self.scores.tree, lowest, highest), self.view)


class OutputGuard(NamedTuple):
    """A selection between what heads mixed and 0, by whether a mask shows any slot.

    JAX attentions end in ``where(any(mask), mixed, 0)``, for rows that are hidden altogether.
    """

    condition: Value  # what the selection chooses by
    reduced: Value  # the largest number of the mask, or whether any is true; ``condition`` is computed of this alone
    mask: MaskValue  # what is reduced, a number for each slot
    keeps: bool  # the condition's truth that chooses what heads mixed


@dataclass(frozen=True, eq=False)
class Attention:
    """What the o projection reads: rows of ``scores`` that took of V, the input ``value``."""

    scores: ScoreRows
    value: str
    axes: CacheAxes  # of V
    window: SlotWindow | None  # the slots whose weights alone meet V; None for all
    guard: OutputGuard | None = None  # what chooses between the result and 0; None for nothing

    @property
    def mask_values(self) -> list[Value]:
        """The values that positions and masks decide, of its scores and of its output guard."""
        guards = [] if self.guard is None else [self.guard.mask.value]
        return list({id(value): value for value in (*self.scores.tree.values, *guards)}.values())

    @property
    def all_windows(self) -> list[SlotWindow]:
        """Those of its scores and of its weights."""
        return sorted(self.scores.tree.windows | ({self.window} if self.window is not None else set()))


Form = Cache | QueryTerms | ScoreView | Term
"""Of a value that an activation or a cache decides, or of a constant that meets one."""

Operand = Form | Value
"""Of an operator: a form, or the value itself where positions and masks decide it, or it is a constant without a form:
one that is large, or that holds no numbers.
"""


def operand_shape(operand: Operand) -> tuple[int, ...]:
    if isinstance(operand, Cache | ScoreView):
        return operand.view.shape
    if isinstance(operand, QueryTerms):
        return operand.terms.shape
    return operand.ids.shape if isinstance(operand, Term) else tuple(operand.tensor.shape)


def broadcast_shape(operands: Sequence[Operand]) -> tuple[int, ...]:
    """The shape that ``operands`` have together."""
    return np.broadcast_shapes(*map(operand_shape, operands))


# What has been read of a graph: the form of each value, and where expressions and attentions stand.


@dataclass(eq=False)
class ReadGraph:
    """What every value of ``graph`` is, as far as it was read."""

    graph: FlatGraph
    # Whether what cannot be read is refused. If not, it is an expression "unread", and attentions are such.
    strict: bool = True
    expressions: Expressions = field(default_factory=Expressions)
    # By ``id`` of a value, its form; constants that were asked for are among them
    forms: dict[int, Form] = field(default_factory=dict)
    # Expression → the first value that is all of it, and the factor there
    first: dict[Expr, tuple[Value, float]] = field(default_factory=dict)
    # Expression → values that are all of it times constants, in the order of the graph
    scaled: dict[Expr, list[tuple[Term, Value]]] = field(default_factory=dict)
    products: dict[Expr, Node] = field(default_factory=dict)  # expression of a product with a matrix → its operator
    attentions: dict[Expr, Attention] = field(default_factory=dict)  # expression of what heads mixed → how
    # Activations that the file holds in other types than FLOAT32, and weights that an operator rounds
    rounded: list[Value] = field(default_factory=list)
    current: Node | None = None  # the operator that is being read, or was when it was refused; None where all were read
    refusal: MtpExtractError | None = None  # why the reading ended before the last operator; None where it did not

    @cached_property
    def positions(self) -> Positions:
        """What the position alone decides, and the slots of the caches; an UnsupportedError if too many."""
        return Positions(self.graph)

    def require_all(self) -> ReadGraph:
        """Itself, read to its end; else its ``refusal`` is raised."""
        if self.refusal is not None:
            raise self.refusal
        return self
