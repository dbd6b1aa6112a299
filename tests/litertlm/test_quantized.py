"""Codes to numbers: golden bytes, an independent decoder, and every axis, block and zero point."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.make_bundle import Memory
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mtp_extract.errors import UnsupportedError
from mtp_extract.io.source import Region
from mtp_extract.litertlm.quantized import QuantizedTensor
from mtp_extract.litertlm.storage import CODE_TYPES, Storage
from mtp_extract.litertlm.tflite import Tensor, TensorType


def make_tensor(
    type_: TensorType,
    shape: tuple[int, ...],
    data: bytes,
    kind: str = "none",
    axis: int = 0,
    scale: Any = (),
    zero_point: Any = None,
    block: int = 0,
) -> QuantizedTensor:
    scales = np.asarray(scale, np.float32)
    zeros = np.zeros(scales.shape, np.int64) if zero_point is None else np.asarray(zero_point, np.int64)
    location = Region(Memory(data), 0, len(data), "test")
    layout = Storage(type_, shape, kind, axis, block, not zeros.any())
    return QuantizedTensor(Tensor(0, 0, "t", shape, type_, 1, 0, None, False, False), location, layout, scales, zeros)


def decode(type_: TensorType, data: bytes, count: int) -> np.ndarray:
    """Decode single bits, lowest first; the highest bit of a signed code counts negative."""
    packing = CODE_TYPES[type_]
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[: count * packing.bits]
    worth = 1 << np.arange(packing.bits)
    worth[-1] *= -1 if packing.signed else 1
    return bits.reshape(count, packing.bits) @ worth


@pytest.mark.parametrize(
    ("type_", "data", "codes"),
    [
        (TensorType.INT4, "78e1", [-8, 7, 1, -2]),
        (TensorType.INT2, "4e", [-2, -1, 0, 1]),
        (TensorType.UINT4, "78e1", [8, 7, 1, 14]),
        (TensorType.INT8, "80ff007f", [-128, -1, 0, 127]),
        (TensorType.UINT8, "80ff007f", [128, 255, 0, 127]),
    ],
)
def test_golden_bytes(type_: TensorType, data: str, codes: list[int]) -> None:
    source = make_tensor(type_, (len(codes),), bytes.fromhex(data), "per_tensor", 0, [0.5])
    np.testing.assert_array_equal(source.codes(), codes)
    np.testing.assert_array_equal(source.dequantize(), np.array(codes) * 0.5)


def test_f32_is_taken_as_it_is() -> None:
    """An old bug: norms with spurious scales came out as zeros."""
    values = np.array([0.9916, -11.4, 1.0], "<f4")
    source = make_tensor(TensorType.FLOAT32, (3,), values.tobytes(), scale=[0.0], zero_point=[1])
    np.testing.assert_array_equal(source.dequantize(), values)
    with pytest.raises(UnsupportedError, match="real numbers"):
        source.codes()


def test_f16_and_bf16_are_widened_exactly() -> None:
    halves = np.array([1.5, -0.0009765625, 65504.0], "<f2")
    np.testing.assert_array_equal(make_tensor(TensorType.FLOAT16, (3,), halves.tobytes()).dequantize(), halves)
    # 0x3F80 is 1, 0xC049 is −3.140625, 0x0001 the smallest subnormal.
    brains = make_tensor(TensorType.BFLOAT16, (3,), np.array([0x3F80, 0xC049, 0x0001], "<u2").tobytes())
    np.testing.assert_array_equal(brains.dequantize(), np.array([1.0, -3.140625, 2.0**-133], np.float32))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_agrees_with_a_decoder_written_by_hand(data: st.DataObject) -> None:
    type_ = data.draw(st.sampled_from(sorted(CODE_TYPES)))
    packing = CODE_TYPES[type_]
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    count = math.prod(shape)
    size = -(-count * packing.bits // 8)
    raw = data.draw(st.binary(min_size=size, max_size=size))
    kind = data.draw(st.sampled_from(["per_tensor", "per_channel", "blockwise"]))
    axis = data.draw(st.integers(0, len(shape) - 1)) if kind == "per_channel" else 0
    block = data.draw(st.sampled_from([n for n in range(1, shape[-1] + 1) if shape[-1] % n == 0]))
    blocks = (*shape[:-1], shape[-1] // block)
    scaled = {"per_tensor": (1,), "per_channel": (shape[axis],), "blockwise": blocks}[kind]
    scale = data.draw(arrays(np.float32, scaled, elements=st.floats(0, 4, width=32)))
    zero = data.draw(arrays(np.int64, scaled, elements=st.integers(packing.lowest, packing.highest)))
    source = make_tensor(type_, shape, raw, kind, axis, scale, zero, block if kind == "blockwise" else 0)

    codes = decode(type_, raw, count).reshape(shape)
    np.testing.assert_array_equal(source.codes(), codes.reshape(-1))
    if kind == "per_channel":
        scale, zero = (np.expand_dims(part, [n for n in range(len(shape)) if n != axis]) for part in (scale, zero))
    elif kind == "blockwise":
        scale, zero = (np.repeat(part, block, -1) for part in (scale, zero))
    expected = (codes - zero).astype(np.float32) * scale
    np.testing.assert_array_equal(source.dequantize(), expected)
    begin = 8 * data.draw(st.integers(0, count // 8))
    end = data.draw(st.integers(begin, count))
    np.testing.assert_array_equal(source.floats(begin, end), expected.reshape(-1)[begin:end])


@pytest.mark.parametrize("columns", [1, 3, 255, 256])
@pytest.mark.parametrize("type_", [TensorType.INT2, TensorType.INT4, TensorType.INT8])
def test_chunk_borders(type_: TensorType, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small chunks, rows that begin within a byte meet every kind of border."""
    monkeypatch.setattr("mtp_extract.litertlm.quantized.CHUNK_ELEMENTS", 512)
    rows = 1031
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, -(-rows * columns * CODE_TYPES[type_].bits // 8), np.uint8).tobytes()
    scale = rng.random(rows, np.float32)
    source = make_tensor(type_, (rows, columns), raw, "per_channel", 0, scale)
    expected = decode(type_, raw, rows * columns).reshape(rows, columns).astype(np.float32) * scale[:, None]
    np.testing.assert_array_equal(source.dequantize(), expected)
    for begin, end in ((0, 8), (64, 65), (8, rows * columns), (16 * columns, 24 * columns)):
        np.testing.assert_array_equal(source.floats(begin, end), expected.reshape(-1)[begin:end])
        np.testing.assert_array_equal(source.codes(begin, end), source.codes()[begin:end])
