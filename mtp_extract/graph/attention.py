"""The inside of attentions: caches and queries on their way to the scores, and how operators move them.

What happens between the scores and what is mixed of V stands in :mod:`mtp_extract.graph.scoring`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mtp_extract.graph.call import CONVERSIONS, Call, axis_of, code_range, grid_of
from mtp_extract.graph.evaluate import inputs_of
from mtp_extract.graph.expressions import Expr, Expressions, Term, UnreadableError
from mtp_extract.graph.flat import INPUT_POS, Depends, FlatGraph, Node
from mtp_extract.graph.forms import Cache, Form, Rotated, Scored, broadcast_shape, shape_of
from mtp_extract.graph.kernels import LAYOUT, moved
from mtp_extract.graph.positions import Positions
from mtp_extract.graph.scoring import Scoring
from mtp_extract.graph.views import View
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import Tensor, TensorType


class AttentionReader:
    """Reads operators whose operands are inside of attentions, or that lead there.

    Attributes:
        scales: of a cache of integers without a scale of their own, the number that the graph multiplies them by.
        queries: the expressions whose elements meet K.
    """

    def __init__(self, graph: FlatGraph, expressions: Expressions) -> None:
        self.graph, self.expressions = graph, expressions
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
        first = next((form for form in operands if isinstance(form, Cache | Scored)), None)
        if isinstance(first, Cache):
            return self._scaled_cache(node, first, operands)
        return self.scoring.scored(node, operands) if isinstance(first, Scored) else self._rotated(node, operands)

    # Operators that move elements.

    def _moved(self, node: Node, operands: list[Form | None]) -> Form | tuple[Form, ...]:
        places = LAYOUT[node.kind]
        if node.kind == "DYNAMIC_UPDATE_SLICE":
            return self.scoring.placed(node, operands[1])
        forms = [operands[i] for i in places if i < len(operands)]
        grids = {grid_of(node.operand(i).tensor) for i in places if i < len(operands)}
        if grids != {grid_of(node.outputs[0].tensor)}:
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
        made = moved(self.graph, node, (query.with_terms(terms).terms for query in queries))
        found = tuple(Rotated(queries[0].query, each) for each in made)
        return found if len(found) > 1 else found[0]

    def _moved_view(self, node: Node, form: Cache | Scored) -> Cache | Scored:
        """A cache or scores with the axes in another order, joined, split, repeated, or some elements chosen."""
        kind, view = node.kind, form.view
        if kind in ("RESHAPE", "SQUEEZE", "EXPAND_DIMS"):
            # Sizes alone: NumPy reshapes a view of one byte.
            (made,) = moved(self.graph, node, [np.broadcast_to(np.zeros((), np.int8), view.shape)])
            return replace(form, view=view.reshaped(made.shape))
        if kind not in ("TRANSPOSE", "BROADCAST_TO", "GATHER"):
            raise UnreadableError("moves elements of a cache or of scores otherwise than a drafter does")
        numbers = self.graph.integers(node.operand(1))
        if kind == "GATHER":
            axis, batch = (Call(self.graph, node).option(slot, "i") for slot in (0, 1))
            if batch or len(node.operand(1).tensor.shape) != 1:
                raise UnreadableError("chooses otherwise in each batch, or makes axes")
            return replace(form, view=view.picked(axis_of(axis, len(view.shape)), numbers))
        sizes = numbers.tolist()
        return replace(form, view=view.transposed(sizes) if kind == "TRANSPOSE" else view.broadcast(sizes))

    def _sliced(self, node: Node, form: Cache | Scored) -> Cache | Scored:
        """SLICE, from where a constant or the position says: whole axes, and some slots."""
        if node.operand(1).depends & ~Depends.POSITION or node.operand(2).depends:
            raise UnreadableError("chooses elements by what is computed")
        begins, sizes, view = self.positions.table(node.operand(1)), self.graph.integers(node.operand(2)), form.view
        for axis, (begin, size, whole) in enumerate(zip(begins.T, sizes.tolist(), view.shape, strict=True)):
            if not ((begin >= 0) & (begin + size <= whole)).all():
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
        """QUANTIZE, DEQUANTIZE, CAST: only of caches, to floats that hold every code, or to a type that does."""
        target = node.outputs[0].tensor
        if not isinstance(form, Cache):
            raise UnreadableError(f"holds numbers inside of an attention as {target.type_name}")
        source, own = node.operand(0).tensor, self.graph.inputs[form.name].tensor
        grid = grid_of(own)
        stored = grid is not None and (source.type, grid_of(source)) == (own.type, grid)
        if node.kind == "DEQUANTIZE" and stored and target.type is TensorType.FLOAT32:
            return form
        if node.kind != "QUANTIZE" and source.type in FLOAT_TYPES and target.type is TensorType.FLOAT32:
            return form
        if node.kind == "CAST" and source.type not in FLOAT_TYPES and grid_of(target) is None and _holds(target, own):
            if stored and grid is not None and grid[1] == 0:
                return replace(form, factor=1 / grid[0])
            if grid_of(source) is None:
                return form
        raise UnreadableError(f"holds {form.name} as {target.type_name}, on another grid than its own")

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
        """A cache times a number: of codes, the scale."""
        at = next((i for i, form in enumerate(operands) if form is not cache), 0)
        number, floats = self.expressions.number_of(operands[at]), node.outputs[0].tensor.type in FLOAT_TYPES
        if len(operands) != 2 or not number or not floats or shape_of(cache) != broadcast_shape(node, operands):
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
            one, other = forms
            if one.query is not other.query or one.terms.shape != other.terms.shape:
                raise UnreadableError("adds elements of different queries")
            return one.plus(other.times(-1.0) if kind == "SUB" else other)
        if len(forms) != 1 or len(operands) != 2 or not (kind == "MUL" or (kind == "DIV" and queries == [0])):
            raise UnreadableError("computes something of a query")
        rotated, at = Rotated(forms[0].query, np.broadcast_to(forms[0].terms, shape)), 1 - queries[0]
        constant, value = operands[at], node.operand(at)
        if isinstance(constant, Term) and not value.depends:
            numbers = np.broadcast_to(self.expressions.numbers_of(self.graph, constant), shape)[..., None]
            made = rotated.times(numbers if kind == "MUL" else 1 / numbers)
            if not np.isfinite(made.number).all():
                raise UnreadableError("multiplies a query by what is no number")
            return made
        table = value.depends == Depends.POSITION and value.tensor.type in FLOAT_TYPES
        if kind == "DIV" or not table or rotated.by.any() or inputs_of([value]) != {INPUT_POS}:
            raise UnreadableError("brings a query together with something else than one table of the position")
        by = np.broadcast_to(self.positions.elements(value), shape)[..., None]
        return Rotated.of(rotated.query, rotated.number, rotated.element, np.broadcast_to(by, rotated.by.shape))


def _holds(target: Tensor, source: Tensor) -> bool:
    """Whether the type of ``target`` holds all codes of the type of ``source``."""
    if source.type is None or source.type in FLOAT_TYPES or target.type in (None, TensorType.BOOL):
        return False
    low, high = code_range(source.type)
    if target.type in FLOAT_TYPES:
        return target.type is TensorType.FLOAT32 and max(-low, high) <= 1 << 24
    ends = code_range(target.type)
    return ends[0] <= low and high <= ends[1]
