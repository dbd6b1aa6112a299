"""Intervals hold every number that an operator can make of numbers within its operands' intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graph.test_evaluate import CASES
from helpers.one_op import OneOp, const

from mtp_extract.graph.bounds import _RULES, Bounds
from mtp_extract.graph.evaluate import evaluate

WITH_RULES = [
    case for case in CASES if case.kind in _RULES and case.input_grid is None and case.results == ("float32",)
]


def made(case: OneOp, inputs: dict[str, Any]) -> tuple[np.ndarray, tuple[float, float]]:
    """What ``case`` computes of ``inputs``, and its interval from theirs."""
    graph = case.flat()
    known = {id(graph.inputs[name]): (float(v.min()), float(v.max())) for name, v in inputs.items()}
    (found,) = evaluate(graph, {name: (v,) for name, v in inputs.items()}, list(graph.outputs.values()))
    return np.asarray(found[0], np.float64), Bounds(graph, known).of(next(iter(graph.outputs.values())))


@pytest.mark.parametrize("case", WITH_RULES, ids=[f"{case.kind}-{n}" for n, case in enumerate(WITH_RULES)])
def test_an_interval_holds_what_is_computed(case: OneOp) -> None:
    numbers, (low, high) = made(case, case.inputs())
    slack = 1e-5 * (1 + np.abs(numbers).max())
    assert low - slack <= numbers.min()
    assert numbers.max() <= high + slack


def test_every_rule_is_tried() -> None:
    moved = {"CONCATENATION", "PACK", "CAST", "QUANTIZE", "DEQUANTIZE", "SPLIT", "SPLIT_V", "UNPACK"}
    assert set(_RULES) <= {case.kind for case in WITH_RULES} | moved


@pytest.mark.parametrize(
    ("kind", "operands", "never"),
    [
        ("MAXIMUM", (np.array([0.5, 2], np.float32), const(np.float32(0))), True),
        ("MAXIMUM", (np.array([-0.5, 2], np.float32), const(np.float32(0))), False),
        ("MAXIMUM", (np.array([-1e9, 2], np.float32), const(np.float32(-1e30))), True),
        ("MINIMUM", (np.array([-0.5, 2], np.float32), const(np.float32(2.5))), True),
        ("MINIMUM", (np.array([-0.5, 3], np.float32), const(np.float32(2.5))), False),
        ("RELU", (np.array([0, 2], np.float32),), True),
        ("RELU", (np.array([-1, 2], np.float32),), False),
        ("RELU6", (np.array([0, 6], np.float32),), True),
        ("RELU6", (np.array([0, 7], np.float32),), False),
        ("ABS", (np.array([-3, 0], np.float32),), False),
    ],
)
def test_a_bound_binds_or_not(kind: str, operands: tuple[Any, ...], never: bool) -> None:
    case = OneOp(kind, operands)
    graph = case.flat()
    known = {id(graph.inputs["i0"]): (float(operands[0].min()), float(operands[0].max()))}
    assert Bounds(graph, known).never_binds(graph.nodes[0]) is never


def test_what_is_not_known_is_of_any_size() -> None:
    graph = OneOp("EXP", (np.zeros(3, np.float32),)).flat()
    assert Bounds(graph, {}).of(graph.outputs["o0"]) == (0.0, np.inf)
    graph = OneOp("SIN", (np.zeros(3, np.float32),)).flat()
    assert Bounds(graph, {}).of(graph.outputs["o0"]) == (-1, 1)
