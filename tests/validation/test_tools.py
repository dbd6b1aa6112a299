"""A tool that is missing or broken says nothing of a checkpoint: it is *not checked*, neither passed nor refuted."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import transformers
from helpers.first_pair import first_bundle

from mtp_extract.bundle import BundledDrafter
from mtp_extract.drafter.mtp import MtpDrafter
from mtp_extract.evaluation.extras import TRANSFORMERS_RELEASES
from mtp_extract.validation import interpreter
from mtp_extract.validation.interpreter import check_interpreter
from mtp_extract.validation.page import build_checks_table
from mtp_extract.validation.parity import check_transformers
from mtp_extract.validation.plan import ValidationPlan
from mtp_extract.validation.run import run_validation

# As transformers 5.23.0 raises it.
PRODUCING = "The set of layer types producing a cache is different from the set of layer types that read one"


def refuse_construction(*arguments: Any, **named: Any) -> None:
    raise ValueError(PRODUCING)


def hide_interpreter(patch: pytest.MonkeyPatch) -> None:
    for name in {"ai_edge_litert", *(name for name in sys.modules if name.startswith("ai_edge_litert."))}:
        patch.setitem(sys.modules, name, None)


def break_interpreter(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("ai_edge_litert.interpreter.Interpreter.__init__", refuse_construction)
    # Its destructor asks for what its constructor made.
    patch.setattr("ai_edge_litert.interpreter.Interpreter.__del__", lambda self: None, raising=False)


WORKS = f".*; {re.escape(TRANSFORMERS_RELEASES)} works$"
BROKEN: list[tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = [
    (
        "transformers",
        lambda patch: patch.setattr(transformers.Gemma4AssistantForCausalLM, "__init__", refuse_construction),
        f"known to be right, too: .*{PRODUCING}{WORKS}",
    ),
    (
        "transformers",
        lambda patch: patch.setitem(sys.modules, "transformers", None),
        f"transformers: it cannot be imported: .*{WORKS}",
    ),
    (
        "transformers",
        lambda patch: patch.setitem(sys.modules, "transformers", ModuleType("transformers")),
        f"no attribute .Gemma4AssistantForCausalLM.{WORKS}",
    ),
    ("interpreter", hide_interpreter, "cannot be asked: it cannot be imported: .*ai_edge_litert"),
    ("interpreter", break_interpreter, PRODUCING),
]


@pytest.mark.parametrize(("name", "plant", "why"), BROKEN)
def test_it_is_not_checked(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, plant: Callable[[pytest.MonkeyPatch], None], why: str
) -> None:
    """Everything else was: the drafter is proven, and who reads it learns what was not asked."""
    plant(monkeypatch)
    found = run_validation(ValidationPlan(checkpoint, source=str(first_bundle()), samples=2))
    (check,) = (check for check in found.checks if check.name == name)
    assert check.passed is None
    assert re.search(why, check.evidence)
    assert (found.verified, found.refuted) == (True, False)
    assert found.verdict.startswith("Verified: the checkpoint is the drafter of")
    assert f"{name} was not checked: {check.evidence}" in found.notes
    assert [row[2] for row in build_checks_table(found).rows if row[0] == name] == ["not checked"]


def test_a_transformers_that_computes_another_thing(
    checkpoint: Path, drafter: MtpDrafter, source: BundledDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_original = transformers.Gemma4AssistantForCausalLM.forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        found = run_original(self, *arguments, **named)
        found.logits = found.logits.flip(-1)
        return found

    monkeypatch.setattr(transformers.Gemma4AssistantForCausalLM, "forward", forward)
    found = check_transformers(checkpoint, drafter, source)
    assert found.passed is None
    assert "known to be right, too: outputs within" in found.evidence


def test_a_damaged_directory_is_refuted_by_a_release_that_was_tried(
    checkpoint: Path, drafter: MtpDrafter, source: BundledDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a layer more in its config than in its weights."""
    damaged = Path(shutil.copytree(checkpoint, tmp_path / "damaged"))
    config = json.loads((damaged / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    config["text_config"]["layer_types"].append(config["text_config"]["layer_types"][-1])
    (damaged / "config.json").write_text(json.dumps(config))
    found = check_transformers(damaged, drafter, source)
    assert found.passed is False
    assert "missing keys" in found.evidence or "does not load" in found.evidence
    # What is in its place changes when its first model is asked for.
    assert transformers.Gemma4AssistantForCausalLM
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.15.1")
    found = check_transformers(damaged, drafter, source)
    assert found.passed is None
    assert found.evidence.startswith("transformers 5.15.1: it is of no release that was tried: ")
    assert found.evidence.endswith(f"; {TRANSFORMERS_RELEASES} works")


def test_the_releases_are_those_that_are_asked_for() -> None:
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"transformers{TRANSFORMERS_RELEASES}"' in text


def test_an_interpreter_that_computes_another_thing(
    drafter: MtpDrafter, source: BundledDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_original = interpreter.run_interpreter

    def run_wrongly(*arguments: Any, **named: Any) -> Any:
        return [(np.ascontiguousarray(logits[::-1]), state) for logits, state in run_original(*arguments, **named)]

    with monkeypatch.context() as patched:
        patched.setattr(interpreter, "run_interpreter", run_wrongly)
        found = check_interpreter(drafter, source, samples=1)
    assert found.passed is None
    assert found.evidence.startswith("it fails with a drafter that is known to be right, too: ")
    # With one that is well, what is wrong is the drafter.
    drafter.get_parameter("final_norm.weight").data.mul_(-1.5)
    assert check_interpreter(drafter, source, samples=1).passed is False
