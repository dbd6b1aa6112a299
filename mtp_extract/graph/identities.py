"""Detours: operators that hand a value on as it is, though an operator of their kind need not.

A bound that no number reaches, a sum with 0, a choice by a constant, a part of what was padded or cut apart before:
each is shown to change nothing, whatever the value is, before it is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.graph.bounds import NEVER_REACHED
from mtp_extract.graph.evaluate import evaluate
from mtp_extract.graph.flat import Depends, FlatGraph, Node, Value, walk_back
from mtp_extract.graph.moving import LAYOUT
from mtp_extract.graph.patterns import PASSES, Aside, constant_under, strip
from mtp_extract.litertlm.storage import FLOAT_TYPES
from mtp_extract.litertlm.tflite import TensorType

_MOST_MOVED = 1 << 18
_LARGEST_READ = 1 << 16
_MOVES = LAYOUT.keys() | {"PAD"}

Elements = npt.NDArray[np.int64]


def mark_identities(graph: FlatGraph) -> Iterator[Aside]:
    """Set :attr:`Value.same` wherever an operator's result is one of its operands again.

    Returns:
        the constants that are used up so, each with the reason.
    """
    for node in graph.nodes:
        if node.op.activation or not node.outputs:
            continue
        # What depends on nothing is constant, or an op before it was lost; positions and masks are tried one by one.
        depends = node.outputs[0].depends
        if depends and not depends & Depends.DATA:
            continue
        if node.kind in _MOVES - PASSES and depends:
            for result in node.outputs:
                result.same = _unmoved(graph, result)
            continue
        for position, deciding, changes_nothing, reason in _RULES.get(node.kind, ()):
            kept, constant = node.input(position), node.input(deciding)
            if kept is None or constant is None or kept.tensor.elements != node.outputs[0].tensor.elements:
                continue
            if constant_under(kept) is not None:
                continue
            numbers, under = _numbers(graph, constant), constant_under(constant)
            if numbers is not None and under is not None and changes_nothing(numbers):
                node.outputs[0].same = kept
                yield Aside(under, reason)
                break
        if node.kind == "NEG" and node.unary:
            inner = strip(node.operand(0)).producer
            if inner is not None and inner.kind == "NEG" and inner.unary:
                node.outputs[0].same = inner.operand(0)


def taken_from(graph: FlatGraph, value: Value) -> tuple[Value, Elements] | None:
    """The value whose elements ``value`` is made of, and which of them, in order; -1 for one that is padding.

    None where it is made of several, or its operators move by what is computed.
    """
    root = _root(value)
    if root is None or root.tensor.elements > _MOST_MOVED:
        return None
    numbered = np.arange(1, root.tensor.elements + 1).reshape(root.tensor.shape)
    ((found,),) = evaluate(graph, {}, [value], [(root, (numbered,))], rounds=False)
    return root, found.reshape(-1).astype(np.int64) - 1


def _root(value: Value) -> Value | None:
    roots: dict[int, Value] = {}

    def at_root(found: Value, node: Node) -> bool:
        others = [v for i, v in enumerate(node.inputs) if i not in LAYOUT.get(node.kind, (0,))]
        if node.kind in _MOVES and not node.op.activation and all(v is not None and v.constant for v in others):
            return False
        roots[id(found)] = found
        return True

    edges, leaves = walk_back([value], at_root)
    if any(operand.constant and position in LAYOUT.get(node.kind, (0,)) for node, position, operand in edges):
        return None
    roots |= {id(v): v for v in leaves if not v.constant}
    root = next(iter(roots.values()), value)
    return root if len(roots) == 1 and root is not value and root.tensor.elements else None


def _unmoved(graph: FlatGraph, value: Value) -> Value | None:
    """What ``value`` is all of, in order."""
    root = _root(value)
    if root is None or root.tensor.elements != value.tensor.elements:
        return None
    taken = taken_from(graph, value)
    return root if taken is not None and np.array_equal(taken[1], np.arange(taken[1].size)) else None


def _numbers(graph: FlatGraph, value: Value) -> npt.NDArray[Any] | None:
    constant = constant_under(value)
    if constant is None or not 0 < constant.tensor.elements <= _LARGEST_READ:
        return None
    if constant.tensor.type is TensorType.BOOL:
        return graph.integers(constant)
    return graph.floats(constant) if constant.tensor.type in FLOAT_TYPES else None


_FAR = "a bound so far out that it never binds"
_NOTHING = "a number that changes nothing"
_CHOICE = "a choice that is the same everywhere"

Rule = tuple[int, int, Callable[[npt.NDArray[Any]], bool], str]
"""The operand that is handed on, the one whose constant decides it, the test of its numbers, and the reason."""


def _either(test: Callable[[npt.NDArray[Any]], bool], reason: str) -> tuple[Rule, ...]:
    return (0, 1, test, reason), (1, 0, test, reason)


_RULES: MappingProxyType[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "MAXIMUM": _either(lambda numbers: bool((numbers <= -NEVER_REACHED).all()), _FAR),
        "MINIMUM": _either(lambda numbers: bool((numbers >= NEVER_REACHED).all()), _FAR),
        "ADD": _either(lambda numbers: not numbers.any(), _NOTHING),
        "SUB": ((0, 1, lambda numbers: not numbers.any(), _NOTHING),),
        "DIV": ((0, 1, lambda numbers: bool((numbers == 1).all()), _NOTHING),),
        **dict.fromkeys(
            ("SELECT", "SELECT_V2"),
            ((1, 0, lambda numbers: bool(numbers.all()), _CHOICE), (2, 0, lambda numbers: not numbers.any(), _CHOICE)),
        ),
    }
)
