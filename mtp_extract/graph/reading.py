"""Read the graph in one forward pass: give each value that depends on an activation or a cache a form, or refuse it.

Outside attentions the form is ``factor × expression`` (:mod:`mtp_extract.graph.expressions`), inside it is one of
:mod:`mtp_extract.graph.forms`. An operator whose result has no such form is refused by its name. So a graph that was
read computes what its forms say; only the numbers are left open, and :mod:`mtp_extract.proof` checks those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mtp_extract.errors import MtpExtractError, RoleError, UnsupportedError
from mtp_extract.graph.attention import read_attention_operator
from mtp_extract.graph.call import (
    CONVERSIONS,
    REDUCTIONS,
    SELECTIONS,
    Call,
    build_refusal,
    convert_errors,
    find_representable_range,
    has_few_bits,
    holds_codes,
    keeps_numbers,
    read_activation_scale,
    read_ints,
    resolve_axis,
)
from mtp_extract.graph.evaluate import evaluate, move_elements, uses_rounded_results
from mtp_extract.graph.expressions import LARGEST_FACTOR, Term, UnreadableError
from mtp_extract.graph.flat import Depends, FlatGraph, Node, Value, find_source, walk_ancestors
from mtp_extract.graph.forms import Cache, Form, Operand, QueryTerms, ReadGraph, ScoreView, get_operand_shape
from mtp_extract.graph.kernels import KERNELS, LAYOUT
from mtp_extract.graph.matrices import PRODUCT, compute_product_shape, find_weight
from mtp_extract.graph.positions import find_caches
from mtp_extract.graph.views import View
from mtp_extract.litertlm.storage import FLOAT_TYPES, NUMBER_TYPES
from mtp_extract.litertlm.tflite import TensorType

_LARGEST_IN_HALF = 64.0
"""Scaled by at most this factor or its inverse, values of ordinary size neither overflow nor vanish in FLOAT16."""
_UNREACHED_BOUNDS = {"MINIMUM": 1e-30, "MAXIMUM": -1e-30}
"""A bound changes nothing if bound × this number ≥ 1: it is beyond ±1e30, which no value of a drafter reaches."""
_SYMMETRIC = frozenset({"ADD", "MINIMUM", "MAXIMUM"})
"""Operators that compute the same of their operands in either order, and are read with a number as the second."""
_OPERAND_COUNTS = {
    **dict.fromkeys(("NEG", "SQUARE", "SQRT", "RSQRT", "EXP", "TANH", "GELU", "SOFTMAX", "LOGICAL_NOT"), 1),
    **dict.fromkeys(("ADD", "SUB", "MUL", "DIV", "POW", "MINIMUM", "MAXIMUM", "EQUAL", "BATCH_MATMUL", *REDUCTIONS), 2),
    **dict.fromkeys(CONVERSIONS, 1),
    **dict.fromkeys(SELECTIONS, 3),
}
"""How many operands an operator takes; operators that take any number are absent."""

COMPUTED_BY_SCALES = frozenset(
    ("ADD", "SUB", "MUL", "DIV", "SQRT", "RSQRT", "TANH", "GELU", "SUM", "MEAN", "SOFTMAX", "BATCH_MATMUL")
)
"""Operators whose kernels dequantize their operands; MINIMUM, MAXIMUM, NEG and selections compute with the codes
themselves (LiteRT 2.3.0; tests/graph/test_codes.py).
"""

_LARGEST_CONSTANT = 1 << 17
_ROUNDING_TOLERANCE = 1e-5
"""Relative change of a computed constant that is allowed when last bits of intermediate results change."""
_LARGEST_AXIS = 1 << 20
_MOST_TRACKED_ELEMENTS = 1 << 20
"""Elements of the largest value that is followed element by element, unless reading is strict; caches are larger."""


def read_graph(graph: FlatGraph, outputs: Sequence[str], *, strict: bool = True) -> ReadGraph:
    """Read the operators that ``outputs`` depend on, in execution order.

    Stops at the first operator that is refused and stores its error as :attr:`ReadGraph.refusal` instead of raising it.
    """
    reading = ReadGraph(graph, strict)
    try:
        _read_inputs(reading)
        needed = {id(value.producer) for name in outputs for value in walk_ancestors(graph.outputs[name])}
        for node in graph.nodes:
            if id(node) in needed and any(v is not None and v.depends & Depends.DATA for v in node.inputs):
                reading.current = node
                for value, form in zip(node.outputs, _read_operator(reading, node), strict=True):
                    _store_form(reading, value, form)
    except MtpExtractError as refusal:
        reading.refusal = refusal
    else:
        reading.current = None
    return reading


def _read_inputs(reading: ReadGraph) -> None:
    inputs = reading.graph.inputs
    caches = find_caches(inputs)
    # Refuses caches with too many slots before anything is allocated for them.
    _ = reading.positions
    for name, value in inputs.items():
        is_data = bool(value.depends & Depends.DATA)
        shape = value.tensor.shape
        if is_data and shape and not 0 < min(shape) <= max(shape) <= _LARGEST_AXIS:
            raise UnsupportedError(f"The input {value.label} is empty, or larger than any input of a drafter.")
        if name in caches and reading.strict:
            reading.forms[id(value)] = Cache(name, View.from_shape(range(4), shape))
        elif _is_too_large(reading, value):
            reading.forms[id(value)] = _make_undivided_term(reading, "input", value, name)
        elif is_data and value.consumers:
            if has_few_bits(value.tensor):
                reading.rounded.append(value)
            _store_form(reading, value, reading.expressions.make_vector("input", name, size=value.tensor.elements))


def _read_operator(reading: ReadGraph, node: Node) -> tuple[Form, ...]:
    try:
        with convert_errors(node.op.label):
            forms = _compute_forms(reading, node)
    except UnreadableError as why:
        if not reading.strict:
            return tuple(_make_unread_term(reading, value, str(why)) for value in node.outputs)
        raise build_refusal(node, f"{why}; this release knows no drafter with such an operator there.") from None
    if node.kind not in LAYOUT:
        reading.rounded += [value for value in node.outputs if has_few_bits(value.tensor)]
    return forms


def _compute_forms(reading: ReadGraph, node: Node) -> tuple[Form, ...]:
    if any(value is not None and _is_too_large(reading, value) for value in (*node.inputs, *node.outputs)):
        raise UnreadableError(f"computes with more than {_MOST_TRACKED_ELEMENTS} elements at once")
    if node.kind == PRODUCT and not node.get_operand(1).depends:
        return (_multiply_matrix(reading, node),)
    _check_operands(node)
    places = _list_number_operands(node)
    operands = [_find_form(reading, v) if i in places else v for i, v in enumerate(node.inputs) if v is not None]

    if not all(isinstance(reading.forms.get(id(value)), Term) for value in node.inputs if value and value.depends):
        if not reading.strict:
            raise UnreadableError("brings an activation together with a mask or the position")
        return read_attention_operator(reading, node, operands)
    if node.op.activation:
        raise UnreadableError("cuts off an activation by its fused function")

    terms = list[Term]()
    for place in places[: len(operands)]:
        operand = operands[place]
        if isinstance(operand, Value):
            raise UnreadableError(f"brings an activation together with {operand.label}")
        assert isinstance(operand, Term)
        terms.append(operand)
    if node.kind in LAYOUT:
        return _move_elements(reading, node, operands, terms)
    return (_compute_term(reading, node, *(terms * 2)[:2]),)


# Values that are not followed element by element.


def _is_too_large(reading: ReadGraph, value: Value) -> bool:
    return not reading.strict and bool(value.depends & Depends.DATA) and value.tensor.elements > _MOST_TRACKED_ELEMENTS


def _make_undivided_term(reading: ReadGraph, kind: str, value: Value, *parts: object) -> Term:
    """Return a term whose element numbers are all −1; no operator on it can be read."""
    expr = reading.expressions.make_expr(kind, *parts, size=value.tensor.elements)
    return Term(1.0, expr, np.broadcast_to(np.int64(-1), value.tensor.shape))


def _make_unread_term(reading: ReadGraph, value: Value, why: str) -> Term:
    if _is_too_large(reading, value):
        return _make_undivided_term(reading, "unread", value, value, why)
    term = reading.expressions.make_vector("unread", value, why, size=value.tensor.elements)
    return replace(term, ids=term.ids.reshape(value.tensor.shape))


# Forms of values.


def _store_form(reading: ReadGraph, value: Value, form: Form) -> None:
    if not _is_too_large(reading, value):
        _check_storage(reading, value, form)
        if isinstance(form, Term):
            form = replace(form, ids=form.ids.reshape(value.tensor.shape))
            if not 1 / LARGEST_FACTOR < abs(form.factor) < LARGEST_FACTOR:
                raise UnsupportedError(f"{value.label} is {form.factor:g} times a value of ordinary size.")
            if form.is_complete:
                reading.first.setdefault(form.expr, (value, form.factor))
                if form.numbers:
                    reading.scaled.setdefault(form.expr, []).append((form, value))
        elif isinstance(form, ScoreView) and (ends := find_representable_range(value.tensor)):
            form = form.clip(*ends)
    reading.forms[id(value)] = form


def _check_storage(reading: ReadGraph, value: Value, form: Form) -> None:
    """Raise if the tensor of ``value`` has another shape than ``form``, or a type that cannot hold it."""
    tensor = value.tensor
    shape = get_operand_shape(form)
    if value.producer is not None and shape != tuple(tensor.shape):
        raise RoleError(f"{value.label} is computed with the shape {list(shape)}: the file is damaged.")
    holds_numbers = tensor.type in FLOAT_TYPES or read_activation_scale(tensor) is not None
    if isinstance(form, Term | QueryTerms) and reading.strict and not holds_numbers:
        raise UnsupportedError(f"{value.label} holds an activation; expected floats, or codes with a scale.")
    if tensor.type is not TensorType.FLOAT16:
        return
    magnitude = _compute_magnitude(form)
    if not 1 / _LARGEST_IN_HALF <= magnitude <= _LARGEST_IN_HALF:
        raise UnsupportedError(
            f"{value.label} holds {magnitude:g} times a value of ordinary size as FLOAT16, where it overflows or "
            "vanishes: that is more than rounding."
        )


def _compute_magnitude(form: Form) -> float:
    """Return the largest factor by which ``form`` multiplies a value of ordinary size."""
    if isinstance(form, Term | Cache):
        return abs(form.factor)
    rotated = form.scores.rotated if isinstance(form, ScoreView) else form
    return float(np.abs(rotated.number).max(initial=0.0))


# Operands.


def _list_number_operands(node: Node) -> tuple[int, ...]:
    """Return the positions of operands that hold numbers; the others hold axes, shapes and offsets."""
    places = (0,) if node.kind in REDUCTIONS else tuple(range(len(node.inputs)))
    return LAYOUT.get(node.kind, places)


def _check_operands(node: Node) -> None:
    """Raise UnreadableError unless ``node`` has as many operands as its kernel takes, and one type of numbers."""
    count = _OPERAND_COUNTS.get(node.kind, len(node.inputs))
    if len(node.inputs) != count or None in node.inputs:
        raise UnreadableError(f"has {len(node.inputs)} operands and should have {count}")
    if node.kind in (*CONVERSIONS, PRODUCT, "BATCH_MATMUL"):
        return
    operands = [node.get_operand(place) for place in _list_number_operands(node) if place < count]
    if node.kind in SELECTIONS:
        condition = operands[0]
        if condition.tensor.type_name != "BOOL":
            raise UnreadableError(f"chooses by {condition.tensor.type_name}")
        operands = [value for value in operands if value is not condition]
    types = {value.tensor.type_name for value in operands}
    # A comparison has a BOOL result, whatever it compares.
    types |= {result.tensor.type_name for result in node.outputs} - {"BOOL"}
    if len(types) > 1:
        raise UnreadableError(f"mixes {' and '.join(sorted(types))}")
    _check_codes(node, operands)


def _check_codes(node: Node, operands: Sequence[Value]) -> None:
    """Raise UnreadableError if a kernel takes codes for the numbers they stand for; moving them is no computation."""
    tensors = [value.tensor for value in (*operands, *node.outputs)]
    if node.kind in LAYOUT or not any(map(holds_codes, tensors)):
        return
    if node.kind in SELECTIONS and len(set(map(read_activation_scale, tensors))) == 1:
        return
    if node.kind not in COMPUTED_BY_SCALES or not all(map(holds_codes, tensors)):
        raise UnreadableError("computes with codes, and LiteRT's kernel does not ask what they stand for")


def _find_form(reading: ReadGraph, value: Value) -> Operand:
    """Return the form of an operand that holds numbers; the value itself if it has no form."""
    if id(value) not in reading.forms and not value.depends and (constant := _read_constant(reading, value)):
        reading.forms[id(value)] = constant
    return reading.forms.get(id(value), value)


def _read_constant(reading: ReadGraph, value: Value) -> Term | None:
    """Return a constant as one number, computed in the file's types, or as a stored vector times a number.

    None if the constant is large, holds no numbers, or is computed in another way.
    """
    tensor = value.tensor
    if not 0 < tensor.elements <= _LARGEST_CONSTANT or tensor.type not in NUMBER_TYPES:
        return None
    if tensor.elements == 1:
        number = float(evaluate(reading.graph, {}, [value])[0].reshape(-1)[0])
        if uses_rounded_results(reading.graph, [value]):
            for last_bits in (1, -1):
                rounded = float(evaluate(reading.graph, {}, [value], last_bits=last_bits)[0].reshape(-1)[0])
                if not math.isclose(number, rounded, rel_tol=_ROUNDING_TOLERANCE):
                    raise UnreadableError(f"computes {number:.6g}, and {rounded:.6g} on hardware that rounds otherwise")
        stored = find_source(value, ("DEQUANTIZE", "CAST", "RESHAPE"))
        return replace(reading.expressions.make_number(number, stored), ids=np.zeros(tensor.shape, np.int64))
    if value.producer is None:
        ids = np.arange(tensor.elements).reshape(tensor.shape)
        return Term(1.0, reading.expressions.make_expr("weight", value, size=tensor.elements), ids)
    if tensor.type not in FLOAT_TYPES or value.producer.kind == "GATHER":
        return None
    (form,) = _read_operator(reading, value.producer)
    return form if isinstance(form, Term) else None


# Operators outside of attentions.


def _multiply_matrix(reading: ReadGraph, node: Node) -> Term:
    if node.get_operand(0).tensor.type != node.outputs[0].tensor.type or len(node.inputs) > 3:
        raise UnreadableError("changes the type of numbers, or has more operands than a matrix and a bias")
    weight = find_weight(reading.graph, node)
    between = (value for value in walk_ancestors(node.get_operand(1)) if value.producer is not None)
    reading.rounded += [value for value in between if has_few_bits(value.tensor)]

    term = _find_form(reading, node.get_operand(0))
    if not isinstance(term, Term):
        raise UnreadableError("multiplies by a matrix what an attention has not mixed yet, or what a position decides")
    shape = compute_product_shape(reading.graph, node, weight, tuple(term.ids.shape))
    size = math.prod(shape)
    inner = reading.expressions.take_elements(term.expr, term.ids.reshape(-1))
    expr = reading.expressions.make_expr("matrix", weight, inner, size=size)
    reading.products.setdefault(expr, node)
    return Term(term.factor, expr, np.arange(size).reshape(shape), term.numbers)


def _move_elements(
    reading: ReadGraph, node: Node, operands: Sequence[Operand], terms: Sequence[Term]
) -> tuple[Form, ...]:
    if node.kind not in KERNELS:
        raise UnreadableError("is none that a drafter needs")
    if len({term.expr for term in terms}) > 1:
        raise UnreadableError("joins what a drafter does not")
    if len({term.factor for term in terms}) > 1:
        # RoPE joins half of a query with the other half, negated.
        if not reading.strict:
            raise UnreadableError("joins what has different factors")
        return read_attention_operator(reading, node, operands)
    scales = {
        read_activation_scale(node.get_operand(place).tensor) for place in _list_number_operands(node)[: len(operands)]
    }
    if scales - {read_activation_scale(node.outputs[0].tensor)}:
        raise UnreadableError("hands codes on with another scale")
    return tuple(replace(terms[0], ids=ids) for ids in move_elements(reading.graph, node, (term.ids for term in terms)))


def _compute_term(reading: ReadGraph, node: Node, first: Term, second: Term) -> Term:
    """Return the result of ``node``, element by element; an operator of one operand gets it as both."""
    expressions = reading.expressions
    if node.kind in _SYMMETRIC and expressions.get_number(first) is not None:
        first, second = second, first
    number = expressions.get_number(second)
    match node.kind:
        case "ADD" | "SUB":
            return expressions.add(first, second, -1.0 if node.kind == "SUB" else 1.0)
        case "NEG":
            return replace(first, factor=-first.factor)
        case "MUL" | "SQUARE":
            return expressions.multiply(first, second)
        case "SQRT" | "RSQRT":
            return expressions.raise_to(first, 0.5 if node.kind == "SQRT" else -0.5)
        case "DIV" if number:
            return replace(first, factor=first.factor / number, numbers=(*first.numbers, *second.numbers))
        case "DIV":
            return expressions.multiply(first, expressions.raise_to(second, -1.0))
        case "POW" if number is not None:
            return expressions.raise_to(first, number)
        case "MINIMUM" | "MAXIMUM" if (number or 0) * _UNREACHED_BOUNDS[node.kind] >= 1:
            return first
        case "TANH" | "GELU":
            is_approximate = node.kind == "GELU" and Call(reading.graph, node).read_option(0, "?", False)
            name = "GELU_TANH" if is_approximate else node.kind
            expr = expressions.make_expr("function", name, first.factor, first.expr, size=first.expr.size)
            return Term(1.0, expr, first.ids)
        case "SUM" | "MEAN":
            return _sum_groups(reading, node, first)
        case "QUANTIZE" | "DEQUANTIZE" | "CAST":
            return _convert(reading, node, first)
    raise UnreadableError("is none that a drafter needs")


def _convert(reading: ReadGraph, node: Node, term: Term) -> Term:
    if not keeps_numbers(node):
        types = f"{node.get_operand(0).tensor.type_name} into {node.outputs[0].tensor.type_name}"
        raise UnreadableError(f"turns {types}, and not into the same numbers")
    if node.kind == "QUANTIZE" and reading.expressions.is_constant(term):
        # A quantizer would have stored the codes; a constant that is rounded when the graph runs is another constant.
        raise UnreadableError("rounds a constant to codes")
    return term


def _sum_groups(reading: ReadGraph, node: Node, term: Term) -> Term:
    rank = term.ids.ndim
    axes = {resolve_axis(axis, rank) for axis in read_ints(reading.graph.read_small_integers(node.get_operand(1)))}
    if axes != {rank - 1} or not term.is_complete:
        raise UnreadableError("sums otherwise than over the last axis")
    total = reading.expressions.sum_groups(term, term.ids.shape[-1], mean=node.kind == "MEAN")
    last = (1,) if Call(reading.graph, node).read_option(0, "?", False) else ()
    return replace(total, ids=total.ids.reshape((*term.ids.shape[:-1], *last)))
