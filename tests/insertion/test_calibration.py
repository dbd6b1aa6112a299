"""Ranges of activations beside a base: what goes through the matrices, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.first_pair import first_base
from helpers.reporters import Recorder

from mtp_extract.drafter.load import load_drafter
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.insertion import calibration


def test_ranges_hold_what_the_matrices_can_do(exact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter, prompts = Recorder(), (Prompt("code", "class Foo(object):"), Prompt("code", "import os"))
    monkeypatch.setattr(calibration, "shipped_prompts", lambda each: prompts)
    found = calibration.measure_ranges(exact, str(first_base()), reporter=reporter)
    # A batch of the base's text, and each text by itself.
    assert [done for _, *done in reporter.parts] == [[1, 1], [1, 2], [2, 2]]
    drafter = load_drafter(exact, dtype=torch.float32)
    matrices = {name: m for name, m in drafter.named_modules() if isinstance(m, torch.nn.Linear)}
    assert found.keys() == matrices.keys()
    for role, (given, made) in found.items():
        weight = matrices[role].weight
        # No row makes more of its inputs than the sum of its weights allows.
        low, high = given
        most = float(weight.abs().sum(dim=1).max()) * max(-low, high)
        assert -most <= made[0] < made[1] <= most
    for layer in range(4):
        assert found[f"layers.{layer}.gate_proj"][0] == found[f"layers.{layer}.up_proj"][0]
    assert found["lm_head"][0] == found["post_projection"][0]
