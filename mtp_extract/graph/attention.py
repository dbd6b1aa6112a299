"""The inside of attentions: operators whose operands are caches, queries or scores, up to what heads mix of V."""

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
    activation_scale,
    axis_of,
    has_few_bits,
    ints,
    keeps_numbers,
)
from mtp_extract.graph.evaluate import LAYOUT, moved
from mtp_extract.graph.expressions import Expr, Ids, Term, UnreadableError
from mtp_extract.graph.flat import Depends, Node, Value, ancestors
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
    heads_and_width,
    operand_shape,
)
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
from mtp_extract.graph.views import Along, View
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor

_Viewed = TypeVar("_Viewed", bound=Cache | ScoreView)
_REDUCTIONS_OF_MASKS = ("REDUCE_MAX", "REDUCE_ANY")


def read_inside(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> tuple[Form, ...]:
    """What ``node`` makes of ``operands``, which are inside of an attention, or lead there."""
    if node.op.activation:
        raise UnreadableError("cuts off numbers inside of an attention by its fused function")
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
    """Elements in other places."""
    if node.kind == "DYNAMIC_UPDATE_SLICE":
        return (place_window(reading, node, operands[1]),)
    places = [place for place in LAYOUT[node.kind] if place < len(operands)]
    scales = {activation_scale(node.operand(place).tensor) for place in places}
    if scales != {activation_scale(node.outputs[0].tensor)}:
        raise UnreadableError("hands codes on with another scale")
    first = operands[places[0]]
    if isinstance(first, Cache | ScoreView) and node.kind == "SLICE":
        return (_slice_view(reading, node, first),)
    if any(value is not None and value.depends for i, value in enumerate(node.inputs) if i not in places):
        raise UnreadableError("chooses elements by what is computed")
    if isinstance(first, Cache | ScoreView):
        return (_move_view(reading, node, first),)
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


def _multiply_cache(reading: ReadGraph, node: Node, first: Operand, cache: Operand) -> Form:
    """BATCH_MATMUL of a query and K, or of weights and V."""
    flips, flips_cache = (bool(Call(reading.graph, node).option(slot, "?", False)) for slot in (0, 1))
    if not isinstance(cache, Cache):
        raise UnreadableError("multiplies what no attention multiplies, or the other way round")
    tensors = [node.operand(0).tensor, node.operand(1).tensor, node.outputs[0].tensor]
    if tensors[0].type != tensors[2].type:
        raise UnreadableError(f"multiplies {tensors[0].type_name} and makes {tensors[2].type_name} of it")
    if any(tensor.type not in FLOAT_TYPES and activation_scale(tensor) is None for tensor in tensors):
        raise UnreadableError(f"multiplies {cache.name} as integers that have no scale")
    scale = activation_scale(tensors[1])
    if tensors[0].type in FLOAT_TYPES and scale and scale[1]:
        raise UnreadableError(f"multiplies floats by {cache.name}, whose zero point LiteRT ignores then")
    if isinstance(first, ScoreView):
        return _mix_values(reading, first, cache, flips_weights=flips, flips_values=flips_cache)
    query = read_query_terms(reading, first)
    return multiply_keys(reading, query, cache, flips_query=flips, flips_keys=flips_cache)


# Caches and scores, moved about and scaled.


def _move_view(reading: ReadGraph, node: Node, form: _Viewed) -> _Viewed:
    """A cache or scores with the axes in another order, joined, split, repeated, or some elements chosen."""
    kind = node.kind
    view = form.view
    if kind in ("RESHAPE", "SQUEEZE", "EXPAND_DIMS"):
        # Sizes alone: NumPy reshapes a view of one byte.
        (reshaped,) = moved(reading.graph, node, [np.broadcast_to(np.zeros((), np.int8), view.shape)])
        return replace(form, view=view.reshaped(reshaped.shape))
    if kind not in ("TRANSPOSE", "BROADCAST_TO", "GATHER"):
        raise UnreadableError("moves elements of a cache or of scores otherwise than a drafter does")
    numbers = reading.graph.integers(node.operand(1))
    if kind == "TRANSPOSE":
        return replace(form, view=view.transposed(ints(numbers)))
    if kind == "BROADCAST_TO":
        return replace(form, view=view.broadcast(ints(numbers)))
    axis, batch = (Call(reading.graph, node).option(slot, "i") for slot in (0, 1))
    if batch or len(node.operand(1).tensor.shape) != 1:
        raise UnreadableError("chooses otherwise in each batch, or makes axes")
    return replace(form, view=view.picked(axis_of(axis, len(view.shape)), numbers))


def _slice_view(reading: ReadGraph, node: Node, form: _Viewed) -> _Viewed:
    """SLICE, from where a constant or the position says: whole axes, and some slots."""
    if node.operand(1).depends & ~Depends.POSITION or node.operand(2).depends:
        raise UnreadableError("chooses elements by what is computed")
    begins = reading.positions.table(node.operand(1))
    sizes = reading.graph.integers(node.operand(2)).tolist()
    view = form.view
    for axis, (begin, size, length) in enumerate(zip(begins.T, sizes, view.shape, strict=True)):
        if not ((begin >= 0) & (begin + size <= length)).all():
            raise UnreadableError("takes elements that its operand lacks")
        view = _slice_axis(reading, view, axis, begin, size)
    if isinstance(form, ScoreView) and view.starts and (form.stage != "weights" or set(view.starts) != {"slot"}):
        raise UnreadableError(f"takes some {form.stage} scores by the position")
    return replace(form, view=view)


def _slice_axis(reading: ReadGraph, view: View, axis: int, begin: Ids, size: int) -> View:
    """``size`` indices of an axis, from where ``begin`` says by position."""
    if (begin == begin[0]).all():
        return view.picked(axis, np.arange(begin[0], begin[0] + size, dtype=np.int64))
    return view.window(axis, size, reading.positions.window(begin))


def _scale_cache(reading: ReadGraph, node: Node, cache: Cache, operands: Sequence[Operand]) -> Cache:
    """A cache times a number: of codes, the scale."""
    at = next((i for i, operand in enumerate(operands) if operand is not cache), 0)
    number = reading.expressions.number_of(operands[at])
    makes_floats = node.outputs[0].tensor.type in FLOAT_TYPES
    is_scaled = len(operands) == 2 and (node.kind == "MUL" or (node.kind == "DIV" and at == 1))
    if not (number and makes_floats and is_scaled) or operand_shape(cache) != broadcast_shape(operands):
        raise UnreadableError("computes something of a cache")
    return replace(cache, factor=cache.factor * number if node.kind == "MUL" else cache.factor / number)


# What heads mix.


def _mix_values(
    reading: ReadGraph, weights: ScoreView, cache: Cache, *, flips_weights: bool, flips_values: bool
) -> Term:
    """Weights times V, ``[…, rows, slots] · […, slots, dimensions]``: a value outside of attentions."""
    if weights.stage != "weights":
        raise UnreadableError(f"multiplies {weights.stage} scores and a cache")
    rank = len(weights.view.axes)
    slot_axis, row_axis = (rank - 2, rank - 1) if flips_weights else (rank - 1, rank - 2)
    values = view_cache_as_matrix(reading, cache, *((-1, -2) if flips_values else (-2, -1)))
    window = _match_slots(reading, weights.view.along(slot_axis), values)
    rows = _match_rows(weights, row_axis, values)

    # As a vector of ``[heads, width]``. Heads that weigh other slots mix something else, so no two are one expression.
    scores = weights.scores
    attention = Attention(scores, cache.name, values.axes, window)
    width = _read_head_width(reading, attention)
    head = _find_query_heads(scores, width)
    expr = _record_attention(reading, attention, scores.rotated.query.size)
    return Term(cache.factor, expr, head[rows[..., None]] * width + values.dimensions)


def _match_slots(reading: ReadGraph, weights: Along, values: CacheMatrix) -> SlotWindow | None:
    """The window of slots whose weights meet V: all that it holds; None for all slots of the cache."""
    label, slots, start = weights
    if label != "slot" or not np.array_equal(slots, values.slots) or start != values.window:
        raise UnreadableError("weighs other slots of V than it scored")
    count = reading.positions.slots if start is None else slots.size
    if not np.array_equal(slots, np.arange(count)):
        raise UnreadableError("weighs some slots alone")
    return None if start is None else SlotWindow(start, slots.size)


def _match_rows(weights: ScoreView, row_axis: int, values: CacheMatrix) -> Ids:
    """The rows of scores that meet V, ``[*batch, rows]``, each of which scored the same head of K."""
    batch = range(len(weights.view.axes) - 2)
    rows = weights.view.places([*batch, row_axis], "row")
    shape = (*np.broadcast_shapes(values.heads.shape, rows.shape[:-1]), rows.shape[-1])
    rows = np.broadcast_to(rows, shape)
    if not np.array_equal(weights.scores.head[rows], np.broadcast_to(values.heads[..., None], shape)):
        raise UnreadableError("weighs another head of V than it scored of K")
    return rows


def _read_head_width(reading: ReadGraph, attention: Attention) -> int:
    """Dimensions of a head, which K and V share."""
    inputs = reading.graph.inputs
    of_keys = heads_and_width(inputs[attention.scores.key].tensor.shape, attention.scores.axes)
    of_values = heads_and_width(inputs[attention.value].tensor.shape, attention.axes)
    if of_keys != of_values:
        raise UnreadableError("mixes V of other heads or dimensions than the K it scored")
    return of_keys[1]


def _find_query_heads(scores: ScoreRows, width: int) -> Ids:
    """Per row, the query head that is in it."""
    rotated = scores.rotated
    heads = np.where(rotated.number != 0, rotated.element // width, -1).reshape(len(rotated.number), -1)
    head: Ids = heads.max(1)
    if ((heads != head[:, None]) & (heads >= 0)).any() or (head < 0).any():
        raise UnreadableError("mixes what several heads scored")
    return head


def _record_attention(reading: ReadGraph, attention: Attention, size: int) -> Expr:
    """The expression of what ``attention`` mixes, which is noted."""
    parts: list[object] = [attention.scores, attention.value, attention.axes, attention.window]
    if attention.guard is not None:
        parts.append(attention.guard)
    expr = reading.expressions.expr("mixed", *parts, size=size)
    reading.attentions.setdefault(expr, attention)
    return expr


# Output guards.


def _read_selection(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> Term:
    """A selection between what heads mixed and 0; :mod:`mtp_extract.proof.attentions` decides which it chooses."""
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
    guarded = replace(attention, guard=_read_output_guard(reading, condition, keeps=keeps))
    return replace(term, expr=_record_attention(reading, guarded, term.expr.size))


def _read_output_guard(reading: ReadGraph, condition: Value, *, keeps: bool) -> OutputGuard:
    """The guard that chooses by ``condition``, which must be computed of one reduction over all slots and of constants;
    ``keeps`` is the truth that chooses what heads mixed.
    """
    if condition.depends & Depends.DATA:
        raise UnreadableError("chooses by what is computed of activations or caches")
    reductions = [
        (v, v.producer) for v in ancestors(condition) if v.producer and v.producer.kind in _REDUCTIONS_OF_MASKS
    ]
    if len(reductions) != 1:
        raise UnreadableError(
            f"chooses by {len(reductions)} reductions; expected one {' or '.join(_REDUCTIONS_OF_MASKS)} over all slots"
        )
    ((reduced, node),) = reductions
    # What decides the condition beside the reduction.
    others = (value for value in ancestors(condition, frozenset([id(reduced)])) if value.producer is None)
    if any(value.depends for value in others):
        raise UnreadableError("chooses by more than whether any slot is shown")
    mask = node.operand(0)
    _check_reduction(reading, node, mask.tensor, reduced.tensor)
    return OutputGuard(condition, reduced, MaskValue(mask, len(mask.tensor.shape) - 1), keeps)


def _check_reduction(reading: ReadGraph, node: Node, mask: Tensor, reduced: Tensor) -> None:
    """Check that ``node`` reduces a mask over all slots, into a tensor of the shape and type that its readers see."""
    rank = len(mask.shape)
    stated = [] if node.operand(1).depends else ints(reading.graph.integers(node.operand(1)))
    axes = {axis_of(axis, rank) for axis in stated}
    if mask.shape[-1:] != (reading.positions.slots,) or rank - 1 not in axes:
        raise UnreadableError("chooses by some slots of a mask alone")
    keeps_axes = bool(Call(reading.graph, node).option(0, "?", False))
    sizes = (1 if axis in axes else size for axis, size in enumerate(mask.shape) if keeps_axes or axis not in axes)
    if tuple(sizes) != tuple(reduced.shape):
        raise UnreadableError(f"chooses by {reduced.label}, which has another shape: the file is damaged")
    if mask.type != reduced.type or reduced.type not in NUMPY_TYPES or has_few_bits(mask):
        raise UnreadableError(f"chooses by a mask of {mask.type_name}")
