"""Codes in bytes: by hand, there and back, and as compressed-tensors packs them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mtp_extract.checkpoint.dtypes import pack, row_bytes, unpack

BITS = (2, 4, 8)


@given(st.data(), st.sampled_from(BITS), st.sampled_from([1, 4]))
def test_a_row_is_one_little_endian_number(data: st.DataObject, bits: int, unit: int) -> None:
    """Element i at bit i · bits, half the range above the code; nothing above the last; and there and back."""
    half, shape = 1 << bits - 1, data.draw(st.tuples(st.integers(1, 5), st.integers(1, 70)))
    codes = data.draw(arrays(np.int8, shape, elements=st.integers(-half, half - 1)))
    packed = pack(codes, bits, unit)
    assert packed.dtype == np.uint8
    assert packed.shape == (len(codes), row_bytes(shape[1], bits, unit)) and packed.shape[1] % unit == 0
    for row, stored in zip(codes.tolist(), packed, strict=True):
        number = sum(code + half << bits * i for i, code in enumerate(row))
        assert int.from_bytes(stored.tobytes(), "little") == number
    np.testing.assert_array_equal(unpack(packed, bits, shape[1]), codes)


@pytest.mark.parametrize(
    ("codes", "bits", "expected"),
    [
        ([-8, 7, 0, 1, -1], 4, "f0 98 07 00"),
        ([-2, -1, 0, 1, 1], 2, "e4 03 00 00"),
        ([-128, 127, 0], 8, "00 ff 80 00"),
    ],
)
def test_bytes(codes: list[int], bits: int, expected: str) -> None:
    assert pack(np.array([codes], np.int8), bits, 4).tobytes() == bytes.fromhex(expected)


@pytest.mark.torch
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [32, 48, 33])
def test_compressed_tensors_packs_the_same(bits: int, columns: int) -> None:
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    half = 1 << bits - 1
    codes = np.random.default_rng(columns).integers(-half, half, (7, columns)).astype(np.int8)
    theirs = helpers.pack_to_int32(torch.from_numpy(codes), bits).numpy()
    np.testing.assert_array_equal(pack(codes, bits, 4), theirs.view(np.uint8))
    back = helpers.unpack_from_int32(torch.from_numpy(theirs), bits, torch.Size(codes.shape)).numpy()
    np.testing.assert_array_equal(back, codes)
