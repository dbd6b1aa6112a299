"""Each format in each engine that is installed here: the text is the base's own, and as many drafts are accepted as
with the F32 checkpoint. What is not installed is skipped; ``scripts/engines.py`` runs the rest."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import engines
import pytest
from engines import list_shortfalls

from mtp_extract.data import sample_base, sample_bundle

IN_PROCESS = ("transformers", "mlx-vlm")
"""Those that need no program of their own."""


Ask = Callable[[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def ask(sample: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Ask:
    """What an engine's script returns for the sample in a format; each is run once."""
    drafter = engines.Drafter(sample, tmp_path_factory.mktemp("formats"))

    @cache
    def run_one(engine: str, format_: str) -> dict[str, Any]:
        module, script, _ = engines.SCRIPTED[engine]
        pytest.importorskip(module)
        check = importlib.import_module(f"_engines.{script}").check
        told: dict[str, Any] = check(str(base), str(drafter.written(format_)), engines.PROMPT, engines.TOKENS)
        return told

    return run_one


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
@pytest.mark.parametrize("engine", IN_PROCESS)
def test_the_f32_checkpoint(engine: str, ask: Ask) -> None:
    """Google's runtime reports a rate of 0.66 for the same pair and prompt."""
    told = ask(engine, engines.F32)
    assert told["identical"]
    assert told["drafted"] > 100
    assert abs(told["accepted"] / told["drafted"] - 0.66) < 0.05, told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("engine", "format_"),
    [(name, kept) for name in IN_PROCESS for kept in engines.SCRIPTED[name][2][1:]],
)
def test_a_format_that_keeps_the_integers(engine: str, format_: str, ask: Ask) -> None:
    expected, told = ask(engine, engines.F32), ask(engine, format_)
    assert told["identical"]
    assert told["text"] == expected["text"]
    assert (told["accepted"], told["drafted"]) == (expected["accepted"], expected["drafted"])


@pytest.mark.skipif("MTP_EXTRACT_LLAMA" not in os.environ, reason="MTP_EXTRACT_LLAMA: llama.cpp's tree, built")
def test_text_and_acceptance_in_llama_cpp(tmp_path: Path) -> None:
    drafter, tree = engines.Drafter(sample_bundle(), tmp_path), Path(os.environ["MTP_EXTRACT_LLAMA"])
    outcomes = list(engines.run_llama(tree, sys.executable, sample_base(), drafter, tmp_path))
    assert len(outcomes) == 2 and all(outcome.identical for outcome in outcomes)
    assert list_shortfalls(outcomes) == []
