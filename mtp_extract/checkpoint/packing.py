"""Codes of 2, 4 and 8 bits in bytes, as engines pack them: a row begins on a byte, its first element lies in the lowest
bits, and what is stored is the code plus half its range.

MLX's ``uint32`` and compressed-tensors' ``int32`` are these bytes, four at a time, little-endian.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mtp_extract.litertlm.storage import pack_bytes, unpack_bytes

Codes = npt.NDArray[np.int8]
Bytes = npt.NDArray[np.uint8]


def row_bytes(columns: int, bits: int, unit: int = 1) -> int:
    """Bytes of a packed row, a multiple of ``unit``."""
    return -(-columns * bits // (8 * unit)) * unit


def pack(codes: Codes, bits: int, unit: int = 1) -> Bytes:
    """``codes``, int8 ``[rows, columns]`` in ``bits`` bits, as ``[rows, row_bytes(columns, bits, unit)]``.

    What fills a row up is 0.
    """
    rows, columns = codes.shape
    stored: Bytes = codes.view(np.uint8) + np.uint8(1 << bits - 1)
    length = row_bytes(columns, bits, unit)
    per_byte = 8 // bits
    if length * per_byte != columns:
        whole = np.zeros((rows, length * per_byte), np.uint8)
        whole[:, :columns] = stored
        stored = whole
    return pack_bytes(stored, bits)


def unpack(packed: Bytes, bits: int, columns: int) -> Codes:
    """What :func:`pack` packed: int8 ``[rows, columns]``."""
    stored = unpack_bytes(packed, bits)[:, :columns]
    codes: Codes = (stored - np.uint8(1 << bits - 1)).view(np.int8)
    return codes
