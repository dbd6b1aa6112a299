"""``mtp-validate`` as a user meets it."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.commands import run_here
from helpers.first_pair import first_bundle
from helpers.prompt_files import few_of, write_prompts
from helpers.variant_files import variant
from typer.testing import CliRunner

from mtp_extract.cli import terminal, validate
from mtp_extract.data import sample_prompts
from mtp_extract.errors import OutputError
from mtp_extract.evaluation.prompts import read_prompts
from mtp_extract.io.threads import interrupt
from mtp_extract.progress import Reporter
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.result import Validation

# They share the pair, and a whole validation of it.
pytestmark = pytest.mark.xdist_group("validation")

RUNNER = CliRunner()


def test_what_cannot_be_written_is_shown(validation: Validation, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> list[str]:
        raise OutputError("report: cannot be written: no space left.")

    monkeypatch.setattr("mtp_extract.validation.run.run_validation", lambda *arguments: validation)
    monkeypatch.setattr("mtp_extract.validation.page.write_validation", full)
    result = RUNNER.invoke(validate.app, ["--sample", "--report", "report"])
    assert isinstance(result.exception, OutputError)
    assert result.stdout.startswith("Verified: the checkpoint is the drafter of sample.litertlm")
    assert "Wrote" not in result.stdout
    assert "What drafting is worth" in result.stdout and "zero_hidden" not in result.stdout, "one table is shown"


def test_the_verdict_is_printed_when_the_bar_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal that shows stdout and stderr: nothing is drawn or erased from the verdict on."""

    def validate_with_a_bar(plan: ValidationPlan, reporter: Reporter) -> object:
        reporter.report_progress("drafting", 1, 4, "batch")
        result = SimpleNamespace(refuted=False)
        reporter.report_result(result)
        return result

    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    for name, value in (("COLUMNS", "200"), ("TERM", "xterm"), ("TTY_COMPATIBLE", "1")):
        monkeypatch.setenv(name, value)
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, screen)
    monkeypatch.setattr("mtp_extract.api.validate", validate_with_a_bar)
    monkeypatch.setattr(validate, "_show", lambda result: terminal.say_all("Verified: it is the drafter."))

    validate.validate_command(directory=None, sample=True, print_json=False)

    drawn, verdict, printed = screen.getvalue().partition("Verified: it is the drafter.\n")
    assert "drafting: batch 1 of 4" in drawn and verdict
    assert printed == "", "nothing is drawn after the verdict"
    assert drawn.removesuffix("\x1b[?25h").endswith("\x1b[2K"), "the verdict begins on an empty line"


def test_sample(tmp_path: Path) -> None:
    few = {kind: texts[:1] for kind, texts in few_of(read_prompts(sample_prompts()), 1).items()}
    result = run_here(
        *("validate", "--sample", "--prompts", write_prompts(tmp_path / "few.jsonl", few)),
        *("--draft-steps", "1,2", "--tree", "2x1", "--new-tokens", "16", "--report", tmp_path / "report"),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Verified: the checkpoint is the drafter of sample.litertlm (config, files, ")
    assert result.stderr.splitlines()[0] == "extracting the sample …"
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["verified"] and report["verdict"] in result.stdout
    assert (report["drafter"], report["base"]["name"]) == ("the sample", "the sample's base")
    worth = {name: (row["tree"], row["drafts"]) for name, row in report["drafters"][0]["worth"].items()}
    assert worth == {"1": (None, 1), "2": (None, 2), "2x1": ("2x1", 4)}


def test_what_was_found_until_ctrl_c_is_printed(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a report the command is what was typed, without the places of files."""
    monkeypatch.setattr("mtp_extract.validation.run.check_transformers", lambda *given: interrupt(signal.SIGINT, None))
    result = run_here("validate", checkpoint, f"--source={first_bundle()}", "--json")
    assert result.returncode == 130
    report = json.loads(result.stdout)
    assert [check["name"] for check in report["checks"]][:2] == ["config", "files"]
    assert report["notes"] == ["It ended early: what is missing was not measured."]
    assert report["run"]["command"] == f"mtp-validate drafter --source={first_bundle().name} --json"
    assert result.stderr.splitlines()[-1].startswith("error: interrupted; what was measured until then is above")


def test_json(checkpoint: Path) -> None:
    result = run_here("validate", checkpoint, "--source", first_bundle(), "--json")
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert "of 16 samples" in report["checks"][-1]["evidence"]
    assert report["drafters"] == []


def test_refuted_is_status_1(checkpoint: Path) -> None:
    result = run_here("validate", checkpoint, "--source", variant("torch_int2"))
    assert result.returncode == 1
    assert result.stdout.startswith("Refuted: tensors: pre_projection (pre_projection.weight) has other values")
    assert result.stderr.splitlines()[-1].startswith("error: the validation shows that something is wrong")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--new-tokens", "9"), "either a drafter's directory or the sample"),
        (("d", "--sample"), "Give one of the two"),
        (("--sample", "--base", "x"), "brings its own base"),
        (("d", "--base", "x", "--tree", "4x2", "--tree", "40x40"), "at most 1024 drafts, found 40x40"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    result = RUNNER.invoke(validate.app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_help_needs_no_extra() -> None:
    """In a process that could import none of it."""
    code = "import sys; sys.modules['torch'] = None; from mtp_extract.cli.validate import main; main()"
    result = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0
    assert "--source" in result.stdout
