"""mtp-convert as a user meets it, and mtp-inspect of what it wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.commands import run
from typer.testing import CliRunner

from mtp_extract import extract
from mtp_extract.architecture.eagle3 import EAGLE3
from mtp_extract.cli import convert, inspect
from mtp_extract.errors import UnsupportedError
from mtp_extract.formats import FORMATS, choose

RUNNER = CliRunner()


def test_a_directory_in_another_format(extracted: Path, sample: Path, tmp_path: Path) -> None:
    result = run("convert", extracted, "--for", "compressed-tensors", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert "from its transformers format" in result.stdout and "23 weights as integers" in result.stdout
    assert "extraction.json says that it was verified when it was extracted: the checkpoint" in result.stdout
    assert "Verified" not in result.stdout, "no bundle was at hand"
    shown = run("inspect", f"{extracted.name}-compressed-tensors", "--against", sample, cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "every bit" in shown.stdout
    assert "compressed-tensors format: 48 weights (25 F32, 13 INT4, 10 INT8)" in shown.stdout


def test_floats_are_rounded_with_codes_beside_them_or_without(sample: Path, tmp_path: Path) -> None:
    """Engines load the floats; what the codes give back is not rounded."""
    record = extract(sample, tmp_path / "floats", format="gguf", dtype="bf16", codes=True).record
    assert record["rounded"] == ["BF16"]
    written = RUNNER.invoke(convert.app, [str(tmp_path / "floats"), "--for", "litert", "-o", str(tmp_path / "exact")])
    assert written.exit_code == 0
    assert "rounded earlier" not in written.stdout and "before rounding" not in written.stdout
    for place in ("floats", "exact"):
        shown = RUNNER.invoke(inspect.app, [str(tmp_path / place), "--against", str(sample)])
        assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize("name", [name for name, listed in FORMATS.items() if not listed.read_as])
def test_what_any_directory_holds(extracted: Path, tmp_path: Path, name: str) -> None:
    """With its record it is checked, without it is shown all the same."""
    out = tmp_path / "out"
    assert RUNNER.invoke(convert.app, [str(extracted), "--for", name, "-o", str(out)]).exit_code == 0
    with_record = json.loads(RUNNER.invoke(inspect.app, [str(out), "--json", "--tensors"]).stdout)
    for own in ("extraction.json", "README.md"):
        (out / own).unlink()
    without = json.loads(RUNNER.invoke(inspect.app, [str(out), "--json", "--tensors"]).stdout)
    assert without["extraction"] is None and without["holds"] == with_record["holds"]
    assert without["holds"]["format"] == name
    assert without["holds"]["geometry"] == with_record["extraction"]["geometry"]
    assert len(without["holds"]["tensors"]) == without["holds"]["weights"] == 48
    shown = RUNNER.invoke(inspect.app, [str(out), "--tensors"])
    assert "Not compared with a bundle" in shown.stdout
    assert "layers.3.layer_scalar" in shown.stdout


@pytest.mark.parametrize(("name", "told"), [("vllm", False), ("litert", True)])
def test_only_a_loss_that_extracting_spares_is_told(sample: Path, tmp_path: Path, name: str, told: bool) -> None:
    """BF16 of BF16 is what extracting writes; F32 of BF16 is not."""
    extract(sample, tmp_path / "bf16")
    result = RUNNER.invoke(convert.app, [str(tmp_path / "bf16"), "--for", name, "-o", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert ("rounded earlier (BF16)" in result.stdout) is told


def test_a_gguf_by_itself(extracted: Path, tmp_path: Path) -> None:
    RUNNER.invoke(convert.app, [str(extracted), "--for", "gguf", "-o", str(tmp_path / "out")])
    alone = shutil.copy(tmp_path / "out" / "mtp-sample-Q4_0.gguf", tmp_path / "some.gguf")
    shown = RUNNER.invoke(inspect.app, [str(alone)])
    assert "gguf format: 48 weights (25 F32, 13 INT4, 10 INT8)" in shown.stdout
    # One that lies beside a record is what the record speaks of.
    shown = RUNNER.invoke(inspect.app, [str(tmp_path / "out" / "mtp-sample-Q4_0.gguf")])
    assert "1 file as recorded in extraction.json" in shown.stdout


@pytest.mark.parametrize(
    ("name", "written", "next_"),
    [
        ("llama.cpp", "gguf", "Next: llama-server -m target.gguf -md "),
        ("mlx-vlm", "mlx", "Next: python -m mlx_vlm generate --model BASE_MODEL --prompt "),
        ("vLLM", "transformers", "Next: vllm serve BASE_MODEL --speculative-config "),
        ("transformers", "transformers", "; output = model.generate(**inputs, assistant_model=drafter, "),
        ("ollama", "transformers", "README.md shows how engines load it."),
        ("compressed-tensors-sglang", "compressed-tensors-sglang", "README.md shows how engines load it."),
    ],
)
def test_a_format_or_the_best_for_an_engine(
    extracted: Path, tmp_path: Path, name: str, written: str, next_: str
) -> None:
    result = RUNNER.invoke(convert.app, [str(extracted), "--for", name, "-o", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert json.loads((tmp_path / "out" / "extraction.json").read_text())["layout"] == written
    assert next_ in result.stdout.splitlines()[-1]


def test_an_engine_chooses_a_layout_for_a_head() -> None:
    assert choose("vllm", EAGLE3) == "speculators"
    assert choose("sglang", EAGLE3) == "eagle3"
    with pytest.raises(UnsupportedError, match=r"llama.cpp loads no drafter of the architecture eagle3"):
        choose("llama.cpp", EAGLE3)
