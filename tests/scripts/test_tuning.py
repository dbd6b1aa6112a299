"""What ``scripts/tuning.py`` asks of ``mtp-tune``, and makes of its record; no drafter is tuned here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import tuning
from _tuning import moved, prompts
from transformers import AutoModelForCausalLM

from mtp_extract.evaluate.prompts import read_prompts

OVERALL = {
    "before": {"mean_accepted_length": 2.9767, "interval": [2.9046, 3.0499]},
    "after": {"mean_accepted_length": 3.4034, "interval": [3.3195, 3.4872]},
    "change": {"mean": 0.4266, "interval": [0.3629, 0.4894]},
}
CODE = "def insert_right(self, a):\n    # not a copy\n    return self.low_end or None\n"


def files() -> dict[str, str]:
    return {f"{name}.py": "".join(f"{name}_{n} = {n}\n" for n in range(12)) for name in "abc"}


def test_prompts_are_lines_of_files_that_are_their_sources(tmp_path: Path) -> None:
    rows = prompts.prompts_of(files(), 20)
    assert rows == prompts.prompts_of(files(), 20)
    assert rows != prompts.prompts_of(files(), 20, seed=1)
    assert len({row["prompt"] for row in rows}) == 20
    assert all(row["prompt"] in files()[row["source"]] for row in rows)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [prompt.source for prompt in read_prompts(path)] == [row["source"] for row in rows]


def test_nothing_is_trained_on_what_the_loop_is_measured_on() -> None:
    wanted = {"a.py": "import os\n" * 20 + "import re\nimport sys\nimport ast\n" + 3 * "\n"}
    assert {row["prompt"].strip() for row in prompts.prompts_of(wanted, 3)} & {"import os"} == set()
    with pytest.raises(ValueError, match="expected 9 different prompts in 1 files"):
        prompts.prompts_of({"a.py": "import os\n" * 20}, 9)


def test_another_language() -> None:
    assert prompts.translated(CODE) == "function insertRight(this, a) {\n  // ! a copy\n  return this.lowEnd || null\n"


def test_a_run_is_read_and_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "qat-0.json").write_text(json.dumps({"tuning": {"overall": OVERALL}, "seconds": 98.4}))
    run = tuning.tuned(tmp_path, "qat-0", tmp_path, tmp_path, tmp_path)
    assert run.length("after") == 3.4034
    assert run.figure("after") == "3.403 (3.320 to 3.487)"
    assert run.figure("change") == "+0.427 (+0.363 to +0.489)"


def test_the_spread_over_seeds() -> None:
    assert tuning.spread([3.0, 3.2, 3.4]) == "3.200 ± 0.200 (3.000 to 3.400)"
    assert tuning.share((423, 509)) == "423 of 509, 0.831"


def test_what_a_command_takes_is_its_own(tmp_path: Path) -> None:
    work = "import time\nwhile time.process_time() < 0.3: pass\nprint('done')"
    printed, seconds = tuning.seconds_of([sys.executable, "-c", work], tmp_path / "log")
    assert printed == "done\n"
    assert seconds > 0.3
    with pytest.raises(SystemExit, match="mtp-tune failed, see"):
        tuning.seconds_of([sys.executable, "-c", "raise OSError('gone')"], tmp_path / "log")
    assert "gone" in (tmp_path / "log").read_text()


def test_a_base_that_moves(base: Path, tmp_path: Path) -> None:
    told = moved.fine_tuned(base, [prompts.translated(CODE) * 30], tmp_path / "moved", steps=8)
    assert told["last"] < told["first"]
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (base, tmp_path / "moved")
    )
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "moved" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
