"""Integers beside floats, and a matrix seen as rows of signed integers, held against what the file stores."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from helpers.variant_files import REFUSED, VARIANTS, variant
from safetensors.numpy import load_file, save_file

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint.codes import CODES_FILE, with_codes
from mtp_extract.checkpoint.safetensors_file import read_file
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


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_codes_beside_are_the_files(tmp_path: Path, name: str, dtype: str) -> None:
    directory = tmp_path / "out"
    extract(variant(name), directory, dtype=dtype, codes=True)
    found = with_codes(directory, read_checkpoint(directory))
    with open_bundle(variant(name)) as opened:
        for role, tensor in checkpoint_of(opened.drafter()).tensors.items():
            try:
                mine = row_codes(tensor)
            except NoCodesError as error:
                with pytest.raises(NoCodesError, match=str(error)):
                    row_codes(found.tensors[role])
                continue
            theirs = row_codes(found.tensors[role])
            assert mine.bits == theirs.bits
            np.testing.assert_array_equal(mine.codes(), theirs.codes(), err_msg=role)
            np.testing.assert_array_equal(tensor.array(), found.tensors[role].array(), err_msg=role)


@pytest.mark.parametrize(
    "said",
    [
        *({}, {"schemes": "5"}, {"schemes": "["}, {"schemes": "{}"}, {"schemes": '{"NAME": 5}'}),
        *(
            {"schemes": f'{{"NAME": {{"bits": {bits}, "factor": {factor}, "axis": 0}}}}'}
            for bits, factor in (
                *((4, factor) for factor in ("0", "true", '"1"', "null", "1" * 400)),
                *((bits, "1") for bits in ("4.0", "3", '"4"')),
            )
        ),
    ],
)
def test_what_is_said_of_codes_is_not_believed(sample: Path, tmp_path: Path, said: dict[str, str]) -> None:
    extract(sample, tmp_path / "out", dtype="f32", codes=True)
    path, name = tmp_path / "out" / CODES_FILE, "model.layers.0.self_attn.q_proj.weight"
    three = {key: value for key, value in load_file(path).items() if key.startswith(name)}
    assert len(three) == 3
    save_file(three, path, {key: text.replace("NAME", name) for key, text in said.items()})
    with pytest.raises(CheckpointError, match=r"codes\.safetensors: "):
        with_codes(tmp_path / "out", read_checkpoint(tmp_path / "out"))


def test_a_part_more_is_refused(sample: Path, tmp_path: Path) -> None:
    extract(sample, tmp_path / "out", dtype="f32", codes=True)
    path = tmp_path / "out" / CODES_FILE
    name = "model.layers.0.self_attn.q_proj.weight"
    four = {key: value for key, value in load_file(path).items() if key.startswith(name)}
    save_file({**four, f"{name}.bias": np.zeros(3, np.float32)}, path, read_file(path)[1])
    with pytest.raises(CheckpointError, match="no whole weight"):
        with_codes(tmp_path / "out", read_checkpoint(tmp_path / "out"))


def test_a_checkpoint_without_codes_is_as_it_is(extracted_bare: Path) -> None:
    found = read_checkpoint(extracted_bare)
    assert with_codes(extracted_bare, found) is found
    assert all(math.prod(t.shape) and t.scheme is None for t in found.tensors.values())


@pytest.fixture
def extracted_bare(sample: Path, tmp_path: Path) -> Path:
    extract(sample, tmp_path / "bare")
    return tmp_path / "bare"


def test_scales_that_are_no_numbers_are_refused(sample: Path, tmp_path: Path) -> None:
    extract(sample, tmp_path / "out", codes=True)
    path = tmp_path / "out" / CODES_FILE
    tensors = load_file(path)
    tensors["pre_projection.weight.scale"] = np.full_like(tensors["pre_projection.weight.scale"], np.inf)
    save_file(tensors, path, read_file(path)[1])
    with pytest.raises(CheckpointError, match="are damaged"):
        with_codes(tmp_path / "out", read_checkpoint(tmp_path / "out"))
