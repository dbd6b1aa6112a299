"""Types of tensors in files: floats, rounded from float32 and back, and packed codes of 2, 4 and 8 bits.

Packed rows: every row begins on a byte, the first element lies in the lowest bits, and the stored number is the code
plus half its range. MLX's ``uint32`` and compressed-tensors' ``int32`` are these bytes, four at a time, little-endian.

GGUF blocks: a row is cut into blocks of 32, each an FP16 step and its codes. Q8_0 has 32 int8. Q4_0 has 16 bytes: byte
j holds the code of element j in its low half and that of element j + 16 in its high half, both plus 8
(``block_q4_0`` and ``block_q8_0`` of ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_extract.errors import UnsupportedError
from mtp_extract.litertlm.storage import Floats, Integers, pack_bytes, round_floats, unpack_bytes, widen_floats
from mtp_extract.litertlm.tflite import TensorType

Codes = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Dtype:
    """A floating-point type."""

    type: TensorType
    safetensors: str  # its name in safetensors
    transformers: str  # its name in transformers
    rounding: str  # the name of rounding to it in a record; empty for F32, in which everything is computed
    roundoff: float  # largest relative error of rounding (FP16: of normal numbers)

    def narrow(self, values: Floats, name: str) -> npt.NDArray[np.generic]:
        """Round finite numbers, float32 ``[n]``, to the nearest, ties to even; BF16 as uint16.

        Args:
            name: the tensor's, for the error text.

        Raises:
            UnsupportedError: a number is beyond the type's range.
        """
        try:
            return round_floats(values, self.type)
        except OverflowError as error:
            why = f"{name} holds values beyond {self.transformers}'s range. Choose f32."
            raise UnsupportedError(why, remedies=("dtype=f32",)) from error

    def widen(self, stored: bytes | memoryview) -> Floats:
        """Return stored little-endian bytes as float32, exactly."""
        return widen_floats(stored, self.type)


DTYPES = MappingProxyType(
    {
        "f32": Dtype(TensorType.FLOAT32, "F32", "float32", "", 2.0**-24),
        "bf16": Dtype(TensorType.BFLOAT16, "BF16", "bfloat16", "BF16", 2.0**-8),
        "f16": Dtype(TensorType.FLOAT16, "F16", "float16", "FP16", 2.0**-11),
    }
)
"""Command-line name → float type."""

ROUNDED_TO = MappingProxyType({dtype.rounding: dtype for dtype in DTYPES.values()})
"""Name of the rounding in a record → float type."""

FLOAT_NAMES = MappingProxyType({dtype.safetensors: dtype for dtype in DTYPES.values()})
"""Name in files → float type."""

BLOCKS = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64"), (1, 8)),
        **dict.fromkeys(("F32", "I32", "U32"), (1, 4)),
        **dict.fromkeys(("F16", "BF16", "I16"), (1, 2)),
        **dict.fromkeys(("I8", "U8", "BOOL"), (1, 1)),
        "Q4_0": (32, 18),
        "Q8_0": (32, 34),
    }
)
"""Name in safetensors or GGUF → elements and bytes of the smallest piece of the type."""

ARRAYS: Mapping[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "I64": np.dtype("<i8"), "BOOL": np.dtype(np.bool_)}
"""Types of small arrays, which are read and written in one piece."""

BLOCK = 32
"""Elements of a row that share a step in GGUF."""


def count_row_bytes(columns: int, bits: int, unit: int = 1) -> int:
    """Return the bytes of a packed row, rounded up to a multiple of ``unit``."""
    return -(-columns * bits // (8 * unit)) * unit


def pack(codes: Integers, bits: int, unit: int = 1) -> Bytes:
    """Pack ``codes``, int8 ``[rows, columns]``, as ``[rows, count_row_bytes(columns, bits, unit)]``, padded with 0."""
    rows, columns = codes.shape
    stored = np.zeros((rows, count_row_bytes(columns, bits, unit) * 8 // bits), np.uint8)
    np.add(codes.view(np.uint8), np.uint8(1 << bits - 1), out=stored[:, :columns])
    return pack_bytes(stored, bits)


def unpack(packed: Bytes, bits: int, columns: int) -> Codes:
    """Undo :func:`pack`: int8 ``[rows, columns]``."""
    stored = unpack_bytes(packed, bits)[:, :columns]
    codes: Codes = (stored - np.uint8(1 << bits - 1)).view(np.int8)
    return codes


@dataclass(frozen=True)
class BlockType:
    """A block type of GGUF: how 32 codes and their step are stored."""

    name: str  # in GGUF
    bits: int  # of a code: 4 or 8

    @property
    def block(self) -> np.dtype[Any]:
        """NumPy type of one block in a file: its step, and the bytes of its codes."""
        return np.dtype([("step", "<f2"), ("codes", "u1", (BLOCK * self.bits // 8,))])

    def pack(self, codes: Integers, steps: Floats) -> Bytes:
        """Pack codes, int8 ``[rows, columns]``, with their steps, which FP16 holds, as ``[rows, bytes of a row]``.

        A step may belong to several blocks of a row.
        """
        rows, blocks = len(codes), codes.shape[1] // BLOCK
        packed = np.empty((rows, blocks), self.block)
        packed["step"] = np.repeat(steps, blocks // steps.shape[1], axis=1)
        stored = codes.reshape(rows, blocks, BLOCK).view(np.uint8)
        if self.bits == 4:
            stored = stored + np.uint8(8)
            stored = stored[..., : BLOCK // 2] | stored[..., BLOCK // 2 :] << np.uint8(4)
        packed["codes"] = stored
        return packed.view(np.uint8)

    def codes(self, rows: Bytes) -> Codes:
        """Return the codes in ``rows``, ``[rows, bytes of a row]``, as int8 ``[rows, columns]``."""
        stored = rows.view(self.block)["codes"]
        if self.bits == 4:
            stored = np.concatenate([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1) - np.uint8(8)
        return np.ascontiguousarray(stored).view(np.int8).reshape(len(rows), -1)

    def steps(self, rows: Bytes) -> Floats:
        """Return the steps in ``rows``, ``[rows, bytes of a row]``, as float32 ``[rows, columns / 32]``."""
        scales: Floats = rows.view(self.block)["step"].astype(np.float32)
        return scales


BLOCK_TYPES = MappingProxyType({4: BlockType("Q4_0", 4), 8: BlockType("Q8_0", 8)})
"""Bits of a code → block type."""
