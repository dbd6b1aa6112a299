"""What goes through matrices beside a base: how far a drafter's activations reach, and what static grids cut off of a
base's, counted beside what the same module reads in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.first_pair import first_base
from helpers.reporters import Recorder
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp_extract.architecture.activation import Activation
from mtp_extract.drafter.load import load_drafter
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.insertion import calibration
from mtp_extract.progress import SILENT

PROMPT = "class Foo(object):"


def test_ranges_hold_what_the_matrices_can_do(exact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reporter, prompts = Recorder(), (Prompt("code", PROMPT), Prompt("code", "import os"))
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


def grid(largest: float) -> Activation:
    return Activation("int8", largest / 127, 0)


def test_numbers_beyond_the_grid_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "shipped_prompts", lambda each: (Prompt("code", PROMPT),))
    monkeypatch.setattr(calibration.Codec, "encode", lambda codec, text, chat_template: (2, *codec.continued(text)))
    directory = str(first_base())
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokens = (2, *AutoTokenizer.from_pretrained(directory)(PROMPT, add_special_tokens=False)["input_ids"])
    seen = list[torch.Tensor]()
    module = model.get_decoder().layers[1].mlp.down_proj
    module.register_forward_hook(lambda _, inputs, made: seen.extend((inputs[0], made)))
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]))
    read, made = (values.flatten().abs() for values in seen)

    # Half of what is read lies beyond the first grid, and nothing of what is made beyond the second.
    middle = float(read.median())
    grids = {"layers.1.down_proj": (grid(middle), grid(float(made.max()) * 1.1))}
    found = calibration.measure_cut_off(directory, grids, reporter=SILENT)

    beyond = int((read > middle / 127 * 127.5).sum())
    assert beyond > len(read) / 3
    assert found == pytest.approx(beyond / (len(read) + len(made)), abs=2 / len(read))
    assert calibration.measure_cut_off(directory, {"layers.1.down_proj": (None, grid(1e6))}, reporter=SILENT) == 0
