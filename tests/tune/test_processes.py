"""Two processes on a CPU, as torchrun starts them, tune as one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_extract.evaluate.prompts import shipped_prompts
from mtp_extract.pipeline.check import verify
from mtp_extract.tune import corpus
from mtp_extract.tune.run import Plan, run_tuning

COMMAND = """
from mtp_extract.tune import corpus
few = corpus.shipped_prompts()[::5]
corpus.shipped_prompts = lambda: few
from mtp_extract.cli.tune import main
main()
"""


def lines(folder: Path) -> list[str]:
    return sorted(line for path in folder.iterdir() for line in path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    ("changes", "options", "drafts"),
    [
        ({"mode": "qat"}, ["--mode", "qat"], 1),
        ({"directory": None, "draft_vocab": 128}, ["--new", "eagle3", "--draft-vocab", "128"], 3),
    ],
    ids=["a drafter", "a new head"],
)
def test_two_are_as_one(
    plan: Callable[..., Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, object],
    options: list[str],
    drafts: int,
) -> None:
    """The same text, the same loss at every step, one drafter; also with one draft, where a projection is idle."""
    # More prompts than one batch of text takes, and a batch of texts that two cannot divide evenly.
    few = shipped_prompts()[::5]
    monkeypatch.setattr(corpus, "shipped_prompts", lambda: few)
    alone = plan(tmp_path / "alone", work=tmp_path / "alone.work", draft_steps=drafts, batch=3, steps=3, **changes)
    run_tuning(alone)
    arguments: list[str | Path] = [
        "--prompts",
        alone.setting.prompts,
        "--new-tokens",
        "16",
        "--draft-steps",
        str(drafts),
        "--batch",
        "3",
    ]
    arguments += ["--steps", "3", "--anchors", "6", *options, "--device", "cpu", "--no-chat-template"]
    arguments += ["--force", "-o", tmp_path / "two", "--work", tmp_path / "two.work", "--base", alone.setting.base]
    drafter = [alone.setting.directory] if alone.setting.directory is not None else []
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*launcher, "--no-python", sys.executable, "-c", COMMAND, *drafter, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Wrote ") == 1
    assert ran.stderr.count("step 3 of 3") == 1
    assert len([*(tmp_path / "two.work/text").iterdir()]) > len([*(tmp_path / "alone.work/text").iterdir()])
    assert lines(tmp_path / "two.work/text") == lines(tmp_path / "alone.work/text")
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()]
        for name in ("alone.work", "two.work")
    )
    assert len(one) == len(two)
    for mine, theirs in zip(one, two, strict=True):
        assert mine.keys() == theirs.keys()
        if "loss" in mine:
            assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-3)
            assert theirs["agreement"] == pytest.approx(mine["agreement"], abs=1e-6)
    single, double = (verify(tmp_path / name).record["tuning"] for name in ("alone", "two"))
    assert double["texts"] == single["texts"]
    assert double["overall"]["before"] == single["overall"]["before"]
