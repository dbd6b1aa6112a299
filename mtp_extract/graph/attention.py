"""Read the operators inside attentions, whose operands are caches, queries or scores, up to weights · V."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from mtp_extract.graph.call import (
    CONVERSIONS,
    NUMPY_TYPES,
    SELECTIONS,
    Call,
    has_few_bits,
    keeps_numbers,
    read_activation_scale,
    read_ints,
    resolve_axis,
)
from mtp_extract.graph.evaluate import move_elements
from mtp_extract.graph.expressions import Expr, Ids, Term, UnreadableError
from mtp_extract.graph.flat import Depends, Node, Value, walk_ancestors
from mtp_extract.graph.forms import (
    Attention,
    Cache,
    Form,
    Operand,
    OutputGuard,
    ReadGraph,
    ScoreRows,
    ScoreView,
    broadcast_shape,
    get_operand_shape,
    read_heads_and_width,
)
from mtp_extract.graph.kernels import LAYOUT
from mtp_extract.graph.mask_trees import MaskValue, SlotWindow
from mtp_extract.graph.scores import (
    CacheMatrix,
    compute_query,
    compute_scores,
    move_queries,
    multiply_keys,
    place_window,
    read_query_terms,
    view_cache_as_matrix,
)
from mtp_extract.graph.views import AxisPlaces
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor

_Viewed = TypeVar("_Viewed", bound=Cache | ScoreView)
_MASK_REDUCTIONS = ("REDUCE_MAX", "REDUCE_ANY")


def read_attention_operator(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> tuple[Form, ...]:
    """Return the form of each output of ``node``, an operator inside an attention, or on the way into one.

    Raises:
        UnreadableError: no attention of a drafter has such an operator.
    """
    if node.op.activation:
        raise UnreadableError("has a fused activation function inside an attention (expected none)")
    if node.kind in LAYOUT:
        return _move_elements(reading, node, operands)
    return (_compute_form(reading, node, operands),)


def _compute_form(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> Form:
    if node.kind in CONVERSIONS:
        return _convert(node, operands[0])
    if node.kind == "BATCH_MATMUL":
        return _multiply_cache(reading, node, *operands)
    first = next((operand for operand in operands if isinstance(operand, Cache | ScoreView)), None)
    if isinstance(first, Cache):
        return _scale_cache(reading, node, first, operands)
    if isinstance(first, ScoreView):
        return compute_scores(reading, node, operands)
    if node.kind in SELECTIONS:
        return _read_selection(reading, node, operands)
    return compute_query(reading, node, operands)


def _move_elements(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> tuple[Form, ...]:
    if node.kind == "DYNAMIC_UPDATE_SLICE":
        return (place_window(reading, node, operands[1]),)
    places = [place for place in LAYOUT[node.kind] if place < len(operands)]
    scales = {read_activation_scale(node.get_operand(place).tensor) for place in places}
    if scales != {read_activation_scale(node.outputs[0].tensor)}:
        raise UnreadableError("moves quantized values into a tensor of another scale (expected its operand's)")
    first = operands[places[0]]
    if isinstance(first, Cache | ScoreView) and node.kind == "SLICE":
        return (_slice_view(reading, node, first),)
    if any(value is not None and value.depends for i, value in enumerate(node.inputs) if i not in places):
        raise UnreadableError("moves elements by axes, sizes or indices that are computed (expected constants)")
    if isinstance(first, Cache | ScoreView):
        return (_move_view(reading, node, first),)
    return move_queries(reading, node, (operands[place] for place in places))


def _convert(node: Node, operand: Operand) -> Form:
    """Return ``operand``, whose numbers a conversion has to keep.

    A CAST of a quantized cache to floats returns its codes instead: numbers divided by the scale, if the zero point
    is 0.
    """
    source = node.get_operand(0).tensor
    target = node.outputs[0].tensor
    if not isinstance(operand, Value) and keeps_numbers(node):
        return operand
    scale = read_activation_scale(source)
    if isinstance(operand, Cache) and node.kind == "CAST" and target.type in FLOAT_TYPES and scale and not scale[1]:
        return replace(operand, factor=operand.factor / scale[0])
    raise UnreadableError(f"may change numbers inside an attention: {source.type_name} to {target.type_name}")


def _multiply_cache(reading: ReadGraph, node: Node, first: Operand, cache: Operand) -> Form:
    """Read a BATCH_MATMUL: a query times K, or weights times V."""
    flips, flips_cache = (bool(Call(reading.graph, node).read_option(slot, "?", False)) for slot in (0, 1))
    if not isinstance(cache, Cache):
        raise UnreadableError("multiplies by a matrix that is no cache (expected query · K or weights · V)")
    tensors = [node.get_operand(0).tensor, node.get_operand(1).tensor, node.outputs[0].tensor]
    if tensors[0].type != tensors[2].type:
        raise UnreadableError(
            f"multiplies {tensors[0].type_name} by {cache.name} into {tensors[2].type_name} (expected one type)"
        )
    if any(tensor.type not in FLOAT_TYPES and read_activation_scale(tensor) is None for tensor in tensors):
        raise UnreadableError(f"multiplies by {cache.name} in integers that have no scale (expected one for each)")
    scale = read_activation_scale(tensors[1])
    if tensors[0].type in FLOAT_TYPES and scale and scale[1]:
        raise UnreadableError(f"multiplies floats by {cache.name}, whose zero point LiteRT ignores here (expected 0)")
    if isinstance(first, ScoreView):
        return _mix_values(reading, first, cache, flips_weights=flips, flips_values=flips_cache)
    query = read_query_terms(reading, first)
    return multiply_keys(reading, query, cache, flips_query=flips, flips_keys=flips_cache)


# Caches and scores, moved about and scaled.


def _move_view(reading: ReadGraph, node: Node, form: _Viewed) -> _Viewed:
    """Return a cache or scores after an operator that reshapes, permutes, repeats or picks elements."""
    kind = node.kind
    view = form.view
    if kind in ("RESHAPE", "SQUEEZE", "EXPAND_DIMS"):
        # Only the shape is computed, with an array that NumPy broadcasts from one byte.
        (reshaped,) = move_elements(reading.graph, node, [np.broadcast_to(np.zeros((), np.int8), view.shape)])
        return replace(form, view=view.reshape(reshaped.shape))
    if kind not in ("TRANSPOSE", "BROADCAST_TO", "GATHER"):
        raise UnreadableError("moves a cache or scores (expected RESHAPE, TRANSPOSE, BROADCAST_TO, SLICE or GATHER)")
    numbers = reading.graph.read_small_integers(node.get_operand(1))
    if kind == "TRANSPOSE":
        return replace(form, view=view.transpose(read_ints(numbers)))
    if kind == "BROADCAST_TO":
        return replace(form, view=view.broadcast(read_ints(numbers)))
    axis, batch = (Call(reading.graph, node).read_option(slot, "i") for slot in (0, 1))
    if batch or len(node.get_operand(1).tensor.shape) != 1:
        raise UnreadableError("gathers a cache or scores by batches (expected one list of indices for all)")
    return replace(form, view=view.take(resolve_axis(axis, len(view.shape)), numbers))


def _slice_view(reading: ReadGraph, node: Node, form: _Viewed) -> _Viewed:
    """Return a cache or scores after a SLICE, whose begin is a constant or depends on the position."""
    if node.get_operand(1).depends & ~Depends.POSITION or node.get_operand(2).depends:
        raise UnreadableError("slices from where a mask or an activation says (expected a constant or the position)")
    begins = reading.positions.compute_table(node.get_operand(1))
    sizes = reading.graph.read_small_integers(node.get_operand(2)).tolist()
    view = form.view
    for axis, (begin, size, length) in enumerate(zip(begins.T, sizes, view.shape, strict=True)):
        # A size of −1 reaches to the end: with begins that vary, no one count of elements fits all.
        count = length - int(begin.min()) if size == -1 else size
        if count < 1 or not ((begin >= 0) & (begin + count <= length)).all():
            raise UnreadableError(f"slices beyond the {length} elements of axis {axis} of its operand")
        if (begin == begin[0]).all():
            view = view.take(axis, np.arange(begin[0], begin[0] + count, dtype=np.int64))
        else:
            view = view.take_window(axis, count, reading.positions.register_window(begin))
    if isinstance(form, ScoreView) and view.starts and (form.stage != "weights" or set(view.starts) != {"slot"}):
        raise UnreadableError(f"slices scores (stage: {form.stage}) by the position (expected weights, along slots)")
    return replace(form, view=view)


def _scale_cache(reading: ReadGraph, node: Node, cache: Cache, operands: Sequence[Operand]) -> Cache:
    """Return ``cache`` multiplied by a number: where it holds codes, by their scale."""
    place = next((i for i, operand in enumerate(operands) if operand is not cache), 0)
    number = reading.expressions.get_number(operands[place])
    makes_floats = node.outputs[0].tensor.type in FLOAT_TYPES
    is_scaled = len(operands) == 2 and (node.kind == "MUL" or (node.kind == "DIV" and place == 1))
    if not (number and makes_floats and is_scaled) or get_operand_shape(cache) != broadcast_shape(operands):
        raise UnreadableError(
            f"changes the numbers of a cache, {cache.name} (expected MUL or DIV by a number, to floats)"
        )
    return replace(cache, factor=cache.factor * number if node.kind == "MUL" else cache.factor / number)


# The output of an attention.


def _mix_values(
    reading: ReadGraph, weights: ScoreView, cache: Cache, *, flips_weights: bool, flips_values: bool
) -> Term:
    """Return the output of an attention: weights times V, ``[…, rows, slots] · […, slots, dimensions]``."""
    if weights.stage != "weights":
        raise UnreadableError(f"multiplies {cache.name} by scores before the end of a softmax (stage: {weights.stage})")
    rank = len(weights.view.axes)
    slot_axis, row_axis = (rank - 2, rank - 1) if flips_weights else (rank - 1, rank - 2)
    values = view_cache_as_matrix(reading, cache, *((-1, -2) if flips_values else (-2, -1)))
    window = _match_slots(reading, weights.view.locate_axis(slot_axis), values)
    rows = _match_rows(weights, row_axis, values)

    # Heads that attend to other slots have another output, so the expression is a vector of ``[heads, width]``.
    scores = weights.scores
    attention = Attention(scores, cache.name, values.axes, window)
    width = _read_head_width(reading, attention)
    head = _find_query_heads(scores, width)
    expr = _record_attention(reading, attention, scores.rotated.query.size)
    return Term(cache.factor, expr, head[rows[..., None]] * width + values.dimensions)


def _match_slots(reading: ReadGraph, weights: AxisPlaces, values: CacheMatrix) -> SlotWindow | None:
    """Return the window of slots whose weights are multiplied by V; None if these are all slots of the cache.

    Raises:
        UnreadableError: weights and V have different slots, or only some of the window or cache.
    """
    label, slots, start = weights
    if label != "slot" or not np.array_equal(slots, values.slots) or start != values.window:
        raise UnreadableError("multiplies the weights of slots by V of other slots")
    count = reading.positions.slots if start is None else slots.size
    if not np.array_equal(slots, np.arange(count)):
        raise UnreadableError("multiplies the weights of some slots alone by V (expected all of the cache or window)")
    return None if start is None else SlotWindow(start, slots.size)


def _match_rows(weights: ScoreView, row_axis: int, values: CacheMatrix) -> Ids:
    """Return the rows of scores, ``[*batch, rows]``, that are multiplied by V.

    Raises:
        UnreadableError: a row's scores are of another KV head than the V it is multiplied by.
    """
    batch = range(len(weights.view.axes) - 2)
    rows = weights.view.locate_axes([*batch, row_axis], "row")
    shape = (*np.broadcast_shapes(values.heads.shape, rows.shape[:-1]), rows.shape[-1])
    rows = np.broadcast_to(rows, shape)
    if not np.array_equal(weights.scores.head[rows], np.broadcast_to(values.heads[..., None], shape)):
        raise UnreadableError("multiplies the weights of a query head by V of another KV head than K was of")
    return rows


def _read_head_width(reading: ReadGraph, attention: Attention) -> int:
    inputs = reading.graph.inputs
    of_keys = read_heads_and_width(inputs[attention.scores.key].tensor.shape, attention.scores.axes)
    of_values = read_heads_and_width(inputs[attention.value].tensor.shape, attention.axes)
    if of_keys != of_values:
        raise UnreadableError(f"attends to {of_keys} heads and dimensions of K, {of_values} of V (expected the same)")
    return of_keys[1]


def _find_query_heads(scores: ScoreRows, width: int) -> Ids:
    """Return the query head of each row."""
    rotated = scores.rotated
    heads = np.where(rotated.number != 0, rotated.element // width, -1).reshape(len(rotated.number), -1)
    head: Ids = heads.max(1)
    if ((heads != head[:, None]) & (heads >= 0)).any() or (head < 0).any():
        raise UnreadableError("multiplies V by weights that several query heads made (expected one head a row)")
    return head


def _record_attention(reading: ReadGraph, attention: Attention, size: int) -> Expr:
    """Return the expression of the output of ``attention``, and record under it how it is computed."""
    parts: list[object] = [attention.scores, attention.value, attention.axes, attention.window]
    if attention.guard is not None:
        parts.append(attention.guard)
    expr = reading.expressions.make_expr("mixed", *parts, size=size)
    reading.attentions.setdefault(expr, attention)
    return expr


# Output guards.


def _read_selection(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> Term:
    """Return the output of an attention behind its guard, a selection between it and 0.

    :mod:`mtp_extract.proof.attentions` decides which of the two is selected.
    """
    condition, *branches = operands
    outputs = [branch for branch in branches if isinstance(branch, Term) and branch.expr in reading.attentions]
    if not isinstance(condition, Value) or len(outputs) != 1:
        raise UnreadableError("selects between activations (expected an attention's output and 0, by a mask)")
    (term,) = outputs
    keeps = branches[0] is term
    attention = reading.attentions[term.expr]
    if reading.expressions.get_number(branches[keeps]) != 0:
        raise UnreadableError("replaces an attention's output by something else than 0")
    if attention.guard is not None:
        raise UnreadableError("selects between an attention's output and 0 a second time (expected once at most)")
    if broadcast_shape(operands) != term.ids.shape:
        raise UnreadableError("repeats an attention's output (expected a result of its shape)")
    if node.kind == "SELECT" and len(condition.tensor.shape) != term.ids.ndim:
        raise UnreadableError("selects whole rows by a condition of fewer axes (expected as many as the operands')")
    guarded = replace(attention, guard=_read_output_guard(reading, condition, keeps=keeps))
    return replace(term, expr=_record_attention(reading, guarded, term.expr.size))


def _read_output_guard(reading: ReadGraph, condition: Value, *, keeps: bool) -> OutputGuard:
    """Return the guard whose selection keeps the output of an attention where ``condition`` is ``keeps``.

    Raises:
        UnreadableError: the condition is computed of anything but constants and one reduction of a mask over all slots.
    """
    if condition.depends & Depends.DATA:
        raise UnreadableError("selects by activations or caches (expected masks and the position alone)")
    reductions = [
        (v, v.producer) for v in walk_ancestors(condition) if v.producer and v.producer.kind in _MASK_REDUCTIONS
    ]
    if len(reductions) != 1:
        raise UnreadableError(
            f"selects by {len(reductions)} reductions (expected one REDUCE_MAX or REDUCE_ANY of slots)"
        )
    ((reduced, node),) = reductions
    leaves = (value for value in walk_ancestors(condition, frozenset([id(reduced)])) if value.producer is None)
    if any(value.depends for value in leaves):
        raise UnreadableError("selects by more than whether any slot is shown (expected one reduction of a mask)")
    mask = node.get_operand(0)
    _check_reduction(reading, node, mask.tensor, reduced.tensor)
    return OutputGuard(condition, reduced, MaskValue(mask, len(mask.tensor.shape) - 1), keeps)


def _check_reduction(reading: ReadGraph, node: Node, mask: Tensor, reduced: Tensor) -> None:
    """Raise UnreadableError unless ``node`` reduces a mask over all slots to the shape and type of ``reduced``."""
    rank = len(mask.shape)
    stated = [] if node.get_operand(1).depends else read_ints(reading.graph.read_small_integers(node.get_operand(1)))
    axes = {resolve_axis(axis, rank) for axis in stated}
    if mask.shape[-1:] != (reading.positions.slots,) or rank - 1 not in axes:
        raise UnreadableError("selects by some slots of a mask alone (expected all, along its last axis)")
    keeps_axes = bool(Call(reading.graph, node).read_option(0, "?", False))
    sizes = (1 if axis in axes else size for axis, size in enumerate(mask.shape) if keeps_axes or axis not in axes)
    if tuple(sizes) != tuple(reduced.shape):
        raise UnreadableError(f"selects by {reduced.label}, whose shape is not that of its reduction (a damaged file)")
    if mask.type != reduced.type or reduced.type not in NUMPY_TYPES or has_few_bits(mask):
        raise UnreadableError(
            f"reduces a mask of {mask.type_name} to {reduced.type_name} (expected one type, no codes)"
        )
