"""The fuzzer's harness: what an input makes, and what is a finding. Fuzzing itself wants atheris, which is optional."""

from __future__ import annotations

from collections import Counter
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from seam import MtpExtractError


@pytest.fixture
def fuzz() -> ModuleType:
    pytest.importorskip("atheris")
    import fuzz

    return fuzz


def test_inputs_make_drafters_that_are_sound_damaged_and_none_at_all(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = Counter[str]()

    def proven(source: Any) -> None:
        try:
            original(source)
        except MtpExtractError:
            outcomes["refused"] += 1
            raise
        outcomes["proven"] += 1

    original = fuzz.prove
    monkeypatch.setattr(fuzz, "prove", proven)
    monkeypatch.setattr(fuzz, "MOST_WRITTEN", 1)
    for seed in fuzz.SEEDS[:25]:
        fuzz.run_case(seed)
    assert outcomes["refused"] > 5 and outcomes["proven"] >= 1


@pytest.mark.parametrize(
    "fault", [ValueError("not ours"), MtpExtractError("a line\x1b[2J"), MtpExtractError("x" * 9999)]
)
def test_another_error_and_words_that_cannot_be_read_are_findings(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    monkeypatch.setattr(fuzz, "prove", Mock(side_effect=fault))
    with pytest.raises((ValueError, AssertionError)):
        fuzz.run_case(b"")
