"""The inside of attentions: caches and queries on their way to scores, masks, softmax, and what heads mix of V."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mtp_extract.graph.call import (
    CONVERSIONS,
    REDUCTIONS,
    SELECTIONS,
    Call,
    activation_scale,
    axis_of,
    holds_codes,
    ints,
    keeps_numbers,
)
from mtp_extract.graph.evaluate import LAYOUT, evaluate, inputs_of, moved
from mtp_extract.graph.expressions import Expr, Expressions, Ids, Term, UnreadableError
from mtp_extract.graph.flat import INPUT_POS, Depends, FlatGraph, Node, Value
from mtp_extract.graph.forms import (
    SCORE,
    Attention,
    Cache,
    CacheAxes,
    Form,
    MaskTree,
    Rotated,
    Scored,
    Scores,
    SlotWindow,
    broadcast_shape,
    form_shape,
    heads_and_width,
)
from mtp_extract.graph.guards import output_guard
from mtp_extract.graph.positions import Positions
from mtp_extract.graph.views import View
from mtp_extract.litertlm.storage import FLOAT_TYPES, Floats

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


class AttentionReader:
    """Reads operators whose operands are inside of attentions, or that lead there.

    Attributes:
        queries: the expressions whose elements meet K.
        attentions: expression of what heads mixed → how.
    """

    def __init__(self, graph: FlatGraph, expressions: Expressions) -> None:
        self.graph, self.expressions = graph, expressions
        self.positions = Positions(graph)
        self.queries: set[Expr] = set()
        self.attentions: dict[Expr, Attention] = {}

    def read(self, node: Node, operands: list[Form | None]) -> Form | tuple[Form, ...]:
        """What ``node`` makes of ``operands``; None among them is what positions and masks decide."""
        if node.op.activation:
            raise UnreadableError("cuts off numbers inside of an attention by its fused function")
        if node.kind in LAYOUT:
            return self._moved(node, operands)
        if node.kind in CONVERSIONS:
            return self._converted(node, operands[0])
        if node.kind == "BATCH_MATMUL":
            return self._product(node, operands)
        first = next((form for form in operands if isinstance(form, Cache | Scored)), None)
        if node.kind in SELECTIONS and first is None:
            return self._guarded(node, operands)
        if isinstance(first, Cache):
            return self._scaled_cache(node, first, operands)
        return self.scored(node, operands) if isinstance(first, Scored) else self._rotated(node, operands)

    # Operators that move elements.

    def _moved(self, node: Node, operands: list[Form | None]) -> Form | tuple[Form, ...]:
        places = LAYOUT[node.kind]
        if node.kind == "DYNAMIC_UPDATE_SLICE":
            return self.placed(node, operands[1])
        forms = [operands[i] for i in places if i < len(operands)]
        grids = {activation_scale(node.operand(i).tensor) for i in places if i < len(operands)}
        if grids != {activation_scale(node.outputs[0].tensor)}:
            raise UnreadableError("hands codes on with another scale")
        first = forms[0]
        if isinstance(first, Cache | Scored) and node.kind == "SLICE":
            return self._sliced(node, first)
        if any(value.depends for i, value in enumerate(node.inputs) if i not in places and value is not None):
            raise UnreadableError("chooses elements by what is computed")
        if isinstance(first, Cache | Scored):
            return self._moved_view(node, first)
        queries = [self.rotated(form) for form in forms]
        if any(query.query is not queries[0].query for query in queries):
            raise UnreadableError("joins elements of different queries")
        terms = max(query.number.shape[-1] for query in queries)
        moved_terms = moved(self.graph, node, (query.with_terms(terms).terms for query in queries))
        results = tuple(Rotated(queries[0].query, each) for each in moved_terms)
        return results if len(results) > 1 else results[0]

    def _moved_view(self, node: Node, form: Cache | Scored) -> Cache | Scored:
        """A cache or scores with the axes in another order, joined, split, repeated, or some elements chosen."""
        kind, view = node.kind, form.view
        if kind in ("RESHAPE", "SQUEEZE", "EXPAND_DIMS"):
            # Sizes alone: NumPy reshapes a view of one byte.
            (reshaped,) = moved(self.graph, node, [np.broadcast_to(np.zeros((), np.int8), view.shape)])
            return replace(form, view=view.reshaped(reshaped.shape))
        if kind not in ("TRANSPOSE", "BROADCAST_TO", "GATHER"):
            raise UnreadableError("moves elements of a cache or of scores otherwise than a drafter does")
        numbers = self.graph.integers(node.operand(1))
        if kind == "GATHER":
            axis, batch = (Call(self.graph, node).option(slot, "i") for slot in (0, 1))
            if batch or len(node.operand(1).tensor.shape) != 1:
                raise UnreadableError("chooses otherwise in each batch, or makes axes")
            return replace(form, view=view.picked(axis_of(axis, len(view.shape)), numbers))
        sizes = ints(numbers)
        return replace(form, view=view.transposed(sizes) if kind == "TRANSPOSE" else view.broadcast(sizes))

    def _sliced(self, node: Node, form: Cache | Scored) -> Cache | Scored:
        """SLICE, from where a constant or the position says: whole axes, and some slots."""
        if node.operand(1).depends & ~Depends.POSITION or node.operand(2).depends:
            raise UnreadableError("chooses elements by what is computed")
        begins = self.positions.table(node.operand(1))
        sizes = self.graph.integers(node.operand(2))
        view = form.view
        for axis, (begin, size, length) in enumerate(zip(begins.T, sizes.tolist(), view.shape, strict=True)):
            if not ((begin >= 0) & (begin + size <= length)).all():
                raise UnreadableError("takes elements that its operand lacks")
            if (begin == begin[0]).all():
                view = view.picked(axis, np.arange(begin[0], begin[0] + size, dtype=np.int64))
            else:
                view = view.window(axis, size, self.positions.window(begin))
        if isinstance(form, Scored) and view.starts and (form.stage != "weights" or set(view.starts) != {"slot"}):
            raise UnreadableError(f"takes some {form.stage} scores by the position")
        return replace(form, view=view)

    # Operators that hand numbers on.

    def _converted(self, node: Node, form: Form | None) -> Form:
        """The same numbers in another type; and of a cache whose zero point is 0, a CAST to the codes themselves."""
        source, target = node.operand(0).tensor, node.outputs[0].tensor
        if form is not None and keeps_numbers(node):
            return form
        grid = activation_scale(source)
        if isinstance(form, Cache) and node.kind == "CAST" and target.type in FLOAT_TYPES and grid and not grid[1]:
            return replace(form, factor=form.factor / grid[0])
        raise UnreadableError(f"turns {source.type_name} inside of an attention into {target.type_name}")

    # Products.

    def _product(self, node: Node, operands: list[Form | None]) -> Form:
        """BATCH_MATMUL of a query and K, or of weights and V."""
        first, right = operands
        flips = [bool(Call(self.graph, node).option(slot, "?", False)) for slot in (0, 1)]
        if not isinstance(right, Cache):
            raise UnreadableError("multiplies what no attention multiplies, or the other way round")
        tensors = [node.operand(0).tensor, node.operand(1).tensor, node.outputs[0].tensor]
        if tensors[0].type != tensors[2].type:
            raise UnreadableError(f"multiplies {tensors[0].type_name} and makes {tensors[2].type_name} of it")
        if any(tensor.type not in FLOAT_TYPES and activation_scale(tensor) is None for tensor in tensors):
            raise UnreadableError(f"multiplies {right.name} as integers that have no scale")
        if isinstance(first, Scored):
            return self.mixed(first, right, *flips)
        return self.scores(self.rotated(first), right, *flips)

    # Element by element.

    def _scaled_cache(self, node: Node, cache: Cache, operands: list[Form | None]) -> Cache:
        """A cache times a number: of codes, the scale."""
        at = next((i for i, form in enumerate(operands) if form is not cache), 0)
        number, floats = self.expressions.number_of(operands[at]), node.outputs[0].tensor.type in FLOAT_TYPES
        if len(operands) != 2 or not number or not floats or form_shape(cache) != broadcast_shape(node, operands):
            raise UnreadableError("computes something of a cache")
        if node.kind == "MUL" or (node.kind == "DIV" and at == 1):
            return replace(cache, factor=cache.factor * number if node.kind == "MUL" else cache.factor / number)
        raise UnreadableError("computes something of a cache")

    def rotated(self, form: Form | None) -> Rotated:
        """Elements of a query."""
        if isinstance(form, Rotated):
            return form
        if form is None or isinstance(form, Cache | Scored) or self.expressions.is_constant(form):
            raise UnreadableError("brings a query together with something else")
        query, element = self.expressions.origin(form.expr, form.ids)
        self.queries.add(query)
        number = np.full((*element.shape, 1), form.factor)
        return Rotated.of(query, number, element[..., None], np.zeros(number.shape, np.int64))

    def _rotated(self, node: Node, operands: list[Form | None]) -> Rotated:
        """Sums of elements of one query; products with numbers, and once with what the position decides."""
        kind, shape = node.kind, broadcast_shape(node, operands)
        queries = [i for i, form in enumerate(operands) if form is not None and not self.expressions.is_constant(form)]
        forms = [self.rotated(operands[i]) for i in queries]
        if kind == "NEG" and len(forms) == 1:
            return forms[0].times(-1.0)
        if kind in ("ADD", "SUB") and len(forms) == 2:
            first, other = forms
            if first.query is not other.query or first.terms.shape != other.terms.shape:
                raise UnreadableError("adds elements of different queries")
            return first.plus(other.times(-1.0) if kind == "SUB" else other)
        if len(forms) != 1 or len(operands) != 2 or not (kind == "MUL" or (kind == "DIV" and queries == [0])):
            raise UnreadableError("computes something of a query")
        rotated, at = Rotated(forms[0].query, np.broadcast_to(forms[0].terms, shape)), 1 - queries[0]
        constant, value = operands[at], node.operand(at)
        if isinstance(constant, Term) and not value.depends:
            numbers = np.broadcast_to(self.expressions.numbers_of(self.graph, constant), shape)[..., None]
            scaled = rotated.times(numbers if kind == "MUL" else 1 / numbers)
            if not np.isfinite(scaled.number).all():
                raise UnreadableError("multiplies a query by what is no number")
            return scaled
        if holds_codes(value.tensor):
            raise UnreadableError("rotates a query by codes, which cut off or round the position's cosines and sines")
        table = value.depends == Depends.POSITION and value.tensor.type in FLOAT_TYPES
        if kind == "DIV" or not table or rotated.by.any() or inputs_of([value]) != {INPUT_POS}:
            raise UnreadableError("brings a query together with something else than one table of the position")
        by = np.broadcast_to(self.positions.elements(value), shape)[..., None]
        return Rotated.of(rotated.query, rotated.number, rotated.element, np.broadcast_to(by, rotated.by.shape))

    # Products.

    def _cache_axes(self, cache: Cache, slot: object, dimension: object) -> tuple[CacheAxes, Ids]:
        """Of a cache whose last axes run along ``slot`` and ``dimension``: its axes, and the KV heads of the others."""
        shape, batch = self.graph.inputs[cache.name].tensor.shape, range(len(cache.view.axes) - 2)
        heads = cache.view.running(batch)
        if not isinstance(slot, int) or not isinstance(dimension, int) or slot == dimension:
            raise UnreadableError(f"takes {cache.name} otherwise than by slots and dimensions")
        if heads & {slot, dimension} or len(heads) > 1:
            raise UnreadableError(f"takes {cache.name} otherwise than by KV heads, slots and dimensions")
        head = next((int(label) for label in heads), None)
        rest = [size for axis, size in enumerate(shape) if axis not in (head, slot, dimension)]
        if shape[slot] != self.positions.slots or max(rest, default=1) > 1 or not set(cache.view.starts) <= {slot}:
            raise UnreadableError(f"takes some of {cache.name} alone, or by the position")
        places = np.zeros(cache.view.shape[:-2], np.int64) if head is None else cache.view.places(batch, head)
        return (head, slot, dimension), places

    def scores(self, rotated: Rotated, cache: Cache, flip: bool, flip_cache: bool) -> Scored:
        """A query times K, ``[…, rows, dimensions] · […, dimensions, slots]``."""
        if flip:
            raise UnreadableError("multiplies a query that it transposes")
        over, along = (-1, -2) if flip_cache else (-2, -1)
        dimension, dimensions, _ = cache.view.along(over)
        slot, slots, start = cache.view.along(along)
        axes, heads = self._cache_axes(cache, slot, dimension)
        if np.unique(dimensions).size != dimensions.size or rotated.terms.shape[-1] != dimensions.size:
            raise UnreadableError("multiplies queries and K otherwise than over its dimensions")
        shape = (*np.broadcast_shapes(heads.shape, rotated.terms.shape[:-2]), rotated.terms.shape[-2])
        rows, width = int(np.prod(shape)), self.graph.inputs[cache.name].tensor.shape[axes[2]]
        if rows * width * rotated.number.shape[-1] > _MOST_NUMBERS:
            raise UnreadableError("has more heads and dimensions than any drafter")
        terms = np.zeros((rows, width), rotated.terms.dtype)
        terms[:, dimensions] = np.broadcast_to(rotated.terms, (*shape, dimensions.size)).reshape(rows, -1)
        wide = Rotated(rotated.query, terms).times(cache.factor)
        head = np.broadcast_to(heads[..., None], shape).reshape(-1)
        view = View.whole(["row", "slot"], [rows, slots.size]).reshaped((*shape, slots.size))
        view = view.with_axis(len(shape), np.outer([0, 1], slots))
        view = view if start is None else replace(view, starts={"slot": start})
        return Scored("score", Scores(cache.name, axes, head, wide, SCORE), view)

    def mixed(self, scored: Scored, cache: Cache, flip: bool, flip_cache: bool) -> Form:
        """Weights times V, ``[…, rows, slots] · […, slots, dimensions]``."""
        if scored.stage != "weights":
            raise UnreadableError(f"multiplies {scored.stage} scores and a cache")
        rank = len(scored.view.axes)
        at, other = (rank - 2, rank - 1) if flip else (rank - 1, rank - 2)
        over, along = (-1, -2) if flip_cache else (-2, -1)
        label, places, start = scored.view.along(at)
        slot, slots, begins = cache.view.along(over)
        dimension, dimensions, _ = cache.view.along(along)
        axes, heads = self._cache_axes(cache, slot, dimension)
        if label != "slot" or not np.array_equal(places, slots) or start != begins:
            raise UnreadableError("weighs other slots of V than it scored")
        if places.tolist() != [*range(self.positions.slots if start is None else places.size)]:
            raise UnreadableError("weighs some slots alone")
        window = None if start is None else SlotWindow(start, places.size)
        rows = scored.view.places([*range(rank - 2), other], "row")
        rows = np.broadcast_to(rows, (*np.broadcast_shapes(heads.shape, rows.shape[:-1]), rows.shape[-1]))
        if not np.array_equal(scored.scores.head[rows], np.broadcast_to(heads[..., None], rows.shape)):
            raise UnreadableError("weighs another head of V than it scored of K")
        attention = Attention(scored.scores, cache.name, axes, window)
        return self._outside(attention, cache.factor, rows[..., None], dimensions)

    def _outside(self, attention: Attention, factor: float, row: Ids, dimension: Ids) -> Term:
        """What heads mixed of V, as a vector of ``[heads, width]``: a value outside of attentions."""
        name, scores = attention.value, attention.scores
        shapes = (self.graph.inputs[cache].tensor.shape for cache in (scores.key, name))
        sizes = list(map(heads_and_width, shapes, (scores.axes, attention.axes)))
        if sizes[0] != sizes[1]:
            raise UnreadableError("mixes V of other heads or dimensions than the K it scored")
        rotated, width = scores.rotated, sizes[0][1]
        heads = np.where(rotated.number != 0, rotated.element // width, -1).reshape(len(rotated.number), -1)
        head: Ids = heads.max(1)
        if ((heads != head[:, None]) & (heads >= 0)).any() or (head < 0).any():
            raise UnreadableError("mixes what several heads scored")
        # Heads that weigh other slots mix something else: so no two of them are one expression.
        size = rotated.query.size
        expr = self.expressions.expr("mixed", scores, name, attention.axes, attention.window, size=size)
        self.attentions.setdefault(expr, attention)
        return Term(factor, expr, head[row] * width + dimension)

    # Output guards.

    def _guarded(self, node: Node, operands: Sequence[Form | None]) -> Term:
        """A selection between what heads mixed and 0; :mod:`mtp_extract.proof.slots` decides which it chooses."""
        places = [i for i, form in enumerate(operands) if isinstance(form, Term) and form.expr in self.attentions]
        if operands[0] is not None or len(places) != 1:
            raise UnreadableError("chooses between activations that are not what heads mixed")
        (mixed,) = places
        term = operands[mixed]
        assert isinstance(term, Term)
        condition, attention = node.operand(0), self.attentions[term.expr]
        if self.expressions.number_of(operands[3 - mixed]) != 0:
            raise UnreadableError("replaces what heads mixed by something else than 0")
        if attention.guard is not None:
            raise UnreadableError("chooses again between what heads mixed and 0")
        if broadcast_shape(node, operands) != term.ids.shape:
            raise UnreadableError("repeats what heads mixed")
        if node.kind == "SELECT" and len(condition.tensor.shape) != term.ids.ndim:
            raise UnreadableError("chooses whole rows")
        guard = output_guard(self.graph, self.positions.slots, condition, keeps=mixed == 1)
        parts = (attention.scores, attention.value, attention.axes, attention.window, guard)
        expr = self.expressions.expr("mixed", *parts, size=term.expr.size)
        self.attentions.setdefault(expr, replace(attention, guard=guard))
        return replace(term, expr=expr)

    # From scores to weights.

    def scored(self, node: Node, operands: Sequence[Form | None]) -> Scored:
        """What operators make of scores, stage by stage."""
        rows = [form for form in operands if isinstance(form, Scored)]
        if any(isinstance(form, Rotated | Cache) for form in operands):
            raise UnreadableError("brings a score together with a query or a cache")
        if node.kind == "SOFTMAX":
            return self._softmax(node, rows[0])
        stages = (f.stage if isinstance(f, Scored) else self.expressions.number_of(f) for f in operands)
        stage = _STAGES.get((node.kind, *stages))
        if stage is None and {row.stage for row in rows} == {"score"} and node.kind not in REDUCTIONS:
            return self._masked(node, operands, rows)
        if stage is None:
            raise UnreadableError(
                f"computes something of {rows[0].stage} scores, between the scores and the weights of an attention"
            )
        if node.kind in REDUCTIONS:
            return self._reduced(node, rows[0], stage)
        widest = max(rows, key=lambda row: math.prod(row.view.shape))
        if any(row is not widest and not _same_rows(widest, row) for row in rows):
            raise UnreadableError("brings scores and a number of other rows together")
        return replace(widest, stage=stage)

    def _all_slots(self, view: View, axis: int) -> bool:
        label, places, start = view.along(axis)
        return label == "slot" and start is None and np.array_equal(places, np.arange(self.positions.slots))

    def _softmax(self, node: Node, scored: Scored) -> Scored:
        beta = float(Call(self.graph, node).option(0, "f", 0.0))
        if scored.stage != "score" or beta != 1 or not self._all_slots(scored.view, len(scored.view.axes) - 1):
            raise UnreadableError("is a softmax of something else than the scores of all slots")
        return replace(scored, stage="weights")

    def _reduced(self, node: Node, scored: Scored, stage: str) -> Scored:
        """The largest score, the total, or whether any slot is seen: over all slots."""
        at = scored.slot_axis
        view = scored.view
        axes = node.operand(1)
        over = [] if axes.depends else ints(self.graph.integers(axes))
        if {axis_of(axis, len(view.axes)) for axis in over} != {at} or not self._all_slots(view, at):
            raise UnreadableError(f"reduces {scored.stage} scores otherwise than a softmax does")
        keeps = bool(Call(self.graph, node).option(0, "?", False))
        return Scored(stage, scored.scores, view.without(at, keeps=keeps))

    # Windows.

    def placed(self, node: Node, scored: Form | None) -> Scored:
        """DYNAMIC_UPDATE_SLICE of the scores of a window into one number, where that window lies."""
        around = node.operand(0)
        if not isinstance(scored, Scored) or scored.stage != "score" or around.depends:
            raise UnreadableError("writes something else than the scores of a window")
        if around.tensor.type not in FLOAT_TYPES:
            raise UnreadableError(f"writes the scores of a window into numbers of {around.tensor.type_name}")
        numbers = np.unique(self._ground(around))
        view = scored.view
        shape = around.tensor.shape
        at = scored.slot_axis
        begins = np.clip(self.positions.table(node.operand(2)), 0, np.array(shape) - np.array(view.shape))
        label, places, start = view.along(at)
        fits = all(view.shape[axis] == size for axis, size in enumerate(shape) if axis != at)
        belongs = start == self.positions.window(begins[:, at]) and np.array_equal(places, np.arange(places.size))
        if numbers.size != 1 or start is None or not (belongs and fits) or shape[at] != self.positions.slots:
            raise UnreadableError("puts scores where they do not belong")
        tree = ("window", scored.scores.tree, SlotWindow(start, places.size), float(numbers[0]))
        by_slot = np.outer([slot_label == label for slot_label in view.labels], np.arange(shape[at]))
        full_view = replace(view.with_axis(at, by_slot), starts={})
        return Scored("score", replace(scored.scores, tree=tree), full_view)

    def _ground(self, around: Value) -> Floats:
        """The numbers of a constant that is stored, or filled with one number."""
        if around.constant:
            return self.graph.floats(around)
        filler = around.producer
        if (
            filler is None
            or filler.kind != "FILL"
            or ints(self.graph.integers(filler.operand(0))) != [*around.tensor.shape]
        ):
            raise UnreadableError("writes the scores of a window into something else than constant numbers")
        return evaluate(self.graph, {}, [filler.operand(1)])[0].reshape(-1)

    # Masks.

    def _masked(self, node: Node, operands: Sequence[Form | None], rows: Sequence[Scored]) -> Scored:
        """A score that meets masks, positions and numbers."""
        shape = broadcast_shape(node, operands)
        # With axes of one element in front, where the other operand has more.
        views = [row.view.reshaped((1,) * (len(shape) - len(row.view.axes)) + row.view.shape) for row in rows]
        if any(not view.same(views[0]) for view in views) or views[0].shape != shape:
            raise UnreadableError("brings scores of different slots or heads together, or repeats them")
        first = rows[0].scores
        if any(row.scores.rotated is not first.rotated or row.scores.head is not first.head for row in rows):
            raise UnreadableError("brings different scores together")
        at = views[0].only("slot")
        parts = [self._part(form, value, views[0], at) for form, value in zip(operands, node.inputs, strict=True)]
        if first.tree == SCORE and (factor := _factor(node.kind, parts)):
            return Scored("score", replace(first, rotated=first.rotated.times(factor)), views[0])
        return Scored("score", replace(first, tree=_tree(node, parts)), views[0])

    def _part(self, form: Form | None, value: Value | None, view: View, at: int) -> Any:
        """What an operand is in a mask tree: a number a slot, the same for all rows."""
        if isinstance(form, Scored):
            return form.scores.tree
        number = self.expressions.number_of(form)
        if number is not None:
            return number
        if value is None or value.depends & Depends.DATA:
            raise UnreadableError("brings a score together with another activation")
        # Masks are read along their last axis: so that of the slots has to be.
        if at != len(view.axes) - 1 and value.tensor.elements > 1:
            raise UnreadableError("meets a mask otherwise than along its last axis")
        axis = at - (len(view.axes) - len(value.tensor.shape))
        if axis < 0 or value.tensor.shape[axis] == 1:
            return "leaf", value, None
        if not self._all_slots(view, at):
            raise UnreadableError("meets scores of some slots with a mask")
        return "leaf", value, axis


def _tree(node: Node, parts: list[Any]) -> MaskTree:
    """The mask tree of an operator on ``parts``, which are trees, leaves and numbers."""
    mine = [isinstance(part, tuple) and part[0] != "leaf" for part in parts]
    if node.kind in SELECTIONS and not mine[0]:
        if node.kind == "SELECT" and len(node.operand(0).tensor.shape) != len(node.outputs[0].tensor.shape):
            raise UnreadableError("chooses whole rows")
        return "select", *parts
    if node.kind in ("ADD", "SUB") and sum(mine) == 1 and (node.kind == "ADD" or mine[0]):
        tree, leaf = parts if mine[0] else parts[::-1]
        return "add", tree, leaf, 1.0 if node.kind == "ADD" else -1.0
    raise UnreadableError("computes something of a score")


def _factor(kind: str, parts: list[Any]) -> float | None:
    """What an operator multiplies a score by that no mask has met; None where it does something else."""
    numbers = [part for part in parts if isinstance(part, float)]
    if kind == "NEG":
        return -1.0
    if kind == "MUL" and len(numbers) == 1:
        return numbers[0]
    return 1 / numbers[0] if kind == "DIV" and numbers == parts[1:] and numbers[0] else None


def _same_rows(widest: Scored, narrow: Scored) -> bool:
    """Whether ``narrow``, a number a row, is of the same scores and rows as ``widest``."""
    if widest.scores is not narrow.scores or len(widest.view.axes) != len(narrow.view.axes):
        return False
    at = widest.slot_axis
    rest = [axis for axis in range(len(widest.view.axes)) if axis != at]
    return narrow.view.shape[at] == 1 and np.array_equal(
        widest.view.places(rest, "row"), narrow.view.places(rest, "row")
    )
