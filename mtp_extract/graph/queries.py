"""Queries inside of an attention: moved about, scaled, and rotated by tables of the position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mtp_extract.graph.call import holds_codes
from mtp_extract.graph.evaluate import inputs_of, moved
from mtp_extract.graph.expressions import Ids, Term, UnreadableError
from mtp_extract.graph.flat import INPUT_POS, Depends, Node, Value
from mtp_extract.graph.forms import Operand, QueryTerms, ReadGraph, broadcast_shape
from mtp_extract.litertlm.storage import FLOAT_TYPES


def query_terms(reading: ReadGraph, operand: Operand) -> QueryTerms:
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
    queries = [query_terms(reading, operand) for operand in operands]
    query = queries[0].query
    if any(part.query is not query for part in queries):
        raise UnreadableError("joins elements of different queries")
    terms = max(part.number.shape[-1] for part in queries)
    records = moved(reading.graph, node, (part.with_terms(terms).terms for part in queries))
    return tuple(QueryTerms(query, each) for each in records)


def compute_query(reading: ReadGraph, node: Node, operands: Sequence[Operand]) -> QueryTerms:
    """Sums of elements of one query; products with numbers, and once with what the position decides."""
    shape = broadcast_shape(operands)
    is_constant = reading.expressions.is_constant
    places = [i for i, each in enumerate(operands) if not isinstance(each, Value) and not is_constant(each)]
    queries = [query_terms(reading, operands[place]) for place in places]
    if node.kind == "NEG" and len(queries) == 1:
        return queries[0].times(-1.0)
    if node.kind in ("ADD", "SUB") and len(queries) == 2:
        return _add(queries[0], queries[1], sign=-1.0 if node.kind == "SUB" else 1.0)
    is_product = node.kind == "MUL" or (node.kind == "DIV" and places == [0])
    if len(queries) != 1 or len(operands) != 2 or not is_product:
        raise UnreadableError("computes something of a query")
    repeated = QueryTerms(queries[0].query, np.broadcast_to(queries[0].terms, shape))
    other = operands[1 - places[0]]
    if isinstance(other, Value):
        return _rotate(reading, node.kind, repeated, other)
    return _scale(reading, node.kind, repeated, other)


def _add(first: QueryTerms, other: QueryTerms, sign: float) -> QueryTerms:
    if first.query is not other.query or first.terms.shape != other.terms.shape:
        raise UnreadableError("adds elements of different queries")
    return first.plus(other.times(sign) if sign != 1 else other)


def _scale(reading: ReadGraph, kind: str, query: QueryTerms, constant: Operand) -> QueryTerms:
    """``query`` times, or by, the numbers of a constant."""
    assert isinstance(constant, Term)
    numbers = np.broadcast_to(reading.expressions.numbers_of(reading.graph, constant), query.terms.shape)[..., None]
    scaled = query.times(numbers if kind == "MUL" else 1 / numbers)
    if not np.isfinite(scaled.number).all():
        raise UnreadableError("multiplies a query by what is no number")
    return scaled


def _rotate(reading: ReadGraph, kind: str, query: QueryTerms, table: Value) -> QueryTerms:
    """``query``, each element times that of ``table`` beside it."""
    if holds_codes(table.tensor):
        raise UnreadableError("rotates a query by codes, which cut off or round the position's cosines and sines")
    is_table = table.depends == Depends.POSITION and table.tensor.type in FLOAT_TYPES
    if kind == "DIV" or not is_table or query.by.any() or inputs_of([table]) != {INPUT_POS}:
        raise UnreadableError("brings a query together with something else than one table of the position")
    by: Ids = np.broadcast_to(reading.positions.elements(table), query.terms.shape)[..., None]
    return QueryTerms.of(query.query, query.number, query.element, np.broadcast_to(by, query.by.shape))
