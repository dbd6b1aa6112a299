"""Q4_0 and Q8_0, the types of GGUF in which codes of 4 and 8 bits are exact.

A row is cut into blocks of 32, each an FP16 step and its codes. Q8_0: 32 times int8. Q4_0: 16 bytes, of which byte j
holds the code of element j in its low half and that of element j + 16 in its high half, both plus 8 (``block_q4_0`` and
``block_q8_0`` of ggml-common.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from mtp_extract.checkpoint.packing import Bytes, Codes
from mtp_extract.checkpoint.weight import RowCodes, row_ranges

BLOCK = 32
"""Neighbouring elements of a row that share a step."""


_STEP = 2
"""Bytes of a block's step."""


def _pack_halves(codes: Codes) -> Bytes:
    biased: Bytes = (codes + np.int8(8)).view(np.uint8)
    halves: Bytes = biased[..., : BLOCK // 2] | biased[..., BLOCK // 2 :] << np.uint8(4)
    return halves


def _unpack_halves(stored: Bytes) -> Codes:
    biased: Codes = np.concatenate([stored & np.uint8(15), stored >> np.uint8(4)], axis=-1).view(np.int8)
    biased -= np.int8(8)
    return biased


@dataclass(frozen=True)
class BlockType:
    """How 32 codes lie in bytes."""

    name: str  # GGUF's
    bits: int  # of a code
    size: int  # bytes of a block, its step included
    pack: Callable[[Codes], Bytes]  # codes […, 32] to their bytes […, size − 2]
    unpack: Callable[[Bytes], Codes]


BLOCK_TYPES = MappingProxyType(
    {
        4: BlockType("Q4_0", 4, _STEP + BLOCK // 2, _pack_halves, _unpack_halves),
        8: BlockType(
            "Q8_0", 8, _STEP + BLOCK, lambda codes: codes.view(np.uint8), lambda stored: stored.copy().view(np.int8)
        ),
    }
)
"""Each by the bits of its codes."""


def blocks_of(codes: RowCodes) -> Iterator[Bytes]:
    """``codes`` around zero, of rows and blocks that divide by 32, as blocks of the type for their width, some rows at
    a time."""
    kind, steps = BLOCK_TYPES[max(codes.bits, min(BLOCK_TYPES))], codes.steps
    halves = steps.size.astype("<f2").view(np.uint8).reshape(*steps.size.shape, _STEP)
    for first, last in row_ranges(codes):
        rows = codes.codes(first, last).astype(np.int8, copy=False)
        made = np.empty((last - first, codes.columns // BLOCK, kind.size), np.uint8)
        made[..., :_STEP] = np.repeat(halves[first:last], steps.block // BLOCK, axis=1)
        made[..., _STEP:] = kind.pack(rows.reshape(*made.shape[:2], BLOCK))
        yield made.reshape(-1)


def unpacked(kind: BlockType, rows: Bytes) -> Codes:
    """The codes in ``rows`` ``[rows, bytes of a row]``: ``[rows, elements of a row]``."""
    return kind.unpack(rows.reshape(len(rows), -1, kind.size)[..., _STEP:]).reshape(len(rows), -1)


def steps_of(kind: BlockType, rows: Bytes) -> npt.NDArray[np.float32]:
    """The steps in them: ``[rows, blocks of a row]``."""
    stored = rows.reshape(len(rows), -1, kind.size)[..., :_STEP]
    return np.ascontiguousarray(stored).view("<f2")[..., 0].astype(np.float32)
