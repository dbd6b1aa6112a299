"""Codes in bytes: there and back."""

from __future__ import annotations

import numpy as np
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
