"""Ranges of a drafter's activations, and the share of a base's that static scales clip, as counted in transformers."""

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
    monkeypatch.setattr(calibration, "load_shipped_prompts", lambda each: prompts)
    ranges = calibration.measure_ranges(exact, str(first_base()), reporter=reporter)
    # A batch of the base's text, and each text by itself.
    assert [done for _, *done in reporter.parts] == [[1, 1], [1, 2], [2, 2]]
    drafter = load_drafter(exact, dtype=torch.float32)
    matrices = {name: m for name, m in drafter.named_modules() if isinstance(m, torch.nn.Linear)}
    assert ranges.keys() == matrices.keys()
    for role, (input_range, output) in ranges.items():
        weight = matrices[role].weight
        # No output exceeds the largest input times a row's sum of weights.
        low, high = input_range
        most = float(weight.abs().sum(dim=1).max()) * max(-low, high)
        assert -most <= output[0] < output[1] <= most
    for layer in range(4):
        assert ranges[f"layers.{layer}.gate_proj"][0] == ranges[f"layers.{layer}.up_proj"][0]
    assert ranges["lm_head"][0] == ranges["post_projection"][0]


def grid(largest: float) -> Activation:
    return Activation("int8", largest / 127, 0)


def test_numbers_beyond_the_grid_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "load_shipped_prompts", lambda each: (Prompt("code", PROMPT),))
    monkeypatch.setattr(
        calibration.Codec, "encode", lambda codec, text, chat_template: (2, *codec.encode_continuation(text))
    )
    directory = str(first_base())
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokens = (2, *AutoTokenizer.from_pretrained(directory)(PROMPT, add_special_tokens=False)["input_ids"])
    seen = list[torch.Tensor]()
    module = model.get_decoder().layers[1].mlp.down_proj
    module.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output)))
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]))
    read, output = (values.flatten().abs() for values in seen)

    # Half of the input lies beyond the first scale, and nothing of the output beyond the second.
    middle = float(read.median())
    grids = {"layers.1.down_proj": (grid(middle), grid(float(output.max()) * 1.1))}
    share = calibration.measure_cut_off(directory, grids, reporter=SILENT)

    beyond = int((read > middle / 127 * 127.5).sum())
    assert beyond > len(read) / 3
    assert share == pytest.approx(beyond / (len(read) + len(output)), abs=2 / len(read))
    assert calibration.measure_cut_off(directory, {"layers.1.down_proj": (None, grid(1e6))}, reporter=SILENT) == 0
