"""The Python of the README runs as it stands, on the sample."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.torch
def test_the_python_section_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    section = README[README.index("### Python\n") : README.index("## How fast")]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    printed = []
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
        printed.append(capsys.readouterr().out)
    opened, extracted, validated, generated = printed
    assert "lm_head (512, 64)" in opened
    assert "model.safetensors" in extracted
    assert "projected_activations" in extracted
    assert validated.splitlines()[-1] == "False"
    assert (tmp_path / "report" / "report.json").is_file()
    alone = names["generator"].generate(names["question"], drafts=0, max_new_tokens=32)
    assert names["result"].text == alone.text
    assert names["result"].text == "GTFHWECIMQYJVDZOKRXL"
    assert names["result"].text in generated
