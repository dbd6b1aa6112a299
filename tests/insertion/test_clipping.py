"""What static grids cut off of a base's activations, counted beside what the same module reads in transformers."""

from __future__ import annotations

import pytest
import torch
from helpers.first_pair import first_base
from transformers import AutoModelForCausalLM, AutoTokenizer

from mtp_extract.architecture.activation import Activation
from mtp_extract.evaluation.prompts import Prompt
from mtp_extract.insertion import clipping
from mtp_extract.progress import SILENT

PROMPT = "class Foo(object):"


def grid(largest: float) -> Activation:
    return Activation("int8", largest / 127, 0)


def test_numbers_beyond_the_grid_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clipping, "shipped_prompts", lambda each: (Prompt("code", PROMPT),))
    monkeypatch.setattr(clipping.Codec, "encode", lambda codec, text, chat_template: (2, *codec.continued(text)))
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
    found = clipping.measure_cut_off(directory, grids, reporter=SILENT)

    beyond = int((read > middle / 127 * 127.5).sum())
    assert beyond > len(read) / 3
    assert found == pytest.approx(beyond / (len(read) + len(made)), abs=2 / len(read))
    assert clipping.measure_cut_off(directory, {"layers.1.down_proj": (None, grid(1e6))}, reporter=SILENT) == 0
