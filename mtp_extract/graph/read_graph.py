"""What has been read of a graph: the form of each value, and where expressions and attentions stand."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from mtp_extract.errors import MtpExtractError
from mtp_extract.graph.expressions import Expr, Expressions, Term
from mtp_extract.graph.flat import FlatGraph, Node, Value
from mtp_extract.graph.forms import Attention, Form
from mtp_extract.graph.positions import Positions


@dataclass(eq=False)
class ReadGraph:
    """What every value of ``graph`` is, as far as it was read.

    Attributes:
        strict: whether what cannot be read is refused. If not, it is an expression "unread", and attentions are such.
        forms: by ``id`` of a value, its form; constants that were asked for are among them.
        first: expression → the first value that is all of it, and the factor there.
        scaled: expression → values that are all of it times constants, in the order of the graph.
        products: expression of a product with a matrix → its operator.
        attentions: expression of what heads mixed → how.
        rounded: activations that the file holds in other types than FLOAT32, and weights that an operator rounds.
        current: the operator that is being read, or was when it was refused; None where all were read.
        refusal: why the reading ended before the last operator; None where it did not.
    """

    graph: FlatGraph
    strict: bool = True
    expressions: Expressions = field(default_factory=Expressions)
    forms: dict[int, Form] = field(default_factory=dict)
    first: dict[Expr, tuple[Value, float]] = field(default_factory=dict)
    scaled: dict[Expr, list[tuple[Term, Value]]] = field(default_factory=dict)
    products: dict[Expr, Node] = field(default_factory=dict)
    attentions: dict[Expr, Attention] = field(default_factory=dict)
    rounded: list[Value] = field(default_factory=list)
    current: Node | None = None
    refusal: MtpExtractError | None = None

    @cached_property
    def positions(self) -> Positions:
        """What the position alone decides, and the slots of the caches.

        Raises:
            UnsupportedError: caches have more slots than any of a drafter.
        """
        return Positions(self.graph)

    def require_all(self) -> ReadGraph:
        """Itself, read to its end.

        Raises:
            MtpExtractError: its ``refusal``.
        """
        if self.refusal is not None:
            raise self.refusal
        return self
