"""A whole tuning of the sample: what is written, what is not, and what a stop leaves."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.schemas import validator
from safetensors.numpy import load_file

from mtp_extract.checkpoint.check import verify
from mtp_extract.drafter import load_drafter
from mtp_extract.errors import MtpExtractError, OutputError
from mtp_extract.tune import Plan, Setting, run_tuning
from mtp_extract.tune import prompts as texts
from mtp_extract.validate import prompts as shipped

HEADS = ("class ", "def ", "import ", "for ", "if ", "return ", "with ", "raise ", "    self.", "try:\n    ", "from ")
TAILS = ("a", "Foo", "os", "i in range(", "self", "None", "open(", "value", "name = 1\n", "x(", "ValueError", "sys")


@pytest.fixture(scope="module", autouse=True)
def _small() -> Any:
    """One thread, and few of the shipped prompts: each is a text that the base writes."""
    threads, every = torch.get_num_threads(), shipped.shipped_prompts()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "shipped_prompts", lambda: every[::20])
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "code.jsonl"
    every = [head + tail for head in HEADS for tail in TAILS]
    sides = {texts.TRAINED: 8, texts.WATCHED: 4, texts.HELD_OUT: 6}
    chosen = [p for side, count in sides.items() for p in [q for q in every if texts.side_of(q) == side][:count]]
    assert len(chosen) == sum(sides.values())
    rows = [{"prompt": prompt, "source": prompt, "workload": "code"} for prompt in chosen]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def plan(extracted: Path, base: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """Plans share what the base wrote."""
    work = tmp_path_factory.mktemp("work")

    def make(out: Path, **changes: Any) -> Plan:
        setting = {"prompts": prompts, "new_tokens": 16, "batch": 4, "device": "cpu", "chat_template": False}
        setting |= {name: changes.pop(name) for name in list(changes) if name in Setting.__dataclass_fields__}
        settings = {"mode": "norms", "steps": 4, "anchors": 6, "force": True}
        return Plan(Setting(extracted, str(base), work, **setting), out, **(settings | changes))

    return make


def test_norms(plan: Callable[..., Plan], extracted: Path, tmp_path: Path) -> None:
    """Matrices and codes as they were; record and card say what was done; the same seed gives the same bytes."""
    made = plan(tmp_path / "tuned", learning_rate=0.05)
    found = run_tuning(made)
    assert found.directory == tmp_path / "tuned"
    before, after = (load_file(directory / "model.safetensors") for directory in (extracted, found.directory))
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    record = verify(found.directory).record
    validator("extraction")(record)
    assert changed == set(record["tuning"]["changed"])
    if found.trained.step:
        assert changed
    assert all(before[name].ndim == 1 for name in changed)
    codes = "codes/codes.safetensors"
    assert (found.directory / codes).read_bytes() == (extracted / codes).read_bytes()
    assert record["proof"] is None
    card = (found.directory / "README.md").read_text(encoding="utf-8")
    assert "no longer those they were extracted as" in card
    assert "--against" not in card
    workloads = record["tuning"]["workloads"]
    assert {name: found["trained_on_its_kind"] for name, found in workloads.items()}["code"] is True
    assert any(name.endswith(" (shipped)") and not found["trained_on_its_kind"] for name, found in workloads.items())
    assert record["tuning"]["overall"]["texts"] == found.comparisons.overall.before.texts
    assert (made.setting.work / "progress.png").is_file()
    assert (made.setting.work / "log.jsonl").is_file()
    (made.setting.work / "state.pt").unlink()
    run_tuning(plan(tmp_path / "again", learning_rate=0.05))
    for name in record["files"]:
        assert (tmp_path / "again" / name).read_bytes() == (found.directory / name).read_bytes(), name


def test_qat(plan: Callable[..., Plan], extracted: Path, tmp_path: Path) -> None:
    """Codes move, scales do not, floats are the codes'; what was measured is what was written."""
    found = run_tuning(plan(tmp_path / "tuned", mode="qat", steps=8, learning_rate=0.004))
    assert found.directory is not None
    before, after = (load_file(directory / "codes/codes.safetensors") for directory in (extracted, found.directory))
    floats = load_file(found.directory / "model.safetensors")
    changed = 0
    for name in before:
        weight, _, part = name.rpartition(".")
        if part != "codes" or before[name].ndim != 2:
            assert np.array_equal(before[name], after[name]), name
            continue
        changed += int((before[name] != after[name]).sum())
        scale, zero = (after[f"{weight}.{part}"].reshape(-1, 1) for part in ("scale", "zero_point"))
        if scale.size in (1, len(after[name])):
            assert np.array_equal(floats[weight], (after[name].astype(np.float32) - zero.astype(np.float32)) * scale)
    told = verify(found.directory).record["tuning"]["changed"]
    assert changed == sum(count for name, count in told.items() if floats[name].ndim == 2)
    assert found.trained.step == 0 or changed
    load_drafter(found.directory)


def test_what_is_not_better_is_not_written(plan: Callable[..., Plan], tmp_path: Path) -> None:
    found = run_tuning(plan(tmp_path / "tuned", learning_rate=1e-12, force=False))
    assert found.directory is None
    assert "not better on held-out text" in found.refused[0]
    assert not (tmp_path / "tuned").exists()


def test_a_stop_leaves_the_best_so_far(plan: Callable[..., Plan], tmp_path: Path) -> None:
    steps = iter(range(100))
    found = run_tuning(plan(tmp_path / "tuned", steps=9), stop=lambda: next(steps) == 3)
    assert found.trained.interrupted
    assert found.trained.done == 4
    assert verify(tmp_path / "tuned").record["tuning"]["interrupted"] is True
    assert "stopped before its end" in (tmp_path / "tuned" / "README.md").read_text(encoding="utf-8")
    whole = run_tuning(plan(tmp_path / "tuned", steps=9, overwrite=True))
    assert whole.trained.done > 4
    assert not whole.trained.interrupted


def test_a_second_stop_leaves_nothing(plan: Callable[..., Plan], tmp_path: Path) -> None:
    class Stopped(BaseException):
        pass

    def tell(progress: Any) -> None:
        if progress.step == 2:
            raise Stopped

    with pytest.raises(Stopped):
        run_tuning(plan(tmp_path / "tuned", seed=5), tell=tell)
    assert list(tmp_path.iterdir()) == []


def test_the_first_ctrl_c_is_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step it is as everywhere; after it, once asks and twice is as everywhere."""
    from mtp_extract.cli.tune import _asked_to_stop

    class Stopped(BaseException):
        pass

    def stopped(number: int, frame: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGINT, stopped)
    try:
        with pytest.raises(Stopped), _asked_to_stop(tell_so=True):
            signal.raise_signal(signal.SIGINT)
        with _asked_to_stop(tell_so=True) as stop:
            assert not stop()
            signal.raise_signal(signal.SIGINT)
            assert stop()
            with pytest.raises(Stopped):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is stopped
    finally:
        signal.signal(signal.SIGINT, before)


def test_refused_before_any_work(plan: Callable[..., Plan], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(OutputError, match="is not replaced"):
        run_tuning(plan(tmp_path / "there"))
    for changes, message in [
        ({"text": tmp_path / "x"}, "found both"),
        ({"steps": 0}, "steps of at least 1"),
        ({"prompts": None, "text": tmp_path / "x", "temperature": 1.0}, "text of the base itself"),
    ]:
        with pytest.raises(MtpExtractError, match=message):
            run_tuning(plan(tmp_path / "out", **changes))


def test_sides_are_of_sources() -> None:
    """A source is on one side, wherever it stands; and the shares are about those asked for."""
    sides = [texts.side_of(f"source {number}") for number in range(4000)]
    assert sides == [texts.side_of(f"source {number}") for number in range(4000)]
    assert sides.count(texts.WATCHED) / 4000 == pytest.approx(0.08, abs=0.02)
    assert sides.count(texts.HELD_OUT) / 4000 == pytest.approx(0.12, abs=0.02)


def test_too_few_prompts(plan: Callable[..., Plan], tmp_path: Path) -> None:
    few = tmp_path / "few.txt"
    few.write_text("import os\nclass Foo\n")
    with pytest.raises(MtpExtractError, match="found 2 prompts from 2 sources"):
        run_tuning(plan(tmp_path / "out", prompts=few))


@pytest.mark.parametrize("line", ["{", "[]", '{"prompt": 3}', '{"prompt": ""}', '{"text": "a"}', '{"prompt": [1]}'])
def test_prompts_of_another_form(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(MtpExtractError, match=r"prompts\.jsonl"):
        texts.read_items(path)
