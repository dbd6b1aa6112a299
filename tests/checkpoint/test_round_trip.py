"""What is read from a directory and planned again is the directory, the ordered head included."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.random_assistants import GEOMETRIES, random_assistant
from safetensors.numpy import load_file
from safetensors.torch import save_file

from mtp_extract.checkpoint.arranged import arrange
from mtp_extract.checkpoint.files import write_file
from mtp_extract.errors import CheckpointError
from mtp_extract.formats import format_named, read_checkpoint

pytestmark = pytest.mark.torch


def saved(folder: Path, name: str) -> Path:
    model = random_assistant(GEOMETRIES[name])
    tensors = {key: value.contiguous() for key, value in model.state_dict().items() if key != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GEOMETRIES[name].config()))
    return folder


@pytest.mark.parametrize("name", ["dense", "ordered", "deep-ordered"])
def test_a_directory_is_planned_as_it_is(tmp_path: Path, name: str) -> None:
    directory = saved(tmp_path, name)
    weights, *_ = arrange(format_named("transformers"), read_checkpoint(directory), "f32").files
    write_file(tmp_path, replace(weights, name="again.safetensors"))
    before, after = load_file(directory / "model.safetensors"), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)


@pytest.mark.parametrize("role", ["layers.0.q_proj", "final_norm", "ordered_head.token_ordering"])
def test_a_weight_that_is_missing_is_not_made_up(tmp_path: Path, role: str) -> None:
    checkpoint = read_checkpoint(saved(tmp_path, "ordered"))
    rest = {key: tensor for key, tensor in checkpoint.tensors.items() if key != role}
    with pytest.raises(CheckpointError, match=f"{role}: expected a weight"):
        assert arrange(format_named("transformers"), replace(checkpoint, tensors=rest), "f32").files
