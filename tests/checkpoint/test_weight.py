"""Any rows of a weight equal those of the entire weight, and its codes stand for its numbers."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from helpers.variant_files import REFUSED, VARIANTS, variant

from mtp_extract.bundle import open_bundle
from mtp_extract.checkpoint import weight as weights
from mtp_extract.checkpoint.dtypes import DTYPES
from mtp_extract.checkpoint.stored import FileWeight, TensorPlace, find_common_dtype
from mtp_extract.checkpoint.weight import Weight, build_constant_weight, split_rows
from mtp_extract.errors import CheckpointError, NoCodesError
from mtp_extract.pipeline.extraction import build_checkpoint


def parts(weight: Weight) -> list[tuple[int, int]]:
    """Ranges of its rows, the first and the last ones among them."""
    half = weight.rows // 2 // weights.ROW_STEP * weights.ROW_STEP
    return [(0, min(weights.ROW_STEP, weight.rows)), (half, weight.rows), (0, weight.rows)]


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - REFUSED))
def test_constants(name: str) -> None:
    """Rows equal those of the entire weight and the file's numbers, and those of matrices equal code · step."""
    with open_bundle(variant(name)) as opened:
        matrices = 0
        for role, weight in build_checkpoint(opened.read_drafter()).tensors.items():
            rows = weight.array().reshape(weight.rows, weight.columns)
            for first, last in parts(weight):
                np.testing.assert_array_equal(weight.floats(first, last), rows[first:last], err_msg=role)
            if not isinstance(weight, weights.BundleWeight) or weight.scheme is None:
                continue
            codes, floats = weight.codes(), weight.source.floats().reshape(rows.shape)
            assert codes.shape == rows.shape and codes.min() >= weight.scheme.lowest, role
            np.testing.assert_array_equal(weights.unfold_factor(floats, weight.factor), rows, err_msg=role)
            for first, last in parts(weight):
                np.testing.assert_array_equal(weight.codes(first, last), codes[first:last], err_msg=role)
            try:
                centered = weights.center_codes(weight)
            except NoCodesError as error:
                assert len(weight.shape) != 2 or weight.source.zero_point.any(), f"{role}: {error}"
                continue
            matrices += 1
            codes, steps = centered.codes(), centered.steps.size
            assert np.abs(codes.astype(int) + 0.5).max() < 1 << centered.bits - 1
            values = codes.reshape(*steps.shape, -1).astype(np.float32) * steps[..., None]
            tolerance = 0 if weights.has_exact_steps(weight) else 2**-22
            np.testing.assert_allclose(values, rows.reshape(values.shape), rtol=tolerance, atol=0, err_msg=role)
        assert matrices or "float" in name or "f16" in name or "f32" in name


def test_ranges_begin_on_bytes_and_leave_nothing_out() -> None:
    assert list(split_rows(build_constant_weight((37, 3)), elements=50)) == [(0, 16), (16, 32), (32, 37)]
    assert list(split_rows(build_constant_weight((9, 1000)), elements=10)) == [(0, 8), (8, 9)]
    assert list(split_rows(build_constant_weight((5,)))) == [(0, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_a_file_and_columns_of_it(tmp_path: Path, dtype: str) -> None:
    kind, values = DTYPES[dtype], np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
    stored = kind.narrow(values.reshape(-1), "values")
    path = tmp_path / "tensors"
    path.write_bytes(b"before" + stored.tobytes())
    weight = FileWeight(path, TensorPlace(kind.safetensors, (20, 6), 6, stored.nbytes), "values")
    expected = kind.widen(stored.tobytes()).reshape(20, 6)
    np.testing.assert_array_equal(weight.array(), expected)
    np.testing.assert_array_equal(weight.floats(8, 16), expected[8:16])
    np.testing.assert_array_equal(weight.cut_columns(2, 5).floats(8, 20), expected[8:, 2:5])
    assert find_common_dtype([weight]) == dtype and find_common_dtype([weight, weights.wrap_array(values)]) == "f32"
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="shrank"):
        weight.array()


@pytest.mark.parametrize(("size", "zero_point"), [(3e38, 0), (np.inf, 3), (np.nan, -1)])
def test_numbers_that_leave_float32_are_no_warning(size: float, zero_point: int) -> None:
    """A warning would be printed; such numbers are refused where they are used."""
    steps = weights.Steps(2, np.full((2, 1), size, np.float32), np.full((2, 1), zero_point, np.int64), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = steps.floats(np.array([[127, -127], [zero_point, 5]], np.int8))
    assert not np.isfinite(values).all()
