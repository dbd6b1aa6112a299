"""A whole tuning of the sample: what is written, what is not, and what a stop leaves."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import run_here
from helpers.reporters import Recorder
from helpers.schemas import validator
from safetensors.numpy import load_file
from seam import verify

from mtp_extract.cli.tune import _TuningReporter
from mtp_extract.errors import CheckpointError, MtpExtractError, OutputError
from mtp_extract.io.place import stage_output
from mtp_extract.io.threads import Interrupted
from mtp_extract.tuning import corpus as texts
from mtp_extract.tuning.corpus import gather_texts
from mtp_extract.tuning.pair import Pair
from mtp_extract.tuning.plan import TuningPlan
from mtp_extract.tuning.run import run_tuning
from mtp_extract.tuning.work import lock_folder

from .conftest import Plans, choose_sources, write_rows


def test_norms(plan: Plans, extracted: Path, tmp_path: Path) -> None:
    """Matrices and codes are unchanged; record and card describe the tuning; the same seed gives the same bytes."""
    first_plan = plan(tmp_path / "tuned", learning_rate=0.05)
    outcome = run_tuning(first_plan)
    assert outcome.directory == tmp_path / "tuned"
    before, after = (load_file(directory / "model.safetensors") for directory in (extracted, outcome.directory))
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    record = verify(outcome.directory)
    validator("extraction")(record)
    assert changed or not outcome.record["best_step"]
    assert all(before[name].ndim == 1 for name in changed)
    codes = "codes/codes.safetensors"
    assert (outcome.directory / codes).read_bytes() == (extracted / codes).read_bytes()
    assert record["proof"] is None
    card = (outcome.directory / "README.md").read_text(encoding="utf-8")
    assert "no longer those they were extracted as" in card and "--against" not in card
    assert "code" in record["tuning"]["workloads"]
    assert any(name.endswith(" (shipped)") for name in record["tuning"]["workloads"])
    assert record["tuning"]["overall"]["texts"] == outcome.comparisons.overall.texts
    assert (first_plan.work / "log.jsonl").is_file()
    (first_plan.work / "state.pt").unlink()
    run_tuning(plan(tmp_path / "again", learning_rate=0.05))
    for name in record["files"]:
        assert (tmp_path / "again" / name).read_bytes() == (outcome.directory / name).read_bytes(), name


@pytest.mark.parametrize(("error", "status"), [(Interrupted(signal.SIGINT), 130), (MtpExtractError("no."), 1)])
def test_an_interrupted_run_names_its_work_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int
) -> None:
    """After Ctrl-C and after an error, but only if this run has written there."""

    def run_until_then(plan: TuningPlan, *tell: object) -> None:
        if plan.mode == "qat" and not plan.kept_in.exists():
            plan.kept_in.mkdir()
            (plan.kept_in / "texts.jsonl").touch()
        raise error

    monkeypatch.setattr("mtp_extract.api.tune", run_until_then)
    arguments = ("tune", tmp_path / "drafter", "--base", "base", "-o", tmp_path / "new")
    nothing, something, older = (run_here(*arguments, "--mode", mode) for mode in ("norms", "qat", "qat"))
    assert [done.returncode for done in (nothing, something, older)] == [status] * 3
    assert nothing.stdout == older.stdout == ""
    assert something.stdout == f"Text and state so far are in {tmp_path}/new.work/: the same command goes on there.\n"


def test_a_result_that_is_not_better_is_not_written(plan: Plans, tmp_path: Path) -> None:
    outcome = run_tuning(plan(tmp_path / "tuned", learning_rate=1e-12, force=False))
    assert outcome.directory is None and not (tmp_path / "tuned").exists()
    assert outcome.refused[0].startswith("it is not shown to take fewer rounds on held-out text (")
    assert ": ratio 1.000, 1.000 to 1.000 at 95 %; " in outcome.refused[0]


def test_a_stop_saves_the_best_so_far(plan: Plans, tmp_path: Path) -> None:
    steps = iter(range(100))
    outcome = run_tuning(plan(tmp_path / "tuned", steps=9), Recorder(stop=lambda: next(steps) == 3))
    assert outcome.record["interrupted"] and outcome.record["steps_done"] == 4
    assert verify(tmp_path / "tuned")["tuning"]["interrupted"] is True
    assert "stopped before its end" in (tmp_path / "tuned" / "README.md").read_text(encoding="utf-8")
    complete = run_tuning(plan(tmp_path / "tuned", steps=9, overwrite=True))
    assert complete.record["steps_done"] > 4 and not complete.record["interrupted"]


def test_the_first_ctrl_c_asks_to_stop() -> None:
    """Before the first step it interrupts at once; after it, the second one does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), _TuningReporter():
            signal.raise_signal(signal.SIGINT)
        with _TuningReporter() as reporter:
            assert not reporter.is_stopped()
            signal.raise_signal(signal.SIGINT)
            assert reporter.is_stopped()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_refused_before_any_work(plan: Plans, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("mine")
    with pytest.raises(OutputError, match="is not replaced"):
        run_tuning(plan(tmp_path / "there"))
    for changes, message in [
        ({"text": tmp_path / "x"}, "texts by people alone, found prompts or a server"),
        ({"text": tmp_path / "x", "text_from": "http://localhost:1", "prompts": None}, "texts by people alone"),
        ({"temperature": float("inf")}, "temperature of at most 100"),
        ({"new_tokens": 4}, "new_tokens of at least 5"),
        ({"steps": 0}, "steps of at least 1"),
        ({"learning_rate": 0.0}, "learning rate above 0"),
        ({"prompts": None, "text": tmp_path / "x", "temperature": 1.0}, "the base.s own text"),
    ]:
        with pytest.raises(MtpExtractError, match=message):
            run_tuning(plan(tmp_path / "out", work=tmp_path / "work", **changes))
    assert not (tmp_path / "work").exists()


def test_only_the_first_process_checks_the_target(plan: Plans, tmp_path: Path, monkeypatch: Any) -> None:
    """The check locks the target, so that a second process at the same time would be refused."""
    with stage_output(tmp_path / "out", overwrite=False, listed=lambda path: []):
        monkeypatch.setenv("RANK", "1")
        plan(tmp_path / "out").check()
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(OutputError, match="another run"):
            plan(tmp_path / "out").check()


def test_processes_are_limited_by_batch_and_mode(plan: Plans, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "5")
    for changes, message in ({}, "batch of at least 5"), ({"batch": 8, "mode": "ordered"}, "one process to make"):
        with pytest.raises(MtpExtractError, match=message):
            plan(tmp_path / "out", **changes).check()


def test_a_hash_of_the_source_decides_the_side() -> None:
    sides = [texts.choose_side(f"source {number}") for number in range(4000)]
    assert sides.count(texts.WATCHED) / 4000 == pytest.approx(0.08, abs=0.02)
    assert sides.count(texts.HELD_OUT) / 4000 == pytest.approx(0.12, abs=0.02)


def test_sampled_serving(plan: Plans, tmp_path: Path) -> None:
    """The tuning is for the probability that a draft is accepted."""
    # Text is written in several batches, which differ in length, and asked for side by side.
    outcome = run_tuning(plan(tmp_path / "tuned", work=tmp_path / "work", temperature=1.0, steps=2))
    record = verify(tmp_path / "tuned")
    validator("extraction")(record)
    assert record["tuning"]["recipe"]["objective"] == "mixed"
    # A greedy draft stands or falls; one that is drawn stands with a probability.
    assert outcome.comparisons.overall.before.rounds % 1
    drawn = list(map(json.loads, (tmp_path / "work/texts.jsonl").read_text(encoding="utf-8").splitlines()))
    texts_drawn = [tuple(tokens) for batch in drawn for tokens in batch["tokens"]]
    assert len(set(texts_drawn)) > len(texts_drawn) * 0.9


def test_damaged_text_is_refused(plan: Plans, tmp_path: Path) -> None:
    pair = Pair(plan(tmp_path / "tuned", work=tmp_path / "work"))
    written = gather_texts(pair)
    path = tmp_path / "work/texts.jsonl"
    stored = path.read_bytes()
    for line in (b"[]", b"{}", b"\xff\xfe", b'{"name": "a", "tokens": [[null]]}'):
        path.write_bytes(stored + line + b"\n")
        with pytest.raises(CheckpointError, match=r"texts\.jsonl: expected text that the base wrote"):
            gather_texts(pair)
    # What is gone, or was cut off, is written again, and is the same.
    for rest in (b"", stored[: len(stored) // 2]):
        path.write_bytes(rest)
        assert gather_texts(pair) == written
        assert sorted(path.read_bytes().splitlines()) == sorted(stored.splitlines())


def test_a_work_folder_that_is_a_file_or_in_use(plan: Plans, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for work in (tmp_path / "file", tmp_path / "work"):
        with (
            lock_folder(tmp_path / "work"),
            pytest.raises(OutputError, match=f"{work.name}: expected a place .* in use") as caught,
        ):
            run_tuning(plan(tmp_path / "tuned", work=work))
        assert caught.value.remedies == ("work",)
    assert not (tmp_path / "tuned").exists()


def test_human_text(plan: Plans, tmp_path: Path) -> None:
    """It is trained on in windows; intervals count texts, since windows of one text are alike."""
    chosen = choose_sources(map("file {}".format, range(1000)), {texts.TRAINED: 6, texts.WATCHED: 4, texts.HELD_OUT: 5})
    sources = [source for side in chosen for source in side]
    rows = [{"prompt": f"def {source}(self):\n    return self.name\n" * 4, "source": source} for source in sources]
    path = write_rows(tmp_path / "texts.jsonl", rows)
    outcome = run_tuning(plan(tmp_path / "tuned", prompts=None, text=path, steps=1))
    assert outcome.corpus.own_count > 5
    assert outcome.comparisons.overall.texts == 5
    writer = outcome.record["text_from"]
    assert writer["kind"] == "people" and 0 < writer["agreement"] < 1
    assert any(f"would have written {writer['agreement']:.1%} of" in note for note in outcome.notes)
    validator("extraction")(verify(tmp_path / "tuned"))
    shipped = [item for item, _ in outcome.corpus.held_out[outcome.corpus.own_count :]]
    assert shipped and all(item.workload.endswith("(shipped)") for item in shipped)
