"""Two processes on a CPU, as torchrun starts them, tune as one does; and without matplotlib."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from seam import verify
from torch.distributed import TCPStore

from mtp_extract.evaluation.prompts import load_shipped_prompts
from mtp_extract.tuning import corpus, train
from mtp_extract.tuning.run import run_tuning

from .conftest import Plans

FEW = 4

COMMANDS = """
import json, os, signal, sys
# Pictures are no part of a training.
sys.modules["matplotlib"] = None
# What both need is imported once.
import accelerate, transformers
from transformers.models.auto import modeling_auto, tokenization_auto
from transformers.models.gemma4 import modeling_gemma4
from mtp_extract.cli.tune import main
from mtp_extract.tuning import corpus, eagle3, ordered, train
few = corpus.load_shipped_prompts(int(sys.argv[1]))
corpus.load_shipped_prompts = lambda each=None: few
children = []
for rank in ("0", "1"):
    children.append(os.fork())
    if not children[-1]:
        status = 1
        try:
            os.environ.update(RANK=rank, LOCAL_RANK=rank)
            for arguments in json.loads(sys.argv[2]):
                sys.argv = ["mtp-tune", *arguments]
                try:
                    main()
                except SystemExit as ended:
                    status = ended.code or 0
                if status:
                    break
            sys.stdout.flush()
        finally:
            os._exit(status)
for _ in children:
    if os.wait()[1]:
        for child in children:
            os.kill(child, signal.SIGKILL)
        sys.exit(1)
"""


CASES: dict[str, tuple[dict[str, Any], list[str], int]] = {
    # With one draft a round a projection is idle.
    "drafter": ({"mode": "qat"}, ["--mode", "qat"], 1),
    "head": (
        {"directory": None, "mode": "eagle3", "draft_vocab": 128},
        ["--mode=eagle3", "--draft-vocab=128"],
        3,
    ),
}


def test_two_processes_give_the_result_of_one(plan: Plans, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text, loss at every step and result, for a tuned drafter and for a new head."""
    # More prompts than one batch of text takes, and a batch of texts that two cannot divide evenly.
    few = load_shipped_prompts(FEW)
    monkeypatch.setattr(corpus, "load_shipped_prompts", lambda each=None: few)
    monkeypatch.setattr(train, "ANCHORS", 24)
    commands = []
    for name, (changes, options, drafts) in CASES.items():
        changes |= {"work": tmp_path / f"{name}.work", "draft_steps": drafts, "new_tokens": 9, "batch": 3, "steps": 3}
        alone = plan(tmp_path / name, **changes)
        run_tuning(alone)
        out, drafter = tmp_path / f"two {name}", [alone.directory] if alone.directory else []
        arguments = [*drafter, "--base", alone.base, "--prompts", alone.prompts, "--draft-steps", drafts, *options]
        arguments += ["--new-tokens", 9, "--batch", 3, "--steps", 3, "--no-chat-template"]
        arguments += ["--device", "cpu", "--force", "-o", out, "--work", f"{out}.work"]
        commands.append([str(argument) for argument in arguments])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    launched |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", COMMANDS, str(FEW), json.dumps(commands)],
        capture_output=True,
        text=True,
        env={**os.environ, **launched, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("Wrote ") == len(CASES)
    assert ran.stderr.count("step 3 of 3") == len(CASES)
    for name in CASES:
        works = [tmp_path / f"{each}.work" for each in (name, f"two {name}")]
        first, second = ((work / "texts.jsonl").read_bytes() for work in works)
        assert second == first
        logs = ([json.loads(line) for line in (work / "log.jsonl").read_text().splitlines()] for work in works)
        for expected, entry in zip(*logs, strict=True):
            assert expected.keys() == entry.keys()
            if "loss" in expected:
                assert entry["loss"] == pytest.approx(expected["loss"], rel=1e-3)
                assert entry["agreement"] == pytest.approx(expected["agreement"], abs=1e-6)
        single, double = (verify(work.with_suffix(""))["tuning"] for work in works)
        assert double["texts"] == single["texts"]
        assert double["overall"]["before"] == single["overall"]["before"]
