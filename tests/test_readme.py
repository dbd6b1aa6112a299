"""The Python of the README runs as it stands, on the sample."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from mtp_extract.cli import extract, insert, inspect
from mtp_extract.data import sample_base, sample_bundle

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


def test_what_is_said_of_extracting_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block under the first command is what that command prints."""
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(extract.app, ["--sample"]).output
    block = re.search(r"```\n(MTP drafter of sample\.litertlm.*?)```", README, re.DOTALL)
    assert block is not None
    assert block[1] in printed
    assert "--against" in README
    checked = CliRunner().invoke(inspect.app, ["sample-mtp-drafter", "--against", str(sample_bundle())])
    assert checked.exit_code == 0, checked.output
    assert "equal, bit for bit" in checked.output


def test_what_is_said_of_the_samples_base(tmp_path: Path) -> None:
    """Of the pair in the package: every weight is found, and put back it changes no byte of the bundle."""
    found = CliRunner().invoke(inspect.app, [str(sample_bundle()), "--against", str(sample_base())])
    assert found.exit_code == 0, found.output
    tensors, equal, codes = re.search(
        r"Of the sample: (\d+ of \d+ tensors),\n(\d+) equal, (\d+) roles in equal codes", README
    ).groups()  # type: ignore[union-attr]
    assert f"{tensors} found" in found.output
    assert f"{equal} equal, {codes} equal codes" in found.output
    assert "The bundle's own base changes nothing, byte for\nbyte" in README
    again = tmp_path / "again.litertlm"
    put = CliRunner().invoke(insert.app, [str(sample_bundle()), "--base-weights", str(sample_base()), "-o", str(again)])
    assert put.exit_code == 0, put.output
    assert again.read_bytes() == sample_bundle().read_bytes()


def test_a_weight_with_a_factor_in_it_is_put_back_with_it(tmp_path: Path) -> None:
    """The packaged sample's ``per_layer_model_projection`` has 1/√width in its scales: a changed one gets it, too."""
    base = Path(shutil.copytree(sample_base(), tmp_path / "base"))
    tensors = load_file(base / "model.safetensors")
    name = "model.language_model.per_layer_model_projection.weight"
    tensors[name] = np.ascontiguousarray(tensors[name][::-1])
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "new.litertlm"
    put = CliRunner().invoke(insert.app, [str(sample_bundle()), "--base-weights", str(base), "-o", str(out)])
    assert put.exit_code == 0, put.output
    assert CliRunner().invoke(inspect.app, [str(out), "--against", str(base)]).exit_code == 0
    assert CliRunner().invoke(inspect.app, [str(out), "--against", str(sample_base())]).exit_code == 1
