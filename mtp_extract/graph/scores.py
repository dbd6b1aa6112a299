"""Read the operators from queries to weights: they move, scale and rotate queries, multiply them by K, and mask the
scores up to the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mtp_extract.graph.call import (
    REDUCTIONS,
    SELECTIONS,
    Call,
    holds_codes,
    read_activation_scale,
    read_ints,
    resolve_axis,
)
from mtp_extract.graph.evaluate import evaluate, find_input_names, move_elements
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
    # A row that sees no slot would have NaN as weights; 0 takes their place, and no drafter uses the row.
    ("SELECT_V2", "none", 0.0, "weights"): "weights",
}
"""Operator, then the stages of its operands or their numbers (None: axes) → the stage of its result, where a softmax is
spelled out.
"""


# Queries.


def read_query_terms(reading: ReadGraph, operand: Operand) -> QueryTerms:
    """Return ``operand`` as terms; an activation is taken for a query, each of its elements one term.

    Raises:
        UnreadableError: it is no query: a constant, a mask, the position, a cache or scores.
    """
    if isinstance(operand, QueryTerms):
        return operand
    if not isinstance(operand, Term) or reading.expressions.is_constant(operand):
        raise UnreadableError("has a constant, a mask, the position or scores where a query is expected")
    query, element = reading.expressions.find_origin(operand.expr, operand.ids)
    number = np.full((*element.shape, 1), operand.factor)
    return QueryTerms.of(query, number, element[..., None], np.zeros(number.shape, np.int64))


def move_queries(reading: ReadGraph, node: Node, operands: Iterable[Operand]) -> tuple[QueryTerms, ...]:
    """Return the elements of one query after an operator that moves, splits or joins them."""
    queries = [read_query_terms(reading, operand) for operand in operands]
    query = queries[0].query
    if any(terms.query is not query for terms in queries):
        raise UnreadableError("joins elements of different queries (expected one query)")
    count = max(terms.number.shape[-1] for terms in queries)
    records = move_elements(reading.graph, node, (terms.pad_terms(count).terms for terms in queries))
    return tuple(QueryTerms(query, terms) for terms in records)


def compute_query(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> QueryTerms:
    """Return a sum of elements of one query, or their product with constants or, once, with a table of the position."""
    shape = broadcast_shape(operands)
    is_constant = reading.expressions.is_constant
    places = [i for i, operand in enumerate(operands) if not isinstance(operand, Value) and not is_constant(operand)]
    queries = [read_query_terms(reading, operands[place]) for place in places]
    if node.kind == "NEG" and len(queries) == 1:
        return queries[0].multiply(-1.0)
    if node.kind in ("ADD", "SUB") and len(queries) == 2:
        first, second = queries
        if first.query is not second.query or first.terms.shape != second.terms.shape:
            raise UnreadableError("adds elements of different queries, or of another shape (expected one query's)")
        return first.add(second.multiply(-1.0) if node.kind == "SUB" else second)
    is_product = node.kind == "MUL" or (node.kind == "DIV" and places == [0])
    if len(queries) != 1 or len(operands) != 2 or not is_product:
        raise UnreadableError(
            "computes with a query (expected NEG; ADD or SUB of two parts of it; "
            "MUL or DIV by a constant, or MUL by a table of the position)"
        )
    repeated = QueryTerms(queries[0].query, np.broadcast_to(queries[0].terms, shape))
    factor = operands[1 - places[0]]
    if isinstance(factor, Value):
        return _rotate_query(reading, node.kind, repeated, factor)
    return _scale_query(reading, node.kind, repeated, factor)


def _scale_query(reading: ReadGraph, kind: str, query: QueryTerms, constant: Operand) -> QueryTerms:
    """Return ``query`` multiplied by the numbers of a constant, or divided by them."""
    assert isinstance(constant, Term)
    numbers = np.broadcast_to(reading.expressions.read_constant(reading.graph, constant), query.terms.shape)[..., None]
    scaled = query.multiply(numbers if kind == "MUL" else 1 / numbers)
    if not np.isfinite(scaled.number).all():
        raise UnreadableError("scales a query to numbers that are not finite")
    return scaled


def _rotate_query(reading: ReadGraph, kind: str, query: QueryTerms, table: Value) -> QueryTerms:
    """Return ``query``, each element multiplied by the one of ``table`` at its place: a cosine or sine of RoPE."""
    if holds_codes(table.tensor):
        raise UnreadableError("rotates a query by quantized cosines or sines (expected floats)")
    is_table = table.depends == Depends.POSITION and table.tensor.type in FLOAT_TYPES
    if kind == "DIV" or not is_table or query.by.any() or find_input_names([table]) != {INPUT_POS}:
        raise UnreadableError("rotates a query otherwise than by MUL with one float table of the position")
    by: Ids = np.broadcast_to(reading.positions.number_elements(table), query.terms.shape)[..., None]
    return QueryTerms.of(query.query, query.number, query.element, np.broadcast_to(by, query.by.shape))


# Scores, up to the weights.


@dataclass(frozen=True)
class CacheMatrix:
    """A cache as a matrix per KV head, ``[*batch, slots, dimensions]``, or the last two the other way round."""

    axes: CacheAxes  # of the cache's input
    heads: Ids  # KV head, ``[*batch]``
    slots: Ids  # numbers of the slots in the input
    dimensions: Ids  # numbers of the dimensions in the input
    window: int | None  # table of the first slot by position; None if the slots are the same at all positions


def view_cache_as_matrix(reading: ReadGraph, cache: Cache, slot_axis: int, dimension_axis: int) -> CacheMatrix:
    """Return ``cache`` as a matrix per KV head, whose axes ``slot_axis`` and ``dimension_axis`` are the last two.

    Raises:
        UnreadableError: these axes, or those of the batch, run along anything else.
    """
    view = cache.view
    dimensions = view.locate_axis(dimension_axis)
    slots = view.locate_axis(slot_axis)
    batch = range(len(view.axes) - 2)
    head_labels = view.find_labels(batch)
    slot, dimension = slots.label, dimensions.label
    if not isinstance(slot, int) or not isinstance(dimension, int) or slot == dimension:
        raise UnreadableError(f"multiplies {cache.name} along other axes (expected slots and dimensions)")
    if head_labels & {slot, dimension} or len(head_labels) > 1:
        raise UnreadableError(f"multiplies {cache.name} by other batches (expected KV heads)")

    head = next((int(label) for label in head_labels), None)
    shape = reading.graph.inputs[cache.name].tensor.shape
    others = {size for axis, size in enumerate(shape) if axis not in (head, slot, dimension)}
    if shape[slot] != reading.positions.slots or not others <= {1} or not set(view.starts) <= {slot}:
        raise UnreadableError(f"multiplies a part of {cache.name} (expected all of it, or a window of slots)")
    heads = np.zeros(view.shape[:-2], np.int64) if head is None else view.locate_axes(batch, head)
    return CacheMatrix((head, slot, dimension), heads, slots.places, dimensions.places, slots.window)


def multiply_keys(
    reading: ReadGraph, query: QueryTerms, cache: Cache, *, flips_query: bool, flips_keys: bool
) -> ScoreView:
    """Return the scores of a query times K, ``[…, rows, dimensions] · […, dimensions, slots]``."""
    if flips_query:
        raise UnreadableError("transposes a query before K (expected adj_x to be false)")
    keys = view_cache_as_matrix(reading, cache, *((-2, -1) if flips_keys else (-1, -2)))
    shape = (*np.broadcast_shapes(keys.heads.shape, query.terms.shape[:-2]), query.terms.shape[-2])
    width = reading.graph.inputs[cache.name].tensor.shape[keys.axes[2]]
    rotated = _repeat_query(query, keys.dimensions, shape, width).multiply(cache.factor)
    head = np.broadcast_to(keys.heads[..., None], shape).reshape(-1)

    view = View.from_shape(["row", "slot"], [head.size, keys.slots.size]).reshape((*shape, keys.slots.size))
    view = view.replace_axis(len(shape), np.outer([0, 1], keys.slots))
    if keys.window is not None:
        view = replace(view, starts={"slot": keys.window})
    return ScoreView("score", ScoreRows(cache.name, keys.axes, head, rotated, SCORE), view)


def _repeat_query(query: QueryTerms, dimensions: Ids, shape: tuple[int, ...], width: int) -> QueryTerms:
    """Return ``query`` repeated to the rows ``shape``, as ``[rows, width]``: its elements stand at ``dimensions`` of K,
    and are 0 elsewhere.
    """
    if np.unique(dimensions).size != dimensions.size or query.terms.shape[-1] != dimensions.size:
        raise UnreadableError("multiplies a query by other dimensions than K has (expected each once)")
    rows = math.prod(shape)
    if rows * width * query.number.shape[-1] > _MOST_NUMBERS:
        raise UnreadableError(f"computes scores of {rows} rows × {width} dimensions, more than any drafter has")
    terms = np.zeros((rows, width), query.terms.dtype)
    terms[:, dimensions] = np.broadcast_to(query.terms, (*shape, dimensions.size)).reshape(rows, -1)
    return QueryTerms(query.query, terms)


def compute_scores(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> ScoreView:
    """Return the scores after an operator: a mask, a softmax, or a step of a softmax that is spelled out."""
    rows = [operand for operand in operands if isinstance(operand, ScoreView)]
    if any(isinstance(operand, QueryTerms | Cache) for operand in operands):
        raise UnreadableError("computes with scores and a query or a cache (expected masks and numbers)")
    if node.kind == "SOFTMAX":
        return _apply_softmax(reading, node, rows[0])
    stage = _find_next_stage(reading, node, operands)
    if stage is None and {row.stage for row in rows} == {"score"} and node.kind not in REDUCTIONS:
        return _apply_mask(reading, node, operands, rows)
    if stage is None:
        raise UnreadableError(
            f"is no step of a softmax after scores of the stage {rows[0].stage!r} "
            "(expected SOFTMAX, or REDUCE_MAX, SUB, EXP, SUM and DIV)"
        )
    if node.kind in REDUCTIONS:
        return _reduce_slots(reading, node, rows[0], stage)
    widest = max(rows, key=lambda row: math.prod(row.view.shape))
    if any(row is not widest and not _has_same_rows(widest, row) for row in rows):
        raise UnreadableError("combines scores with numbers of other rows (expected one number for each row)")
    return replace(widest, stage=stage)


def _find_next_stage(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> str | None:
    """Return the stage of the result if ``node`` is a step of a softmax that is spelled out, else None."""
    number_of = reading.expressions.get_number
    stages = (operand.stage if isinstance(operand, ScoreView) else number_of(operand) for operand in operands)
    return _STAGES.get((node.kind, *stages))


def _has_same_rows(widest: ScoreView, narrow: ScoreView) -> bool:
    """Whether ``narrow`` has one number for each row of ``widest``, in the same order and of the same scores."""
    if widest.scores is not narrow.scores or len(widest.view.axes) != len(narrow.view.axes):
        return False
    slot_axis = widest.slot_axis
    row_axes = [axis for axis in range(len(widest.view.axes)) if axis != slot_axis]
    rows = widest.view.locate_axes(row_axes, "row")
    rows_of_narrow = narrow.view.locate_axes(row_axes, "row")
    return narrow.view.shape[slot_axis] == 1 and np.array_equal(rows, rows_of_narrow)


def _holds_all_slots(reading: ReadGraph, view: View, axis: int) -> bool:
    label, places, window = view.locate_axis(axis)
    return label == "slot" and window is None and np.array_equal(places, np.arange(reading.positions.slots))


def _apply_softmax(reading: ReadGraph, node: Node, scored: ScoreView) -> ScoreView:
    beta = float(Call(reading.graph, node).read_option(0, "f", 0.0))
    last = len(scored.view.axes) - 1
    if scored.stage != "score" or beta != 1 or not _holds_all_slots(reading, scored.view, last):
        raise UnreadableError("is no softmax of the scores of all slots, along the last axis, with a beta of 1")
    result = node.outputs[0].tensor
    if result.type is TensorType.UINT8 and read_activation_scale(result) != (2.0**-8, 0):
        raise UnreadableError("writes weights in UINT8 with a scale that LiteRT does not use for them (expected 1/256)")
    return replace(scored, stage="weights")


def _reduce_slots(reading: ReadGraph, node: Node, scored: ScoreView, stage: str) -> ScoreView:
    """Return one number a row, reduced over all slots: the largest score, the total, or whether any slot is seen."""
    view = scored.view
    slot_axis = scored.slot_axis
    stated = node.get_operand(1)
    axes = [] if stated.depends else read_ints(reading.graph.read_small_integers(stated))
    reduces_slots = {resolve_axis(axis, len(view.axes)) for axis in axes} == {slot_axis}
    if not reduces_slots or not _holds_all_slots(reading, view, slot_axis):
        raise UnreadableError(f"reduces scores (stage: {scored.stage}) over other axes than all slots")
    keeps = bool(Call(reading.graph, node).read_option(0, "?", False))
    return ScoreView(stage, scored.scores, view.reduce_axis(slot_axis, keeps=keeps))


# Masks.


def _apply_mask(reading: ReadGraph, node: Node, operands: Sequence[Operand], rows: Sequence[ScoreView]) -> ScoreView:
    """Return the scores after an operator that combines them with masks, positions or numbers."""
    view = _require_common_view(rows, broadcast_shape(operands))
    first = rows[0].scores
    if any(row.scores.rotated is not first.rotated or row.scores.head is not first.head for row in rows):
        raise UnreadableError("combines the scores of different queries or caches")
    slot_axis = view.find_axis("slot")
    pairs = zip(operands, node.inputs, strict=True)
    parts = [_read_mask_part(reading, operand, value, view, slot_axis) for operand, value in pairs]
    factor = _find_factor(node.kind, parts)
    if isinstance(first.tree, Score) and factor:
        return ScoreView("score", replace(first, rotated=first.rotated.multiply(factor)), view)
    return rows[0].replace_tree(_build_tree(node, parts), view)


def _require_common_view(rows: Sequence[ScoreView], shape: tuple[int, ...]) -> View:
    """Return the view that all of ``rows`` have; axes of one element come first where ``shape`` has more of them."""
    views = [row.view.reshape((1,) * (len(shape) - len(row.view.axes)) + row.view.shape) for row in rows]
    if any(not view.equals(views[0]) for view in views) or views[0].shape != shape:
        raise UnreadableError("combines scores of different slots or heads, or repeats them (expected the same, once)")
    return views[0]


def _read_mask_part(reading: ReadGraph, operand: Operand, value: Value | None, view: View, slot_axis: int) -> MaskTree:
    """Return ``operand``, which is ``value`` in the graph, as a mask tree: one number for each slot."""
    if isinstance(operand, ScoreView):
        return operand.scores.tree
    number = reading.expressions.get_number(operand)
    if number is not None:
        return MaskNumber(number)
    if value is None or value.depends & Depends.DATA:
        raise UnreadableError("combines scores with another activation (expected masks, the position or numbers)")
    # The proof reads a mask along its last axis, so that has to be the axis of the slots.
    if slot_axis != len(view.axes) - 1 and value.tensor.elements > 1:
        raise UnreadableError("masks scores whose slots are not along the last axis")
    axis = slot_axis - (len(view.axes) - len(value.tensor.shape))
    if axis < 0 or value.tensor.shape[axis] == 1:
        return MaskValue(value, None)
    if not _holds_all_slots(reading, view, slot_axis):
        raise UnreadableError("masks the scores of some slots alone (expected all slots of the cache)")
    return MaskValue(value, axis)


def _find_factor(kind: str, parts: Sequence[MaskTree]) -> float | None:
    """Return the number by which an operator multiplies a score; None if it does anything else."""
    numbers = [part.number for part in parts if isinstance(part, MaskNumber)]
    if kind == "NEG":
        return -1.0
    if kind == "MUL" and len(numbers) == 1:
        return numbers[0]
    is_divisor = len(parts) == 2 and isinstance(parts[1], MaskNumber)
    return 1 / numbers[0] if kind == "DIV" and is_divisor and numbers[0] else None


def _build_tree(node: Node, parts: Sequence[MaskTree]) -> MaskTree:
    if node.kind in SELECTIONS and isinstance(parts[0], Leaf):
        if node.kind == "SELECT" and len(node.get_operand(0).tensor.shape) != len(node.outputs[0].tensor.shape):
            raise UnreadableError("selects whole rows by a condition of fewer axes (expected as many as the scores')")
        return Select(parts[0], *parts[1:])
    sign = {"ADD": 1.0, "SUB": -1.0}.get(node.kind)
    if sign is not None and isinstance(parts[1], Leaf):
        return Add(parts[0], parts[1], sign)
    if node.kind == "ADD" and isinstance(parts[0], Leaf):
        return Add(parts[1], parts[0], 1.0)
    raise UnreadableError(
        "changes the numbers of a score (expected MUL or DIV by one number before all masks; "
        "ADD, SUB or a selection by masks and numbers)"
    )


# Windows.


def place_window(reading: ReadGraph, node: Node, scored: Operand) -> ScoreView:
    """Return the scores of all slots after a DYNAMIC_UPDATE_SLICE of those of a window into a constant number."""
    background = node.get_operand(0)
    if not isinstance(scored, ScoreView) or scored.stage != "score" or background.depends:
        raise UnreadableError("updates a slice with anything but scores, or of anything but a constant")
    if background.tensor.type not in FLOAT_TYPES:
        raise UnreadableError(f"writes the scores of a window into {background.tensor.type_name} (expected floats)")
    numbers = np.unique(_read_background(reading.graph, background))
    slot_axis = scored.slot_axis
    label, places, start = scored.view.locate_axis(slot_axis)
    shape = tuple(background.tensor.shape)
    # As LiteRT does, move a window back that would reach beyond the end.
    begins = np.clip(
        reading.positions.compute_table(node.get_operand(2)), 0, np.array(shape) - np.array(scored.view.shape)
    )
    table = reading.positions.register_window(begins[:, slot_axis])

    full_shape = (*scored.view.shape[:slot_axis], reading.positions.slots, *scored.view.shape[slot_axis + 1 :])
    is_run = np.array_equal(places, np.arange(places.size))
    if numbers.size != 1 or start != table or not is_run or shape != full_shape:
        raise UnreadableError("writes scores where they do not belong (expected a window, and one number elsewhere)")
    tree = InWindow(scored.scores.tree, SlotWindow(table, places.size), MaskNumber(float(numbers[0])))
    by_slot = np.outer([view_label == label for view_label in scored.view.labels], np.arange(reading.positions.slots))
    return scored.replace_tree(tree, replace(scored.view.replace_axis(slot_axis, by_slot), starts={}))


def _read_background(graph: FlatGraph, background: Value) -> Floats:
    """Return the numbers of a constant that is stored, or that FILL makes."""
    if background.constant:
        return graph.read_small_floats(background)
    filler = background.producer
    if (
        filler is None
        or filler.kind != "FILL"
        or read_ints(graph.read_small_integers(filler.get_operand(0))) != [*background.tensor.shape]
    ):
        raise UnreadableError("writes scores of a window into computed numbers (expected a constant or a FILL)")
    return evaluate(graph, {}, [filler.get_operand(1)])[0].reshape(-1)
