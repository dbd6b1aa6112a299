"""The functions of the package: the commands' arguments, their work, typed results."""

from __future__ import annotations

import inspect as python
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import mtp_extract
from mtp_extract.cli import module_of
from mtp_extract.insert.plan import InsertionPlan, InsertionResult
from mtp_extract.pipeline.inspection import Inspection
from mtp_extract.serving.plan import BenchPlan
from mtp_extract.tune.plan import TuningPlan

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "python.md"

NOT_ARGUMENTS = {
    # Said by leaving the source out, by printing, by the type of what is given, or as one CardWords.
    *("sample", "print_json", "controls", "version", "context"),
    *(field.name for field in fields(mtp_extract.CardWords)),
    # In Python a mapping of types, a directory that is None, and another function.
    *("each", "base_weights", "kind"),
    "controls",  # what the terminal shows
}
OTHERWISE = {"out": "report"}


FUNCTIONS = ("bench", "convert", "extract", "insert", "inspect", "tune", "upload", "validate")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_arguments_of_its_command(name: str) -> None:
    options = set(python.signature(module_of(name).app.registered_commands[0].callback).parameters)
    arguments = set(python.signature(getattr(mtp_extract, name)).parameters)
    if name == "upload":
        arguments = {"repository" if argument == "repo_id" else argument for argument in arguments}
    if name == "tune":
        arguments |= {field.name for field in fields(TuningPlan)}
    missing = {option for option in options - NOT_ARGUMENTS if not {option, OTHERWISE.get(option)} & arguments}
    assert not missing


def test_a_bundle_there_and_back(sample: Path, tmp_path: Path) -> None:
    found = mtp_extract.inspect(sample)
    assert isinstance(found, Inspection) and found.as_json["drafter"]["roles_found"] == 48
    made = mtp_extract.extract(sample, tmp_path / "drafter", engine="mlx-vlm", section=6)
    assert made.record["layout"] == "mlx"
    held = mtp_extract.inspect(made.directory, against=sample)
    assert isinstance(held, mtp_extract.CheckpointInspection)
    assert held.verification is not None and held.verification.against is not None
    planned = mtp_extract.insert(made.directory, sample, dry_run=True)
    assert isinstance(planned, InsertionPlan) and planned.changed == 0
    written = mtp_extract.insert(made.directory, sample, tmp_path / "new.litertlm")
    assert isinstance(written, InsertionResult)
    assert written.path.read_bytes() == sample.read_bytes()
    with pytest.raises(ValueError, match="out: expected a place"):
        mtp_extract.insert(made.directory, sample)


def test_options_are_those_of_the_plan() -> None:
    shown = python.signature(mtp_extract.bench).parameters
    for field in fields(BenchPlan)[1:]:
        assert shown[field.name].default == field.default
    with pytest.raises(TypeError, match="bse"):
        mtp_extract.validate("drafter", bse="model")


def test_the_page_names_every_function_and_its_blocks_are_python() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)\(", text, re.MULTILINE))
    assert named == {*FUNCTIONS, "open"}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, str(DOCUMENT), "exec")


def test_the_package_alone_loads_nothing_heavy() -> None:
    code = (
        "import sys, mtp_extract; dir(mtp_extract); mtp_extract.MtpExtractError; mtp_extract.bench\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
