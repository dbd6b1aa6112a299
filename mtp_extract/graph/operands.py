"""How many operands operators have, which of them hold numbers, and what LiteRT's kernels ask of their types."""

from __future__ import annotations

from collections.abc import Sequence

from mtp_extract.graph.call import CONVERSIONS, REDUCTIONS, SELECTIONS, activation_scale, holds_codes
from mtp_extract.graph.evaluate import LAYOUT
from mtp_extract.graph.expressions import UnreadableError
from mtp_extract.graph.flat import Node, Value
from mtp_extract.graph.matrices import PRODUCT

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


def data_operands(node: Node) -> tuple[int, ...]:
    """The places of operands that hold numbers; the others say axes, shapes and offsets."""
    places = (0,) if node.kind in REDUCTIONS else tuple(range(len(node.inputs)))
    return LAYOUT.get(node.kind, places)


def check_operands(node: Node) -> None:
    """As many operands as the operator has, and one type of numbers on both sides, as LiteRT wants them.

    Raises:
        UnreadableError: it has others.
    """
    count = _OPERANDS.get(node.kind, len(node.inputs))
    if len(node.inputs) != count or None in node.inputs:
        raise UnreadableError(f"has {len(node.inputs)} operands and should have {count}")
    if node.kind in (*CONVERSIONS, PRODUCT, "BATCH_MATMUL"):
        return
    operands = [node.operand(place) for place in data_operands(node) if place < count]
    if node.kind in SELECTIONS:
        condition = operands[0]
        if condition.tensor.type_name != "BOOL":
            raise UnreadableError(f"chooses by {condition.tensor.type_name}")
        operands = [value for value in operands if value is not condition]
    _check_one_type(node, operands)
    _check_codes(node, operands)


def _check_one_type(node: Node, operands: Sequence[Value]) -> None:
    types = {value.tensor.type_name for value in operands}
    # What a comparison makes is of another type than what it compares.
    types |= {result.tensor.type_name for result in node.outputs} - {"BOOL"}
    if len(types) > 1:
        raise UnreadableError(f"mixes {' and '.join(sorted(types))}")


def _check_codes(node: Node, operands: Sequence[Value]) -> None:
    """Codes are moved, or chosen between where their scales are the same; else a kernel has to ask for their scales."""
    tensors = [value.tensor for value in (*operands, *node.outputs)]
    if node.kind in LAYOUT or not any(map(holds_codes, tensors)):
        return
    if node.kind in SELECTIONS and len(set(map(activation_scale, tensors))) == 1:
        return
    if node.kind not in COMPUTED_BY_SCALES or not all(map(holds_codes, tensors)):
        raise UnreadableError("computes with codes, and LiteRT's kernel does not ask what they stand for")
