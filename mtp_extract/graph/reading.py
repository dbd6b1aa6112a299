"""One pass over the graph, forwards: every value that an activation or a cache decides gets a form, or is refused.

Outside of attentions the form is ``factor × expression`` (:mod:`mtp_extract.graph.expressions`), inside it is one of
:mod:`mtp_extract.graph.forms`. An operator that makes neither of its operands is refused by its name. Being read is the
proof that the graph computes what the forms say: what is left open are numbers, which :mod:`mtp_extract.proof` holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mtp_extract.errors import AnotherKindError, RoleError, UnsupportedError
from mtp_extract.graph.attention import AttentionReader
from mtp_extract.graph.call import (
    CONVERSIONS,
    REDUCTIONS,
    SELECTIONS,
    Call,
    activation_scale,
    axis_of,
    code_range,
    computing,
    has_few_bits,
    holds_codes,
    ints,
    keeps_numbers,
    refused,
)
from mtp_extract.graph.evaluate import LAYOUT, MOVING, evaluate, moved
from mtp_extract.graph.expressions import Expr, Expressions, Term, UnreadableError
from mtp_extract.graph.flat import Depends, FlatGraph, Node, Value, ancestors, source_through
from mtp_extract.graph.forms import Cache, Form, Rotated, Scored, form_shape
from mtp_extract.graph.positions import caches_of
from mtp_extract.graph.views import View
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES, QuantizedTensor
from mtp_extract.litertlm.tflite import TensorType

MATRIX = "FULLY_CONNECTED"
LARGEST = 1e6
"""No number of a drafter is this many times larger or smaller than one of ordinary size."""

_MOST_ROTATED = 1 << 20
_FUNCTIONS = frozenset({"TANH", "GELU"})
_ARITHMETIC: dict[str, Callable[[Expressions, Term, Term], Term]] = {
    "ADD": lambda made, one, other: made.add(one, other),
    "SUB": lambda made, one, other: made.add(one, other, -1.0),
    "NEG": lambda made, one, other: replace(one, factor=-one.factor),
    "SQUARE": lambda made, one, other: made.multiply(one, one),
    "SQRT": lambda made, one, other: made.power(one, 0.5),
    "RSQRT": lambda made, one, other: made.power(one, -0.5),
}
_OPERANDS = {
    **dict.fromkeys(("NEG", "SQUARE", "SQRT", "RSQRT", "EXP", "TANH", "GELU", "SOFTMAX", "LOGICAL_NOT"), 1),
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV", "POW", "MINIMUM", "MAXIMUM", "EQUAL", "BATCH_MATMUL", *REDUCTIONS), 2),
    **dict.fromkeys(CONVERSIONS, 1),
    **dict.fromkeys(SELECTIONS, 3),
}
"""How many operands an operator has, of those that have a number of them."""
COMPUTED_BY_SCALES = frozenset(
    ("ADD", "SUB", "MUL", "DIV", "SQRT", "RSQRT", "TANH", "GELU", "SUM", "MEAN", "SOFTMAX", "BATCH_MATMUL")
)
"""Operators whose kernels compute with what codes stand for; MINIMUM, MAXIMUM, NEG and selections take the codes
themselves (LiteRT 2.3.0, as tests/graph/test_codes.py shows).
"""
_LARGEST_IN_HALF = 64.0
"""How many times larger or smaller FLOAT16 may hold a value: ordinary numbers neither leave it so nor vanish in it."""
_NEVER_REACHED = {"MINIMUM": 1e-30, "MAXIMUM": -1e-30}
"""Operators and what their bound times this is at least, where no number of a drafter reaches it."""
_MOST_ELEMENTS = 1 << 17
_LARGEST_AXIS = 1 << 20
_MOST_TOLD_APART = 1 << 20
"""Elements of the largest value whose elements are looked at one by one where not all is read: no cache of a base."""


class Reading:
    """What every value of ``graph`` is.

    Attributes:
        forms: by ``id`` of a value, its form; constants that were asked for are among them.
        first: expression → the first value that is all of it, and the factor there.
        scaled: expression → values that are all of it times constants, in the order of the graph.
        products: expression of a product with a matrix → its operator.
        inside: its attentions.
        rounded: activations that the file holds in other types than FLOAT32, and weights that an operator rounds.
        current: the operator that is being read; after a refusal, the one that was refused.
    """

    def __init__(self, graph: FlatGraph, *, whole: bool = True) -> None:
        """Nothing is read yet.

        Args:
            whole: refuse what cannot be read. If not, it becomes an expression "unread", and attentions are such.
        """
        self.graph = graph
        self.expressions = Expressions()
        self.whole = whole
        self.forms: dict[int, Form] = {}
        self.first: dict[Expr, tuple[Value, float]] = {}
        self.scaled: dict[Expr, list[tuple[Term, Value]]] = {}
        self.products: dict[Expr, Node] = {}
        self.rounded: list[Value] = []
        self.current: Node | None = None
        self.inside = AttentionReader(graph, self.expressions)

    def read_all(self, outputs: Sequence[str]) -> Reading:
        """Read what ``outputs`` are computed of. Where it ends in a refusal, ``forms`` hold all before that.

        Raises:
            MtpExtractError: as for :meth:`read`.
        """
        self._read_inputs()
        needed = {id(value.producer) for name in outputs for value in ancestors(self.graph.outputs[name])}
        for node in self.graph.nodes:
            if id(node) in needed and any(v is not None and v.depends & Depends.DATA for v in node.inputs):
                self.current = node
                forms = self.read(node)
                for value, form in zip(node.outputs, forms, strict=True):
                    self.keep(value, form)
        self.current = None
        return self

    def _read_inputs(self) -> None:
        caches = caches_of(self.graph.inputs)
        for name, value in self.graph.inputs.items():
            sizes = value.tensor.shape if value.depends & Depends.DATA else ()
            if sizes and not 0 < min(sizes) <= max(sizes) <= _LARGEST_AXIS:
                raise UnsupportedError(f"The input {value.label} is empty, or larger than any of a drafter.")
            if name in caches and self.whole:
                self.forms[id(value)] = Cache(name, View.whole(range(4), value.tensor.shape))
            elif self._is_too_large(value):
                self.forms[id(value)] = self._undivided("input", value, name)
            elif value.depends & Depends.DATA and value.consumers:
                if has_few_bits(value.tensor):
                    self.rounded.append(value)
                self.keep(value, self.expressions.whole("input", name, size=value.tensor.elements))

    def read(self, node: Node) -> tuple[Form, ...]:
        """The forms of what ``node`` computes.

        Raises:
            UnsupportedError: it computes what no drafter does.
            FormatError: its operands do not fit it.
        """
        try:
            with computing(node.op.label):
                forms = self._read(node)
        except UnreadableError as why:
            if not self.whole:
                return tuple(self._unread(value, str(why)) for value in node.outputs)
            reason = f"{why}; this release knows no drafter with such an operator there. Nothing is written."
            raise refused(node, reason) from None
        if node.kind not in LAYOUT:
            self.rounded += [value for value in node.outputs if has_few_bits(value.tensor)]
        return forms if isinstance(forms, tuple) else (forms,)

    @staticmethod
    def _check_signature(node: Node, moved: Sequence[int]) -> None:
        """As many operands as the operator has, and one type of numbers on both sides, as LiteRT wants them."""
        count = _OPERANDS.get(node.kind, len(node.inputs))
        if len(node.inputs) != count or None in node.inputs:
            raise UnreadableError(f"has {len(node.inputs)} operands and should have {count}")
        if node.kind in (*CONVERSIONS, MATRIX, "BATCH_MATMUL"):
            return
        chosen_by = node.operand(0) if node.kind in SELECTIONS else None
        if chosen_by is not None and chosen_by.tensor.type_name != "BOOL":
            raise UnreadableError(f"chooses by {chosen_by.tensor.type_name}")
        operands = [node.operand(i) for i in moved if i < len(node.inputs)]
        types = {value.tensor.type_name for value in operands if value is not chosen_by}
        # What a comparison makes is of another type than what it compares.
        types |= {result.tensor.type_name for result in node.outputs} - {"BOOL"}
        if len(types) > 1:
            raise UnreadableError(f"mixes {' and '.join(sorted(types))}")
        tensors = [value.tensor for value in (*operands, *node.outputs) if value is not chosen_by]
        if node.kind in LAYOUT or not any(map(holds_codes, tensors)):
            return
        if node.kind in SELECTIONS and len(set(map(activation_scale, tensors))) == 1:
            return
        if node.kind not in COMPUTED_BY_SCALES or not all(map(holds_codes, tensors)):
            raise UnreadableError("computes with codes, and LiteRT's kernel does not ask what they stand for")

    def _is_too_large(self, value: Value) -> bool:
        """Whether the elements of an activation or a cache are not looked at one by one, as time and memory have it."""
        return not self.whole and bool(value.depends & Depends.DATA) and value.tensor.elements > _MOST_TOLD_APART

    def _undivided(self, kind: str, value: Value, *parts: object) -> Term:
        """A value whose elements are not told apart; no operator on it is read."""
        expr = self.expressions.expr(kind, *parts, size=value.tensor.elements)
        return Term(1.0, expr, np.broadcast_to(np.int64(-1), value.tensor.shape))

    def _unread(self, value: Value, why: str) -> Term:
        if self._is_too_large(value):
            return self._undivided("unread", value, value, why)
        term = self.expressions.whole("unread", value, why, size=value.tensor.elements)
        return replace(term, ids=term.ids.reshape(value.tensor.shape))

    def _read(self, node: Node) -> Form | tuple[Form, ...]:
        if any(value is not None and self._is_too_large(value) for value in (*node.inputs, *node.outputs)):
            raise UnreadableError(f"computes with more than {_MOST_TOLD_APART} elements at once")
        if node.kind == MATRIX and not node.operand(1).depends:
            if node.operand(0).tensor.type != node.outputs[0].tensor.type or len(node.inputs) > 3:
                raise UnreadableError("makes numbers of another type, or of more than a matrix and a bias")
            return self._matrix(node)
        moved = self.data_operands(node)
        operands = [self.operand(node, i) if i in moved else None for i in range(len(node.inputs))]
        deciding = [v for v in node.inputs if v is not None and v.depends]
        self._check_signature(node, moved)
        if not all(isinstance(self.forms.get(id(value)), Term) for value in deciding):
            if not self.whole:
                raise UnreadableError("brings an activation together with a mask or the position")
            return self.inside.read(node, operands)
        terms = [term for term in operands if isinstance(term, Term)]
        if node.op.activation:
            raise UnreadableError("cuts off an activation by its fused function")
        if len(terms) != sum(node.input(i) is not None for i in moved if i < len(node.inputs)):
            others = [v.label for i in moved if (v := node.input(i)) is not None and operands[i] is None]
            raise UnreadableError(f"brings an activation together with {others[0]}")
        if node.kind in LAYOUT:
            return self._move(node, operands, terms)
        return self._compute(node, terms)

    def keep(self, value: Value, form: Form) -> None:
        """Note that ``value`` is ``form``."""
        if self._is_too_large(value):
            self.forms[id(value)] = form
            return
        node, tensor = value.producer, value.tensor
        if node is not None and form_shape(form) != tuple(tensor.shape):
            raise RoleError(f"{value.label} is computed as {list(form_shape(form))}: the file is damaged.")
        grid = activation_scale(tensor)
        if isinstance(form, Term | Rotated) and self.whole and tensor.type not in FLOAT_TYPES and grid is None:
            raise UnsupportedError(f"{value.label} holds an activation; expected floats, or codes with a scale.")
        if tensor.type is TensorType.FLOAT16 and not 1 / _LARGEST_IN_HALF <= _factor_of(form) <= _LARGEST_IN_HALF:
            raise UnsupportedError(
                f"{value.label} holds {_factor_of(form):g} times a value of a drafter as FLOAT16, in which numbers of "
                "ordinary size overflow or vanish so: that is more than rounding. Nothing is written."
            )
        if isinstance(form, Term):
            form = self._keep_term(value, replace(form, ids=form.ids.reshape(tensor.shape)))
        elif isinstance(form, Scored) and grid is not None and tensor.type is not None:
            form = form.within(*((code - grid[1]) * grid[0] for code in code_range(tensor.type)))
        self.forms[id(value)] = form

    def _keep_term(self, value: Value, term: Term) -> Term:
        if not 1 / LARGEST < abs(term.factor) < LARGEST:
            raise UnsupportedError(f"{value.label} is {term.factor:g} times a value of a drafter.")
        if term.whole:
            self.first.setdefault(term.expr, (value, term.factor))
            if term.numbers:
                self.scaled.setdefault(term.expr, []).append((term, value))
        return term

    # Operands.

    @staticmethod
    def data_operands(node: Node) -> tuple[int, ...]:
        """The places of operands that hold numbers; the others say axes, shapes and offsets."""
        return LAYOUT.get(node.kind, (0,) if node.kind in REDUCTIONS else tuple(range(len(node.inputs))))

    def operand(self, node: Node, position: int) -> Form | None:
        """An operand's form; None where it is left out, where the position or a mask decides it, or where it is a
        constant that is large or holds no numbers.
        """
        value = node.input(position)
        if value is None or (id(value) not in self.forms and value.depends):
            return None
        if id(value) not in self.forms:
            constant = self.constant(value)
            if constant is None:
                return None
            self.forms[id(value)] = constant
        return self.forms[id(value)]

    def constant(self, value: Value) -> Term | None:
        """A constant: one number, computed exactly as the file's types say, or a stored vector times a number."""
        tensor = value.tensor
        if not 0 < tensor.elements <= _MOST_ELEMENTS or tensor.type not in NUMBER_TYPES:
            return None
        if tensor.elements == 1:
            number = float(evaluate(self.graph, {}, [value])[0].reshape(-1)[0])
            stored = source_through(value, ("DEQUANTIZE", "CAST", "RESHAPE"))
            return replace(self.expressions.number(number, stored), ids=np.zeros(tensor.shape, np.int64))
        if value.producer is None:
            ids = np.arange(tensor.elements).reshape(tensor.shape)
            return Term(1.0, self.expressions.expr("weight", value, size=tensor.elements), ids)
        if tensor.type not in FLOAT_TYPES or value.producer.kind == "GATHER":
            return None
        (form,) = self.read(value.producer)
        return form if isinstance(form, Term) else None

    # Operators outside of attentions.

    def _matrix(self, node: Node) -> Term:
        weight = weight_of(self.graph, node)
        between = [value for value in ancestors(node.operand(1)) if value.producer is not None]
        self.rounded += [value for value in between if has_few_bits(value.tensor)]
        read = self.operand(node, 0)
        if not isinstance(read, Term):
            raise UnreadableError(
                "multiplies by a matrix what an attention has not mixed yet, or what a position decides"
            )
        shape = product_of(self.graph, node, weight, tuple(read.ids.shape))
        size, ids = math.prod(shape), read.ids.reshape(-1)
        inner = self.expressions.part(read.expr, ids)
        expr = self.expressions.expr("matrix", weight, inner, size=size)
        self.products.setdefault(expr, node)
        return Term(read.factor, expr, np.arange(size).reshape(shape), read.numbers)

    def _move(self, node: Node, operands: list[Any], terms: list[Term]) -> Form | tuple[Form, ...]:
        if node.kind not in MOVING:
            raise UnreadableError("is none that a drafter needs")
        if len({(term.expr, term.factor) for term in terms}) > 1:
            if len({term.expr for term in terms}) == 1:
                # Half of a query and the other half negated.
                if not self.whole:
                    raise UnreadableError("joins what has different factors")
                return self.inside.read(node, operands)
            raise UnreadableError("joins what a drafter does not")
        places = self.data_operands(node)
        if any(
            activation_scale(node.operand(i).tensor) != activation_scale(node.outputs[0].tensor)
            for i in places
            if node.input(i)
        ):
            raise UnreadableError("hands codes on with another scale")
        return tuple(replace(terms[0], ids=ids) for ids in moved(self.graph, node, (term.ids for term in terms)))

    def _compute(self, node: Node, terms: list[Term]) -> Term:
        kind, expressions = node.kind, self.expressions
        first, other = (terms * 2)[:2]
        if kind in _ARITHMETIC:
            return _ARITHMETIC[kind](expressions, first, other)
        if kind in CONVERSIONS:
            return self._converted(node, first)
        if kind == "MUL":
            return expressions.multiply(first, other)
        if kind == "POW" and expressions.number_of(other) is not None:
            return expressions.power(first, other.factor)
        if kind == "DIV" and expressions.number_of(other):
            return replace(first, factor=first.factor / other.factor, numbers=(*first.numbers, *other.numbers))
        if kind in ("SUM", "MEAN"):
            return self._summed(node, first)
        if kind in _NEVER_REACHED and (expressions.number_of(other) or 0) * _NEVER_REACHED[kind] >= 1:
            return first
        if kind in _FUNCTIONS:
            name = "GELU_TANH" if kind == "GELU" and Call(self.graph, node).option(0, "?", False) else kind
            return Term(
                1.0, expressions.expr("function", name, first.factor, first.expr, size=first.expr.size), first.ids
            )
        if kind == "DIV":
            return expressions.multiply(first, expressions.power(other, -1.0))
        raise UnreadableError("is none that a drafter needs")

    def _converted(self, node: Node, term: Term) -> Term:
        if not keeps_numbers(node):
            types = f"{node.operand(0).tensor.type_name} into {node.outputs[0].tensor.type_name}"
            raise UnreadableError(f"turns {types}, and not into the same numbers")
        if node.kind == "QUANTIZE" and self.expressions.is_constant(term):
            # A quantizer stores a constant's codes; what an operator rounds or cuts off is no longer the constant.
            raise UnreadableError("rounds a constant to codes")
        return term

    def _summed(self, node: Node, term: Term) -> Term:
        rank = term.ids.ndim
        if {axis_of(a, rank) for a in ints(self.graph.integers(node.operand(1)))} != {rank - 1} or not term.whole:
            raise UnreadableError("sums otherwise than over the last axis")
        total = self.expressions.groups(term, term.ids.shape[-1], mean=node.kind == "MEAN")
        keeps = Call(self.graph, node).option(0, "?", False)
        return replace(total, ids=total.ids.reshape((*term.ids.shape[:-1], *([1] if keeps else []))))


def _factor_of(form: Form) -> float:
    """How many times larger than a value of ordinary size ``form`` is."""
    if isinstance(form, Term | Cache):
        return abs(form.factor)
    rotated = form.scores.rotated if isinstance(form, Scored) else form
    return float(np.abs(rotated.number).max(initial=0.0))


# Products with a matrix of constants: FULLY_CONNECTED of a weight that is stored ``[out, in]``.


def weight_of(graph: FlatGraph, node: Node) -> Value:
    """The constant matrix that ``node`` multiplies by, itself or converted to floats of the same numbers.

    Raises:
        UnreadableError: it is another value, LiteRT's kernel reads it otherwise, or no drafter has such numbers.
        AnotherKindError: it is a Hadamard rotation.
    """
    value = node.operand(1)
    maker = value.producer
    while maker is not None and maker.kind in CONVERSIONS and keeps_numbers(maker) and maker.kind != "QUANTIZE":
        value = maker.operand(0)
        maker = value.producer
    tensor = value.tensor
    if not value.constant or len(tensor.shape) != 2:
        raise UnreadableError("multiplies by no matrix of constants")
    if tensor.type not in FLOAT_TYPES and value is node.operand(1):
        _check_codes(QuantizedTensor.of(graph.model, tensor))
    if tensor.shape[0] == tensor.shape[1] > 1 and tensor.elements <= _MOST_ROTATED and _is_hadamard(graph, value):
        raise AnotherKindError(
            f"{node.op.label} is a Hadamard rotation: the weights beside it are stored rotated. They are not the "
            "weights of the model, and this release does not rotate them back."
        )
    return value


def _check_codes(source: QuantizedTensor) -> None:
    """LiteRT's kernels take integer weights ``[out, in]``, signed, with a scale an output and no zero points."""
    label, storage = source.tensor.label, source.storage
    if source.tensor.type is TensorType.INT16:
        raise UnreadableError(f"reads {label}, of a type that LiteRT multiplies by nothing")
    if source.packing is not None and not source.packing.signed:
        raise UnreadableError(f"reads {label}, which LiteRT takes for signed codes")
    if storage.kind == "per_channel" and storage.axis != 0:
        raise UnreadableError(
            f"reads {label}, whose scales run along axis {storage.axis}: LiteRT takes them for outputs"
        )
    if not storage.symmetric:
        raise UnreadableError(f"reads {label}, whose zero points are not 0: LiteRT ignores them")


def _is_hadamard(graph: FlatGraph, matrix: Value) -> bool:
    """Whether all entries are ±1/√n."""
    return bool(np.allclose(np.abs(graph.floats(matrix)), matrix.tensor.shape[0] ** -0.5, rtol=1e-2))


def product_of(graph: FlatGraph, node: Node, matrix: Value, read: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a product with what has the shape ``read``.

    Raises:
        UnreadableError: the operator has a bias or a fused function, or shapes that do not fit.
    """
    options, (rows, columns) = node.op.options, matrix.tensor.shape
    if node.op.activation or (options and options.integer(1, "b")):
        raise UnreadableError("has a fused activation, or a weight that is stored shuffled")
    bias = node.input(2)
    if bias is not None and (bias.depends or bias.producer is not None or np.any(graph.floats(bias))):
        raise UnreadableError("has a bias, which a drafter's checkpoint has no place for")
    keeps = bool(options and options.scalar(2, "?", False))
    count, odd = divmod(int(np.prod(read)), columns)
    if odd or (keeps and read[-1:] != (columns,)):
        raise UnreadableError(f"multiplies {list(read)} numbers by a matrix of {columns} columns")
    return (*read[:-1], rows) if keeps else (count, rows)
