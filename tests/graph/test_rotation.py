"""Rotations: frequencies are measured from any table of the position, and pairs that are not RoPE's are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.make_bundle import Memory, pack
from helpers.make_drafter import DrafterSpec, plain_model
from hypothesis import given, settings
from hypothesis import strategies as st
from seam import MtpExtractError, RoleError, read

from mtp_extract.graph.expressions import Expressions
from mtp_extract.graph.forms import QueryTerms, ScoreRows
from mtp_extract.graph.mask_trees import SCORE
from mtp_extract.graph.rotation import Rotation, read_rotation

WIDTH, HEADS, SLOTS = 8, 4, 300


class Tables:
    """Positions with one table: the cosines, then the sines, of ``angles`` ``[slots, half]``."""

    def __init__(self, angles: np.ndarray) -> None:
        self.slots, self.count = len(angles), 1 + 2 * angles.shape[1]
        self.table = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)

    def find_values(self, elements: Any) -> list[Any]:
        return [self]

    def number_elements(self, value: Any) -> np.ndarray:
        return np.arange(1, self.count)

    def evaluate_in_batches(self, positions: Any, values: Any, *, last_bits: int) -> Any:
        assert not last_bits
        yield positions, [self.table[positions]]


def build_scores(amplitude: float = 1.0, heads: int = HEADS) -> ScoreRows:
    """Return scores with RoPE as files have it: two terms for each row and dimension."""
    half = WIDTH // 2
    dimension = np.arange(WIDTH)
    element = np.stack([dimension, (dimension + half) % WIDTH], -1) + WIDTH * np.arange(heads)[:, None, None]
    by = np.broadcast_to(np.stack([1 + dimension % half, 1 + half + dimension % half], -1), element.shape).copy()
    number = np.broadcast_to(
        amplitude * np.stack([np.ones(WIDTH), np.where(dimension < half, -1, 1)], -1), element.shape
    )
    query = Expressions().make_expr("input", "q", size=WIDTH * heads)
    head = np.arange(heads) // 2
    return ScoreRows("k", (1, 2, 3), head, QueryTerms.of(query, number, element, by), SCORE)


def read_scores(rows: ScoreRows, angles: np.ndarray) -> Rotation:
    return read_rotation("layers.0", rows, HEADS, 2, Tables(angles))  # type: ignore[arg-type]


@given(st.floats(100, 1e7), st.sampled_from([1.0, 0.5, 0.25]), st.floats(0.01, 4))
@settings(max_examples=50, deadline=None)
def test_frequencies_and_amplitude_are_recovered(theta: float, share: float, amplitude: float) -> None:
    half = WIDTH // 2
    wanted = np.where(np.arange(half) < share * half, theta ** (-np.arange(half) / half), 0)
    rotation = read_scores(build_scores(amplitude), np.arange(SLOTS)[:, None] * wanted)
    assert rotation.amplitude == pytest.approx(amplitude)
    frequencies, doubt = rotation.measure_frequencies()
    assert (np.abs(frequencies - wanted) <= doubt + 1e-7 * wanted).all()
    assert (frequencies[wanted == 0] == 0).all()
    for positions, coefficients in rotation.at():
        angle = positions[:, None] * wanted
        expected = (np.cos(angle), np.cos(angle), np.sin(angle), np.sin(angle))
        np.testing.assert_allclose(coefficients, expected, atol=2e-6)


def change_scores(part: str, place: Any, value: float) -> ScoreRows:
    rows = build_scores()
    getattr(rows.rotated, part)[place] = value
    return rows


@pytest.mark.parametrize(
    "odd",
    [
        change_scores("element", (0, 0, 1), 1),  # another pair
        change_scores("element", (1, 2), 2),  # of another head
        change_scores("by", (1, 2, 0), 1),  # one head by another table
        change_scores("number", (1, 2, 1), 1),  # one head the other way round
        change_scores("number", (slice(None), 3), 0),  # of nothing
        build_scores(heads=3),
    ],
)
def test_other_rotations_are_refused_or_are_no_rope(odd: ScoreRows) -> None:
    try:
        rotation = read_scores(odd, np.arange(SLOTS)[:, None] * 10.0 ** -np.arange(4))
    except RoleError:
        return
    (_, (low, high, *_)), *_ = rotation.at()
    assert np.abs(low - high).max() > 0.1


def test_numbers_that_are_not_finite_are_an_error_of_ours() -> None:
    angles = np.arange(SLOTS)[:, None] * 10.0 ** -np.arange(4)
    angles[64] = np.nan
    with pytest.raises(MtpExtractError):
        read_scores(build_scores(), angles).measure_frequencies()


@pytest.mark.parametrize("slots", [1, 2, 3, 17])
def test_few_positions_say_what_they_can(slots: int) -> None:
    model = plain_model(DrafterSpec(cache=slots))
    try:
        layers = read(Memory(pack(model))).structure.layers
    except MtpExtractError:
        assert slots < 3
    else:
        assert layers[0].inverse_frequencies == pytest.approx([1, 0.01], rel=1e-4)


def test_rotations_of_heads_of_other_sizes_are_others() -> None:
    """Though their numbers have the same bytes, the check of one does not stand for the other."""
    number, by = np.ones((2, 4, 4), np.float32), np.zeros((2, 4, 4), np.int64)
    positions: Any = Tables(np.zeros((SLOTS, 2)))
    small, large = (Rotation(1.0, number.reshape(s), by.reshape(s), positions) for s in ((2, 4, 4), (2, 8, 2)))
    assert small.key != large.key
