"""Rows of masks are called alike only if they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.make_bundle import Memory, pack
from helpers.make_drafter import DrafterSpec, plain_model
from helpers.surgery import Graph
from hypothesis import given, settings
from hypothesis import strategies as st
from proof.test_proof import load_case
from seam import MtpExtractError, evaluate, flat, read

from mtp_extract.graph.flat import Depends, FlatGraph, Value
from mtp_extract.graph.masks import Masks
from mtp_extract.graph.positions import Positions

SLOTS = 16
ROW = np.arange(SLOTS, dtype=np.int32)
CONSTANTS = [ROW, ROW + 4, ROW * 2, ROW % 5, ROW[::-1].copy(), np.minimum(ROW, 9), np.int32([7]), np.int32([3])]
TABLES = [np.equal.outer(ROW, ROW), np.subtract.outer(ROW, ROW) < 4, np.eye(SLOTS, k=3), np.tile(ROW < 5, (SLOTS, 1))]
TABLES[2][9, 4] = 1
Step = tuple[str, int, int]
INTEGER_OPS = ["ADD", "SUB", "MUL", "FLOOR_DIV", "MAXIMUM", "MINIMUM"]
COMPARED = ["LESS", "LESS_EQUAL", "GREATER", "GREATER_EQUAL", "EQUAL", "NOT_EQUAL"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *INTEGER_OPS,
                *COMPARED,
                *COMPARED,
                "ABS",
                "NEG",
                "FLOAT",
                "LOGICAL_AND",
                "LOGICAL_OR",
                "LOGICAL_NOT",
                "ROW",
            ]
        ),
        st.integers(0, 20),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=10,
)


def build_graph(steps: list[Step]) -> FlatGraph:
    """Return a drafter's graph with unused operators on the position, the mask and constants."""
    g = Graph(plain_model(DrafterSpec(cache=SLOTS)), {})
    integers = [g.input("input_pos"), *(g.constant(c.reshape(1, 1, 1, -1), np.int32) for c in CONSTANTS)]
    floats, bools = [g.cast(integers[0], np.float32), g.cast(integers[1], np.float32)], [g.input("mask")]
    for kind, a, b in steps:
        if kind in INTEGER_OPS:
            integers.append(g.call(kind, integers[a % len(integers)], integers[b % len(integers)]))
        elif kind in COMPARED:
            pool = floats if a % 4 == 0 else integers
            bools.append(g.call(kind, pool[(a + 1) % len(pool)], pool[b % len(pool)]))
        elif kind in ("ABS", "NEG"):
            integers.append(g.call(kind, integers[a % len(integers)]))
        elif kind == "FLOAT":
            floats.append(g.call("MUL", g.cast(integers[a % len(integers)], np.float32), np.float32(1 + b % 3 / 3)))
        elif kind == "LOGICAL_NOT":
            bools.append(g.call(kind, bools[a % len(bools)]))
        elif kind == "ROW":
            table = TABLES[a % len(TABLES)].astype(bool)
            picked = g.call("GATHER", g.constant(table, np.bool_), integers[0], shape=[1, SLOTS], axis=0)
            bools.append(g.reshape(picked, [1, 1, 1, SLOTS]))
        else:
            bools.append(g.call(kind, bools[a % len(bools)], bools[b % len(bools)]))
    return flat(pack(g.model))


def compute_rows(graph: FlatGraph, value: Value) -> np.ndarray:
    """Return ``value`` at every position, with a mask that shows all and one that hides all: ``[2, rows, slots]``."""
    tables = []
    for shown in (True, False):
        inputs = {"input_pos": ROW[:, None], "mask": np.full((1, 1, 1, 1, SLOTS), shown)}
        (table,) = evaluate(graph, inputs, [value])
        tables.append(np.broadcast_to(table.reshape(len(table), -1), (SLOTS, SLOTS)))
    return np.stack(tables)


def are_alike(tables: np.ndarray) -> bool:
    """Return whether every number is a function of slot − position."""
    return all(
        np.unique(np.diagonal(table, offset)).size == 1 for table in tables for offset in range(1 - SLOTS, SLOTS)
    )


@given(STEPS)
@settings(max_examples=250, deadline=None)
def test_rows_that_differ_are_never_called_alike(steps: list[Step]) -> None:
    graph = build_graph(steps)
    masks = Masks(graph, Positions(graph))
    decided = [v for node in graph.nodes for v in node.outputs if not v.depends & Depends.DATA]
    for value in decided:
        try:
            alike = masks.are_rows_alike([value])
        except MtpExtractError:
            continue  # an integer overflows
        if alike and value.tensor.elements in (1, SLOTS):
            assert are_alike(compute_rows(graph, value)), value.label


@pytest.mark.parametrize(
    ("steps", "alike"),
    [
        ([("GREATER_EQUAL", 17, 1)], True),  # position ≥ slot
        ([("LESS", 17, 2)], True),  # position < slot + 4
        ([("GREATER_EQUAL", 17, 1), ("LESS", 17, 2), ("LOGICAL_AND", 1, 2), ("LOGICAL_AND", 0, 3)], True),
        ([("SUB", 0, 1), ("ABS", 9, 0), ("LESS", 9, 7)], True),  # |position − slot| < 7
        ([("LESS", 17, 3)], False),  # position < 2 · slot
        ([("LESS", 17, 5)], False),  # position < 15 − slot
        ([("LESS", 6, 1)], False),  # 7 < slot
        ([("ROW", 1, 0)], False),  # A table is not looked into.
    ],
)
def test_lines_are_followed(steps: list[Step], alike: bool) -> None:
    graph = build_graph(steps)
    assert Masks(graph, Positions(graph)).are_rows_alike(graph.nodes[-1].outputs) is alike


NOT_ALIKE = ["positions/window_of_all_at_37", "positions/window_late_at_37", "tables/window_table_row_37"]
NOT_ALIKE += ["fourth: large integers/slot_100_late"]


def has_alike_rows(source: Any) -> bool:
    drafter = read(source)
    masks = Masks(drafter.graph, drafter.structure.reading.positions)
    return all(masks.are_rows_alike(layer.attention.mask_values) for layer in drafter.structure.layers)


@pytest.mark.parametrize("label", NOT_ALIKE)
def test_a_change_of_one_row_is_no_shift(label: str) -> None:
    assert not has_alike_rows(load_case(label))


def test_sound_rows_are_alike(sample: Any) -> None:
    assert has_alike_rows(sample)
    assert has_alike_rows(Memory(pack(plain_model(DrafterSpec(windows=(5, None, 5), cache=64)))))
