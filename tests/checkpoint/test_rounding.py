"""Rules give the bits of the packages that they come from; roundings can be repeated; and codes are packed in bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mtp_extract.checkpoint.dtypes import DTYPES, count_row_bytes, pack, unpack
from mtp_extract.checkpoint.rounding import RULES, repeat_roundings
from mtp_extract.checkpoint.weight import center_codes, wrap_array
from mtp_extract.errors import UnsupportedError
from mtp_extract.formats import MTP_FORMATS
from mtp_extract.pipeline.identity import find_chain

Floats = npt.NDArray[np.float32]


def matrix(rows: int = 37, columns: int = 96) -> Floats:
    random = np.random.default_rng(5)
    values = random.standard_normal((rows, columns)) * random.uniform(1e-6, 4, (rows, 1))
    values[3] = 0
    values[4, :32] = np.repeat(0.25, 32)
    values[5] = np.arange(columns) / 8 - 6
    return values.astype(np.float32)


@pytest.mark.parametrize("rule", ["q4_0", "q8_0"])
def test_ggmls_rules_are_ggmls(rule: str) -> None:
    gguf = pytest.importorskip("gguf")
    from gguf.quants import dequantize, quantize

    values = matrix()
    kind = gguf.GGMLQuantizationType[rule.upper()]
    rounded = RULES[rule].round_matrix(wrap_array(values))
    theirs = dequantize(quantize(values, kind), kind)
    np.testing.assert_array_equal(rounded.array().view(np.uint32), theirs.view(np.uint32))
    assert rounded.scheme is not None
    assert (rounded.scheme.bits, rounded.steps.block) == (RULES[rule].bits, 32)


@pytest.mark.parametrize(
    ("rule", "codes", "scale"),
    [
        # As ai_edge_quantizer's uniform_quantize_tensor makes them: scale = bound / qmax, halves to even.
        ("int4", [[7, -7, 4, 0], [0, 0, 0, 0], [7, 2, -2, 3]], [0.5, 1e-9 / 7, 1.0]),
        ("int8", [[127, -127, 64, 5], [0, 0, 0, 0], [127, 45, -27, 63]], [3.5 / 127, 1e-9 / 127, 7 / 127]),
    ],
)
def test_a_scale_a_row(rule: str, codes: list[list[int]], scale: list[float]) -> None:
    values = np.array([[3.5, -3.5, 1.75, 0.125], [0, 0, 0, 0], [7, 2.5, -1.5, 3.4999]], np.float32)
    rounded = center_codes(RULES[rule].round_matrix(wrap_array(values)))
    np.testing.assert_allclose(rounded.steps.size.reshape(-1), np.array(scale, np.float32), rtol=1e-6)
    np.testing.assert_array_equal(rounded.codes().reshape(values.shape), codes)


@pytest.mark.parametrize("rule", RULES)
def test_any_rows_are_those_of_the_whole(rule: str) -> None:
    rounded = RULES[rule].round_matrix(wrap_array(matrix()))
    values = rounded.array()
    np.testing.assert_array_equal(rounded.floats(8, 24), values[8:24])
    centered = center_codes(rounded)
    assert centered.bits == RULES[rule].bits
    steps = centered.steps.size
    codes = centered.codes().reshape(*steps.shape, -1)
    np.testing.assert_array_equal((codes * steps[..., None]).reshape(values.shape), values)


@pytest.mark.parametrize(
    ("rule", "values", "what"),
    [
        ("q8_0", np.full((8, 32), np.inf, np.float32), "not finite"),
        ("q8_0", np.full((8, 32), np.nan, np.float32), "not finite"),
        ("q4_0", matrix() * np.float32(1e7), "FP16"),
    ],
)
def test_numbers_that_a_rule_does_not_take(rule: str, values: Floats, what: str) -> None:
    with pytest.raises(UnsupportedError, match=what):
        RULES[rule].round_matrix(wrap_array(values)).floats()


def test_roundings_are_told_and_done_again() -> None:
    original = wrap_array(matrix())
    assert find_chain(original, original) == ()
    assert {rule for listed in MTP_FORMATS.values() for rule in listed.rules} <= set(RULES)
    for step in ("BF16", "FP16"):
        once = repeat_roundings(original, [step])
        assert not np.array_equal(once.array(), original.array())
        assert find_chain(original, once) == (step,)
    coded = RULES["int8"].round_matrix(original)
    scales = repeat_roundings(coded, ["FP16 scales"])
    assert find_chain(coded, scales) == ("FP16 scales",)
    np.testing.assert_array_equal(repeat_roundings(original, ["int8", "FP16 scales"]).array(), scales.array())
    assert find_chain(original, coded) == ("int8",)
    for weight, step in ((original, "FP16 scales"), (wrap_array(matrix()[0, :40]), "q8_0")):
        with pytest.raises(UnsupportedError):
            repeat_roundings(weight, [step])


@pytest.mark.torch
@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_bf16_rounds_as_torch_does(bits: list[int]) -> None:
    import torch

    values = np.array(bits, np.uint32).view(np.float32)
    values[~np.isfinite(values)] = 0
    ours = np.asarray(DTYPES["bf16"].narrow(values.copy(), "t"))
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(ours, theirs)


@given(st.data(), st.sampled_from([2, 4, 8]), st.sampled_from([1, 4]))
def test_a_row_is_one_little_endian_number(data: st.DataObject, bits: int, unit: int) -> None:
    """Element i lies at bit i · bits, half its range above the code, and bits above the last are 0."""
    half, shape = 1 << bits - 1, data.draw(st.tuples(st.integers(1, 5), st.integers(1, 70)))
    codes = data.draw(arrays(np.int8, shape, elements=st.integers(-half, half - 1)))
    packed = pack(codes, bits, unit)
    assert packed.dtype == np.uint8
    assert packed.shape == (len(codes), count_row_bytes(shape[1], bits, unit)) and packed.shape[1] % unit == 0
    for row, stored in zip(codes.tolist(), packed, strict=True):
        number = sum(code + half << bits * i for i, code in enumerate(row))
        assert int.from_bytes(stored.tobytes(), "little") == number
    np.testing.assert_array_equal(unpack(packed, bits, shape[1]), codes)
