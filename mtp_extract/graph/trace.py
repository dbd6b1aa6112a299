"""List how the reader understood each value, operator by operator, and where it stopped, for reports on a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mtp_extract.errors import MtpExtractError, escape
from mtp_extract.graph.drafter import DrafterReader, read_drafter_graph
from mtp_extract.graph.expressions import Expr, Term, format_multiple
from mtp_extract.graph.flat import Depends, FlatGraph, Value
from mtp_extract.graph.forms import Cache, Form, QueryTerms, ReadGraph, ScoreView
from mtp_extract.graph.mask_trees import Score

REFUSED, NOT_NEEDED = "refused", "not needed"


@dataclass(frozen=True)
class TraceLine:
    """One result of an operator."""

    subgraph: int
    op: int
    kind: str  # the operator's name
    type: str  # element type of the value
    shape: tuple[int, ...]
    read_as: str  # how the reader understood it: "norm", "stream", "score", "mask", …
    what: str  # details: a role, an expression, an input, or the reason of a refusal


def trace_drafter(graph: FlatGraph) -> list[TraceLine]:
    """Return the values of a drafter's graph in execution order, up to an operator that the reader refused."""
    walker = DrafterReader(ReadGraph(graph))
    why = ""
    try:
        walker = DrafterReader(read_drafter_graph(graph))
        walker.read_structure()
    except MtpExtractError as error:
        # A trace is made to show why a file was refused.
        why = str(error)
    return list(_list_lines(walker, _find_refused_value(walker) if why else None, why))


def _find_refused_value(walker: DrafterReader) -> Value | None:
    """Return the value at which the reader, or the walk through the graph that it read, stopped; None if unknown."""
    reading = walker.reading
    if reading.refusal is None:
        return reading.first[walker.matched][0] if walker.matched in reading.first else None
    outputs = () if reading.current is None else reading.current.outputs
    return next((value for value in outputs if id(value) not in reading.forms), None)


def _list_lines(walker: DrafterReader, refused: Value | None, why: str) -> Iterator[TraceLine]:
    reading = walker.reading
    roles = {id(role.result): role.role for role in walker.roles if role.result is not None}
    for node in reading.graph.nodes:
        for value in node.outputs:
            read_as, details = _describe_value(reading, value, roles.get(id(value)))
            if value is refused:
                read_as = REFUSED
                # Leave out the operator's label, which is in the same line, and the advice.
                details = why.removeprefix(node.op.label).lstrip(" :").partition(". ")[0].rstrip(".")
            kind = escape(node.kind)
            shape = tuple(value.tensor.shape)
            yield TraceLine(node.op.subgraph, node.op.index, kind, value.tensor.type_name, shape, read_as, details)
            if value is refused and reading.refusal is not None:
                return


def _describe_value(reading: ReadGraph, value: Value, role: str | None) -> tuple[str, str]:
    """Return ``read_as`` and ``what`` of a value."""
    form = reading.forms.get(id(value))
    if form is None:
        names = {Depends.POSITION: "position", Depends.MASK: "mask", Depends.POSITION | Depends.MASK: "mask"}
        return NOT_NEEDED if value.depends & Depends.DATA else names.get(value.depends, "constant"), ""
    if role is not None:
        return ("product" if isinstance(form, Term) and form.expr.kind == "matrix" else "norm"), role
    if isinstance(form, Term):
        return _classify_expr(form.expr), format_multiple(form.factor, str(form.expr))
    return _describe_inside(form)


def _classify_expr(expr: Expr) -> str:
    if expr.kind == "product":
        return "norm" if -0.5 in expr.powers.values() else "product" if expr.powers else "constant"
    if expr.kind == "sum":
        return "stream" if any(-0.5 in term.powers.values() for term in expr.terms) else "sum"
    names = {"matrix": "product", "groups": "sum", "weight": "constant", "mixed": "mixed", "unread": "not read"}
    return names.get(expr.kind, expr.kind)


def _describe_inside(form: Form) -> tuple[str, str]:
    if isinstance(form, Cache):
        return "cache", format_multiple(form.factor, escape(form.name))
    if isinstance(form, QueryTerms):
        return ("rotated query" if form.by.any() else "query"), str(form.query)
    assert isinstance(form, ScoreView)
    masked = "" if isinstance(form.scores.tree, Score) else ", masked"
    return form.stage, f"of {escape(form.scores.key)}{masked}"
