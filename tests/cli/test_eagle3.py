"""EAGLE-3 heads at the command line: shown with what engines make of them, converted, measured beside a base."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.commands import run
from helpers.random_heads import edit, head_config, random_head, write_head
from helpers.schemas import validator
from typer.testing import CliRunner

from mtp_extract.cli import convert, inspect

RUNNER = CliRunner()


def test_a_head_is_shown_and_converted(tmp_path: Path) -> None:
    directory = write_head(tmp_path / "head", random_head(head_config(fc_norm=True, base="org/base")))
    shown = RUNNER.invoke(inspect.app, [str(directory), "--tensors"])
    assert shown.exit_code == 0, shown.output
    assert "0.02 M parameters, 1 layer of its own, 8 heads of 8, 2 KV heads" in shown.output
    assert "backbone 32, 24 of 40 tokens" in shown.output
    assert "reads what enters layers 1, 3, 5 of org/base" in shown.output
    assert "midlayer.self_attn.q_proj.weight" in shown.output
    made = RUNNER.invoke(convert.app, [str(directory), "--for", "speculators", "-o", str(tmp_path / "out")])
    assert made.exit_code == 0, made.output
    assert made.output.startswith("EAGLE-3 head of head, from its eagle3 format\n")
    validator("extraction")(json.loads((tmp_path / "out" / "extraction.json").read_text()))
    again = RUNNER.invoke(inspect.app, [str(tmp_path / "out"), "--json"])
    found = json.loads(again.stdout)
    assert found["ok"] and found["holds"]["format"] == "speculators"
    told = [(finding["engine"].split(" ")[0], finding["is_error"]) for finding in found["holds"]["findings"]]
    assert told == [("mlx-vlm", False)]


def test_what_an_engine_would_load_wrongly_is_an_error(tmp_path: Path) -> None:
    directory = edit(write_head(tmp_path / "head", random_head(head_config())), norm_before_residual=True)
    shown = run("inspect", directory)
    assert shown.returncode == 1 and "Traceback" not in shown.stderr
    assert "SGLang 0.5.23 loads it wrongly: norm_before_residual is true" in shown.stdout
    assert "load it wrongly without an error (1 finding). Convert it" in shown.stderr
    found = RUNNER.invoke(inspect.app, [str(directory), "--json"])
    assert not json.loads(found.stdout)["ok"] and found.exit_code == 1
    edit(directory, hidden_act="gelu_pytorch_tanh")
    shown = run("inspect", directory)
    assert shown.returncode == 1 and not shown.stdout
    assert "says hidden_act gelu_pytorch_tanh" in shown.stderr


def test_a_head_is_not_compared_with_a_bundle(tmp_path: Path, sample: Path) -> None:
    """Measured beside its base it is in ``validation/test_validation.py``."""
    refused = run("validate", write_head(tmp_path / "head", random_head(head_config())), "--source", sample)
    assert refused.returncode == 1
    assert "Expected an MTP drafter, found an EAGLE-3 head" in refused.stderr and "(--source)" in refused.stderr
