"""Codes beside floats must give the floats, and damage to them is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtp_extract import extract
from mtp_extract.checkpoint.codes import CODES_FILE, attach_codes
from mtp_extract.checkpoint.safetensors_file import read_safetensors
from mtp_extract.errors import CheckpointError
from mtp_extract.formats import read_checkpoint

NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def coded(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample in floats, with the codes of one matrix beside them."""
    folder = tmp_path_factory.mktemp("codes") / "out"
    extract(sample, folder, dtype="f32", codes=True)
    path = folder / CODES_FILE
    tensors = {key: value for key, value in load_file(path).items() if key.startswith(NAME)}
    scheme = json.loads(read_safetensors(path)[1]["schemes"])[NAME]
    save_file(tensors, path, {"schemes": json.dumps({NAME: scheme})})
    assert attach_codes(folder, read_checkpoint(folder).tensors)["layers.0.q_proj"].scheme is not None
    return folder


def said(bits: str = "4", factor: str = "1", axis: str = "0") -> str:
    return f'{{"{NAME}": {{"bits": {bits}, "factor": {factor}, "axis": {axis}}}}}'


@pytest.mark.parametrize(
    ("part", "value", "what"),
    [
        ("bias", np.zeros(3, np.float32), "nothing says how"),
        ("scale", None, "expected codes of a matrix"),
        ("scale", np.full(128, np.inf, np.float32), "with finite scales in F32"),
        ("scale", np.ones(3, np.float32), "with finite scales in F32"),
        ("zero_point", np.zeros(3, np.int64), "with finite scales in F32"),
        ("codes", np.zeros((3, 64), np.int8), "in I8 or U8"),
        ("scale", np.ones(128, np.float64), "finite scales in F32"),
        ("scale", np.ones(128, np.float32), "not those of its floats"),
        *(("", text, r"codes\.safetensors: ") for text in ("", "5", "[", "{}", f'{{"{NAME}": 5}}', said(axis="1"))),
        ("", '{"a": 5, "a": 5}', "a key occurs twice"),
        *(("", said(bits), r"codes\.safetensors: ") for bits in ("4.0", "3", '"4"')),
        *(("", said(factor=text), r"codes\.safetensors: ") for text in ("0", "true", '"1"', "null", "1" * 400)),
    ],
)
def test_parts_that_are_damaged(coded: Path, tmp_path: Path, part: str, value: np.ndarray | str, what: str) -> None:
    """Replace a tensor; or, without a part, the schemes in the header."""
    folder = Path(shutil.copytree(coded, tmp_path / "copy"))
    tensors, metadata = load_file(folder / CODES_FILE), read_safetensors(folder / CODES_FILE)[1]
    if isinstance(value, str):
        metadata["schemes"] = value
    else:
        tensors.pop(f"{NAME}.{part}", None)
        tensors |= {} if value is None else {f"{NAME}.{part}": value}
    save_file(tensors, folder / CODES_FILE, metadata)
    with pytest.raises(CheckpointError, match=what):
        attach_codes(folder, read_checkpoint(folder).tensors)
