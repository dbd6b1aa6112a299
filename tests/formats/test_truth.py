"""Extraction against what the quantizer computed before packing: integers, scales, zero points, floats."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from helpers.variant_files import REFUSED, STATIC, VARIANTS, variant
from safetensors.numpy import load_file

from mtp_extract import extract
from mtp_extract.bundle import open_bundle
from mtp_extract.graph.call import read_activation_scale

TRUTH = VARIANTS | STATIC
MADE = sorted(set(TRUTH) - REFUSED)


def hash_array(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.mark.parametrize("name", MADE)
def test_variant(name: str, tmp_path: Path) -> None:
    expected = TRUTH[name]
    extract(variant(name), tmp_path / "out", dtype="f32", codes=True)
    codes = load_file(tmp_path / "out" / "codes/codes.safetensors")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert set(weights) == {*expected["matrices"], *expected["vectors"]}
    for tensor, matrix in expected["matrices"].items():
        stored, scale, zero_point = (codes[f"{tensor}.{part}"] for part in ("codes", "scale", "zero_point"))
        assert hash_array(stored) == matrix["codes"], tensor
        assert hash_array(scale) == matrix["scale"], tensor
        assert hash_array(zero_point) == matrix["zero_point"], tensor
        if matrix["block"]:
            scale, zero_point = (np.repeat(part, matrix["block"], axis=1) for part in (scale, zero_point))
        else:
            scale, zero_point = (part.reshape(-1, 1) for part in (scale, zero_point))
        value = (stored.astype(np.float32) - zero_point.astype(np.float32)) * scale
        if matrix["factor"] != 1:
            value = (value.astype(np.float64) / matrix["factor"]).astype(np.float32)
        np.testing.assert_array_equal(weights[tensor], value, err_msg=tensor)
    for tensor, digest in expected["vectors"].items():
        assert hash_array(weights[tensor]) == digest, tensor


def test_published_shape_is_42_constants(tmp_path: Path) -> None:
    """A bundle without layer scalars and with one q norm for the sliding layers has the seed's 42 tensors."""
    extract(variant("jax_published_noscalar"), tmp_path / "out", format="litert")
    dimensions = [weight.ndim for weight in load_file(tmp_path / "out" / "mtp_drafter.safetensors").values()]
    assert (dimensions.count(2), dimensions.count(1), len(dimensions)) == (23, 19, 42)


def test_static_quantization_of_caches_is_shown() -> None:
    with open_bundle(variant("jax_published")) as opened:
        walk = opened.read_drafter().structure
    grids = [(cache.type_name, read_activation_scale(cache)) for cache in walk.caches.values()]
    assert all(kind == "INT8" and grid and grid[0] > 0 and grid[1] == 0 for kind, grid in grids)
    assert [layer.key for layer in walk.layers] == [*["kv_cache_k_2"] * 3, "kv_cache_k_3"]
