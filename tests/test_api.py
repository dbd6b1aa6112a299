"""The functions of the package: the commands' arguments, their work, typed results, and the schemas of records."""

from __future__ import annotations

import inspect as python
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import mtp_extract
from mtp_extract.insertion.plan import InsertionPlan, InsertionResult
from mtp_extract.pipeline.inspection import Inspection
from mtp_extract.schemas import RecordName, build_schema

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "python.md"

FUNCTIONS = ("bench", "convert", "diagnose", "extract", "insert", "inspect", "open", "tune", "upload", "validate")


def test_a_bundle_there_and_back(sample: Path, tmp_path: Path) -> None:
    found = mtp_extract.inspect(sample)
    assert isinstance(found, Inspection) and found.report["drafter"]["roles_found"] == 48
    made = mtp_extract.extract(sample, tmp_path / "drafter", format="mlx-vlm", section=6)
    assert made.record["layout"] == "mlx"
    held = mtp_extract.inspect(made.directory, against=sample)
    assert isinstance(held, Inspection)
    assert held.report["against"] == str(sample) and held.report["ok"]
    planned = mtp_extract.insert(made.directory, sample, dry_run=True)
    assert isinstance(planned, InsertionPlan) and not planned.overlays
    written = mtp_extract.insert(made.directory, sample, tmp_path / "new.litertlm")
    assert isinstance(written, InsertionResult)
    assert written.path.read_bytes() == sample.read_bytes()
    with pytest.raises(ValueError, match="out: expected a place"):
        mtp_extract.insert(made.directory, sample)


def test_the_page_names_every_function_and_its_blocks_are_python() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)\(", text, re.MULTILINE))
    assert named == set(FUNCTIONS)
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(block, str(DOCUMENT), "exec")


def test_no_folder_hides_a_function() -> None:
    """Once it is imported, a folder would stand where the function of its name was."""
    package = Path(mtp_extract.__file__).parent
    assert not [name for name in mtp_extract.__all__ if (package / name).is_dir() or (package / f"{name}.py").is_file()]


def test_every_function_is_defined_in_one_module_and_explains_its_arguments() -> None:
    for name in FUNCTIONS:
        function = getattr(mtp_extract, name)
        assert function.__module__ == "mtp_extract.api"
        page = python.getdoc(function) or ""
        for argument in python.signature(function).parameters:
            assert re.search(rf"\b{argument}\b.*:", page), f"{name} does not say what {argument} is"


def test_the_package_alone_loads_nothing_heavy() -> None:
    code = (
        "import sys, mtp_extract; dir(mtp_extract); mtp_extract.MtpExtractError; mtp_extract.bench\n"
        "assert not {'numpy', 'torch', 'transformers', 'matplotlib', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_library_does_not_need_the_packages_of_its_commands() -> None:
    """Whoever calls a function parses no command line."""
    package = Path(mtp_extract.__file__).parent
    for file in package.rglob("*.py"):
        if file.parent.name != "cli":
            text = file.read_text(encoding="utf-8")
            assert not re.search(r"^ *(import|from) (click|typer)\b", text, re.MULTILINE), file
    plans = [f"{room}.plan" for room in ("doctor", "pipeline", "serving", "tuning", "validation")]
    names = [f"mtp_extract.{name}" for name in ("api", "options", "bundle", "pipeline.extraction", *plans)]
    code = f"import sys, {', '.join(names)}; assert not {{'click', 'typer', 'rich', 'pydantic'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.torch
@pytest.mark.parametrize("name", get_args(RecordName))
def test_every_field_says_what_it_means(name: str) -> None:
    found = build_schema(name)
    for kind, part in {name: found, **found["definitions"]}.items():
        for field, of in part.get("properties", {}).items():
            assert of.get("description"), f"{kind}.{field} has no comment"


def test_a_command_prints_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mtp_extract", "schema", "doctor"], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == build_schema("doctor")
