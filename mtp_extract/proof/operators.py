"""Which operators may touch what: the rules that make agreement on random inputs an agreement on all of them.

Two functions that are analytic in their inputs and agree on random continuous ones agree everywhere. So an operator
that chooses or cuts (a comparison, a maximum, a cast to integers) may look at constants, at the position and at masks,
whose values are tried one by one (:mod:`mtp_extract.proof.tables`, :mod:`mtp_extract.proof.rows`), and at activations
and caches only where it never binds. Inside an attention even less is allowed: everything but its softmax is linear in
the query, in K and in V, so that nothing there can tell one input from another. docs/proof.md has the whole argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from mtp_extract.graph.bounds import NEVER_REACHED, Bounds, Range
from mtp_extract.graph.call import Call, grid_of
from mtp_extract.graph.drafter import Walk
from mtp_extract.graph.flat import Depends, FlatGraph, Node, Value, ancestors
from mtp_extract.graph.kernels import ELEMENTWISE, KERNELS
from mtp_extract.graph.ledger import FoundRole
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.graph.patterns import PASSES, strip
from mtp_extract.litertlm.quantized import read_floats
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import TensorType
from mtp_extract.proof.attentions import AttentionOps, attention_of, check_linear, refused

ANALYTIC = frozenset(
    {
        *("ADD", "SUB", "MUL", "DIV", "NEG", "SQUARE", "SQUARED_DIFFERENCE", "MEAN", "SUM", "CUMSUM", "PAD"),
        *("FULLY_CONNECTED", "BATCH_MATMUL", "CONV_2D", "SOFTMAX", "LOG_SOFTMAX", "GELU", "TANH", "LOGISTIC"),
        *("RSQRT", "SQRT", "POW", "EXP", "LOG"),
    }
)
"""Operators without a corner, wherever a drafter uses them."""

_INTEGER_CACHES = frozenset({TensorType.INT8, TensorType.UINT8, TensorType.INT16, TensorType.INT32})
_LARGEST_EXPONENT = 80.0
"""What a float32 can be raised to, and summed."""


@dataclass(frozen=True)
class OperatorFindings:
    """What was found while the rules were checked.

    Attributes:
        attentions: the attentions, by layer.
        choosing: what operators choose by: "position" or "mask" → kind → how many.
        idioms: operators that could cut activations and do not, each with the reason.
        narrowed: activations that are held in fewer bits than they are computed in: a rounding of the runtime's.
    """

    attentions: tuple[AttentionOps, ...]
    choosing: Mapping[str, Mapping[str, int]]
    idioms: tuple[str, ...]
    narrowed: tuple[Value, ...]


def check_operators(graph: FlatGraph, walk: Walk, outputs: list[Value]) -> OperatorFindings:
    """Hold every operator that ``outputs`` depend on against the rules.

    Raises:
        UnsupportedError: one is not allowed to look at what it looks at; the message names both.
    """
    return _Rules(graph, walk, outputs).check()


class _Rules:
    def __init__(self, graph: FlatGraph, walk: Walk, outputs: list[Value]) -> None:
        self.graph, self.walk = graph, walk
        needed = {id(v.producer) for output in outputs for v in ancestors(output)}
        self.nodes = [node for node in graph.nodes if id(node) in needed]
        self.bounds = Bounds(graph, dict(_norms(graph, walk)))
        self.idioms: list[str] = []
        self.choosing: dict[str, Counter[str]] = {"position": Counter(), "mask": Counter()}
        self.narrowed: list[Value] = []
        self.slots: dict[int, npt.NDArray[np.int64]] = {}

    def check(self) -> OperatorFindings:
        attentions = tuple(
            attention_of(self.graph, index, layer, self.bounds) for index, layer in enumerate(self.walk.layers)
        )
        inside = {id(node) for attention in attentions for node in attention.nodes}
        for node in self.nodes:
            depends = _depends(node)
            if depends & Depends.DATA:
                self._data(node, id(node) in inside)
            elif depends & Depends.MASK:
                self._mask(node)
            elif depends and node.kind not in ANALYTIC | LAYOUT.keys() | {"CAST", "SIN", "COS", "DEQUANTIZE"}:
                self.choosing["position"][node.kind] += 1
        for attention in attentions:
            check_linear(self.graph, attention)
        return OperatorFindings(
            attentions,
            {k: dict(sorted(v.items())) for k, v in self.choosing.items()},
            tuple(self.idioms),
            tuple(self.narrowed),
        )

    # What depends on activations or caches.

    def _data(self, node: Node, inside: bool) -> None:
        if not inside and any(v.decided for v in node.inputs if v is not None):
            raise refused(node, "mixes activations with the position or a mask outside of an attention")
        if node.op.activation and not self._harmless_activation(node):
            raise refused(node, "cuts off an activation by its fused function")
        rule = self._DATA.get(node.kind)
        if node.kind in LAYOUT:
            others = [v for i, v in enumerate(node.inputs) if i not in LAYOUT[node.kind] and v is not None]
            if any(v.depends & Depends.DATA for v in others):
                raise refused(node, "takes elements that an activation or a cache chooses")
        elif rule is not None:
            rule(self, node, inside)
        elif node.kind not in ANALYTIC:
            raise refused(node, "depends on activations or a cache, and is none that a drafter needs there")

    def _quantize(self, node: Node, inside: bool) -> None:
        if node.kind == "QUANTIZE":
            self.narrowed.append(node.outputs[0])

    def _select(self, node: Node, inside: bool) -> None:
        if node.operand(0).depends & Depends.DATA:
            raise refused(node, "chooses by an activation or a cache")
        self.choosing["mask" if node.operand(0).depends & Depends.MASK else "position"][node.kind] += 1

    def _power(self, node: Node, inside: bool) -> None:
        if not node.binary or not node.operand(1).constant:
            raise refused(node, "has an exponent that is computed")

    def _largest_of(self, node: Node, inside: bool) -> None:
        if not all(_subtracts(reader, node) for reader in _readers(node.outputs[0])):
            raise refused(node, "takes the largest of activations, for another end than a softmax")
        self.idioms.append(f"{node.op.label}: the largest score, which a softmax subtracts")

    def _bound(self, node: Node, inside: bool) -> None:
        if inside and node.kind in ("MAXIMUM", "MINIMUM") and any(map(_masks, node.inputs)):
            # A mask may bound scores: what it does at both of its values is tried row by row.
            self.choosing["mask"][node.kind] += 1
        elif self.bounds.never_binds(node):
            self.idioms.append(f"{node.op.label}: a bound that never binds")
        else:
            raise refused(node, f"cuts off activations ({_range(self.bounds.of(node.operand(0)))})")

    def _harmless_activation(self, node: Node) -> bool:
        ends = {1: (0.0, NEVER_REACHED)}.get(node.op.activation)
        if ends is None or node.kind == "CONCATENATION":
            return False
        operands = [self.bounds.of(v) for v in node.inputs if v is not None]
        harmless = node.kind in ("ADD", "MUL") and all(low >= 0 for low, _ in operands)
        if harmless:
            self.idioms.append(f"{node.op.label}: a bound that never binds")
        return harmless

    def _cast(self, node: Node, inside: bool) -> None:
        source, target = node.operand(0).tensor, node.outputs[0].tensor
        if target.type not in FLOAT_TYPES and not (source.type in _INTEGER_CACHES and target.type in _INTEGER_CACHES):
            raise refused(node, f"casts an activation or a cache from {source.type_name} to {target.type_name}")
        if source.type not in FLOAT_TYPES | _INTEGER_CACHES or (source.type in _INTEGER_CACHES and grid_of(target)):
            raise refused(node, f"casts an activation or a cache from {source.type_name} to {target.type_name}")
        if target.type in FLOAT_TYPES and target.type is not TensorType.FLOAT32 and source.type in FLOAT_TYPES:
            self.narrowed.append(node.outputs[0])

    def _exponential(self, node: Node, inside: bool) -> None:
        producer = strip(node.operand(0)).producer
        largest = strip(producer.operand(1)).producer if producer is not None and producer.kind == "SUB" else None
        if producer is not None and producer.kind == "LOG_SOFTMAX":
            return
        if (
            producer is not None
            and largest is not None
            and largest.kind == "REDUCE_MAX"
            and _subtracts(producer, largest)
        ):
            return
        if not self.bounds.of(node.operand(0))[1] < _LARGEST_EXPONENT:
            raise refused(node, f"raises numbers that may be large ({_range(self.bounds.of(node.operand(0)))})")
        self.idioms.append(f"{node.op.label}: of numbers that cannot be large")

    _DATA: ClassVar[Mapping[str, Callable[[_Rules, Node, bool], None]]] = {
        "CAST": _cast,
        "EXP": _exponential,
        "POW": _power,
        "REDUCE_MAX": _largest_of,
        **dict.fromkeys(("QUANTIZE", "DEQUANTIZE"), _quantize),
        **dict.fromkeys(("SELECT", "SELECT_V2"), _select),
        **dict.fromkeys(("MAXIMUM", "MINIMUM", "RELU", "RELU6", "RELU_N1_TO_1", "ABS"), _bound),
    }

    # What depends on masks, and not on activations.

    def _mask(self, node: Node) -> None:
        """A mask acts slot by slot: no operator brings two slots together, or lets one choose another."""
        if node.kind in LAYOUT:
            moved = LAYOUT[node.kind]
            others = [v for i, v in enumerate(node.inputs) if i not in moved and v is not None]
            if any(not v.constant for v in others):
                raise refused(node, "moves the slots of a mask by what is computed")
            slots = [
                self._slots(v) if i in moved else self.graph.integers(v).reshape(v.tensor.shape)
                for i, v in enumerate(node.inputs)
                if v is not None
            ]
            made = KERNELS[node.kind](Call(self.graph, node), *slots)
            for value, found in zip(node.outputs, made if isinstance(made, tuple) else (made,), strict=True):
                self.slots[id(value)] = found
            return
        if node.kind not in ELEMENTWISE - {"SOFTMAX", "LOG_SOFTMAX", "BATCH_MATMUL"}:
            raise refused(node, "brings slots of a mask together; a drafter's masks act slot by slot")
        which: npt.NDArray[np.int64] = np.full((), -1)
        for operand in node.inputs:
            own = self._slots(operand) if operand is not None else which
            if ((which >= 0) & (own >= 0) & (which != own)).any():
                raise refused(node, "brings two slots of a mask together; a drafter's masks act slot by slot")
            which = np.maximum(which, own)
        self.slots[id(node.outputs[0])] = which
        self.choosing["mask"][node.kind] += 1

    def _slots(self, value: Value) -> npt.NDArray[np.int64]:
        """Per element, the slot of a mask input that it depends on; -1 for none."""
        if id(value) in self.slots:
            return self.slots[id(value)]
        shape = value.tensor.shape
        if value.depends & Depends.MASK:
            # An input: its last axis is that of the slots.
            return np.arange(value.tensor.elements).reshape(shape)
        return np.full(shape, -1)


def _norms(graph: FlatGraph, walk: Walk) -> Iterator[tuple[int, Range]]:
    """What a norm's result is at most: √n times the largest number of its weight."""
    for role in walk.roles:
        if role.role.endswith("norm") and role.result is not None:
            largest = _largest(graph, role) * role.shape[0] ** 0.5 * (1 + 1e-5)
            yield id(role.result), (-largest, largest)


def _largest(graph: FlatGraph, role: FoundRole) -> float:
    if role.tensor is None:
        return 1.0
    return float(abs(read_floats(graph.model, role.tensor) / role.factor + role.offset).max())


def _depends(node: Node) -> Depends:
    made = Depends.CONSTANT
    for value in node.inputs:
        made |= value.depends if value is not None else Depends.CONSTANT
    return made


def _masks(value: Value | None) -> bool:
    """Whether a mask decides ``value``, and no activation does."""
    return value is not None and value.decided and Depends.MASK in value.depends


def _readers(value: Value) -> Iterator[Node]:
    for reader, _ in value.consumers:
        if reader.kind in PASSES:
            for made in reader.outputs:
                yield from _readers(made)
        else:
            yield reader


def _subtracts(reader: Node, largest: Node) -> bool:
    """Whether ``reader`` takes ``largest`` from what it is the largest of."""
    return (
        reader.kind == "SUB"
        and reader.binary
        and strip(reader.operand(1)).producer is largest
        and strip(reader.operand(0)) is strip(largest.operand(0))
    )


def _range(interval: Range) -> str:
    low, high = ("any size" if abs(end) >= NEVER_REACHED else f"{end:.4g}" for end in interval)
    return "of any size" if "any size" in (low, high) else f"between {low} and {high}"
