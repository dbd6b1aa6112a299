"""What a reading took every value for, operator by operator, up to where it ended: for whoever reports a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mtp_extract.errors import escape
from mtp_extract.graph.expressions import Expr, Term, times
from mtp_extract.graph.flat import Depends, Value
from mtp_extract.graph.forms import SCORE, Cache, Form, Rotated, Scored
from mtp_extract.graph.reading import Reading
from mtp_extract.graph.roles import FoundRole

REFUSED, NOT_NEEDED = "refused", "not needed"


@dataclass(frozen=True)
class TraceLine:
    """One value that an operator computes.

    Attributes:
        subgraph, op: where the operator stands; ``kind`` is its name.
        type, shape: of the value.
        read_as: what it was taken for: "norm", "stream", "score", "mask", …
        what: the same more closely: a role, an expression, an input.
    """

    subgraph: int
    op: int
    kind: str
    type: str
    shape: tuple[int, ...]
    read_as: str
    what: str


def trace_lines(reading: Reading, roles: Sequence[FoundRole]) -> Iterator[TraceLine]:
    """The values of a graph in its order, the last one that which was refused.

    Args:
        reading: of the graph, whole or ended in a refusal.
        roles: those that were found in it.
    """
    by_value = {id(role.result): role.role for role in roles if role.result is not None}
    for node in reading.graph.nodes:
        for value in node.outputs:
            read_as, what = _taken_for(reading, value, by_value.get(id(value)))
            kind, shape = escape(node.kind), tuple(value.tensor.shape)
            yield TraceLine(node.op.subgraph, node.op.index, kind, value.tensor.type_name, shape, read_as, what)
            if read_as == REFUSED:
                return


def _taken_for(reading: Reading, value: Value, role: str | None) -> tuple[str, str]:
    form = reading.forms.get(id(value))
    if form is None:
        return _without_form(reading, value)
    if role is not None:
        return ("product" if isinstance(form, Term) and form.expr.kind == "matrix" else "norm"), role
    if isinstance(form, Term):
        return _kind_of(form.expr), times(form.factor, str(form.expr))
    return _inside(form)


def _without_form(reading: Reading, value: Value) -> tuple[str, str]:
    names = {Depends.POSITION: "position", Depends.MASK: "mask", Depends.POSITION | Depends.MASK: "mask"}
    if value.depends & Depends.DATA:
        return (REFUSED if value.producer is reading.current else NOT_NEEDED), ""
    return names.get(value.depends, "constant"), ""


def _kind_of(expr: Expr) -> str:
    if expr.kind == "product":
        return "norm" if -0.5 in expr.powers.values() else "product" if expr.powers else "constant"
    if expr.kind == "sum":
        return "stream" if any(-0.5 in term.powers.values() for term in expr.terms) else "sum"
    names = {"matrix": "product", "groups": "sum", "weight": "constant", "mixed": "mixed", "unread": "not read"}
    return names.get(expr.kind, expr.kind)


def _inside(form: Form) -> tuple[str, str]:
    """Of what is inside an attention."""
    if isinstance(form, Cache):
        return "cache", times(form.factor, escape(form.name))
    if isinstance(form, Rotated):
        return ("rotated query" if form.by.any() else "query"), str(form.query)
    assert isinstance(form, Scored)
    masked = "" if form.scores.tree == SCORE else ", masked"
    return form.stage, f"of {escape(form.scores.key)}{masked}"
