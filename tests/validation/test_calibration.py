"""Ranges of activations beside a base: what goes through the matrices, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.first_pair import first_base

from mtp_extract.drafter.load import load_drafter
from mtp_extract.evaluation.progress import silent
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.insertion.activations import Ranges
from mtp_extract.validation import calibration


def test_ranges_hold_what_the_matrices_can_do(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, found = list[tuple[int, int]](), list[Ranges]()
    for texts in (["class Foo(object):"], ["class Foo(object):", "import os"]):
        prompts = tuple(Prompt("code", text) for text in texts)
        monkeypatch.setattr(calibration, "shipped_prompts", lambda each, prompts=prompts: prompts)
        found.append(
            calibration.measure_ranges(
                checkpoint, str(first_base()), say=silent, show=lambda part, *batches: shown.append(batches)
            )
        )
    few, many = found
    # A batch of the base's text, and each text by itself.
    assert shown == [(1, 1), (1, 1), (1, 1), (1, 2), (2, 2)]
    drafter = load_drafter(checkpoint, dtype=torch.float32)
    matrices = {name: m for name, m in drafter.named_modules() if isinstance(m, torch.nn.Linear)}
    assert few.keys() == many.keys() == matrices.keys()
    for role, (given, made) in many.items():
        weight = matrices[role].weight
        # No row makes more of its inputs than the sum of its weights allows.
        low, high = given
        most = float(weight.abs().sum(dim=1).max()) * max(-low, high)
        assert -most <= made[0] < made[1] <= most
        assert low <= few[role][0][0] and few[role][0][1] <= high
    for layer in range(4):
        assert many[f"layers.{layer}.gate_proj"][0] == many[f"layers.{layer}.up_proj"][0]
    assert many["lm_head"][0] == many["post_projection"][0]
    norm = drafter.get_submodule("final_norm").weight.abs().max()
    # A norm's output is its weight times numbers whose mean square is 1.
    assert many["lm_head"][0][1] <= float(norm) * drafter.config.hidden_size**0.5
