"""The inside of attentions: operators whose operands are caches, queries or scores, up to what heads mix of V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mtp_extract.graph.caches import CacheMatrix, cache_matrix, move_view, scale_cache, slice_view
from mtp_extract.graph.call import CONVERSIONS, SELECTIONS, Call, activation_scale, keeps_numbers
from mtp_extract.graph.evaluate import LAYOUT
from mtp_extract.graph.expressions import Expr, Ids, Term, UnreadableError
from mtp_extract.graph.flat import Node, Value
from mtp_extract.graph.forms import (
    Attention,
    Cache,
    Form,
    Operand,
    ReadGraph,
    ScoreRows,
    ScoreView,
    broadcast_shape,
    heads_and_width,
)
from mtp_extract.graph.guards import output_guard
from mtp_extract.graph.mask_trees import SlotWindow
from mtp_extract.graph.queries import compute_query, move_queries, query_terms
from mtp_extract.graph.scores import compute_scores, multiply_keys, place_window
from mtp_extract.graph.views import Along
from mtp_extract.litertlm.storage import FLOAT_TYPES


def read_inside(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> tuple[Form, ...]:
    """What ``node`` makes of ``operands``, which are inside of an attention, or lead there."""
    if node.op.activation:
        raise UnreadableError("cuts off numbers inside of an attention by its fused function")
    if node.kind in LAYOUT:
        return _move(reading, node, operands)
    return (_compute(reading, node, operands),)


def _compute(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> Form:
    if node.kind in CONVERSIONS:
        return _convert(node, operands[0])
    if node.kind == "BATCH_MATMUL":
        return _multiply(reading, node, *operands)
    first = next((operand for operand in operands if isinstance(operand, Cache | ScoreView)), None)
    if isinstance(first, Cache):
        return scale_cache(reading, node, first, operands)
    if isinstance(first, ScoreView):
        return compute_scores(reading, node, operands)
    if node.kind in SELECTIONS:
        return _guard(reading, node, operands)
    return compute_query(reading, node, operands)


def _move(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> tuple[Form, ...]:
    """Elements in other places."""
    if node.kind == "DYNAMIC_UPDATE_SLICE":
        return (place_window(reading, node, operands[1]),)
    places = [place for place in LAYOUT[node.kind] if place < len(operands)]
    scales = {activation_scale(node.operand(place).tensor) for place in places}
    if scales != {activation_scale(node.outputs[0].tensor)}:
        raise UnreadableError("hands codes on with another scale")
    first = operands[places[0]]
    if isinstance(first, Cache | ScoreView) and node.kind == "SLICE":
        return (slice_view(reading, node, first),)
    if any(value is not None and value.depends for i, value in enumerate(node.inputs) if i not in places):
        raise UnreadableError("chooses elements by what is computed")
    if isinstance(first, Cache | ScoreView):
        return (move_view(reading.graph, node, first),)
    return move_queries(reading, node, (operands[place] for place in places))


def _convert(node: Node, operand: Operand) -> Form:
    """The same numbers in another type; and of a cache whose zero point is 0, a CAST to the codes themselves."""
    source = node.operand(0).tensor
    target = node.outputs[0].tensor
    if not isinstance(operand, Value) and keeps_numbers(node):
        return operand
    scale = activation_scale(source)
    if isinstance(operand, Cache) and node.kind == "CAST" and target.type in FLOAT_TYPES and scale and not scale[1]:
        return replace(operand, factor=operand.factor / scale[0])
    raise UnreadableError(f"turns {source.type_name} inside of an attention into {target.type_name}")


def _multiply(reading: ReadGraph, node: Node, first: Operand, cache: Operand) -> Form:
    """BATCH_MATMUL of a query and K, or of weights and V."""
    flips, flips_cache = (bool(Call(reading.graph, node).option(slot, "?", False)) for slot in (0, 1))
    if not isinstance(cache, Cache):
        raise UnreadableError("multiplies what no attention multiplies, or the other way round")
    tensors = [node.operand(0).tensor, node.operand(1).tensor, node.outputs[0].tensor]
    if tensors[0].type != tensors[2].type:
        raise UnreadableError(f"multiplies {tensors[0].type_name} and makes {tensors[2].type_name} of it")
    if any(tensor.type not in FLOAT_TYPES and activation_scale(tensor) is None for tensor in tensors):
        raise UnreadableError(f"multiplies {cache.name} as integers that have no scale")
    if isinstance(first, ScoreView):
        return _mix(reading, first, cache, flips_weights=flips, flips_values=flips_cache)
    query = query_terms(reading, first)
    return multiply_keys(reading, query, cache, flips_query=flips, flips_keys=flips_cache)


# What heads mix.


def _mix(reading: ReadGraph, weights: ScoreView, cache: Cache, *, flips_weights: bool, flips_values: bool) -> Term:
    """Weights times V, ``[…, rows, slots] · […, slots, dimensions]``: a value outside of attentions."""
    if weights.stage != "weights":
        raise UnreadableError(f"multiplies {weights.stage} scores and a cache")
    rank = len(weights.view.axes)
    slot_axis, row_axis = (rank - 2, rank - 1) if flips_weights else (rank - 1, rank - 2)
    values = cache_matrix(reading, cache, *((-1, -2) if flips_values else (-2, -1)))
    window = _weighed_slots(reading, weights.view.along(slot_axis), values)
    rows = _weighed_rows(weights, row_axis, values)

    # As a vector of ``[heads, width]``. Heads that weigh other slots mix something else, so no two are one expression.
    scores = weights.scores
    attention = Attention(scores, cache.name, values.axes, window)
    width = _width(reading, attention)
    head = _query_heads(scores, width)
    expr = _mixed(reading, attention, scores.rotated.query.size)
    return Term(cache.factor, expr, head[rows[..., None]] * width + values.dimensions)


def _weighed_slots(reading: ReadGraph, weights: Along, values: CacheMatrix) -> SlotWindow | None:
    """The window of slots whose weights meet V: all that it holds; None for all slots of the cache."""
    label, slots, start = weights
    if label != "slot" or not np.array_equal(slots, values.slots) or start != values.window:
        raise UnreadableError("weighs other slots of V than it scored")
    count = reading.positions.slots if start is None else slots.size
    if not np.array_equal(slots, np.arange(count)):
        raise UnreadableError("weighs some slots alone")
    return None if start is None else SlotWindow(start, slots.size)


def _weighed_rows(weights: ScoreView, row_axis: int, values: CacheMatrix) -> Ids:
    """The rows of scores that meet V, ``[*batch, rows]``, each of which scored the same head of K."""
    batch = range(len(weights.view.axes) - 2)
    rows = weights.view.places([*batch, row_axis], "row")
    shape = (*np.broadcast_shapes(values.heads.shape, rows.shape[:-1]), rows.shape[-1])
    rows = np.broadcast_to(rows, shape)
    if not np.array_equal(weights.scores.head[rows], np.broadcast_to(values.heads[..., None], shape)):
        raise UnreadableError("weighs another head of V than it scored of K")
    return rows


def _width(reading: ReadGraph, attention: Attention) -> int:
    """Dimensions of a head, which K and V share."""
    inputs = reading.graph.inputs
    of_keys = heads_and_width(inputs[attention.scores.key].tensor.shape, attention.scores.axes)
    of_values = heads_and_width(inputs[attention.value].tensor.shape, attention.axes)
    if of_keys != of_values:
        raise UnreadableError("mixes V of other heads or dimensions than the K it scored")
    return of_keys[1]


def _query_heads(scores: ScoreRows, width: int) -> Ids:
    """Per row, the query head that is in it."""
    rotated = scores.rotated
    heads = np.where(rotated.number != 0, rotated.element // width, -1).reshape(len(rotated.number), -1)
    head: Ids = heads.max(1)
    if ((heads != head[:, None]) & (heads >= 0)).any() or (head < 0).any():
        raise UnreadableError("mixes what several heads scored")
    return head


def _mixed(reading: ReadGraph, attention: Attention, size: int) -> Expr:
    """The expression of what ``attention`` mixes, which is noted."""
    parts: list[object] = [attention.scores, attention.value, attention.axes, attention.window]
    if attention.guard is not None:
        parts.append(attention.guard)
    expr = reading.expressions.expr("mixed", *parts, size=size)
    reading.attentions.setdefault(expr, attention)
    return expr


def _guard(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> Term:
    """A selection between what heads mixed and 0; :mod:`mtp_extract.proof.slots` decides which it chooses."""
    condition, *branches = operands
    mixed = [each for each in branches if isinstance(each, Term) and each.expr in reading.attentions]
    if not isinstance(condition, Value) or len(mixed) != 1:
        raise UnreadableError("chooses between activations that are not what heads mixed")
    (term,) = mixed
    keeps = branches[0] is term
    attention = reading.attentions[term.expr]
    if reading.expressions.number_of(branches[keeps]) != 0:
        raise UnreadableError("replaces what heads mixed by something else than 0")
    if attention.guard is not None:
        raise UnreadableError("chooses again between what heads mixed and 0")
    if broadcast_shape(operands) != term.ids.shape:
        raise UnreadableError("repeats what heads mixed")
    if node.kind == "SELECT" and len(condition.tensor.shape) != term.ids.ndim:
        raise UnreadableError("chooses whole rows")
    guard = output_guard(reading.graph, reading.positions.slots, condition, keeps=keeps)
    return replace(term, expr=_mixed(reading, replace(attention, guard=guard), term.expr.size))
