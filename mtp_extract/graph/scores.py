"""From queries to weights: queries are moved, scaled and rotated; masks, windows and a softmax follow query · K."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtp_extract.graph.call import REDUCTIONS, SELECTIONS, Call, activation_scale, axis_of, holds_codes, ints
from mtp_extract.graph.evaluate import evaluate, inputs_of, moved
from mtp_extract.graph.expressions import Ids, Term, UnreadableError
from mtp_extract.graph.flat import INPUT_POS, Depends, FlatGraph, Node, Value
from mtp_extract.graph.forms import (
    Cache,
    CacheAxes,
    Operand,
    QueryTerms,
    ReadGraph,
    ScoreRows,
    ScoreView,
    broadcast_shape,
)
from mtp_extract.graph.mask_trees import (
    SCORE,
    Add,
    InWindow,
    Leaf,
    MaskNumber,
    MaskTree,
    MaskValue,
    Score,
    Select,
    SlotWindow,
)
from mtp_extract.graph.views import View
from mtp_extract.litertlm.storage import FLOAT_TYPES, Floats
from mtp_extract.litertlm.tflite import TensorType

_MOST_NUMBERS = 1 << 20

_STAGES: dict[tuple[str | float | None, ...], str] = {
    ("REDUCE_MAX", "score", None): "largest",
    ("SUB", "score", "largest"): "shifted",
    ("EXP", "shifted"): "raised",
    ("SUM", "raised", None): "total",
    ("DIV", "raised", "total"): "weights",
    ("DIV", 1.0, "total"): "share",
    ("MUL", "raised", "share"): "weights",
    ("MUL", "share", "raised"): "weights",
    ("EQUAL", "score", -np.inf): "hidden",
    ("LOGICAL_NOT", "hidden"): "seen",
    ("REDUCE_ANY", "seen", None): "some",
    ("LOGICAL_NOT", "some"): "none",
    # Where a row sees no slot, its weights are no numbers; such rows are not asked for.
    ("SELECT_V2", "none", 0.0, "weights"): "weights",
}
"""An operator, and of its operands the stages and numbers (None: axes) → the stage of its result."""


# Queries.


def read_query_terms(reading: ReadGraph, operand: Operand) -> QueryTerms:
    """Elements of a query."""
    if isinstance(operand, QueryTerms):
        return operand
    if not isinstance(operand, Term) or reading.expressions.is_constant(operand):
        raise UnreadableError("brings a query together with something else")
    query, element = reading.expressions.origin(operand.expr, operand.ids)
    number = np.full((*element.shape, 1), operand.factor)
    return QueryTerms.of(query, number, element[..., None], np.zeros(number.shape, np.int64))


def move_queries(reading: ReadGraph, node: Node, operands: Iterable[Operand]) -> tuple[QueryTerms, ...]:
    """Elements of one query, moved, split or joined."""
    queries = [read_query_terms(reading, operand) for operand in operands]
    query = queries[0].query
    if any(part.query is not query for part in queries):
        raise UnreadableError("joins elements of different queries")
    terms = max(part.number.shape[-1] for part in queries)
    records = moved(reading.graph, node, (part.pad_terms(terms).terms for part in queries))
    return tuple(QueryTerms(query, each) for each in records)


def compute_query(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> QueryTerms:
    """Sums of elements of one query; products with numbers, and once with what the position decides."""
    shape = broadcast_shape(operands)
    is_constant = reading.expressions.is_constant
    places = [i for i, each in enumerate(operands) if not isinstance(each, Value) and not is_constant(each)]
    queries = [read_query_terms(reading, operands[place]) for place in places]
    if node.kind == "NEG" and len(queries) == 1:
        return queries[0].multiply(-1.0)
    if node.kind in ("ADD", "SUB") and len(queries) == 2:
        first, other = queries
        if first.query is not other.query or first.terms.shape != other.terms.shape:
            raise UnreadableError("adds elements of different queries")
        return first.add(other.multiply(-1.0) if node.kind == "SUB" else other)
    is_product = node.kind == "MUL" or (node.kind == "DIV" and places == [0])
    if len(queries) != 1 or len(operands) != 2 or not is_product:
        raise UnreadableError("computes something of a query")
    repeated = QueryTerms(queries[0].query, np.broadcast_to(queries[0].terms, shape))
    factor = operands[1 - places[0]]
    if isinstance(factor, Value):
        return _rotate_query(reading, node.kind, repeated, factor)
    return _scale_query(reading, node.kind, repeated, factor)


def _scale_query(reading: ReadGraph, kind: str, query: QueryTerms, constant: Operand) -> QueryTerms:
    """``query`` times, or by, the numbers of a constant."""
    assert isinstance(constant, Term)
    numbers = np.broadcast_to(reading.expressions.numbers_of(reading.graph, constant), query.terms.shape)[..., None]
    scaled = query.multiply(numbers if kind == "MUL" else 1 / numbers)
    if not np.isfinite(scaled.number).all():
        raise UnreadableError("multiplies a query by what is no number")
    return scaled


def _rotate_query(reading: ReadGraph, kind: str, query: QueryTerms, table: Value) -> QueryTerms:
    """``query``, each element times that of ``table`` beside it."""
    if holds_codes(table.tensor):
        raise UnreadableError("rotates a query by codes, which cut off or round the position's cosines and sines")
    is_table = table.depends == Depends.POSITION and table.tensor.type in FLOAT_TYPES
    if kind == "DIV" or not is_table or query.by.any() or inputs_of([table]) != {INPUT_POS}:
        raise UnreadableError("brings a query together with something else than one table of the position")
    by: Ids = np.broadcast_to(reading.positions.elements(table), query.terms.shape)[..., None]
    return QueryTerms.of(query.query, query.number, query.element, np.broadcast_to(by, query.by.shape))


# Scores, up to the weights.


@dataclass(frozen=True)
class CacheMatrix:
    """A cache as a product takes it: ``[*batch, slots, dimensions]``, or the last two the other way round."""

    axes: CacheAxes  # of the input
    heads: Ids  # ``[*batch]``, the KV head
    slots: Ids  # which of the input they are
    dimensions: Ids  # likewise
    window: int | None  # the table that says, by position, at which slot they begin; None for slots that stay


def view_cache_as_matrix(reading: ReadGraph, cache: Cache, slot_axis: int, dimension_axis: int) -> CacheMatrix:
    """``cache`` as a matrix a KV head, whose last two axes run along slots and dimensions."""
    view = cache.view
    dimensions = view.along(dimension_axis)
    slots = view.along(slot_axis)
    batch = range(len(view.axes) - 2)
    head_labels = view.running(batch)
    slot, dimension = slots.label, dimensions.label
    if not isinstance(slot, int) or not isinstance(dimension, int) or slot == dimension:
        raise UnreadableError(f"takes {cache.name} otherwise than by slots and dimensions")
    if head_labels & {slot, dimension} or len(head_labels) > 1:
        raise UnreadableError(f"takes {cache.name} otherwise than by KV heads, slots and dimensions")

    head = next((int(label) for label in head_labels), None)
    shape = reading.graph.inputs[cache.name].tensor.shape
    others = {size for axis, size in enumerate(shape) if axis not in (head, slot, dimension)}
    if shape[slot] != reading.positions.slots or not others <= {1} or not set(view.starts) <= {slot}:
        raise UnreadableError(f"takes some of {cache.name} alone, or by the position")
    heads = np.zeros(view.shape[:-2], np.int64) if head is None else view.places(batch, head)
    return CacheMatrix((head, slot, dimension), heads, slots.places, dimensions.places, slots.window)


def multiply_keys(
    reading: ReadGraph, query: QueryTerms, cache: Cache, *, flips_query: bool, flips_keys: bool
) -> ScoreView:
    """A query times K, ``[…, rows, dimensions] · […, dimensions, slots]``."""
    if flips_query:
        raise UnreadableError("multiplies a query that it transposes")
    keys = view_cache_as_matrix(reading, cache, *((-2, -1) if flips_keys else (-1, -2)))
    # A row is a query head.
    shape = (*np.broadcast_shapes(keys.heads.shape, query.terms.shape[:-2]), query.terms.shape[-2])
    width = reading.graph.inputs[cache.name].tensor.shape[keys.axes[2]]
    rotated = _repeat_query(query, keys.dimensions, shape, width).multiply(cache.factor)
    head = np.broadcast_to(keys.heads[..., None], shape).reshape(-1)

    view = View.of_shape(["row", "slot"], [head.size, keys.slots.size]).reshaped((*shape, keys.slots.size))
    view = view.with_axis(len(shape), np.outer([0, 1], keys.slots))
    if keys.window is not None:
        view = replace(view, starts={"slot": keys.window})
    return ScoreView("score", ScoreRows(cache.name, keys.axes, head, rotated, SCORE), view)


def _repeat_query(query: QueryTerms, dimensions: Ids, shape: tuple[int, ...], width: int) -> QueryTerms:
    """``query`` repeated to the rows ``shape``, as ``[rows, width]``: its dimensions are ``dimensions`` of K, and those
    that it has not are 0.
    """
    if np.unique(dimensions).size != dimensions.size or query.terms.shape[-1] != dimensions.size:
        raise UnreadableError("multiplies queries and K otherwise than over its dimensions")
    rows = math.prod(shape)
    if rows * width * query.number.shape[-1] > _MOST_NUMBERS:
        raise UnreadableError("has more heads and dimensions than any drafter")
    terms = np.zeros((rows, width), query.terms.dtype)
    terms[:, dimensions] = np.broadcast_to(query.terms, (*shape, dimensions.size)).reshape(rows, -1)
    return QueryTerms(query.query, terms)


def compute_scores(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> ScoreView:
    """What operators make of scores, stage by stage."""
    rows = [operand for operand in operands if isinstance(operand, ScoreView)]
    if any(isinstance(operand, QueryTerms | Cache) for operand in operands):
        raise UnreadableError("brings a score together with a query or a cache")
    if node.kind == "SOFTMAX":
        return _apply_softmax(reading, node, rows[0])
    stage = _find_next_stage(reading, node, operands)
    if stage is None and {row.stage for row in rows} == {"score"} and node.kind not in REDUCTIONS:
        return _apply_mask(reading, node, operands, rows)
    if stage is None:
        raise UnreadableError(
            f"computes something of {rows[0].stage} scores, between the scores and the weights of an attention"
        )
    if node.kind in REDUCTIONS:
        return _reduce_slots(reading, node, rows[0], stage)
    widest = max(rows, key=lambda row: math.prod(row.view.shape))
    if any(row is not widest and not _has_same_rows(widest, row) for row in rows):
        raise UnreadableError("brings scores and a number of other rows together")
    return replace(widest, stage=stage)


def _find_next_stage(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> str | None:
    """The stage of what a softmax that is spelled out computes; None where it is no part of one."""
    number_of = reading.expressions.number_of
    stages = (each.stage if isinstance(each, ScoreView) else number_of(each) for each in operands)
    return _STAGES.get((node.kind, *stages))


def _has_same_rows(widest: ScoreView, narrow: ScoreView) -> bool:
    """Whether ``narrow``, a number a row, is of the same scores and rows as ``widest``."""
    if widest.scores is not narrow.scores or len(widest.view.axes) != len(narrow.view.axes):
        return False
    slot_axis = widest.slot_axis
    others = [axis for axis in range(len(widest.view.axes)) if axis != slot_axis]
    rows, rows_of_narrow = (each.view.places(others, "row") for each in (widest, narrow))
    return narrow.view.shape[slot_axis] == 1 and np.array_equal(rows, rows_of_narrow)


def _holds_all_slots(reading: ReadGraph, view: View, axis: int) -> bool:
    label, places, window = view.along(axis)
    return label == "slot" and window is None and np.array_equal(places, np.arange(reading.positions.slots))


def _apply_softmax(reading: ReadGraph, node: Node, scored: ScoreView) -> ScoreView:
    beta = float(Call(reading.graph, node).option(0, "f", 0.0))
    last = len(scored.view.axes) - 1
    if scored.stage != "score" or beta != 1 or not _holds_all_slots(reading, scored.view, last):
        raise UnreadableError("is a softmax of something else than the scores of all slots")
    result = node.outputs[0].tensor
    if result.type is TensorType.UINT8 and activation_scale(result) != (2.0**-8, 0):
        raise UnreadableError("makes UINT8 by another scale than 1/256, which LiteRT takes whatever the file says")
    return replace(scored, stage="weights")


def _reduce_slots(reading: ReadGraph, node: Node, scored: ScoreView, stage: str) -> ScoreView:
    """The largest score, the total, or whether any slot is seen: over all slots."""
    view = scored.view
    slot_axis = scored.slot_axis
    stated = node.operand(1)
    axes = [] if stated.depends else ints(reading.graph.integers(stated))
    reduces_slots = {axis_of(axis, len(view.axes)) for axis in axes} == {slot_axis}
    if not reduces_slots or not _holds_all_slots(reading, view, slot_axis):
        raise UnreadableError(f"reduces {scored.stage} scores otherwise than a softmax does")
    keeps = bool(Call(reading.graph, node).option(0, "?", False))
    return ScoreView(stage, scored.scores, view.without(slot_axis, keeps=keeps))


# Masks.


def _apply_mask(reading: ReadGraph, node: Node, operands: Sequence[Operand], rows: Sequence[ScoreView]) -> ScoreView:
    """A score that meets masks, positions and numbers."""
    view = _require_common_view(rows, broadcast_shape(operands))
    first = rows[0].scores
    if any(row.scores.rotated is not first.rotated or row.scores.head is not first.head for row in rows):
        raise UnreadableError("brings different scores together")
    slot_axis = view.only("slot")
    parts = [_read_mask_part(reading, *operand, view, slot_axis) for operand in zip(operands, node.inputs, strict=True)]
    factor = _find_factor(node.kind, parts)
    if isinstance(first.tree, Score) and factor:
        return ScoreView("score", replace(first, rotated=first.rotated.multiply(factor)), view)
    return rows[0].replace_tree(_build_tree(node, parts), view)


def _require_common_view(rows: Sequence[ScoreView], shape: tuple[int, ...]) -> View:
    """The one view that ``rows`` have, with axes of one element in front, where another operand has more."""
    views = [row.view.reshaped((1,) * (len(shape) - len(row.view.axes)) + row.view.shape) for row in rows]
    if any(not each.same(views[0]) for each in views) or views[0].shape != shape:
        raise UnreadableError("brings scores of different slots or heads together, or repeats them")
    return views[0]


def _read_mask_part(reading: ReadGraph, operand: Operand, value: Value | None, view: View, slot_axis: int) -> MaskTree:
    """What an operand, the value ``value``, is in a mask tree: a number a slot, the same for all rows."""
    if isinstance(operand, ScoreView):
        return operand.scores.tree
    number = reading.expressions.number_of(operand)
    if number is not None:
        return MaskNumber(number)
    if value is None or value.depends & Depends.DATA:
        raise UnreadableError("brings a score together with another activation")
    # Masks are read along their last axis: so that of the slots has to be.
    if slot_axis != len(view.axes) - 1 and value.tensor.elements > 1:
        raise UnreadableError("meets a mask otherwise than along its last axis")
    axis = slot_axis - (len(view.axes) - len(value.tensor.shape))
    if axis < 0 or value.tensor.shape[axis] == 1:
        return MaskValue(value, None)
    if not _holds_all_slots(reading, view, slot_axis):
        raise UnreadableError("meets scores of some slots with a mask")
    return MaskValue(value, axis)


def _find_factor(kind: str, parts: Sequence[MaskTree]) -> float | None:
    """What an operator multiplies a score by that no mask has met; None where it does something else."""
    numbers = [part.number for part in parts if isinstance(part, MaskNumber)]
    if kind == "NEG":
        return -1.0
    if kind == "MUL" and len(numbers) == 1:
        return numbers[0]
    is_divisor = len(parts) == 2 and isinstance(parts[1], MaskNumber)
    return 1 / numbers[0] if kind == "DIV" and is_divisor and numbers[0] else None


def _build_tree(node: Node, parts: Sequence[MaskTree]) -> MaskTree:
    """The mask tree of an operator on ``parts``."""
    if node.kind in SELECTIONS and isinstance(parts[0], Leaf):
        if node.kind == "SELECT" and len(node.operand(0).tensor.shape) != len(node.outputs[0].tensor.shape):
            raise UnreadableError("chooses whole rows")
        return Select(parts[0], *parts[1:])
    sign = {"ADD": 1.0, "SUB": -1.0}.get(node.kind)
    if sign is not None and isinstance(parts[1], Leaf):
        return Add(parts[0], parts[1], sign)
    if node.kind == "ADD" and isinstance(parts[0], Leaf):
        return Add(parts[1], parts[0], 1.0)
    raise UnreadableError("computes something of a score")


# Windows.


def place_window(reading: ReadGraph, node: Node, scored: Operand) -> ScoreView:
    """DYNAMIC_UPDATE_SLICE of the scores of a window into one number, where that window lies."""
    around = node.operand(0)
    if not isinstance(scored, ScoreView) or scored.stage != "score" or around.depends:
        raise UnreadableError("writes something else than the scores of a window")
    if around.tensor.type not in FLOAT_TYPES:
        raise UnreadableError(f"writes the scores of a window into numbers of {around.tensor.type_name}")
    numbers = np.unique(_read_background(reading.graph, around))
    slot_axis = scored.slot_axis
    label, places, start = scored.view.along(slot_axis)
    shape = tuple(around.tensor.shape)
    # LiteRT moves a window that would reach beyond the end.
    begins = np.clip(reading.positions.table(node.operand(2)), 0, np.array(shape) - np.array(scored.view.shape))
    table = reading.positions.window(begins[:, slot_axis])

    full_shape = (*scored.view.shape[:slot_axis], reading.positions.slots, *scored.view.shape[slot_axis + 1 :])
    is_run = np.array_equal(places, np.arange(places.size))
    if numbers.size != 1 or start != table or not is_run or shape != full_shape:
        raise UnreadableError("puts scores where they do not belong")
    tree = InWindow(scored.scores.tree, SlotWindow(table, places.size), MaskNumber(float(numbers[0])))
    by_slot = np.outer([each == label for each in scored.view.labels], np.arange(reading.positions.slots))
    return scored.replace_tree(tree, replace(scored.view.with_axis(slot_axis, by_slot), starts={}))


def _read_background(graph: FlatGraph, around: Value) -> Floats:
    """The numbers of a constant that is stored, or filled with one number."""
    if around.constant:
        return graph.floats(around)
    filler = around.producer
    if filler is None or filler.kind != "FILL" or ints(graph.integers(filler.operand(0))) != [*around.tensor.shape]:
        raise UnreadableError("writes the scores of a window into something else than constant numbers")
    return evaluate(graph, {}, [filler.operand(1)])[0].reshape(-1)
