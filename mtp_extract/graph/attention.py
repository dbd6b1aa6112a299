"""The part of a layer between its q norm and its o projection: RoPE, Q·K, mask, softmax, P·V.

Exporters agree on what happens here and on little else (composites, transposes, masks built in many ways), so the
region is not matched operator by operator. It is walked backwards from the o projection, and what it must contain is
checked: one softmax, a value cache after it, a key cache and one q norm before it, a RoPE table, no scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mtp_extract.errors import RoleError, UnsupportedError, escape
from mtp_extract.graph.flat import FlatGraph, Node, Value, ancestors
from mtp_extract.graph.patterns import (
    SHAPE_OPERANDS,
    Aside,
    RmsNorm,
    constant_under,
    match_rms_norm,
    match_rope,
    scalar,
    strip,
)
from mtp_extract.litertlm.tflite import TensorType

__all__ = ["Attention", "read_attention"]

_FLOATING = frozenset({TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16, TensorType.FLOAT64})
# Comparison -> what it says of (left − right), as (sign, closed): sign +1 for ≥ and >, −1 for ≤ and <.
_COMPARISONS = {
    "GREATER_EQUAL": (1, True),
    "GREATER": (1, False),
    "LESS_EQUAL": (-1, True),
    "LESS": (-1, False),
}
_SELECTS = frozenset({"SELECT", "SELECT_V2"})
_LARGE = 1e4
_DEEPEST_INDEX = 6
# What changes numbers in a way that a checkpoint has no word for; a soft cap on the scores, for one.
_FUNCTIONS = frozenset(
    [
        "ABS",
        "CEIL",
        "ELU",
        "EXP",
        "FLOOR",
        "GELU",
        "HARD_SWISH",
        "L2_NORMALIZATION",
        "LEAKY_RELU",
        "LOG",
        "LOGISTIC",
        "LOG_SOFTMAX",
        "POW",
        "PRELU",
        "RELU",
        "RELU6",
        "RELU_0_TO_1",
        "RELU_N1_TO_1",
        "ROUND",
        "RSQRT",
        "SIGN",
        "SQRT",
        "SQUARE",
        "SQUARED_DIFFERENCE",
        "TANH",
    ]
)


@dataclass(frozen=True)
class Attention:
    """What one layer's attention reads.

    Attributes:
        q_norm: the RMSNorm over heads; its ``x`` is the output of the q projection, ``query`` its result.
        key, value: names of the signature's cache inputs.
        inverse_frequencies: RoPE, float64 ``[head_dim / 2]``.
        window: positions a query sees, itself included, if the graph limits them; None when it does not say.
        masks: names of the signature's mask inputs it reads.
    """

    q_norm: RmsNorm
    query: Value
    key: Value
    value: Value
    inverse_frequencies: np.ndarray
    window: int | None
    masks: tuple[str, ...]
    aside: tuple[Aside, ...]


@dataclass(frozen=True)
class _Affine:
    """``position · p + index · i + offset``, where index counts cache slots."""

    p: int
    i: int
    offset: int


Edge = tuple[Node, int, Value]


def _walk(start: Value, stops: Callable[[Value, Node], bool]) -> tuple[list[Edge], list[Value]]:
    """Edges walked backwards from ``start``, and leaves: inputs, constants, values nothing computes.

    The walk goes no further where ``stops`` says so of a value and the node that computes it.
    """
    edges: list[Edge] = []
    leaves: list[Value] = []
    seen, queue = {id(start)}, [start]
    while queue:
        value = queue.pop()
        node = value.producer
        if node is None:
            leaves.append(value)
        elif not stops(value, node):
            for position, source in enumerate(node.inputs):
                if source is None:
                    continue
                edges.append((node, position, source))
                if id(source) not in seen:
                    seen.add(id(source))
                    queue.append(source)
    return edges, leaves


def read_attention(graph: FlatGraph, start: Value, layer: str) -> Attention:
    """The attention whose result is ``start``, the input of the o projection of ``layer`` ("layers.0").

    Raises:
        RoleError: something it must contain is missing.
        UnsupportedError: it scales its scores, or computes RoPE in an unknown way.
    """
    found: list[Node] = []

    def at_softmax(value: Value, node: Node) -> bool:
        if node.kind != "SOFTMAX":
            return False
        found.append(node)
        return True

    edges, leaves = _walk(start, at_softmax)
    if len(found) != 1:
        _unproduced(leaves, f"{layer}.o_proj", "the attention")
        raise RoleError(
            f"{layer}: expected one SOFTMAX before its o projection, found {len(found)}. "
            f"The graph does not lead from {layer}.o_proj to {layer}.q_norm."
        )
    softmax = found[0]
    if not softmax.unary:
        raise RoleError(f"{softmax.op.label} of {layer} lacks its input: the graph is damaged.")
    beta = softmax.op.options.scalar(0, "f", 0.0) if softmax.op.options else 1.0
    if beta != 1.0:
        raise UnsupportedError(f"{softmax.op.label} of {layer} has beta {beta:g}; this drafter's attention scale is 1.")
    value = _cache(leaves, layer, "value")
    (q_norm, query), before, before_leaves = _until_q_norm(graph, softmax.operand(0), layer)
    _unproduced(before_leaves, f"{layer}.q_norm", "the query")
    _unproduced(leaves, f"{layer}.o_proj", "the attention")
    key = _cache(before_leaves, layer, "key")
    reader = _RegionReader(graph, layer, {id(key), id(value)})
    reader.read([*edges, *before])
    if q_norm.weight is None:
        _no_lost_weight(before_leaves, reader, q_norm, layer)
    if reader.table is None:
        raise UnsupportedError(f"{layer}: no RoPE table was found (position times a constant, then COS and SIN).")
    masks = sorted({v.input_name for v in before_leaves if v.input_name and v.tensor.type is TensorType.BOOL})
    return Attention(
        q_norm,
        query,
        key,
        value,
        reader.table,
        reader.window(),
        tuple(masks),
        (*q_norm.aside, *reader.aside.values()),
    )


def _until_q_norm(graph: FlatGraph, start: Value, layer: str) -> tuple[tuple[RmsNorm, Value], list[Edge], list[Value]]:
    """Walk from the softmax back to the q norm, which is where the walk stops."""
    norms: dict[int, tuple[RmsNorm, Value]] = {}

    def at_norm(value: Value, node: Node) -> bool:
        norm = match_rms_norm(graph, value) if node.kind in ("MUL", "DIV") or "rms_norm" in node.kind else None
        if norm is not None:
            norms[id(norm.x)] = (norm, value)
        elif node.kind == "FULLY_CONNECTED" and constant_under(node.operand(1)) is not None:
            raise RoleError(
                f"{layer}.q_norm: expected an RMSNorm with a weight between {node.op.label} and the softmax; "
                "there is none."
            )
        return norm is not None

    edges, leaves = _walk(start, at_norm)
    if len(norms) != 1:
        _unproduced(leaves, f"{layer}.q_norm", "the query")
        raise RoleError(f"{layer}.q_norm: expected one RMSNorm before the softmax of {layer}, found {len(norms)}.")
    return next(iter(norms.values())), edges, leaves


def _unproduced(leaves: list[Value], role: str, what: str) -> None:
    for value in leaves:
        if not value.constant and value.input_name is None and value.tensor.elements:
            raise RoleError(f"{role}: {what} reads {value.label}, which no op computes: the graph lacks {role}.")


def _no_lost_weight(leaves: list[Value], reader: _RegionReader, q_norm: RmsNorm, layer: str) -> None:
    """A norm without a weight has one of ones, unless a constant of its size lies about that nothing accounts for."""
    for value in leaves:
        if value.constant and value.tensor.elements == q_norm.size > 1 and id(value) not in reader.aside:
            raise RoleError(f"{layer}.q_norm: the RMSNorm before the softmax of {layer} does not read {value.label}.")


def _cache(leaves: list[Value], layer: str, which: str) -> Value:
    found = [v for v in leaves if v.input_name and len(v.tensor.shape) == 4 and v.tensor.type in _CACHE_TYPES]
    if len(found) != 1:
        names = ", ".join(escape(n) for n in sorted(v.input_name or "" for v in found)) or "none"
        raise RoleError(f"{layer}: expected one {which} cache among its inputs, found {names}.")
    return found[0]


_CACHE_TYPES = frozenset(
    {TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16, TensorType.INT8, TensorType.INT16}
)


_QUANTIZED_CACHES = frozenset({TensorType.INT8, TensorType.INT16})


class _RegionReader:
    """Accounts for the constants of the region, and keeps what they tell."""

    def __init__(self, graph: FlatGraph, layer: str, caches: set[int]) -> None:
        self.graph, self.layer, self.caches = graph, layer, caches
        self.aside: dict[int, Aside] = {}
        self.table: np.ndarray | None = None
        self.limits: dict[int, set[int]] = {1: set(), -1: set()}

    def read(self, edges: list[Edge]) -> None:
        for node in {id(node): node for node, _, _ in edges}.values():
            if node.kind in ("COS", "SIN"):
                self._rope(node)
            elif node.kind in _COMPARISONS:
                self._comparison(node)
            elif node.kind in _FUNCTIONS:
                raise UnsupportedError(
                    f"{node.op.label} of {self.layer} stands between its q norm and its o projection, where a drafter "
                    "has RoPE, a mask and a softmax; a checkpoint cannot express it."
                )
        for node, position, value in edges:
            constant = value if value.constant else None
            if constant is not None and id(constant) not in self.aside:
                reason = self._reason(node, position, constant)
                if reason:
                    self.aside[id(constant)] = Aside(constant, reason)

    def window(self) -> int | None:
        """Length of the window, where the graph bounds the position on both sides."""
        low, high = self.limits[1], self.limits[-1]
        if not high:
            return None
        if not low:
            raise UnsupportedError(f"{self.layer}: its mask bounds the past and not the future.")
        if len(low) != 1 or len(high) != 1:
            raise UnsupportedError(f"{self.layer}: its mask compares positions in more than one way.")
        return next(iter(high)) - next(iter(low)) + 1

    def _rope(self, node: Node) -> None:
        found = match_rope(self.graph, node.operand(0)) if node.unary else None
        if found is None:
            raise UnsupportedError(
                f"{node.op.label} of {self.layer} takes an angle that is not position times a table."
            )
        if self.table is not None and not np.array_equal(self.table, found.inverse_frequencies):
            raise UnsupportedError(f"{self.layer}: its query is rotated by more than one RoPE table.")
        self.table = found.inverse_frequencies
        self.aside[id(found.aside.value)] = found.aside

    def _comparison(self, node: Node) -> None:
        if not node.binary:
            return
        left, right = (self._affine(node.operand(i)) for i in (0, 1))
        if left is None or right is None:
            return
        sign, closed = _COMPARISONS[node.kind]
        p, i, offset = left.p - right.p, left.i - right.i, left.offset - right.offset
        if p < 0:
            p, i, offset, sign = -p, -i, -offset, -sign
        if (p, i) != (1, -1):
            return
        # sign·(position − index + offset) ≥ 0 (or > 0): a closed bound on (position − index).
        self.limits[sign].add(-offset + (0 if closed else sign))

    def _affine(self, value: Value, depth: int = 0) -> _Affine | None:
        root = strip(value)
        if root.input_name is not None:
            return _Affine(1, 0, 0) if root.tensor.elements == 1 else None
        if root.constant:
            if root.tensor.type in _FLOATING or root.tensor.elements == 0:
                return None
            numbers = self.graph.integers(root)
            if numbers.size == 1:
                return _Affine(0, 0, int(numbers[0]))
            return _Affine(0, 1, int(numbers[0])) if bool((np.diff(numbers) == 1).all()) else None
        node = root.producer
        if node is None or node.kind not in ("ADD", "SUB") or not node.binary or depth == _DEEPEST_INDEX:
            return None
        left, right = (self._affine(node.operand(i), depth + 1) for i in (0, 1))
        if left is None or right is None:
            return None
        sign = 1 if node.kind == "ADD" else -1
        return _Affine(left.p + sign * right.p, left.i + sign * right.i, left.offset + sign * right.offset)

    def _reason(self, node: Node, position: int, constant: Value) -> str | None:
        if position in SHAPE_OPERANDS.get(node.kind, ()):
            return "shape, axis or offset"
        if node.kind in _SELECTS and position > 0:
            return "value of masked and unmasked scores"
        if constant.tensor.type not in _FLOATING and constant.tensor.quantization is None:
            return "index arithmetic of the attention mask"
        number = scalar(self.graph, constant)
        if number is None:
            return self._bias_reason(node, position, constant)
        if node.kind in ("MUL", "DIV"):
            return self._scalar_reason(node, position, number)
        if node.kind in ("ADD", "SUB", "MAXIMUM", "MINIMUM") and (number == 0 or abs(number) >= _LARGE):
            return "value of masked scores"
        return None

    def _from_cache(self, value: Value) -> bool:
        """Whether ``value`` is part of a quantized cache: nothing but it and index arithmetic goes into it."""
        numbers = [v for v in ancestors(value) if v.producer is None and v.tensor.type in _CACHE_TYPES]
        return bool(numbers) and all(id(v) in self.caches and v.tensor.type in _QUANTIZED_CACHES for v in numbers)

    def _bias_reason(self, node: Node, position: int, constant: Value) -> str | None:
        """A constant array of floats is part of the mask if it holds nothing but 0 and very negative numbers."""
        if node.kind == "DYNAMIC_UPDATE_SLICE" and position == 0:
            # Scores of a window written into an array of the length of the cache.
            return "value of scores outside the window"
        if node.kind not in ("ADD", "SUB"):
            return None
        numbers = np.abs(self.graph.floats(constant))
        return "attention mask" if bool(((numbers == 0) | (numbers >= _LARGE)).all()) else None

    def _scalar_reason(self, node: Node, position: int, number: float) -> str | None:
        if abs(number) == 1.0:
            return "sign of RoPE's rotation"
        if self._from_cache(node.operand(1 - position)):
            return "scale of the quantized cache"
        if abs(number) >= _LARGE:
            return "value of masked scores"
        raise UnsupportedError(
            f"{node.op.label} of {self.layer} multiplies by {number:g} between its q norm and its o projection. The "
            "drafter's attention scale is 1; a checkpoint cannot express another."
        )
