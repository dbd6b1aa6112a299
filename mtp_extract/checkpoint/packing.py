"""Codes of 2, 4 and 8 bits in bytes, as engines pack them.

Rows: each begins on a byte, its first element lies in the lowest bits, and what is stored is the code plus half its
range. MLX's ``uint32`` and compressed-tensors' ``int32`` are these bytes, four at a time, little-endian.

Blocks of GGUF: a row is cut into blocks of 32, each an FP16 step and its codes. Q8_0: 32 times int8. Q4_0: 16 bytes, of
which byte j holds the code of element j in its low half and that of element j + 16 in its high half, both plus 8
(``block_q4_0`` and ``block_q8_0`` of ggml-common.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from mtp_extract.litertlm.storage import Floats, Integers, pack_bytes, unpack_bytes

Codes = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]

BLOCK = 32
"""Neighbouring elements of a row that share a step in GGUF."""

_STEP = 2
"""Bytes of a block's step."""


def row_bytes(columns: int, bits: int, unit: int = 1) -> int:
    """Bytes of a packed row, a multiple of ``unit``."""
    return -(-columns * bits // (8 * unit)) * unit


def pack(codes: Integers, bits: int, unit: int = 1) -> Bytes:
    """``codes``, int8 ``[rows, columns]`` in ``bits`` bits, as ``[rows, row_bytes(columns, bits, unit)]``.

    What fills a row up is 0.
    """
    rows, columns = codes.shape
    stored = np.zeros((rows, row_bytes(columns, bits, unit) * 8 // bits), np.uint8)
    np.add(codes.view(np.uint8), np.uint8(1 << bits - 1), out=stored[:, :columns])
    return pack_bytes(stored, bits)


def unpack(packed: Bytes, bits: int, columns: int) -> Codes:
    """What :func:`pack` packed: int8 ``[rows, columns]``."""
    stored = unpack_bytes(packed, bits)[:, :columns]
    codes: Codes = (stored - np.uint8(1 << bits - 1)).view(np.int8)
    return codes


@dataclass(frozen=True)
class BlockType:
    """How 32 codes and their step lie in bytes."""

    name: str  # GGUF's
    bits: int  # of a code: 4 or 8

    @property
    def size(self) -> int:
        """Bytes of a block, its step included."""
        return _STEP + BLOCK * self.bits // 8

    def pack(self, codes: Integers, steps: Floats) -> Bytes:
        """Codes, int8 ``[rows, columns]``, and their steps, which FP16 holds, each for one block of a row or several:
        ``[rows, bytes of a row]``."""
        rows, blocks = len(codes), codes.shape[1] // BLOCK
        made = np.empty((rows, blocks, self.size), np.uint8)
        made[..., :_STEP] = np.repeat(steps.astype("<f2"), blocks // steps.shape[1], axis=1)[..., None].view(np.uint8)
        stored = codes.reshape(rows, blocks, BLOCK).view(np.uint8)
        if self.bits == 4:
            stored = stored + np.uint8(8)
            stored = stored[..., : BLOCK // 2] | stored[..., BLOCK // 2 :] << np.uint8(4)
        made[..., _STEP:] = stored
        return made.reshape(rows, -1)

    def codes(self, rows: Bytes) -> Codes:
        """The codes in ``rows``, ``[rows, bytes of a row]``: ``[rows, columns]``."""
        stored = rows.reshape(len(rows), -1, self.size)[..., _STEP:]
        if self.bits == 4:
            stored = np.concatenate([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1) - np.uint8(8)
        return np.ascontiguousarray(stored).view(np.int8).reshape(len(rows), -1)

    def steps(self, rows: Bytes) -> Floats:
        """The steps in them: float32 ``[rows, columns / 32]``."""
        stored = rows.reshape(len(rows), -1, self.size)[..., :_STEP]
        return np.ascontiguousarray(stored).view("<f2")[..., 0].astype(np.float32)


BLOCK_TYPES = MappingProxyType({4: BlockType("Q4_0", 4), 8: BlockType("Q8_0", 8)})
"""Each by the bits of its codes."""
