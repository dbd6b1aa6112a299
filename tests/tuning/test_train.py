"""The loop: the same seed gives the same bytes, stopping and going on is as if nothing had happened, and it learns."""

from __future__ import annotations

import copy
import json
import math
import pickle
import resource
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from mtp_extract.drafter.protocol import BaseRequirements
from mtp_extract.errors import CheckpointError, OutputError
from mtp_extract.speculate.target import Base
from mtp_extract.speculate.teacher import Text
from mtp_extract.tuning import rounds
from mtp_extract.tuning.latents import Latents
from mtp_extract.tuning.rounds import States, compute_states
from mtp_extract.tuning.train import PATIENCE, TrainingProgress
from mtp_extract.tuning.work import replace_file

from .conftest import Tiny


def assert_same(one: tuple[Latents, TrainingProgress], other: tuple[Latents, TrainingProgress]) -> None:
    """Compare final latents, best weights, and all figures of the history."""
    (latents, trained), (others, again) = one, other
    assert trained.results.keys() == again.results.keys()
    for key, value in trained.results.items():
        assert torch.equal(value, again.results[key]), key
        assert torch.equal(latents.values[key], others.values[key]), key
    assert (trained.step, trained.done, trained.history) == (again.step, again.done, again.history)


@pytest.mark.parametrize(("mode", "changes"), [("qat", {}), ("norms", {"temperature": 1.0, "objective": "tv"})])
def test_a_resumed_training_is_the_same(tiny: Tiny, tmp_path: Path, mode: str, changes: dict[str, object]) -> None:
    class CutOff(BaseException):
        pass

    whole = tiny.train(tmp_path / "whole", mode, **changes)
    assert whole[1].done == 12
    # Without a word, between two measurements.
    with pytest.raises(CutOff):
        tiny.train(tmp_path / "cut", mode, Mock(side_effect=[False] * 6 + [CutOff]), **changes)
    assert_same(whole, tiny.train(tmp_path / "cut", mode, **changes))
    # Stopped twice, between measurements and at one.
    for last in (5, 9):
        calls = iter(range(100))
        done = 0 if last == 5 else 5
        _, part = tiny.train(tmp_path / "part", mode, lambda: done + next(calls) + 1 == last, **changes)  # noqa: B023
        assert (part.done, part.interrupted) == (last, True) and part.results
    rest = tiny.train(tmp_path / "part", mode, **changes)
    assert not rest[1].interrupted
    assert_same(whole, rest)
    logged = [(tmp_path / name / "log.jsonl").read_text() for name in ("whole", "part")]
    assert logged[0] == logged[1]
    assert [json.loads(line) for line in logged[0].splitlines()] == whole[1].history
    # What is finished is not trained again.
    assert_same(whole, (whole[0], tiny.train(tmp_path / "part", mode, **changes)[1]))


def test_another_plan_starts_anew(tiny: Tiny, tmp_path: Path) -> None:
    calls = iter(range(100))
    tiny.train(tmp_path / "work", steps=4, stop=lambda: next(calls) == 1)
    progress = tiny.train(tmp_path / "work", steps=4, learning_rate=1e-3)
    assert_same(progress, tiny.train(tmp_path / "fresh", steps=4, learning_rate=1e-3))


@pytest.mark.parametrize("damaged", [b"", b"no state at all", pickle.dumps(Path("x"), protocol=2), [1, 2], {"done": 1}])
def test_a_damaged_state_is_refused(tiny: Tiny, tmp_path: Path, damaged: Any) -> None:
    torch.save(damaged, tmp_path / "state.pt")
    if isinstance(damaged, bytes):
        (tmp_path / "state.pt").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"state\.pt: expected a training's state"):
        tiny.train(tmp_path)


def test_a_folder_that_cannot_be_written(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(OutputError, match=r"log\.jsonl: expected a place for text and state") as caught:
        tiny.train(tmp_path)
    assert caught.value.remedies == ("work",)


@pytest.mark.parametrize("share", [0, 0.4, 0.98, 0.999])
def test_a_full_disk_keeps_the_previous_state(tmp_path: Path, share: float) -> None:
    path = tmp_path / "state.pt"

    def save() -> None:
        with replace_file(path) as file:
            torch.save({str(number): torch.full((4000,), number) for number in range(3)}, file)

    save()
    before = path.read_bytes()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * len(before)), unlimited[1]))
    try:
        with pytest.raises(OutputError, match=r"cannot be written: .* make room there") as caught:
            save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert caught.value.remedies == ("work",)
    assert path.read_bytes() == before
    save()
    assert [file.name for file in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize(
    ("mode", "rate", "changes"),
    [
        ("qat", 1e-2, {"objective": "ce"}),
        # A few factors must turn the choices of random matrices: at 1e-2 they fall short of it in as many steps.
        ("norms", 6e-2, {"objective": "ce"}),
        ("float", 2e-2, {"objective": "kl", "temperature": 1.0}),
        ("float", 2e-2, {"objective": "tv", "temperature": 0.8}),
    ],
)
def test_it_learns(tiny: Tiny, tmp_path: Path, mode: str, rate: float, changes: dict[str, object]) -> None:
    """The loss of a random drafter on a few texts falls, and its drafts are right more often."""
    _, progress = tiny.train(
        tmp_path, mode, steps=16, batch=5, anchors=12, evaluations=1, learning_rate=rate, **changes
    )
    steps = [entry for entry in progress.history if "loss" in entry]
    loss, agreement = ([float(entry[name]) for entry in steps] for name in ("loss", "agreement"))
    assert mean(loss[-5:]) < mean(loss[:3]) * 0.8
    assert mean(agreement[-5:]) > mean(agreement[:3]) + 0.2


def test_the_best_is_kept(tiny: Tiny, tmp_path: Path) -> None:
    """The watched texts decide; after evaluations without improvement, training ends."""
    _, progress = tiny.train(tmp_path, steps=19, evaluations=19, learning_rate=3.0)
    watched = {int(e["step"]): float(e["teacher_forced"]) for e in progress.history if "loss" not in e}
    assert watched[progress.step] == max(watched.values())
    assert progress.done - progress.step == PATIENCE and progress.done < 19


@pytest.mark.parametrize("mode", ["norms", "qat"])
def test_in_bf16(tiny: Tiny, tmp_path: Path, mode: str) -> None:
    """Beside a BF16 base the drafter computes in BF16; latents, moments and results are F32."""
    half = Tiny(Base(copy.deepcopy(tiny.base.model).bfloat16()), tiny.checkpoint, tiny.drafter, tiny.texts)
    stops = iter([False] * 15 + [True])  # before the last step, as of what is finished no moments are kept
    changes = {"steps": 17, "batch": 5, "anchors": 12, "learning_rate": {"norms": 6e-2, "qat": 1e-2}[mode]}
    latents, progress = half.train(tmp_path, mode, lambda: next(stops), dtype=torch.bfloat16, **changes)
    assert {weight.dtype for weight in latents(torch.bfloat16).values()} == {torch.bfloat16}
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    moments = [entry["exp_avg"] for entry in state["optimizer"]["state"].values()]
    kept = [*latents.values.values(), *state["latents"].values(), *moments]
    assert {value.dtype for value in kept} == {torch.float32}
    # Steps smaller than BF16 can tell apart add up.
    assert (
        any(not torch.equal(value, value.bfloat16().float()) for value in progress.results.values())
        or not progress.step
    )
    losses = [float(entry["loss"]) for entry in progress.history if "loss" in entry]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_steps_without_rows_have_finite_figures(tiny: Tiny, tmp_path: Path) -> None:
    """The base never agrees with this text, so later steps have no rows."""
    tokens = tuple((token + 1 + place) % 40 for place, token in enumerate(tiny.texts[0].tokens))
    odd = Tiny(tiny.base, tiny.checkpoint, tiny.drafter, (*[Text(tokens, 3)] * 5, *tiny.texts[5:]))
    _, progress = odd.train(tmp_path, steps=2, evaluations=1)
    assert all(math.isfinite(entry["agreement"]) for entry in progress.history if "loss" in entry)


# What the base computes over texts


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Count forwards of the base, with groups of two texts."""
    monkeypatch.setattr(rounds, "_TOKENS_AT_ONCE", 48)
    counted = Mock(side_effect=compute_states)
    monkeypatch.setattr(rounds, "compute_states", counted)
    return counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_states_are_the_same(
    tiny: Tiny, forwards: Mock, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All, none or some are cached, and they are requested in any order."""
    base = Base(copy.deepcopy(tiny.base.model).to(dtype))
    needs = BaseRequirements(40, 32, layers=(1, 3), shared_kv=tiny.drafter.needs.shared_kv)
    texts = [*tiny.texts, tiny.texts[0]]
    expected = States(base, needs, texts, 4).look_up(texts)
    size = sum(part.nbytes for item in expected[:-1] for part in item.values())
    groups = forwards.call_count
    assert groups == 4
    for free, most_calls in ((1 << 21, 0), (0, groups), (size, 3)):
        monkeypatch.setattr(rounds, "free_memory", lambda device, free=free: free)
        states = States(base, needs, texts, 4)
        states.look_up(texts)
        forwards.reset_mock()
        states_again = states.look_up(texts[::-1])[::-1]
        assert 0 < forwards.call_count <= most_calls or forwards.call_count == most_calls
        for before, after in zip(expected, states_again, strict=True):
            assert before.keys() == after.keys()
            assert all(torch.equal(part, after[name]) for name, part in before.items())


def test_a_long_text_is_computed_alone(tiny: Tiny, forwards: Mock) -> None:
    """A group has at most a batch of texts."""
    lengths = [4] * 5 + [30] * 2 + [100] * 2
    texts = [Text(tuple(token % 40 for token in range(n, n + length)), 1) for n, length in enumerate(lengths)]
    States(tiny.base, tiny.drafter.needs, texts, 3).look_up(texts)
    assert [len(call.args[2]) for call in forwards.call_args_list] == [3, 2, 1, 1, 1, 1]
