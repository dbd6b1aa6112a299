"""The part of a layer between its q norm and its o projection: RoPE, Q·K, mask, softmax, P·V.

Exporters agree on what happens here and on little else, so nothing of it is matched. The region is walked backwards
from the o projection to the q norm; which caches it reads shows on the way, and what it computes is measured
(:mod:`mtp_extract.graph.probe`) and, in the end, executed beside the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import RoleError, escape
from mtp_extract.graph.evaluate import inputs_of
from mtp_extract.graph.fill import is_mask
from mtp_extract.graph.flat import INPUT_POS, PARAM_TENSOR, Edge, FlatGraph, Node, Value, walk_back
from mtp_extract.graph.ledger import plain_reason
from mtp_extract.graph.patterns import MATRICES, Aside, RmsNorm, constant_under, strip, walk_to_norms
from mtp_extract.graph.probe import measure_frequencies
from mtp_extract.litertlm.storage import NUMBER_TYPES

EXPONENTIALS = frozenset({"SOFTMAX", "EXP"})
"""Operators that only the softmax of an attention has."""

_LARGEST_PERMUTATION = 1 << 20


@dataclass(frozen=True)
class AnyAttention:
    """What is read of every layer's attention."""

    q_norm: RmsNorm  # over heads; its ``x`` is the output of the q projection
    query: Value  # the result of q_norm
    aside: tuple[Aside, ...]  # constants that are no weights


@dataclass(frozen=True)
class Attention(AnyAttention):
    """The attention of a drafter's layer."""

    key: Value  # inputs of the signature: the caches it reads
    value: Value
    mixed: Value  # its result, which the o projection reads
    inverse_frequencies: npt.NDArray[np.float64]  # RoPE, ``[head_dim / 2]``
    frequency_rounding: npt.NDArray[np.float64]  # how far each of them may be off
    masks: tuple[str, ...]  # names of the signature's mask inputs it reads


def read_attention(graph: FlatGraph, start: Value, layer: str) -> Attention:
    """The attention whose result is ``start``, the input of the o projection of ``layer`` ("layers.0").

    Raises:
        RoleError: something it must contain is missing.
        UnsupportedError: it has no RoPE, or one that a checkpoint cannot express.
    """
    region = _region(graph, start, layer, lambda node: False)
    value = _cache(region.after_leaves, layer, "value")
    key = _cache([v for v in region.before_leaves if v is not value], layer, "key")
    nodes = list({id(node): node for node, _, _ in region.before}.values())
    frequencies, rounding = measure_frequencies(graph, nodes, region.q_norm.size, layer)
    return Attention(
        q_norm=region.q_norm,
        query=region.query,
        key=key,
        value=value,
        mixed=start,
        inverse_frequencies=frequencies,
        frequency_rounding=rounding,
        masks=tuple(sorted({v.input_name for v in region.before_leaves if v.input_name and is_mask(v.input_name)})),
        aside=region.aside("a number of the attention, whose result is checked by execution"),
    )


@dataclass(frozen=True)
class WritingAttention(AnyAttention):
    """The attention of a base's layer, whose caches are written in the same graph."""

    key: Node  # the ops that write this step's K and V into the caches
    value: Node


def read_writing_attention(graph: FlatGraph, start: Value, layer: str) -> WritingAttention:
    """The attention whose result is ``start``, in a graph that writes the caches it reads.

    Raises:
        RoleError: something it must contain is missing.
    """
    region = _region(graph, start, layer, writes_cache)
    return WritingAttention(
        q_norm=region.q_norm,
        query=region.query,
        key=_writer(region.before, layer, "key"),
        value=_writer(region.after, layer, "value"),
        aside=region.aside("a number of the attention, which is not looked at"),
    )


def writes_cache(node: Node) -> bool:
    """Whether ``node`` writes a part of a cache that is an input of the signature."""
    return node.kind == "DYNAMIC_UPDATE_SLICE" and strip(node.operand(0)).input_name is not None


def _writer(edges: list[Edge], layer: str, which: str) -> Node:
    found = {id(v.producer): v.producer for _, _, v in edges if v.producer is not None and writes_cache(v.producer)}
    if len(found) != 1:
        raise RoleError(
            f"{layer}: expected its attention to read one {which} cache that DYNAMIC_UPDATE_SLICE writes, found "
            f"{len(found)}."
        )
    return next(iter(found.values()))


@dataclass(frozen=True)
class _Region:
    """Between o projection and q norm: ``after`` the softmax, which V meets there, and ``before`` it."""

    q_norm: RmsNorm
    query: Value
    after: list[Edge]
    after_leaves: list[Value]
    before: list[Edge]
    before_leaves: list[Value]

    def aside(self, number: str) -> tuple[Aside, ...]:
        """Its constants, each with its reason; ``number`` is that of numbers that are computed with."""
        edges = [*self.after, *self.before]
        reasons = (
            Aside(v, plain_reason(node, at, v, number, " of the attention")) for node, at, v in edges if v.constant
        )
        return (*self.q_norm.aside, *reasons)


def _region(graph: FlatGraph, start: Value, layer: str, stops: Callable[[Node], bool]) -> _Region:
    """The region behind ``start``; no further than ops that ``stops`` says."""
    weights: list[Value] = []

    def at_exponential(value: Value, node: Node) -> bool:
        if node.kind not in EXPONENTIALS:
            return stops(node)
        weights.append(value)
        return True

    # V meets the weights of the softmax: it is read on this side of it, K on the other.
    edges, leaves = walk_back([start], at_exponential)
    if not weights:
        _refuse_unproduced(leaves, f"{layer}.o_proj", "the attention")
        raise RoleError(
            f"{layer}: expected a softmax before its o projection, found none. The graph does not lead from "
            f"{layer}.o_proj to {layer}.q_norm."
        )

    def at_weight(node: Node) -> bool:
        if node.kind in MATRICES and _is_weight(graph, node):
            raise RoleError(
                f"{layer}.q_norm: expected an RMSNorm with a weight between {node.op.label} and the softmax; "
                "there is none."
            )
        return stops(node)

    exponentials = [v.producer.operand(0) for v in weights if v.producer is not None]
    norms, before, before_leaves = walk_to_norms(graph, exponentials, at_weight)
    _refuse_unproduced(before_leaves, f"{layer}.q_norm", "the query")
    _refuse_unproduced(leaves, f"{layer}.o_proj", "the attention")
    if len(norms) != 1:
        raise RoleError(f"{layer}.q_norm: expected one RMSNorm before the softmax of {layer}, found {len(norms)}.")
    return _Region(*norms[0], edges, leaves, before, before_leaves)


def _is_weight(graph: FlatGraph, node: Node) -> bool:
    """Whether ``node`` multiplies by a learned matrix: not by a table of angles, or a permutation with signs."""
    weight = constant_under(node.operand(1))
    if weight is None or inputs_of([node.operand(0)]) <= {INPUT_POS}:
        return False
    if weight.tensor.elements > _LARGEST_PERMUTATION or weight.tensor.type not in NUMBER_TYPES:
        return True
    return not bool(np.isin(graph.floats(weight), (-1, 0, 1)).all())


def _refuse_unproduced(leaves: list[Value], role: str, what: str) -> None:
    for value in leaves:
        if value.unproduced:
            raise RoleError(f"{role}: {what} reads {value.label}, which no op computes: the graph lacks {role}.")


def _cache(leaves: list[Value], layer: str, which: str) -> Value:
    """The one input of four axes that is neither a mask nor a number of slots."""
    others = (INPUT_POS, PARAM_TENSOR)
    found = {id(v): v for v in leaves if v.input_name and not is_mask(v.input_name) and v.input_name not in others}
    caches = [v for v in found.values() if len(v.tensor.shape) == 4]
    if len(caches) != 1:
        names = ", ".join(escape(n) for n in sorted(v.input_name or "" for v in caches)) or "none"
        raise RoleError(f"{layer}: expected one {which} cache among its inputs, found {names}.")
    return caches[0]
