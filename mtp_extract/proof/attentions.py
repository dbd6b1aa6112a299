"""An attention: between its query and what it mixes, everything but one softmax is linear.

So nothing there can tell one input from another. docs/proof.md has the whole argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag

from mtp_extract.errors import UnsupportedError
from mtp_extract.graph.bounds import NEVER_REACHED, Bounds
from mtp_extract.graph.drafter import Layer
from mtp_extract.graph.flat import FlatGraph, Node, Value, ancestors
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.graph.patterns import strip
from mtp_extract.litertlm.storage import FLOAT_TYPES

LINEAR = frozenset({"ADD", "SUB", "NEG", "MEAN", "SUM", "CUMSUM", "PAD", "CAST", "QUANTIZE", "DEQUANTIZE"})
PRODUCTS = frozenset({"MUL", "FULLY_CONNECTED", "BATCH_MATMUL", "CONV_2D"})
NORMALIZING = frozenset({"SOFTMAX", "LOG_SOFTMAX", "EXP"})

_KEY_NORM = 16.0
"""The largest root mean square of a row of K that is reckoned with where its cache is of floats: K is a normalized row
times a weight, and published weights are below 1.
"""


class Side(IntFlag):
    """What a value inside an attention is computed from."""

    QUERY = 1
    KEY = 2
    VALUE = 4
    WEIGHTS = 8
    """The softmax' result, or its exponentials."""


@dataclass(frozen=True)
class AttentionOps:
    """One layer's attention, between the normalized query and what the o projection reads.

    Attributes:
        nodes: its operators that see activations or caches, in the order of execution.
        sides: ``id`` of a value → what it is computed from.
        scores: what each exponential or softmax reads; ``weights`` what it gives.
        largest_score: the largest |q · K| that the norms and the cache's grid allow.
    """

    layer: Layer
    nodes: tuple[Node, ...]
    sides: Mapping[int, Side]
    scores: Value
    weights: Value
    largest_score: float


_PAIRS = frozenset(
    map(
        frozenset,
        (
            (Side.QUERY, Side.KEY),
            (Side.WEIGHTS, Side.VALUE),
            (Side.WEIGHTS,),
            (Side.WEIGHTS, Side.WEIGHTS | Side.VALUE),
        ),
    )
)
"""What may be multiplied inside an attention; weights with weights, where their sum is divided by."""

_ALLOWED_ELSEWHERE = frozenset({"SELECT", "SELECT_V2", "MAXIMUM", "MINIMUM", "RELU", "REDUCE_MAX", "ABS"})
"""Operators that the rules for activations have checked already."""


def attention_of(graph: FlatGraph, index: int, layer: Layer, bounds: Bounds) -> AttentionOps:
    """The operators of one layer's attention.

    Raises:
        UnsupportedError: it has another number of softmaxes than one.
    """
    stops = frozenset({id(layer.query)})
    values = {id(v) for v in ancestors(layer.mixed, stops)}
    sides: dict[int, Side] = {
        id(layer.query): Side.QUERY,
        id(graph.inputs[layer.key]): Side.KEY,
        id(graph.inputs[layer.value]): Side.VALUE,
    }
    nodes, ends = [], []
    for node in graph.nodes:
        if not any(id(v) in values for v in node.outputs) or layer.query in node.outputs:
            continue
        side = Side(0)
        for value in node.inputs:
            side |= sides.get(id(value), Side(0)) if value is not None else Side(0)
        if not side:
            continue
        if node.kind in NORMALIZING and not side & Side.WEIGHTS:
            ends.append(node)
            weights = node.outputs[0]
            side = Side.WEIGHTS
        elif node.kind == "EXP":
            # What LOG_SOFTMAX gives, raised again.
            weights = node.outputs[0]
        nodes.append(node)
        sides.update({id(v): side for v in node.outputs})
    if len(ends) != 1:
        raise UnsupportedError(f"layers.{index}: expected one softmax in its attention, found {len(ends)}.")
    scores = ends[0].operand(0)
    if ends[0].kind == "EXP" and (largest := strip(scores).producer) is not None and largest.kind == "SUB":
        # The maximum that a softmax subtracts is the same for all slots.
        scores = strip(largest.operand(0))
    return AttentionOps(layer, tuple(nodes), sides, scores, weights, _largest_score(graph, layer, bounds))


def _largest_score(graph: FlatGraph, layer: Layer, bounds: Bounds) -> float:
    query = max(map(abs, bounds.of(layer.query))) or 1.0
    key = max(map(abs, bounds.of(graph.inputs[layer.key])))
    # |q| ≤ √n · the weight of its norm, which is what bounds each of its elements, too.
    row = math.sqrt(layer.head_dim) * (key if key < NEVER_REACHED else _KEY_NORM)
    return min(query * row, NEVER_REACHED)


def check_linear(graph: FlatGraph, attention: AttentionOps) -> None:
    """Everything but the softmax must be linear in the query, in K, and in V.

    Raises:
        UnsupportedError: an operator is not.
    """
    for node in attention.nodes:
        sides = [attention.sides.get(id(v), Side(0)) if v is not None else Side(0) for v in node.inputs]
        several = [side for side in sides if side]
        if node.kind in LAYOUT:
            moved = LAYOUT[node.kind]
            chosen = [v for i, v in enumerate(node.inputs) if i not in moved and v is not None and v.depends]
            if chosen and attention.sides[id(node.outputs[0])] == Side.QUERY:
                raise refused(node, "moves the query's elements by the position")
        elif node.kind in PRODUCTS:
            if len(several) > 1 and frozenset(several) not in _PAIRS:
                raise refused(node, "multiplies what depends on the same part of an attention")
        elif node.kind == "DIV":
            if len(sides) == 2 and sides[1] and sides[1] != Side.WEIGHTS:
                raise refused(node, "divides by an activation inside of an attention")
        elif node.kind in ("POW", "LOG", "RSQRT", "SQRT"):
            if several != [Side.WEIGHTS]:
                raise refused(node, "bends scores inside of an attention")
        elif node.kind == "QUANTIZE" and several[0] in (Side.KEY, Side.VALUE):
            name = attention.layer.key if several[0] == Side.KEY else attention.layer.value
            if graph.inputs[name].tensor.type in FLOAT_TYPES:
                raise refused(node, "holds a cache of floats on a grid: whether it fits is not in the file")
        elif node.kind not in LINEAR | NORMALIZING | _ALLOWED_ELSEWHERE:
            raise refused(node, "bends numbers inside of an attention, where only its softmax may")


def refused(node: Node, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{node.op.label} {why}. A checkpoint has no such operator, and random inputs cannot show that it changes "
        "nothing; nothing is written. Please report the file."
    )
