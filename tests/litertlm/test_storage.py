"""Numbers to codes, against what ai-edge-quantizer computes.

``requantized.npz`` holds a matrix, and what ai-edge-quantizer 0.10.0 (``tensor_zp_scale_from_min_max`` and
``uniform_quantize``) made of it: codes, scales and zero points a row, a column, the whole and blocks of 32.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mtp_extract.errors import UnsupportedError
from mtp_extract.litertlm.storage import CODE_TYPES, Storage, encode_floats
from mtp_extract.litertlm.tflite import TensorType

GOLDEN = np.load(Path(__file__).parent / "requantized.npz")
CASES = sorted({name.rsplit("/", 1)[0] for name in GOLDEN.files if "/" in name})
assert len(CASES) == 21
BITS = {8: TensorType.INT8, 4: TensorType.INT4, 2: TensorType.INT2}
KINDS = {"channel": ("per_channel", 0, 0), "column": ("per_channel", 1, 0), "tensor": ("per_tensor", 0, 0)}


@pytest.mark.parametrize("case", CASES)
def test_the_quantizers_own_numbers(case: str) -> None:
    of, bits, symmetric = case.split("/")
    kind, axis, block = KINDS.get(of, ("blockwise", 0, 32))
    weight = GOLDEN["weight_of_blocks" if block else "weight"]
    storage = Storage(BITS[int(bits)], weight.shape, kind, axis, block, symmetric == "symmetric")
    scale, zero_point, codes = storage.quantized(weight)
    np.testing.assert_array_equal(scale, GOLDEN[f"{case}/scale"])
    np.testing.assert_array_equal(zero_point, GOLDEN[f"{case}/zero_point"])
    np.testing.assert_array_equal(codes, GOLDEN[f"{case}/codes"])


@given(
    arrays(np.int8, st.integers(0, 70), elements=st.integers(-8, 7)),
    st.sampled_from([TensorType.INT4, TensorType.UINT4, TensorType.INT2, TensorType.INT8]),
)
def test_packing_is_undone_by_unpacking(codes: np.ndarray, type_: TensorType) -> None:
    packing = CODE_TYPES[type_]
    inside = np.clip(codes, packing.lowest, packing.highest).astype(packing.dtype)
    storage = Storage(type_, codes.shape, "per_tensor")
    stored = storage.pack_codes(inside)
    assert len(stored) == storage.length
    np.testing.assert_array_equal(packing.unpack(stored)[: codes.size], inside)


def test_floats_that_a_type_cannot_hold() -> None:
    big = np.array([1.0, 3.39e38], np.float32)
    assert encode_floats(big, TensorType.FLOAT32, "norm") == big.tobytes()
    for type_ in (TensorType.FLOAT32, TensorType.FLOAT16, TensorType.BFLOAT16):
        for value in (np.inf, -np.inf, np.nan, *([3.4e38] if type_ is not TensorType.FLOAT32 else [])):
            with pytest.raises(UnsupportedError, match="norm: holds values beyond"):
                encode_floats(np.array([1.0, value], np.float32), type_, "norm")
    assert encode_floats(np.array([1.0, -2.5], np.float32), TensorType.BFLOAT16, "norm") == b"\x80\x3f\x20\xc0"


@pytest.mark.parametrize("type_", CODE_TYPES)
def test_the_ends_of_a_type_are_those_of_its_codes(type_: TensorType) -> None:
    packing = CODE_TYPES[type_]
    every = packing.unpack(bytes(range(256)) if packing.bits <= 8 else np.arange(1 << 16, dtype="<u2").tobytes())
    assert (packing.lowest, packing.highest) == (every.min(), every.max())


@pytest.mark.parametrize(("kind", "block"), [("per_channel", 0), ("blockwise", 4)])
def test_a_row_of_zeros_has_a_scale(kind: str, block: int) -> None:
    scale, _, codes = Storage(TensorType.INT4, (2, 8), kind, 0, block).quantized(np.zeros(16, np.float32))
    assert (scale > 0).all()
    assert not codes.any()


def test_int16_is_one_scale_for_all() -> None:
    values = np.linspace(-3, 2, 40, dtype=np.float32)
    storage = Storage(TensorType.INT16, (40,), "per_tensor")
    scale, _, codes = storage.quantized(values)
    assert codes.min() == -32767
    np.testing.assert_allclose(np.frombuffer(storage.pack_codes(codes), "<i2") * scale[0], values, atol=1e-4)
