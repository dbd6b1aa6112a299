"""Integers beside floats, and a matrix seen as rows of signed integers, held against what the file stores."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.variant_files import REFUSED, VARIANTS, variant
from safetensors.numpy import load_file, save_file

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.codes import CODES_FILE, with_codes
from mtp_extract.checkpoint.files import read_safetensors
from mtp_extract.checkpoint.weight import Constant, has_exact_steps, row_codes
from mtp_extract.errors import CheckpointError, NoCodesError
from mtp_extract.formats import read_checkpoint
from mtp_extract.pipeline.extraction import checkpoint_of

NAMES = sorted(VARIANTS.keys() - REFUSED)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_codes_are_the_numbers(name: str) -> None:
    """code · step is what dequantizing gives, for every matrix that is seen so."""
    with open_bundle(variant(name)) as opened:
        seen = 0
        for role, tensor in checkpoint_of(opened.drafter()).tensors.items():
            try:
                found = row_codes(tensor)
            except NoCodesError as error:
                symmetric = not isinstance(tensor, Constant) or not tensor.source.zero_point.any()
                assert tensor.scheme is None or len(tensor.shape) != 2 or not symmetric, f"{role}: {error}"
                continue
            seen += 1
            codes = found.codes()
            assert np.abs(codes.astype(int) + 0.5).max() < 1 << found.bits - 1
            made = codes.reshape(*found.steps.size.shape, -1).astype(np.float32) * found.steps.size[..., None]
            values = tensor.array().reshape(made.shape)
            if has_exact_steps(tensor):
                np.testing.assert_array_equal(made, values, err_msg=role)
            else:
                np.testing.assert_allclose(made, values, rtol=2**-22, err_msg=role)
        assert seen or "float" in name or "f16" in name or "f32" in name


NAME = "model.layers.0.self_attn.q_proj.weight"


def damaged_codes(sample: Path, folder: Path, change: Callable[[dict[str, np.ndarray], dict[str, str]], None]) -> Path:
    """The sample in floats, with the codes of one matrix beside them, which ``change`` damages."""
    extract(sample, folder, dtype="f32", codes=True)
    path = folder / CODES_FILE
    tensors = {key: value for key, value in load_file(path).items() if key.startswith(NAME)}
    scheme = json.loads(read_safetensors(path)[1]["schemes"])[NAME]
    metadata = {"schemes": json.dumps({NAME: scheme})}
    save_file(tensors, path, metadata)
    assert with_codes(folder, read_checkpoint(folder)).tensors["layers.0.q_proj"].scheme is not None
    change(tensors, metadata)
    save_file(tensors, path, metadata)
    return folder


@pytest.mark.parametrize(
    "said",
    [
        *("", "5", "[", "{}", f'{{"{NAME}": 5}}'),
        *(
            f'{{"{NAME}": {{"bits": {bits}, "factor": {factor}, "axis": 0}}}}'
            for bits, factor in (
                *((4, factor) for factor in ("0", "true", '"1"', "null", "1" * 400)),
                *((bits, "1") for bits in ("4.0", "3", '"4"')),
            )
        ),
        f'{{"{NAME}": {{"bits": 8, "factor": 1, "axis": 1}}}}',
    ],
)
def test_what_is_said_of_codes_is_not_believed(sample: Path, tmp_path: Path, said: str) -> None:
    folder = damaged_codes(sample, tmp_path / "out", lambda tensors, metadata: metadata.update(schemes=said))
    with pytest.raises(CheckpointError, match=r"codes\.safetensors: "):
        with_codes(folder, read_checkpoint(folder))


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
    ],
)
def test_parts_that_are_damaged(sample: Path, tmp_path: Path, part: str, value: np.ndarray | None, what: str) -> None:
    def change(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
        tensors.pop(f"{NAME}.{part}", None)
        tensors.update({} if value is None else {f"{NAME}.{part}": value})

    folder = damaged_codes(sample, tmp_path / "out", change)
    with pytest.raises(CheckpointError, match=what):
        with_codes(folder, read_checkpoint(folder))


def test_a_checkpoint_without_codes_is_as_it_is(sample: Path, tmp_path: Path) -> None:
    extract(sample, tmp_path / "bare")
    found = read_checkpoint(tmp_path / "bare")
    assert with_codes(tmp_path / "bare", found) is found
    assert all(math.prod(t.shape) and t.scheme is None for t in found.tensors.values())
