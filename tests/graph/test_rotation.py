"""Rotations: frequencies are recovered from any table of positions, and other pairs than RoPE's are refused."""

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
from mtp_extract.graph.rotation import Rotation, rotation_of

WIDTH, HEADS, SLOTS = 8, 4, 300


class Tables:
    """Positions whose one table is cosines, then sines, of ``angles`` ``[slots, half]``."""

    def __init__(self, angles: np.ndarray) -> None:
        self.slots, self.count = len(angles), 1 + 2 * angles.shape[1]
        self.table = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)

    def values_of(self, elements: Any) -> list[Any]:
        return [self]

    def elements(self, value: Any) -> np.ndarray:
        return np.arange(1, self.count)

    def at(self, positions: Any, values: Any, *, last_bits: int) -> Any:
        assert not last_bits
        yield positions, [self.table[positions]]


def scores(amplitude: float = 1.0, heads: int = HEADS) -> ScoreRows:
    """RoPE as files spell it: per row and dimension, two terms."""
    half = WIDTH // 2
    own = np.arange(WIDTH)
    element = np.stack([own, (own + half) % WIDTH], -1) + WIDTH * np.arange(heads)[:, None, None]
    by = np.broadcast_to(np.stack([1 + own % half, 1 + half + own % half], -1), element.shape).copy()
    number = np.broadcast_to(amplitude * np.stack([np.ones(WIDTH), np.where(own < half, -1, 1)], -1), element.shape)
    query = Expressions().expr("input", "q", size=WIDTH * heads)
    head = np.arange(heads) // 2
    return ScoreRows("k", (1, 2, 3), head, QueryTerms.of(query, number, element, by), SCORE)


def rotation(found: ScoreRows, angles: np.ndarray) -> Rotation:
    return rotation_of("layers.0", found, HEADS, 2, Tables(angles))  # type: ignore[arg-type]


@given(st.floats(100, 1e7), st.sampled_from([1.0, 0.5, 0.25]), st.floats(0.01, 4))
@settings(max_examples=50, deadline=None)
def test_frequencies_and_amplitude_are_recovered(theta: float, share: float, amplitude: float) -> None:
    half = WIDTH // 2
    wanted = np.where(np.arange(half) < share * half, theta ** (-np.arange(half) / half), 0)
    found = rotation(scores(amplitude), np.arange(SLOTS)[:, None] * wanted)
    assert found.amplitude == pytest.approx(amplitude)
    frequencies, doubt = found.measured()
    assert (np.abs(frequencies - wanted) <= doubt + 1e-7 * wanted).all()
    assert (frequencies[wanted == 0] == 0).all()
    for positions, (low, high, down, up) in found.at():
        angle = positions[:, None] * wanted
        for one, other in ((low, np.cos(angle)), (high, np.cos(angle)), (down, np.sin(angle)), (up, np.sin(angle))):
            np.testing.assert_allclose(one, other, atol=2e-6)


def changed(part: str, place: Any, value: float) -> ScoreRows:
    made = scores()
    getattr(made.rotated, part)[place] = value
    return made


@pytest.mark.parametrize(
    "odd",
    [
        changed("element", (0, 0, 1), 1),  # another pair
        changed("element", (1, 2), 2),  # of another head
        changed("by", (1, 2, 0), 1),  # one head by another table
        changed("number", (1, 2, 1), 1),  # one head the other way round
        changed("number", (slice(None), 3), 0),  # of nothing
        scores(heads=3),
    ],
)
def test_other_rotations_are_refused_or_are_no_rope(odd: ScoreRows) -> None:
    try:
        found = rotation(odd, np.arange(SLOTS)[:, None] * 10.0 ** -np.arange(4))
    except RoleError:
        return
    (_, (low, high, *_)), *_ = found.at()
    assert np.abs(low - high).max() > 0.1


def test_numbers_that_are_not_finite_are_an_error_of_ours() -> None:
    angles = np.arange(SLOTS)[:, None] * 10.0 ** -np.arange(4)
    angles[64] = np.nan
    with pytest.raises(MtpExtractError):
        rotation(scores(), angles).measured()


@pytest.mark.parametrize("slots", [1, 2, 3, 17])
def test_few_positions_say_what_they_can(slots: int) -> None:
    model = plain_model(DrafterSpec(cache=slots))
    try:
        layers = read(Memory(pack(model))).walk.layers
    except MtpExtractError:
        assert slots < 3
    else:
        assert layers[0].inverse_frequencies == pytest.approx([1, 0.01], rel=1e-4)


def test_rotations_of_heads_of_other_sizes_are_others() -> None:
    """Though their numbers lie in the same bytes: what is held for one would not be held for the other."""
    number, by = np.ones((2, 4, 4), np.float32), np.zeros((2, 4, 4), np.int64)
    positions: Any = Tables(np.zeros((SLOTS, 2)))
    one, other = (Rotation(1.0, number.reshape(s), by.reshape(s), positions) for s in ((2, 4, 4), (2, 8, 2)))
    assert one.key != other.key
