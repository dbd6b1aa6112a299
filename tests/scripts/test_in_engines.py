"""Each format in each engine that is installed here: the text is the base's own, and as many drafts are accepted as
with the F32 checkpoint. What is not installed is skipped; ``scripts/engines.py`` runs the rest."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import engines
import pytest
from engines import list_shortfalls

from mtp_extract.data import sample_base, sample_bundle

IN_PROCESS = ("transformers", "mlx-vlm")
"""Those that need no program of their own."""


class Counted:
    """What an engine said of each format; each is run once."""

    def __init__(self, base: Path, drafter: engines.Drafter) -> None:
        self._base, self._drafter = base, drafter
        self._told: dict[tuple[str, str], dict[str, Any]] = {}

    def told(self, engine: str, format_: str) -> dict[str, Any]:
        """What the engine's script returns for the sample in ``format_``."""
        if (engine, format_) not in self._told:
            module, script, _ = engines.SCRIPTED[engine]
            pytest.importorskip(module)
            check = importlib.import_module(f"_engines.{script}").check
            directory = self._drafter.written(format_)
            self._told[engine, format_] = check(str(self._base), str(directory), engines.PROMPT, engines.TOKENS)
        return self._told[engine, format_]


@pytest.fixture(scope="module")
def counted(sample: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return Counted(base, engines.Drafter(sample, tmp_path_factory.mktemp("formats")))


@pytest.mark.filterwarnings("ignore")  # of packages that are not ours
@pytest.mark.parametrize("engine", IN_PROCESS)
def test_the_f32_checkpoint(engine: str, counted: Counted) -> None:
    """Google's runtime reports a rate of 0.66 for the same pair and prompt."""
    told = counted.told(engine, engines.F32)
    assert told["identical"]
    assert told["drafted"] > 100
    assert abs(told["accepted"] / told["drafted"] - 0.66) < 0.05, told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("engine", "format_"),
    [(name, kept) for name in IN_PROCESS for kept in engines.SCRIPTED[name][2][1:]],
)
def test_a_format_that_keeps_the_integers(engine: str, format_: str, counted: Counted) -> None:
    expected, told = counted.told(engine, engines.F32), counted.told(engine, format_)
    assert told["identical"]
    assert told["text"] == expected["text"]
    assert (told["accepted"], told["drafted"]) == (expected["accepted"], expected["drafted"])


@pytest.mark.skipif("MTP_EXTRACT_LLAMA" not in os.environ, reason="MTP_EXTRACT_LLAMA: llama.cpp's tree, built")
def test_text_and_acceptance_in_llama_cpp(tmp_path: Path) -> None:
    drafter, tree = engines.Drafter(sample_bundle(), tmp_path), Path(os.environ["MTP_EXTRACT_LLAMA"])
    outcomes = list(engines.run_llama(tree, sys.executable, sample_base(), drafter, tmp_path))
    assert len(outcomes) == 2 and all(outcome.identical for outcome in outcomes)
    assert list_shortfalls(outcomes) == []
