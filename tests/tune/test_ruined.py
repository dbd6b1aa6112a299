"""A text is called ruined where it is, and where nothing was changed it is not."""

from __future__ import annotations

import numpy as np
import torch

from mtp_extract.evaluate.measured import Measured
from mtp_extract.tune.ruined import LEAST_ANCHORS, ruined, text_changes

K = 3


def rates(generator: np.random.Generator, length: int, mean: float) -> np.ndarray:
    """Of positions that go together, in runs of eight or so."""
    found: list[float] = []
    while len(found) < length:
        found += [generator.beta(2.3 * mean, 2.3 * (1 - mean))] * int(generator.geometric(1 / 8))
    return np.array(found[:length])


def drawn(generator: np.random.Generator, chances: np.ndarray) -> Measured:
    stands = (generator.random((len(chances), K)) < chances[:, None]).cumprod(1)
    text = torch.zeros(len(chances), dtype=torch.long)
    return Measured.over(text, 1 + torch.arange(len(chances)), torch.from_numpy(stands).double())


def test_beyond_chance() -> None:
    """Two drafters that are as good at every position, drawn anew: none; one a third as good: nearly all."""
    generator = np.random.default_rng(5)
    for mean in (0.5, 0.8):
        alarms = found = fallen = 0
        for _ in range(100):
            chances = rates(generator, 96, mean)
            before = drawn(generator, chances)
            alarms += ruined(before, drawn(generator, chances))
            worse = drawn(generator, chances / 3)
            fallen += worse.mean_accepted_length < 0.7 * before.mean_accepted_length
            found += ruined(before, worse)
        assert alarms == 0
        assert found > 0.8 * fallen > 60


def test_a_few_positions_are_chance() -> None:
    """Where less than five blocks are, nothing is decided, however much is lost."""
    for length, known in ((LEAST_ANCHORS - 1, False), (3 * LEAST_ANCHORS, True)):
        text, anchor = torch.zeros(length, dtype=torch.long), torch.arange(length)
        all_of_them = torch.ones(length, K, dtype=torch.double)
        before, after = (Measured.over(text, anchor, stands) for stands in (all_of_them, 0 * all_of_them))
        (change,) = text_changes(before, after, ["code"], ["a text"])
        assert (change.decided, change.ruined) == (known, known)
        # A little more than 0.7 of it is left.
        kept = Measured.over(text, anchor, (torch.arange(length)[:, None] % 10 < 7) * all_of_them)
        assert not ruined(before, kept)


def test_the_worst_come_first() -> None:
    text = torch.arange(3).repeat_interleave(50)
    stands = torch.tensor([1.0, 0.0, 0.5], dtype=torch.double)[text][:, None].expand(-1, K)
    before = Measured.over(text, torch.arange(150) % 50, torch.full((150, K), 0.5, dtype=torch.double))
    after = Measured.over(text, torch.arange(150) % 50, stands)
    found = text_changes(before, after, ["code", "chat", "code"], ["a", "b", "c"])
    assert [(one.workload, one.name) for one in found] == [("chat", "b"), ("code", "c"), ("code", "a")]
    assert found[0].as_json() == {
        **{"workload": "chat", "name": "b", "anchors": 50, "ruined": True},
        "before": {"mean_accepted_length": 2.5, "tokens_a_round": found[0].as_json()["before"]["tokens_a_round"]},
        "after": {"mean_accepted_length": 1.0, "tokens_a_round": 1.0},
    }
