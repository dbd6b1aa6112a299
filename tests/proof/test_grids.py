"""Activations on grids: ordinary numbers lie on them, or the file is refused."""

from __future__ import annotations

import numpy as np
import pytest
from adversary.edits import Edit, edge, over_int, through
from helpers.make_bundle import Memory
from helpers.surgery import sound
from seam import Proof, UnsupportedError, prove


def held(place: str, edit: Edit) -> Proof:
    graph = sound("torch")
    edge(place, edit)(graph)
    return prove(Memory(graph.data()))


@pytest.mark.parametrize(
    ("place", "scale", "zero_point"), [("0.up", 0.02, 0), ("1.ffw_in", 0.05, 5), ("state", 0.1, 0)]
)
def test_a_grid_that_holds_ordinary_numbers_is_counted(place: str, scale: float, zero_point: int) -> None:
    found = held(place, over_int(scale, zero_point))
    assert found["activations_held_in"] == {"INT8": 1}
    assert found["fewest_codes"] > 8
    assert found["largest_share_cut_off"] < 0.2


@pytest.mark.parametrize(
    ("place", "edit", "noun"),
    [
        ("state", over_int(0.001), "cut off"),  # numbers up to 0.127
        ("state", over_int(0.05, 127), "cut off"),  # those below 0
        ("state", over_int(2.0), "too little"),
        ("1.stream", over_int(1e-6, dtype=np.int16), "cut off"),
        ("logits", over_int(0.01), "cut off"),
        ("0.query_normed", over_int(0.05), "query"),
        ("0.rotated", over_int(0.05), "INT8"),
        ("0.scores", over_int(0.5), "INT8"),
        ("0.key", over_int(0.05), "INT8"),
        ("0.attended", over_int(5.0), "too little"),
        ("0.probabilities", over_int(1 / 256, -128), "INT8"),
        ("1.stream", through(np.float16), "FLOAT16"),
        ("0.scores", through(np.int32), "INT32"),
        ("1.stream", through(np.int32), "INT32"),
    ],
)
def test_a_grid_that_leaves_too_little_is_refused(place: str, edit: Edit, noun: str) -> None:
    with pytest.raises(UnsupportedError, match=noun):
        held(place, edit)
