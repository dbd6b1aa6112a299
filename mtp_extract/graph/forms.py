"""The forms that values inside an attention may have; any other value is refused.

=======  ==============================================================================================================
cache    K or V: elements of an input, times a number
query    each element a sum of number · query element · element of a table of the position
score    a number for each row (a query head) and slot, or for each row, at a stage: score, weights, or between
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
"""Nodes of a mask tree; Google's files and those of exporters have at most six."""

CacheAxes = tuple[int | None, int, int]
"""Axes of a cache's shape: KV heads (None if there is only one), slots and dimensions."""


def read_heads_and_width(shape: Sequence[int], axes: CacheAxes) -> tuple[int, int]:
    """Return how many KV heads a cache has, and how many dimensions each."""
    return 1 if axes[0] is None else shape[axes[0]], shape[axes[2]]


@dataclass(frozen=True, eq=False)
class Cache:
    """Elements of the input ``name`` × ``factor``; the labels of ``view`` are the axes of the input."""

    name: str
    view: View
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class QueryTerms:
    """Elements of a query, each the sum over terms of ``number · query[element] · table of the position[by]``."""

    query: Expr  # the expression of the normed query
    # Records ``[*shape]`` of number, element and by, each of the three ``[terms]``; ``by`` 0 stands for the number 1
    terms: npt.NDArray[np.void]

    @staticmethod
    def of(query: Expr, number: Doubles, element: Ids, by: Ids) -> QueryTerms:
        """Join the arrays, each ``[*shape, terms]``, to records."""
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
        return QueryTerms.of(self.query, self.number * numbers, self.element, self.by)

    def add(self, other: QueryTerms) -> QueryTerms:
        """Return the sum: the terms of both. Raise UnreadableError if these are more than any rotation has."""
        if self.number.shape[-1] + other.number.shape[-1] > _MOST_TERMS:
            raise UnreadableError(f"adds more than {_MOST_TERMS} elements of a query")
        number = np.concatenate([self.number, other.number], -1)
        element = np.concatenate([self.element, other.element], -1)
        return QueryTerms.of(self.query, number, element, np.concatenate([self.by, other.by], -1))

    def pad_terms(self, count: int) -> QueryTerms:
        """Add terms of 0, up to ``count`` of them."""
        widths = [(0, 0)] * self.terms.ndim + [(0, count - self.number.shape[-1])]
        return QueryTerms.of(
            self.query, np.pad(self.number, widths), np.pad(self.element, widths), np.pad(self.by, widths)
        )


@dataclass(frozen=True, eq=False)
class ScoreRows:
    """Rows of scores, each of a rotated query head and one head of K."""

    key: str  # the input that holds K
    axes: CacheAxes  # of K
    head: Ids  # the KV head of each row
    rotated: QueryTerms  # the query of each row, by dimensions of K: ``[rows, dimensions, terms]``
    tree: MaskTree  # what masks do to the scores


@dataclass(frozen=True, eq=False)
class ScoreView:
    """Numbers of ``scores`` at a stage; ``view`` has the labels "row" and, unless slots were reduced, "slot"."""

    # "score" (query · K, with masks), "weights" (the result of the softmax), or a step between them if the softmax is
    # spelled out: :mod:`mtp_extract.graph.scores` lists them
    stage: str
    scores: ScoreRows
    view: View

    @property
    def slot_axis(self) -> int:
        return self.view.find_axis("slot")

    def replace_tree(self, tree: MaskTree, view: View) -> ScoreView:
        """Return the score with another mask tree and view.

        Raises:
            UnsupportedError: the tree is larger than any drafter's. The time to compute its effect is proportional to
                its size, which doubles with each selection between a score and itself.
        """
        if tree.size > _MOST_MASKS:
            raise UnsupportedError(
                f"Expected at most {_MOST_MASKS} numbers, masks and operators between a score and its softmax, found "
                f"{tree.size}, each counted wherever it is used. Please report the file."
            )
        return ScoreView("score", replace(self.scores, tree=tree), view)

    def clip(self, lowest: float, highest: float) -> ScoreView:
        """Return the score after quantization to a range; before any mask, the mask tree stays as it is."""
        if self.stage != "score" or isinstance(self.scores.tree, Score):
            return self
        return self.replace_tree(Clipped(self.scores.tree, lowest, highest), self.view)


class OutputGuard(NamedTuple):
    """A selection between the output of an attention and 0, by whether a mask shows any slot.

    JAX attentions end in ``where(any(mask), output, 0)``, for rows that the mask hides completely.
    """

    condition: Value
    reduced: Value  # the largest number of the mask, or whether any is true; ``condition`` depends on nothing else
    mask: MaskValue  # a number for each slot
    keeps: bool  # the value of ``condition`` that selects the output of the attention


@dataclass(frozen=True, eq=False)
class Attention:
    """What the o projection reads: softmax(``scores``) · V."""

    scores: ScoreRows
    value: str  # the input that holds V
    axes: CacheAxes  # of V
    window: SlotWindow | None  # the slots whose weights are multiplied by V; None for all
    guard: OutputGuard | None = None

    @property
    def mask_values(self) -> list[Value]:
        """The values that positions and masks decide: those of the mask tree, and the mask of the output guard."""
        guards = [] if self.guard is None else [self.guard.mask.value]
        return list({id(value): value for value in (*self.scores.tree.values, *guards)}.values())

    @property
    def all_windows(self) -> list[SlotWindow]:
        return sorted(self.scores.tree.windows | ({self.window} if self.window is not None else set()))


Form = Cache | QueryTerms | ScoreView | Term
"""The form of a value that depends on an activation or a cache, or of a constant that is combined with one."""

Operand = Form | Value
"""An operand as a form; or as the value itself if positions and masks decide it, or if it is a constant without a form,
which is large or holds no numbers.
"""


def get_operand_shape(operand: Operand) -> tuple[int, ...]:
    if isinstance(operand, Cache | ScoreView):
        return operand.view.shape
    if isinstance(operand, QueryTerms):
        return operand.terms.shape
    return operand.ids.shape if isinstance(operand, Term) else tuple(operand.tensor.shape)


def broadcast_shape(operands: Sequence[Operand]) -> tuple[int, ...]:
    return np.broadcast_shapes(*map(get_operand_shape, operands))


@dataclass(eq=False)
class ReadGraph:
    """The form of every value of ``graph`` that has been read, and where expressions and attentions are computed."""

    graph: FlatGraph
    # If False, an operator that cannot be read is no error but an expression "unread", and so is any attention.
    strict: bool = True
    expressions: Expressions = field(default_factory=Expressions)
    # ``id`` of a value → its form; constants are added when they are asked for
    forms: dict[int, Form] = field(default_factory=dict)
    # Expression → the first value that holds all its elements, and its factor there
    first: dict[Expr, tuple[Value, float]] = field(default_factory=dict)
    # Expression → values that hold all its elements times constants, in the order of the graph
    scaled: dict[Expr, list[tuple[Term, Value]]] = field(default_factory=dict)
    products: dict[Expr, Node] = field(default_factory=dict)  # expression of a product with a matrix → its operator
    attentions: dict[Expr, Attention] = field(
        default_factory=dict
    )  # expression of an attention's output → how it is computed
    # Activations of other types than FLOAT32, and weights that an operator rounds
    rounded: list[Value] = field(default_factory=list)
    current: Node | None = None  # the operator being read, or the refused one; None at the end
    refusal: MtpExtractError | None = None  # why reading ended before the last operator

    @cached_property
    def positions(self) -> Positions:
        """The tables of the position, and the slots of the caches. Raises UnsupportedError if there are too many."""
        return Positions(self.graph)

    def require_all(self) -> ReadGraph:
        """Return itself if the whole graph was read, else raise :attr:`refusal`."""
        if self.refusal is not None:
            raise self.refusal
        return self
