"""The inside of attentions: caches and queries on their way to the scores, and how operators move them.

What happens between the scores and what is mixed of V stands in :mod:`mtp_extract.graph.scoring`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mtp_extract.graph.call import CONVERSIONS, HALF_REACH, REDUCTIONS, Call, code_range, grid_of
from mtp_extract.graph.evaluate import inputs_of
from mtp_extract.graph.expressions import Expr, Expressions, Ids, Term, UnreadableError
from mtp_extract.graph.flat import INPUT_POS, Depends, FlatGraph, Node, Value
from mtp_extract.graph.forms import Cache, Form, Inside, Rotated, Scored, Tree, shape_of
from mtp_extract.graph.kernels import KERNELS
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.graph.positions import Positions
from mtp_extract.graph.scoring import Scoring
from mtp_extract.graph.views import View, moved
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType

_WHOLE_FLOATS = {TensorType.FLOAT16: 1 << 11, TensorType.FLOAT32: 1 << 24}
"""The integers up to these, of either sign, are floats of the type."""
_LEAST_SHARE = 1 / 254


class AttentionReader:
    """Reads operators whose operands are inside of attentions, or that lead there.

    Attributes:
        scales: of a cache of integers without a scale of their own, the number that the graph multiplies them by.
        queries: the expressions whose elements meet K.
    """

    def __init__(self, graph: FlatGraph, expressions: Expressions, coarse: list[Value]) -> None:
        self.graph, self.expressions, self.coarse = graph, expressions, coarse
        self.positions = Positions(graph)
        self.scales: dict[str, float] = {}
        self.queries: set[Expr] = set()
        self.scoring = Scoring(graph, expressions, self.positions)

    def cache(self, name: str, tensor: Tensor) -> Cache:
        """The input ``name``."""
        return Cache(name, View.whole(range(4), tensor.shape))

    def scaled(self, cache: Cache) -> float:
        """What multiplies the numbers of a cache where it meets a query or weights.

        Of integers without a scale, the factor is the scale: only that says what they stand for.
        """
        if cache.added:
            raise UnreadableError(f"takes the codes of {cache.name} for what they stand for")
        tensor = self.graph.inputs[cache.name].tensor
        if tensor.type in FLOAT_TYPES or grid_of(tensor) is not None:
            return cache.factor
        if cache.factor <= 0 or self.scales.setdefault(cache.name, cache.factor) != cache.factor:
            raise UnreadableError(f"multiplies {cache.name} by a number below 0, or by another one than elsewhere")
        return 1.0

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
        if node.kind not in REDUCTIONS:
            self._check_shape(node, operands)
        first = next((form for form in operands if isinstance(form, Cache | Scored)), None)
        if isinstance(first, Cache):
            return self._scaled_cache(node, first, operands)
        return self.scoring.scored(node, operands) if isinstance(first, Scored) else self._rotated(node, operands)

    def _check_shape(self, node: Node, operands: list[Form | None]) -> None:
        pairs = zip(operands, node.inputs, strict=True)
        shapes = [shape_of(form) if form is not None else tuple(v.tensor.shape) for form, v in pairs if v is not None]
        if np.broadcast_shapes(*shapes) != tuple(node.outputs[0].tensor.shape):
            raise UnreadableError("declares another shape than it computes")

    # Operators that move elements.

    def _moved(self, node: Node, operands: list[Form | None]) -> Form | tuple[Form, ...]:
        places = LAYOUT[node.kind]
        if node.kind == "DYNAMIC_UPDATE_SLICE":
            return self.scoring.placed(node, operands[1])
        forms = [operands[i] for i in places if i < len(operands)]
        grids = {grid_of(node.operand(i).tensor) for i in places if i < len(operands)}
        if grids != {grid_of(node.outputs[0].tensor)}:
            raise UnreadableError("hands codes on with another scale")
        others = [v for i, v in enumerate(node.inputs) if i not in places and v is not None]
        if any(value.depends for value in others):
            return self._window(node, forms[0])
        constants = [self.graph.integers(value).reshape(value.tensor.shape) for value in others]
        made: list[Any]
        if all(self.is_query(form) for form in forms):
            made = self._moved_queries(node, [self.rotated(form) for form in forms], constants)
        else:
            made = self._moved_views(node, forms, constants)
        return tuple(made) if len(node.outputs) > 1 else made[0]

    def _run(self, node: Node, arrays: list[Any], constants: list[Ids]) -> tuple[Any, ...]:
        """The operator's results, of arrays in the place of what it moves."""
        moving, others = iter(arrays), iter(constants)
        given = [next(moving) if i in LAYOUT[node.kind] else next(others) for i, v in enumerate(node.inputs) if v]
        made = KERNELS[node.kind](Call(self.graph, node), *given)
        return made if isinstance(made, tuple) else (made,)

    def _moved_queries(self, node: Node, forms: list[Rotated], constants: list[Ids]) -> list[Rotated]:
        if any(form.query is not forms[0].query for form in forms):
            raise UnreadableError("joins elements of different queries")
        terms = max(form.number.shape[-1] for form in forms)
        arrays = zip(*(form.with_terms(terms).arrays for form in forms), strict=True)
        made = []
        for parts in arrays:
            by_term = [self._run(node, [part[..., t] for part in parts], constants) for t in range(terms)]
            made.append([np.stack(results, -1) for results in zip(*by_term, strict=True)])
        return [Rotated(forms[0].query, *each) for each in zip(*made, strict=True)]

    def _moved_views(self, node: Node, forms: list[Form | None], constants: list[Ids]) -> list[Inside]:
        first = forms[0]
        if not isinstance(first, Cache | Scored) or not all(_alike(first, form) for form in forms):
            raise UnreadableError("joins what is not alike")
        views = [form.view for form in forms if isinstance(form, Cache | Scored)]
        found = moved(Call(self.graph, node), KERNELS[node.kind], views, constants)
        return [replace(first, view=view) for view in found]

    def _window(self, node: Node, form: Form | None) -> Cache | Scored:
        """SLICE from where the position says: whole axes, and some slots."""
        decided = (
            node.kind == "SLICE" and not node.operand(1).depends & ~Depends.POSITION and not node.operand(2).depends
        )
        if not decided or not isinstance(form, Cache | Scored):
            raise UnreadableError("chooses elements by what is computed")
        begins, sizes, view = self.positions.table(node.operand(1)), self.graph.integers(node.operand(2)), form.view
        for axis, (begin, size, whole) in enumerate(zip(begins.T, sizes.tolist(), view.shape, strict=True)):
            if not ((begin >= 0) & (begin + size <= whole)).all():
                raise UnreadableError("takes elements that its operand lacks")
            if (begin == begin[0]).all():
                view = view.picked(axis, np.arange(begin[0], begin[0] + size, dtype=np.int64))
            else:
                view = view.window(axis, size, self.positions.window(begin))
        if isinstance(form, Scored):
            self.scoring.check_window(form, view)
        return replace(form, view=view)

    # Operators that hand numbers on.

    def _converted(self, node: Node, form: Form | None) -> Form:
        """QUANTIZE, DEQUANTIZE, CAST: between floats; of caches also what keeps their codes; weights on a fine grid."""
        target = node.outputs[0].tensor
        if isinstance(form, Cache) and not _floats(node):
            return self._converted_cache(node, form)
        if isinstance(form, Scored) and form.stage == "weights":
            if node.kind == "QUANTIZE" and _holds_shares(target):
                self.coarse.append(node.outputs[0])
                return form
            if node.kind == "DEQUANTIZE" and target.type in FLOAT_TYPES:
                return form
        if not _floats(node) or form is None or isinstance(form, Term):
            raise UnreadableError(f"holds numbers inside of an attention as {target.type_name}")
        if target.type is not TensorType.FLOAT32:
            self._check_half(form)
            self.coarse.append(node.outputs[0])
        return form

    def _check_half(self, form: Inside) -> None:
        rotated = form.scores.rotated if isinstance(form, Scored) else form
        factors = rotated.number if isinstance(rotated, Rotated) else np.array([rotated.factor])
        numbers = np.abs(factors[factors != 0])
        if isinstance(form, Scored) and _is_scaled(form.scores.tree):
            raise UnreadableError("holds scores in half precision that were multiplied after they were masked")
        if numbers.size and not (numbers.min() * HALF_REACH >= 1 and numbers.max() <= HALF_REACH):
            raise UnreadableError("holds very large or very small numbers in half precision")

    def _converted_cache(self, node: Node, cache: Cache) -> Cache:
        """From the grid of the input itself to floats, or its codes to a type that holds them all."""
        source, target, own = node.operand(0).tensor, node.outputs[0].tensor, self.graph.inputs[cache.name].tensor
        grid = grid_of(own)
        stored = grid is not None and (source.type, grid_of(source)) == (own.type, grid)
        if stored and node.kind == "DEQUANTIZE" and target.type in FLOAT_TYPES:
            return cache
        if stored and node.kind == "QUANTIZE" and (target.type, grid_of(target)) == (own.type, grid):
            return cache
        if node.kind == "CAST" and source.type not in FLOAT_TYPES and grid_of(target) is None and _holds(target, own):
            if stored and grid is not None:
                return replace(cache, factor=1 / grid[0], added=float(grid[1]))
            if grid_of(source) is None:
                return cache
        raise UnreadableError(f"holds {cache.name} as {target.type_name}, on another grid than its own")

    # Products.

    def _product(self, node: Node, operands: list[Form | None]) -> Form:
        """BATCH_MATMUL of a query and K, or of weights and V."""
        left, right = operands
        flips = [bool(Call(self.graph, node).option(slot, "?", False)) for slot in (0, 1)]
        if not isinstance(right, Cache):
            raise UnreadableError("multiplies what no attention multiplies, or the other way round")
        tensor = node.operand(1).tensor
        if node.operand(0).tensor.type != node.outputs[0].tensor.type:
            raise UnreadableError("makes numbers of another type")
        if tensor.type not in FLOAT_TYPES and grid_of(tensor) is None:
            raise UnreadableError(f"multiplies integers of {right.name} that have no scale")
        right = replace(right, factor=self.scaled(right))
        if isinstance(left, Scored):
            return self.scoring.mixed(left, right, *flips)
        return self.scoring.scores(self.rotated(left), right, *flips)

    # Element by element.

    def _scaled_cache(self, node: Node, cache: Cache, operands: list[Form | None]) -> Cache:
        """A cache times a number, or less one: of codes, the scale and the zero point."""
        at = next((i for i, form in enumerate(operands) if form is not cache), 0)
        number, floats = self.expressions.number_of(operands[at]), node.outputs[0].tensor.type in FLOAT_TYPES
        if len(operands) != 2 or not number or not floats or shape_of(cache) != tuple(node.outputs[0].tensor.shape):
            raise UnreadableError("computes something of a cache")
        if node.kind == "SUB" and at == 1:
            return replace(cache, added=cache.added - number)
        if node.kind == "MUL" or (node.kind == "DIV" and at == 1):
            factor = number if node.kind == "MUL" else 1 / number
            return replace(cache, factor=cache.factor * factor, added=cache.added * factor)
        raise UnreadableError("computes something of a cache")

    def is_query(self, form: Form | None) -> bool:
        """Whether it is elements of a query, rotated or not."""
        return form is not None and not isinstance(form, Cache | Scored)

    def rotated(self, form: Form | None) -> Rotated:
        """Elements of a query."""
        if isinstance(form, Rotated):
            return form
        if form is None or isinstance(form, Cache | Scored) or self.expressions.is_constant(form):
            raise UnreadableError("brings a query together with something else")
        query, element = self.expressions.origin(form.expr, form.ids)
        self.queries.add(query)
        number = np.full((*element.shape, 1), form.factor)
        return Rotated(query, number, element[..., None], np.zeros(number.shape, np.int64))

    def _rotated(self, node: Node, operands: list[Form | None]) -> Rotated:
        """Sums of elements of one query; products with numbers, and once with what the position decides."""
        kind, shape = node.kind, tuple(node.outputs[0].tensor.shape)
        queries = [i for i, form in enumerate(operands) if form is not None and not self.expressions.is_constant(form)]
        forms = [self.rotated(operands[i]) for i in queries]
        if kind == "NEG" and len(forms) == 1:
            return replace(forms[0], number=-forms[0].number)
        if kind in ("ADD", "SUB") and len(forms) == 2:
            one, other = forms
            if one.query is not other.query or one.shape != other.shape:
                raise UnreadableError("adds elements of different queries")
            return one.plus(other, -1.0 if kind == "SUB" else 1.0)
        if len(forms) != 1 or len(operands) != 2 or not (kind == "MUL" or (kind == "DIV" and queries == [0])):
            raise UnreadableError("computes something of a query")
        rotated, at = forms[0].moved(lambda a: np.broadcast_to(a, shape)), 1 - queries[0]
        constant, value = operands[at], node.operand(at)
        if isinstance(constant, Term) and not value.depends:
            numbers = np.broadcast_to(self.expressions.numbers_of(self.graph, constant), shape)[..., None]
            made = rotated.number * numbers if kind == "MUL" else rotated.number / numbers
            if not np.isfinite(made).all():
                raise UnreadableError("multiplies a query by what is no number")
            return replace(rotated, number=made)
        table = value.depends == Depends.POSITION and (value.tensor.type in FLOAT_TYPES or grid_of(value.tensor))
        if kind == "DIV" or not table or rotated.by.any() or inputs_of([value]) != {INPUT_POS}:
            raise UnreadableError("brings a query together with something else than one table of the position")
        by = np.broadcast_to(self.positions.elements(value), shape)[..., None]
        return replace(rotated, by=np.broadcast_to(by, rotated.by.shape).copy())


def _is_scaled(tree: Tree) -> bool:
    """Whether a score is multiplied on its way through the masks."""
    inner = (part for part in tree[1:] if isinstance(part, tuple) and part[0] != "leaf")
    return tree[0] in ("times", "over") or any(map(_is_scaled, inner))


def _alike(one: Inside, other: Form | None) -> bool:
    """Whether they may be joined."""
    if isinstance(one, Cache):
        return isinstance(other, Cache) and (one.name, one.factor, one.added) == (other.name, other.factor, other.added)
    if not isinstance(one, Scored) or not isinstance(other, Scored):
        return False
    return one.scores is other.scores and one.stage == other.stage


def _floats(node: Node) -> bool:
    """Whether it is a CAST or DEQUANTIZE from floats to floats."""
    types = {node.operand(0).tensor.type, node.outputs[0].tensor.type}
    return node.kind != "QUANTIZE" and types <= FLOAT_TYPES


def _holds(target: Tensor, source: Tensor) -> bool:
    """Whether the type of ``target`` holds all codes of the type of ``source``."""
    if source.type is None or source.type in FLOAT_TYPES or target.type in (None, TensorType.BOOL):
        return False
    low, high = code_range(source.type)
    if target.type in FLOAT_TYPES:
        return max(-low, high) <= _WHOLE_FLOATS.get(target.type, 0)
    ends = code_range(target.type)
    return ends[0] <= low and high <= ends[1]


def _holds_shares(tensor: Tensor) -> bool:
    """Whether its grid holds 0 to 1 in 254 steps at least, as runtimes want of a softmax."""
    grid = grid_of(tensor)
    if grid is None or tensor.type is None:
        return False
    scale, zero_point = grid
    low, high = ((end - zero_point) * scale for end in code_range(tensor.type))
    return low <= 0 and high >= 1 - 1.001 * scale and scale <= _LEAST_SHARE
