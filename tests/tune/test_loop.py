"""The loop: the same seed gives the same bytes, stopping and going on is as if nothing had happened, and it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mtp_extract.errors import CheckpointError
from mtp_extract.tune.loop import Recipe, Trained
from mtp_extract.tune.modes import Latents

from .conftest import Tiny


def assert_same(one: tuple[Latents, Trained], other: tuple[Latents, Trained]) -> None:
    """Where they ended, what was best, and every number on the way."""
    (latents, trained), (others, again) = one, other
    assert trained.values.keys() == again.values.keys()
    for key, value in trained.values.items():
        assert torch.equal(value, again.values[key]), key
        assert torch.equal(latents.values[key], others.values[key]), key
    assert (trained.step, trained.done, trained.history) == (again.step, again.done, again.history)


@pytest.mark.parametrize(("mode", "changes"), [("qat", {}), ("norms", {"temperature": 1.0, "objective": "tv"})])
def test_it_goes_on_as_if_nothing_had_happened(
    tiny: Tiny, tmp_path: Path, mode: str, changes: dict[str, object]
) -> None:
    whole = tiny.train(tmp_path / "whole", mode, **changes)
    assert_same(whole, tiny.train(tmp_path / "again", mode, **changes))
    assert whole[1].done == 12
    # Stopped twice, between measurements and at one.
    for last in (5, 9):
        calls = iter(range(100))
        done = 0 if last == 5 else 5
        _, part = tiny.train(tmp_path / "part", mode, lambda: done + next(calls) + 1 == last, **changes)  # noqa: B023
        assert (part.done, part.interrupted) == (last, True)
        assert part.values
    rest = tiny.train(tmp_path / "part", mode, **changes)
    assert not rest[1].interrupted
    assert_same(whole, rest)
    logged = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "part")]
    assert logged[0] == logged[1]
    assert [json.loads(line) for line in logged[0].splitlines()] == list(whole[1].history)
    # What is finished is not trained again.
    assert_same(whole, tiny.train(tmp_path / "part", mode, **changes))


def test_another_seed_gives_others(tiny: Tiny, tmp_path: Path) -> None:
    one, other = (tiny.train(tmp_path / str(seed), seed=seed)[1] for seed in (0, 1))
    assert one.history != other.history


def test_another_plan_begins_anew(tiny: Tiny, tmp_path: Path) -> None:
    calls = iter(range(100))
    tiny.train(tmp_path / "work", stop=lambda: next(calls) == 3)
    found = tiny.train(tmp_path / "work", learning_rate=1e-3)
    assert_same(found, tiny.train(tmp_path / "fresh", learning_rate=1e-3))


def test_a_damaged_state_is_said(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(b"PK\x03\x04 damaged")
    with pytest.raises(CheckpointError, match=r"state\.pt: cannot be read"):
        tiny.train(tmp_path)


@pytest.mark.parametrize(
    ("mode", "rate", "changes"),
    [
        ("qat", 1e-2, {"objective": "ce"}),
        # A few factors must turn the choices of random matrices: at 1e-2 they fall short of it in as many steps.
        ("norms", 3e-2, {"objective": "ce"}),
        ("float", 1e-2, {"objective": "kl", "temperature": 1.0}),
        ("float", 1e-2, {"objective": "tv", "temperature": 0.8}),
    ],
)
def test_it_learns(tiny: Tiny, tmp_path: Path, mode: str, rate: float, changes: dict[str, object]) -> None:
    """A random drafter on a few texts: the loss falls, and drafts on them are right more often."""
    _, found = tiny.train(tmp_path, mode, steps=40, batch=5, anchors=12, learning_rate=rate, **changes)
    steps = [entry for entry in found.history if "loss" in entry]

    def ends(name: str) -> tuple[float, float]:
        first, last = (sum(float(entry[name]) for entry in part) / len(part) for part in (steps[:3], steps[-5:]))
        return first, last

    before, after = ends("loss")
    assert after < before * 0.8
    before, after = ends("agreement")
    assert after > before + 0.2


def test_the_best_is_kept(tiny: Tiny, tmp_path: Path) -> None:
    """By the watched texts; and after some that are no better, it ends."""
    _, found = tiny.train(tmp_path, steps=40, evaluations=40, patience=3, learning_rate=3.0)
    watched = {int(e["step"]): float(e["mean_accepted_length"]) for e in found.history if "loss" not in e}
    assert watched[found.step] == max(watched.values())
    assert found.done < 40
    assert found.done - found.step == 3


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(steps=100)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates.index(max(rates)) in (9, 10)
    assert max(rates) == 1
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.05
